"""InputProcessor: validates and tokenises a call. A GenerateReqInput becomes one request a choice of each prompt, or a
typed error before a page is touched. Dims: S tokens of a prompt."""

import dataclasses
import functools
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from jaxtyping import Int32

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import (
    PARAM,
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    field_slot,
    prompt_index,
    raise_as,
)
from routed_experts.core.extra_key import check_extra_key
from routed_experts.core.grammar_spec import TOKENS, GrammarSpec
from routed_experts.core.grammar_state import CompiledGrammar
from routed_experts.core.integers import is_integer, to_int
from routed_experts.core.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from routed_experts.core.model_worker_batch import MAX_BIAS, MAX_GIVEN_IDS
from routed_experts.core.sampling_params import ResolvedSampling, SamplingParams
from routed_experts.engine.requests.prompt_lists import check_prediction, split_by_prompt
from routed_experts.engine.requests.prompt_params import PromptParams, logprob_options, sampling_params_of
from routed_experts.engine.requests.request_ids import request_ids
from routed_experts.engine.requests.routing_options import SGLANG_DEFAULTS, RoutingDefaults, resolve_routing_options
from routed_experts.engine.requests.token_ids import as_integers, is_nested
from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.grammar.compiler import GrammarCompiler
from routed_experts.grammar.token_rules import TokenRules


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What an engine can take. `longest_context`: what context_length may be raised to, 0 if that is not known;
    `pool_tokens`: KV slots that one request may fill."""

    context_length: int
    pool_tokens: int
    vocab_size: int
    capture: CaptureSpec | None
    eos_token_ids: frozenset[int] = frozenset()  # of the checkpoint and its tokenizer
    default_max_tokens: int = 128
    max_requests: int = 1024  # of one call
    longest_context: int = 0
    num_ranks: int = 1  # data ranks
    no_grammar: str | None = None  # why no request may have a grammar
    no_given_ids: str | None = None  # why no request may ask for logprobs of ids that it names


class InputProcessor:
    """Validates and tokenises requests. Thread-safe: its state is a source of seeds, and the grammars that were
    compiled last.

    Two calls prepare the engine: `before_grammar` before the first grammar is compiled, and `before_given_ids` before
    the first request that names ids. Each may be called again. Requests without a seed get one of a series, which
    begins at `random_seed`. With a `seed_stream` it begins at a hash of both: engines of one random_seed have
    different series."""

    def __init__(
        self,
        limits: RequestLimits,
        tokenizer: Tokenizer | None,
        *,
        random_seed: int,
        seed_stream: str | None = None,
        before_grammar: Callable[[], object] | None = None,
        before_given_ids: Callable[[], object] | None = None,
    ) -> None:
        self.limits, self._tokenizer = limits, tokenizer
        self._before_grammar, self._before_given_ids = before_grammar, before_given_ids
        self._compiler: GrammarCompiler | None = None
        self._compiler_lock = threading.Lock()
        self._seeds = itertools.count(_first_seed(random_seed, seed_stream))

    def process(
        self,
        request: GenerateReqInput,
        *,
        default_max_tokens: int | None = None,
        routing: RoutingDefaults = SGLANG_DEFAULTS,
        stream_interval_s: float = 0.0,
        cut_max_tokens: bool = False,
    ) -> list[TokenizedGenerateReqInput]:
        """One request a choice of each prompt, in order (prompt x n + choice). `default_max_tokens` replaces an unset
        length, and is cut to what fits, as a given one is with `cut_max_tokens`; `routing` replaces unset routing
        options; `stream_interval_s` is the least time between two outputs of a stream. Raises InvalidRequestError or a
        subclass."""
        prompts = list(self._prompts(request))
        is_batch = not isinstance(request.text, str) and (request.text is not None or is_nested(request.input_ids))
        split = split_by_prompt(request, len(prompts), is_batch=is_batch)
        params = [sampling_params_of(split, index) for index in range(len(prompts))]
        counts = [1 if own.values.n is None else int(own.values.n) for own in params]
        self._check_num_requests(counts)
        all_ids = request_ids(request, split, counts)
        prediction, rank = self._prediction(request, len(prompts)), self._data_parallel_rank(request)
        default = self.limits.default_max_tokens if default_max_tokens is None else default_max_tokens
        requests: list[TokenizedGenerateReqInput] = []
        for index, (ids, call, own, (call_id, group, rids)) in enumerate(
            zip(prompts, split.calls, params, all_ids, strict=True)
        ):
            try:
                _check_flags(call)
                extra_key = check_extra_key(call.extra_key)
                options = resolve_routing_options(
                    call,
                    own.values,
                    prompt_len=ids.size,
                    capture=self.limits.capture,
                    defaults=routing,
                    names=own.names,
                )
                return_logprob, start, top = logprob_options(call, own.values, ids.size)
                given_ids = self._given_ids(call) if return_logprob else ()
                sampling, stop_token_ids, grammar = self._resolve_params(
                    own, ids.size, split.prompt_field, default, cut=cut_max_tokens
                )
            except InvalidRequestError as error:
                raise_as(error, split.error_at(error, index, own.own_fields))
            requests += [
                TokenizedGenerateReqInput(
                    rid=rid,
                    group=group,
                    call_id=call_id,
                    choice=choice,
                    input_ids=ids,
                    sampling=sampling,
                    stop_token_ids=stop_token_ids,
                    prediction=prediction,
                    data_parallel_rank=rank,
                    extra_key=extra_key,
                    stream=call.stream is True,
                    return_logprob=return_logprob,
                    logprob_start_len=start,
                    top_logprobs_num=top,
                    token_ids_logprob=given_ids,
                    routed_experts=options,
                    stream_interval_s=stream_interval_s,
                    grammar=grammar,
                )
                for choice, rid in enumerate(rids)
            ]
        return requests

    def _resolve_params(
        self, params: PromptParams, prompt_len: int, prompt_field: str, default_max_tokens: int, *, cut: bool
    ) -> tuple[ResolvedSampling, frozenset[int], CompiledGrammar | None]:
        """The sampling values of one prompt, the token ids that stop it, and its grammar. Errors have the names that
        were sent."""
        try:
            sampling, stop_token_ids = self._sampling(params.values, prompt_len, default_max_tokens, cut=cut)
            return sampling, stop_token_ids, None if sampling.grammar is None else self._compile(sampling.grammar)
        except InvalidRequestError as error:
            raise_as(error, error.with_names({**params.names, "prompt": prompt_field}))

    def _check_num_requests(self, counts: Sequence[int]) -> None:
        """Raise InvalidRequestError for a call that no queue would hold."""
        if sum(counts) > self.limits.max_requests:
            many = f"n={counts[0]}" if len(set(counts)) == 1 else f"n={min(counts)} to {max(counts)}"
            text = (
                f"{len(counts)} prompts with {many} are {sum(counts)} requests, above "
                f"max_queued_requests={self.limits.max_requests}; lower n, or send fewer prompts in one call"
            )
            raise InvalidRequestError(text, param="n")

    def _prompts(self, request: GenerateReqInput) -> Iterator[Int32[np.ndarray, " S"]]:
        """Token ids of each prompt."""
        if (request.text is None) == (request.input_ids is None):
            count = "both" if request.text is not None else "neither"
            raise InvalidRequestError(f"{PARAM} and input_ids: {count} given; give exactly one of them", param="prompt")
        if request.text is not None:
            texts: Sequence[object] = [request.text] if isinstance(request.text, str) else request.text
            if not isinstance(texts, list | tuple):
                text = f"{PARAM}={short_repr(request.text)} must be text or a list of texts"
                raise InvalidRequestError(text, param="prompt")
            self.check_count("prompt", len(texts))
            yield from _each_prompt("prompt", texts, self._encode)
            return
        input_ids: Any = request.input_ids
        rows = input_ids if is_nested(input_ids) else [input_ids]
        self.check_count("input_ids", len(rows))
        yield from _each_prompt("input_ids", rows, lambda ids: self._check_ids(as_integers(ids), "input_ids"))

    def _encode(self, text: object) -> Int32[np.ndarray, " S"]:
        """Token ids of one prompt that is text."""
        if isinstance(text, int | np.integer | list | tuple):
            message = f"{PARAM} holds {short_repr(text)}, which is no text; token ids go to input_ids="
            raise InvalidRequestError(message, param="prompt")
        if not isinstance(text, str) or text == "":
            message = f"{PARAM}={short_repr(text)} must be text of at least one character"
            raise InvalidRequestError(message, param="prompt")
        ids = self._text_tokenizer("prompt").encode(text, max_tokens=self.limits.context_length)
        return self._check_ids(np.asarray(ids), "prompt")

    def _data_parallel_rank(self, request: GenerateReqInput) -> int | None:
        """The data rank that is asked for."""
        rank, num_ranks = request.data_parallel_rank, self.limits.num_ranks
        if rank is None:
            return None
        meaning, fix = f", a data rank (dp_size={num_ranks})", "choose one, or leave it out"
        error = functools.partial(InvalidRequestError, param="data_parallel_rank")
        return to_int(PARAM, rank, 0, num_ranks - 1, error=error, meaning=meaning, fix=fix)

    def check_count(self, param: str, count: int) -> None:
        """Raise InvalidRequestError for a call of no prompt, or of more than the queue holds."""
        most = self.limits.max_requests
        if not 1 <= count <= most:
            text = f"{PARAM} holds {count} prompts; send 1 to {most} in a call (max_queued_requests)"
            raise InvalidRequestError(text, param=param)

    def _prediction(self, request: GenerateReqInput, num_prompts: int) -> Int32[np.ndarray, " G"] | None:
        """Token ids of the expected answer, at most a context of them."""
        prediction, limits = request.prediction, self.limits
        if prediction is None:
            return None
        check_prediction(prediction, num_prompts)
        if isinstance(prediction, str):
            tokenizer, most = self._text_tokenizer("prediction"), limits.context_length
            try:
                ids = np.asarray(tokenizer.encode(prediction, max_tokens=most, add_special_tokens=False), np.int64)
            except InvalidRequestError as error:
                raise error.renamed("prediction") from error
        else:
            ids = as_integers(prediction, "prediction")
        if ids.size > limits.context_length:
            text = f"{PARAM} has {ids.size} tokens, above the context of {limits.context_length}"
            raise InvalidRequestError(f"{text}; shorten it", param="prediction")
        return self._check_in_vocabulary(ids, "prediction").astype(np.int32)

    def _check_in_vocabulary(self, ids: np.ndarray, param: str) -> np.ndarray:
        vocab = self.limits.vocab_size
        if ids.size and (ids.min() < 0 or ids.max() >= vocab):
            wrong = short_repr(int(ids[(ids < 0) | (ids >= vocab)][0]))
            text = f"{PARAM} holds the token id {wrong}, out of vocabulary: this model's {vocab} ids are 0..{vocab - 1}"
            raise InvalidRequestError(f"{text}; encode with this model's tokenizer", param=param)
        return ids

    def check_rollout(self, ids: Sequence[int], param: str) -> Int32[np.ndarray, " S"]:
        """Token ids of a prompt or of an answer that are handed in as drafts. Raises InvalidRequestError."""
        array = self._check_in_vocabulary(as_integers(ids, param), param)
        if not 0 < array.size <= self.limits.context_length:
            text = f"{PARAM} has {array.size} tokens; give 1 to {self.limits.context_length}"
            raise InvalidRequestError(text, param=param)
        return array.astype(np.int32)

    def _check_ids(self, ids: np.ndarray, param: str) -> Int32[np.ndarray, " S"]:
        limits = self.limits
        if ids.size == 0:
            raise InvalidRequestError(f"{PARAM} is empty; give at least one token", param=param)
        self._check_in_vocabulary(ids, param)
        if ids.size >= limits.context_length:
            text = (
                f"{PARAM} of {ids.size} tokens is longer than the model's context length. This model's maximum context "
                f"length is {limits.context_length} tokens, with one new token; shorten it to at most "
                f"{limits.context_length - 1}"
            )
            if limits.longest_context > limits.context_length:
                text += f", or raise context_length, up to {limits.longest_context}"
            raise PromptTooLongError(text, param=param)
        return ids.astype(np.int32)

    def _sampling(
        self, params: SamplingParams, prompt_len: int, default_max_tokens: int, *, cut: bool
    ) -> tuple[ResolvedSampling, frozenset[int]]:
        """The sampling values of one prompt, and the token ids that stop it. Equal prompts of a call get seeds of their
        own."""
        max_tokens = self._max_tokens(params, prompt_len, default_max_tokens, cut=cut)
        if params.max_tokens not in (None, max_tokens):  # cut
            min_tokens = None if params.min_tokens is None else min(params.min_tokens, max_tokens)
            params = dataclasses.replace(params, max_tokens=max_tokens, min_tokens=min_tokens)
        sampling = params.resolve(default_max_tokens=max_tokens, default_seed=next(self._seeds))
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self.limits.eos_token_ids
        self._check_token_ids(sampling, stop_token_ids)
        if sampling.stop:
            self._text_tokenizer("stop")
        if sampling.min_tokens > max_tokens:
            text = (
                f"{PARAM}={sampling.min_tokens} is above the {max_tokens} tokens that may be generated; "
                f"lower it or raise {field_slot('max_tokens')}"
            )
            was_cut = max_tokens < (params.max_tokens or default_max_tokens)
            raise InvalidRequestError(text, param="min_tokens", depends_on_prompt=was_cut)
        return sampling, stop_token_ids

    def _given_ids(self, call: GenerateReqInput) -> tuple[int, ...]:
        """The ids whose logprobs a prompt's request asks for. Raises InvalidRequestError."""
        token_ids, param = call.token_ids_logprob, "token_ids_logprob"
        if token_ids is None:
            return ()
        if not isinstance(token_ids, list | tuple) or not all(map(is_integer, token_ids)):
            raise InvalidRequestError(f"{PARAM}={short_repr(token_ids)} must be a flat list of integers", param=param)
        ids, vocab = tuple(int(cast("int", token)) for token in token_ids), self.limits.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            text = f"{PARAM} holds the out-of-vocabulary id {short_repr(wrong)}: this model's {vocab} ids are"
            raise InvalidRequestError(f"{text} 0..{vocab - 1}", param=param)
        if len(ids) > MAX_GIVEN_IDS:
            text = f"{PARAM} holds {len(ids)} ids; send at most {MAX_GIVEN_IDS}, or take top logprobs"
            raise InvalidRequestError(text, param=param)
        if ids and self.limits.no_given_ids is not None:
            text = f"{PARAM} is not served by this engine: {self.limits.no_given_ids}; leave it out"
            raise InvalidRequestError(text, param=param, code="unsupported_parameter")
        if ids and self._before_given_ids is not None:
            self._before_given_ids()
        return ids

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar of a request. Raises InvalidRequestError, also without llguidance."""
        if self.limits.no_grammar is not None:
            text = f"{PARAM} is not served by this engine: {self.limits.no_grammar}; leave it out"
            raise InvalidRequestError(text, param=spec.param, code="grammar_unsupported")
        if spec.kind == TOKENS:
            compiled: CompiledGrammar = self._token_rules(spec)
        else:
            try:
                compiled = self._grammar_compiler(spec).compile(spec)
            except ConfigError as error:
                raise InvalidRequestError(f"{PARAM}: {error}", param=spec.param, code="grammar_unsupported") from error
        if self._before_grammar is not None:
            self._before_grammar()
        return compiled

    def _token_rules(self, spec: GrammarSpec) -> TokenRules:
        encode = None if self._tokenizer is None else self._tokenizer.encode_plain
        return TokenRules.create(spec, encode, vocab_size=self.limits.vocab_size)

    def _grammar_compiler(self, spec: GrammarSpec) -> GrammarCompiler:
        with self._compiler_lock:
            if self._compiler is None:
                limits, tokenizer = self.limits, self._text_tokenizer(spec.param)
                self._compiler = GrammarCompiler(
                    tokenizer, vocab_size=limits.vocab_size, eos_token_ids=sorted(limits.eos_token_ids)
                )
            return self._compiler

    def _max_tokens(self, params: SamplingParams, prompt_len: int, default: int, *, cut: bool) -> int:
        """Tokens that may be generated. A length that was given must fit, unless `cut`; a default is cut to what
        does."""
        limits = self.limits
        room = min(limits.context_length, limits.pool_tokens) - prompt_len
        if room < 1:
            raise PromptTooLongError(
                f"the prompt of {prompt_len} tokens does not fit the KV pool of {limits.pool_tokens} "
                f"tokens with one new token; shorten it to at most {limits.pool_tokens - 1} or raise max_total_tokens",
                param="prompt",
            )
        if params.max_tokens is None:
            return min(default, room)
        if params.max_tokens > room:
            if cut:
                return room
            # Clients of vLLM and SGLang look for three phrases: "max_completion_tokens is too large", "Requested token
            # count exceeds the model's maximum context length" and "This model's maximum context length is".
            text = (
                f"{PARAM}={params.max_tokens}: max_completion_tokens is too large. Requested token count exceeds the "
                f"model's maximum context length. This model's maximum context length is {limits.context_length} "
                f"tokens (KV pool {limits.pool_tokens}), and the prompt has {prompt_len}"
            )
            raise PromptTooLongError(f"{text}; ask for at most {room}", param="max_tokens")
        return params.max_tokens

    def _text_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            fix = "stop strings need one: give stop_token_ids" if param == "stop" else "give input_ids"
            raise InvalidRequestError(f"{PARAM} is text, but this engine has no tokenizer; {fix}", param=param)
        return self._tokenizer

    def _check_token_ids(self, sampling: ResolvedSampling, stop_token_ids: frozenset[int]) -> None:
        """Ids of the sampling parameters are in the vocabulary, and min_tokens can forbid all stop ids."""
        vocab = self.limits.vocab_size
        for param, ids in (
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            wrong = [token for token in ids if token >= vocab]
            if wrong:
                ids = f"this model's {vocab} ids are 0..{vocab - 1}"
                text = f"{PARAM} holds the token id {wrong[0]}, out of vocabulary: {ids}"
                raise InvalidRequestError(f"{text}; give ids of this model's tokenizer", param=param)
        room = MAX_BIAS - len(sampling.logit_bias)
        if sampling.min_tokens > 0 and len(stop_token_ids) > room:
            text = (
                f"{PARAM}={sampling.min_tokens} forbids {len(stop_token_ids)} stop ids, with room for "
                f"{room}; name fewer stop_token_ids"
            )
            raise InvalidRequestError(text, param="min_tokens")


def _first_seed(random_seed: int, stream: str | None) -> int:
    """The seed that a series begins with: far from commonly chosen small seeds, and with room to count in an int64."""
    if stream is None:
        return (random_seed << 32) + (1 << 31)
    digest = hashlib.blake2b(f"{random_seed} {stream}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 2) + (1 << 31)


def _each_prompt(
    param: str, prompts: Sequence[object], to_ids: Callable[[Any], Int32[np.ndarray, " S"]]
) -> Iterator[Int32[np.ndarray, " S"]]:
    """Token ids of each prompt. The error of one of several holds its index."""
    for index, prompt in enumerate(prompts):
        with prompt_index(index if len(prompts) > 1 else None, param):
            ids = to_ids(prompt)
        yield ids


def _check_flags(request: GenerateReqInput) -> None:
    for param, flag in (("stream", request.stream), ("return_logprob", request.return_logprob)):
        if flag is not None and not isinstance(flag, bool):
            raise InvalidRequestError(f"{PARAM}={short_repr(flag)} must be True or False", param=param)
