"""Answer: one sequence as its caller sees it, built from the news of its steps. Knows nothing of the loop.

Text and wire payloads are made here, in the caller's thread, never on the step path."""

import dataclasses
import time

import numpy as np

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutedExpertsError, RoutingFormatError, RoutingIncompleteError
from routed_experts.core.io_struct import BatchStrOut, FinishReason, Logprobs, TokenIDOut, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.detokenizer import IncrementalDetokenizer
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.formats.wire import START_KEY, drop_checksum, encode_as_lists, encode_meta_info


class SequenceState:
    """Accumulates what a request told; `to_dict` is the result of API.md at any time."""

    def __init__(
        self,
        request: TokenizedGenerateReqInput,
        tokenizer: Tokenizer | None,
        *,
        logprobs_mode: str,
        capture: CaptureSpec | None = None,
    ) -> None:
        self.request, self.record, self._capture = request, None, capture
        self.finish_reason: FinishReason | None = None
        self._tokenizer, self._mode = tokenizer, logprobs_mode
        self._text = (
            None if tokenizer is None or not request.sampling.detokenize else detokenizer_of(request, tokenizer)
        )
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[object] = []
        self._top: list[object] = []
        self._input: Logprobs | None = None
        self._last: TokenIDOut | None = None
        self._since, self._latency = time.monotonic(), 0.0

    def add(self, out: TokenIDOut) -> BatchStrOut:
        """Take in news and give it its text. Raises the error that ended the request, if one did; rows that break the
        row law end it with RoutingIncompleteError."""
        self._last, self._latency = out, time.monotonic() - self._since
        self.finish_reason = out.finish_reason
        self._ids += out.new_token_ids
        self._input = out.input_logprobs or self._input
        if self.request.return_logprob:
            told = zip(out.output_logprobs.values, out.output_logprobs.top, out.new_token_ids, strict=True)
            for value, top, token in told:
                self._logprobs.append(self._entry(value, token))
                self._top.append(None if top is None else [self._entry(*alternative) for alternative in top])
        text = ""
        if self._text is not None:
            text = self._text.push(self._shown(out))
            if out.finish_reason is not None:
                text += self._text.finish()
            self._pieces.append(text)
        if out.error is not None:
            raise out.error
        if out.finish_reason is not None and out.finish_reason.type == "error":
            raise RoutedExpertsError(out.finish_reason.message)
        if out.routed_experts is not None:
            try:
                out.routed_experts.validate()
            except RoutingFormatError as cause:
                text = f"the routing of request {out.rid!r} is damaged: {cause}; report this with the request"
                raise RoutingIncompleteError(text) from cause
        self.record = out.routed_experts
        return BatchStrOut(out=out, text=text)

    @property
    def counts(self) -> TokenIDOut:
        """The last news, whose counts are those of the whole answer."""
        assert self._last is not None, self.request.rid
        return self._last

    def to_dict(self, *, prompt_only: bool = False, rows: RoutedExperts | None = None) -> dict[str, object]:
        """`text`, `output_ids`, `meta_info`, cumulative. `prompt_only` leaves out what was generated: every token left
        was fed. `rows`: encode these instead of all."""
        out = self.counts
        meta: dict[str, object] = {
            "id": out.rid,
            "finish_reason": None if out.finish_reason is None else out.finish_reason.to_dict(),
            "prompt_tokens": out.prompt_tokens,
            "completion_tokens": out.completion_tokens,
            "cached_tokens": out.cached_tokens,
            "e2e_latency": self._latency,
            "weight_version": str(out.weight_version),
            "logprobs_mode": self._mode,
        }
        if not out.exact:
            meta["exact"] = False
        if out.rerouting is not None:
            meta |= {"mode": "reroute", "exact": out.exact, **dataclasses.asdict(out.rerouting)}
        if self.request.return_logprob:
            meta |= self._told_logprobs()
        if out.return_routed_experts and (out.finish_reason is not None or self.record is not None):
            whole = self.rows_of_prompt() if prompt_only else self.rows
            meta |= self._encoded_rows(whole if rows is None else rows)
        if prompt_only:
            left_out: dict[str, object] = {
                name: [] for name in ("output_token_logprobs", "output_top_logprobs") if name in meta
            }
            if out.finish_reason is not None and out.finish_reason.type == "stop":
                left_out["finish_reason"] = {"type": "length", "length": 0}
            return {"text": "", "output_ids": [], "meta_info": {**meta, "completion_tokens": 0, **left_out}}
        return {"text": "".join(self._pieces), "output_ids": list(self._ids), "meta_info": meta}

    def _shown(self, out: TokenIDOut) -> tuple[int, ...]:
        """The new tokens that have text: all but a stop token, which is kept in the ids alone unless stops are asked
        for."""
        at_stop_token = out.finish_reason is not None and isinstance(out.finish_reason.matched, int)
        return (
            out.new_token_ids[:-1]
            if at_stop_token and not self.request.sampling.include_stop_str_in_output
            else out.new_token_ids
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What has been generated so far."""
        return tuple(self._ids)

    @property
    def rows(self) -> RoutedExperts:
        """The record of a request that asked for one and has ended; of 0 rows if it ended before its first token. Of
        one that streams its rows: those of its last news."""
        return self._no_rows() if self.record is None else self.record

    def rows_of_prompt(self) -> RoutedExperts:
        """The rows without the generated tokens: the last token of the prompt was fed, and has one."""
        prompt_len = self.rows.num_prompt_tokens
        return self.rows if self.record is None else dataclasses.replace(self.rows[:prompt_len], num_tokens=prompt_len)

    def _encoded_rows(self, rows: RoutedExperts) -> dict[str, object]:
        """The wire form of the rows; of a ref, which is for the server that keeps them, only their start."""
        wanted, aborted = self.request.routed_experts, self.record is None
        layers = "moe" if wanted.layers == "moe" else "all"
        if wanted.format == "ref":
            return {START_KEY: rows.start}
        if wanted.format == "list":
            fields: dict[str, object] = {START_KEY: rows.start, **encode_as_lists(rows, layers=layers, aborted=aborted)}
        else:
            payload_format = "npy" if wanted.format == "npy" else "int32"
            fields = encode_meta_info(rows, payload_format=payload_format, layers=layers, aborted=aborted)
        return drop_checksum(fields) if wanted.stream else fields

    def _no_rows(self) -> RoutedExperts:
        """The record of a request that ended before its first token."""
        spec, prompt_len = self._capture, int(self.request.input_ids.size)
        assert spec is not None, "the door refuses a request for rows where none are recorded"
        return RoutedExperts(
            ids=np.zeros((0, spec.num_moe_layers, spec.top_k), spec.dtype),
            start=self.request.routed_experts.start,
            num_tokens=prompt_len,
            num_prompt_tokens=prompt_len,
            layer_ids=spec.layer_ids,
            num_hidden_layers=spec.num_hidden_layers,
            num_experts=spec.num_experts,
            version_spans=(),
            router=spec.router,
        )

    def _told_logprobs(self) -> dict[str, object]:
        told: dict[str, object] = {"output_token_logprobs": list(self._logprobs)}
        with_top = self.request.top_logprobs_num > 0
        if with_top:
            told["output_top_logprobs"] = list(self._top)
        if self._input is not None:
            start = self.request.logprob_start_len
            tokens = self.request.input_ids[start:].tolist()
            told["input_token_logprobs"] = [self._entry(*pair) for pair in zip(self._input.values, tokens, strict=True)]
            if with_top:
                told["input_top_logprobs"] = [
                    None if top is None else [self._entry(*alternative) for alternative in top]
                    for top in self._input.top
                ]
        return told

    def _entry(self, value: float | None, token: int) -> list[object]:
        text = None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
        return [value if value is None or np.isfinite(value) else None, token, text]


def detokenizer_of(request: TokenizedGenerateReqInput, tokenizer: Tokenizer) -> IncrementalDetokenizer:
    """A detokenizer with the request's stop strings."""
    sampling = request.sampling
    return IncrementalDetokenizer(
        tokenizer,
        skip_special_tokens=sampling.skip_special_tokens,
        stop=sampling.stop,
        include_stop_str=sampling.include_stop_str_in_output,
        min_tokens=sampling.min_tokens,
    )
