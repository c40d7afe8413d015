"""SequenceState: everything that one sequence has generated so far, accumulated from the outputs of its steps.

It is the only accumulator of a sequence: SGLang's dict, RequestOutput and OpenAI's choices are views of it. Text is
decoded once: here, in the caller's thread, or on the engine thread if the request has stop strings, which are found
there."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from routed_experts.capture.host_cache import empty_weights
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutedExpertsError, RoutingFormatError, RoutingIncompleteError
from routed_experts.core.io_struct import FinishReason, StrOut, TokenIDOut, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.weight_version import WeightRun, to_labels, weight_runs
from routed_experts.engine.requests.detokenizer import IncrementalDetokenizer
from routed_experts.engine.requests.placement_fields import placement_fields
from routed_experts.engine.requests.tokenizer import Tokenizer


class TokenLogprob(NamedTuple):
    """One token and its logprob: None for minus infinity, and for the first token of a prompt. `text` is None without a
    tokenizer."""

    logprob: float | None
    token_id: int
    text: str | None


TopLogprobs = tuple[TokenLogprob, ...] | None  # the best alternatives of one token


class SequenceState:
    """One sequence of a call. `record` holds the rows of the last output, which are all of them unless the request
    streams its rows; none of a request that ended before its first token."""

    def __init__(
        self,
        request: TokenizedGenerateReqInput,
        tokenizer: Tokenizer | None,
        *,
        logprobs_mode: str,
        capture: CaptureSpec | None = None,
        num_compiled: Callable[[], int] = lambda: 0,
    ) -> None:
        self.request, self.logprobs_mode = request, logprobs_mode
        self.output_logprobs: list[TokenLogprob] = []
        self.output_top_logprobs: list[TopLogprobs] = []
        self.output_given_logprobs: list[TopLogprobs] = []  # of the ids that the request names
        self.cumulative_logprob = 0.0  # of the generated tokens
        self.input_logprobs: list[TokenLogprob] | None = None
        self.input_top_logprobs: list[TopLogprobs] = []
        self.input_given_logprobs: list[TopLogprobs] = []
        self.record: RoutedExperts | None = None
        self.latency_s = 0.0  # from the call to the last output
        self._tokenizer, self._capture, self._start_s = tokenizer, capture, time.monotonic()
        self.stop_detokenizer: IncrementalDetokenizer | None = None  # the engine thread's
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and request.sampling.stop:
            self.stop_detokenizer = _create_detokenizer(request, tokenizer)
        elif tokenizer is not None and request.sampling.detokenize:
            self._detokenizer = _create_detokenizer(request, tokenizer)
        self._num_compiled, self._compiled_before = num_compiled, num_compiled()
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._last: TokenIDOut | None = None

    def update(self, out: TokenIDOut) -> StrOut:
        """Add an output; returns it with its text. Raises the error that ended the request, if one did; rows that break
        the row law end it with RoutingIncompleteError."""
        self._last, self.latency_s = out, time.monotonic() - self._start_s
        self._token_ids += out.new_token_ids
        if self.request.return_logprob:
            self._add_logprobs(out)
        text = self._decode(out)
        self._text.append(text)
        if out.error is not None:
            raise out.error
        if out.finish_reason is not None and out.finish_reason.type == "error":
            raise RoutedExpertsError(out.finish_reason.message)
        if out.routed_experts is not None:
            try:
                out.routed_experts.validate()
            except RoutingFormatError as cause:
                message = f"the routing of request {out.rid!r} is damaged: {cause}; report this with the request"
                raise RoutingIncompleteError(message) from cause
        self.record = None if out.routed_experts is None else self._described(out.routed_experts, out)
        if out.finish_reason is not None and self.num_tokens == 0 and self.request.routed_experts.enabled:
            self.record = self._no_rows()
        return StrOut(out=out, text=text)

    @property
    def has_output(self) -> bool:
        """Whether there is a last output."""
        return self._last is not None

    @property
    def last(self) -> TokenIDOut:
        """The last output; its counts are those of the whole sequence."""
        assert self._last is not None, self.request.rid
        return self._last

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it runs."""
        return None if self._last is None else self._last.finish_reason

    @property
    def text(self) -> str:
        """The text so far; empty with detokenize=False or without a tokenizer."""
        return "".join(self._text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens generated so far, a stop token included."""
        return tuple(self._token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self._token_ids)

    @property
    def num_compiled(self) -> int:
        """Programs that the engine has compiled since the sequence began: there should be none."""
        return self._num_compiled() - self._compiled_before

    @property
    def rows(self) -> RoutedExperts:
        """The record of a request that asked for one, in an output that has rows."""
        assert self.record is not None, self.request.rid
        return self.record

    def weight_runs(self) -> tuple[WeightRun, ...]:
        """Which weights fed which tokens, the prompt's first, up to the last output. The weights that fed a token
        sampled the one after it."""
        return weight_runs(self.last.weight_changes, self.last.weight_version, self.last.num_fed)

    def echoed_logprobs(self, echo: str) -> list[tuple[TokenLogprob, TopLogprobs]]:
        """The logprobs of the prompt, whose texts join to `echo`, its text, and their alternatives. Special tokens that
        a tokenizer has put before a text have none here, and the token after them begins it: a decoder may strip its
        space. A token has the same text among its alternatives."""
        entries = list(zip(self.input_logprobs or (), self.input_top_logprobs, strict=True))
        tokenizer, ids = self._tokenizer, [token.token_id for token, _ in entries]
        if not entries or tokenizer is None:
            return entries
        num_added = next((index for index, token_id in enumerate(ids) if not tokenizer.is_special(token_id)), 0)
        if num_added == 0 or tokenizer.decode(ids[num_added:], skip_special_tokens=False) != echo:
            return entries
        texts = [*[""] * num_added, tokenizer.decode(ids[num_added : num_added + 1], skip_special_tokens=False)]
        changed = [_with_text(*entry, text) for entry, text in zip(entries, texts, strict=False)]
        return [*changed, *entries[len(changed) :]]

    def rows_of_prompt(self) -> RoutedExperts:
        """The rows without the generated tokens: the last token of the prompt was fed, and has one."""
        prompt_len = self.rows.num_prompt_tokens
        return dataclasses.replace(self.rows[:prompt_len], num_tokens=prompt_len)

    def _decode(self, out: TokenIDOut) -> str:
        """The text of an output: of all its tokens but a stop token, unless stops are included."""
        sampling = self.request.sampling
        if self._detokenizer is None:
            return (out.text or "") if sampling.detokenize else ""
        tokens, reason = out.new_token_ids, out.finish_reason
        if reason is not None and isinstance(reason.matched, int) and not sampling.include_stop_str_in_output:
            tokens = tokens[:-1]
        text = self._detokenizer.push(tokens)
        return text if reason is None else text + self._detokenizer.finish()

    def _add_logprobs(self, out: TokenIDOut) -> None:
        new, prompt = out.output_logprobs, out.input_logprobs
        for value, top, token_id in zip(new.values, new.top, out.new_token_ids, strict=True):
            entry = self._entry(value, token_id)
            self.output_logprobs.append(entry)
            self.cumulative_logprob += -math.inf if entry.logprob is None else entry.logprob
            alternatives, named = self._split_top(top)
            self.output_top_logprobs.append(alternatives)
            self.output_given_logprobs.append(named)
        if prompt is not None:
            token_ids = self.request.input_ids[self.request.logprob_start_len :].tolist()
            self.input_logprobs = [self._entry(*pair) for pair in zip(prompt.values, token_ids, strict=True)]
            if self.request.logprob_start_len == 0 and self._tokenizer is not None:  # it begins the text of the ids
                text = self._tokenizer.decode(token_ids[:1], skip_special_tokens=False)
                self.input_logprobs[:1] = [self.input_logprobs[0]._replace(text=text)]
            pairs = [self._split_top(top) for top in prompt.top]
            self.input_top_logprobs = [alternatives for alternatives, _ in pairs]
            self.input_given_logprobs = [named for _, named in pairs]

    def _entry(self, value: float | None, token_id: int) -> TokenLogprob:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return TokenLogprob(value if value is None or math.isfinite(value) else None, token_id, text)

    def _split_top(self, top: Sequence[tuple[float, int]] | None) -> tuple[TopLogprobs, TopLogprobs]:
        """The best alternatives of a token, and the ids that the request names, which stand after them."""
        if top is None:
            return None, None
        entries = tuple(self._entry(*alternative) for alternative in top)
        num_given = len(self.request.token_ids_logprob)
        if not num_given:
            return entries, None
        return entries[:-num_given] if self.request.top_logprobs_num else None, entries[-num_given:]

    @staticmethod
    def _described(record: RoutedExperts, out: TokenIDOut) -> RoutedExperts:
        """The record with the labels of the weights that made its rows, and with what balancing changed."""
        versions = [*(version for _, version in out.weight_changes), out.weight_version]
        changes = None if out.exact else placement_fields(out)
        return dataclasses.replace(record, version_labels=to_labels(versions), exact=out.exact, placement=changes)

    def _no_rows(self) -> RoutedExperts:
        """The record of a request that ended before its first token."""
        spec, prompt_len = self._capture, int(self.request.input_ids.size)
        assert spec is not None, "a request for rows is refused where none are recorded"
        return RoutedExperts.from_spec(
            spec,
            ids=np.zeros((0, spec.num_moe_layers, spec.top_k), spec.dtype),
            start=self.request.routed_experts.start,
            num_tokens=prompt_len,
            num_prompt_tokens=prompt_len,
            version_spans=(),
            weights=empty_weights(spec) if self.request.routed_experts.weights else None,
        )


def _with_text(token: TokenLogprob, top: TopLogprobs, text: str) -> tuple[TokenLogprob, TopLogprobs]:
    """The token and its alternatives with another text of the token."""
    if top is not None:
        top = tuple(other._replace(text=text) if other.token_id == token.token_id else other for other in top)
    return token._replace(text=text), top


def _create_detokenizer(request: TokenizedGenerateReqInput, tokenizer: Tokenizer) -> IncrementalDetokenizer:
    sampling = request.sampling
    return IncrementalDetokenizer(
        tokenizer,
        prompt_ids=request.input_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        visible_special_ids=sampling.visible_special_ids,
        stop=sampling.stop,
        include_stop_str=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )
