"""The door: what a caller said becomes requests that can be served, or a typed error before a page is touched.
Knows limits and the tokenizer; nothing of the loop."""

import dataclasses
import itertools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError, PromptTooLongError, QueueFullError
from routed_experts.core.io_struct import GenerateReqInput, RoutedExpertsRequest, TokenizedGenerateReqInput
from routed_experts.core.model_worker_batch import MAX_BIAS
from routed_experts.core.sampling_params import ResolvedSampling, SamplingParams
from routed_experts.engine.requests.routing_options import NATIVE, RoutingDefaults, resolve_routing_options
from routed_experts.engine.requests.tokenizer import Tokenizer

MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 20
_RID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What an engine can take. `pool_tokens`: KV slots that one request may fill."""

    context_length: int
    pool_tokens: int
    vocab_size: int
    capture: bool
    eos_token_ids: frozenset[int] = frozenset()  # of the checkpoint; those of the tokenizer come on top
    default_max_tokens: int = 128
    max_requests: int = 1024  # of one call


class InputProcessor:
    """Checks and tokenises. Thread-safe: its only state is the source of seeds for requests that bring none."""

    def __init__(self, limits: RequestLimits, tokenizer: Tokenizer | None, *, random_seed: int) -> None:
        self._limits, self._tokenizer = limits, tokenizer
        self._seeds = itertools.count((random_seed << 32) + (1 << 31))  # far from the small seeds that people choose

    def admit(
        self, said: GenerateReqInput, *, default_max_tokens: int | None = None, routing: RoutingDefaults = NATIVE
    ) -> list[TokenizedGenerateReqInput]:
        """One request a choice of each prompt, in order (prompt x n + choice). `default_max_tokens` stands for a length
        that was not named, and is cut to what fits; `routing` for what is not said of routed experts. Raises
        InvalidRequestError and its kin."""
        _check_flags(said)
        params = _params_of(said)
        default = self._limits.default_max_tokens if default_max_tokens is None else default_max_tokens
        prompts = list(self._prompts(said))
        samplings = [
            params.resolve(default_seed=next(self._seeds)) for _ in prompts
        ]  # equal prompts of a call are rollouts of their own
        n = samplings[0].n
        if len(prompts) * n > self._limits.max_requests:
            raise QueueFullError(
                f"{len(prompts)} prompts with n={n} are {len(prompts) * n} requests, above "
                f"max_queued_requests={self._limits.max_requests}; send fewer in one call"
            )
        call = said.rid if said.rid is not None else secrets.token_hex(8)
        if not isinstance(call, str) or not _RID.fullmatch(call):
            raise InvalidRequestError(
                f"{PARAM}={short_repr(call)} must be 1 to 64 of A-Z a-z 0-9 . _ -; change it", param="rid"
            )
        several = len(prompts) * n > 1
        requests: list[TokenizedGenerateReqInput] = []
        for index, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            routed = resolve_routing_options(
                said, params, prompt_len=ids.size, capture=self._limits.capture, defaults=routing
            )
            for choice in range(n):
                rid = f"{call}-{index * n + choice}" if several else call
                request = self._request(said, params, sampling, ids, routed, default_max_tokens=default)
                requests.append(dataclasses.replace(request, rid=rid, group=f"{call}-{index}", choice=choice))
        return requests

    def _prompts(self, said: GenerateReqInput) -> Iterator[Int32[np.ndarray, " S"]]:
        """Token ids of each prompt."""
        if (said.text is None) == (said.input_ids is None):
            came = "both" if said.text is not None else "neither"
            raise InvalidRequestError(f"prompt and input_ids: {came} given; give exactly one of them", param="prompt")
        if said.text is not None:
            texts: Sequence[object] = [said.text] if isinstance(said.text, str) else said.text
            if not isinstance(texts, list | tuple):
                raise InvalidRequestError(
                    f"prompt={short_repr(said.text)} must be text or a list of texts", param="prompt"
                )
            _check_count("prompt", len(texts))
            for text in texts:
                if not isinstance(text, str) or text == "":
                    raise InvalidRequestError(
                        f"prompt={short_repr(text)} must be text of at least one character", param="prompt"
                    )
                ids = self._text_tokenizer("prompt").encode(text, most_tokens=self._limits.context_length)
                yield self._checked(np.asarray(ids), "prompt")
            return
        listed: Any = said.input_ids
        nested = is_nested(listed)
        _check_count("input_ids", len(listed) if nested else 1)
        for ids in listed if nested else [listed]:
            yield self._checked(_as_integers(ids), "input_ids")

    def _checked(self, ids: np.ndarray, param: str) -> Int32[np.ndarray, " S"]:
        limits = self._limits
        if ids.size == 0:
            raise InvalidRequestError(f"{PARAM} is empty; give at least one token", param=param)
        if ids.min() < 0 or ids.max() >= limits.vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= limits.vocab_size)][0])
            text = f"{PARAM} holds the token id {wrong}, outside 0..{limits.vocab_size - 1}; use this model's ids"
            raise InvalidRequestError(text, param=param)
        if ids.size >= limits.context_length:
            text = f"{PARAM} has {ids.size} tokens, and the context of {limits.context_length} must also hold one new token; shorten it"
            raise PromptTooLongError(text, param=param)
        return ids.astype(np.int32)

    def _request(
        self,
        said: GenerateReqInput,
        params: SamplingParams,
        sampling: ResolvedSampling,
        ids: Int32[np.ndarray, " S"],
        routed: RoutedExpertsRequest,
        *,
        default_max_tokens: int,
    ) -> TokenizedGenerateReqInput:
        """One choice of one prompt; the caller names it."""
        wants = said.return_logprob or params.logprobs is not None or params.prompt_logprobs is not None
        start = 0 if params.prompt_logprobs is not None else said.logprob_start_len
        _check_logprobs(said, start, ids.size)
        top = max(said.top_logprobs_num, params.logprobs or 0, params.prompt_logprobs or 0)
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos())
        self._check_bias(sampling, stops)
        if sampling.stop:
            self._text_tokenizer("stop")
        new_tokens = self._new_tokens(params, ids.size, default_max_tokens)
        if sampling.min_tokens > new_tokens:
            text = f"min_tokens={sampling.min_tokens} is above the {new_tokens} tokens that may be generated; lower it or raise max_tokens"
            raise InvalidRequestError(text, param="min_tokens")
        return TokenizedGenerateReqInput(
            rid="",
            group="",
            choice=0,
            input_ids=ids,
            sampling=dataclasses.replace(sampling, max_tokens=new_tokens),
            stop_token_ids=stops,
            extra_key=said.extra_key,
            stream=said.stream,
            return_logprob=wants,
            logprob_start_len=start if wants else -1,
            top_logprobs_num=top if wants else 0,
            routed_experts=routed,
        )

    def _new_tokens(self, params: SamplingParams, prompt_len: int, default: int) -> int:
        """How many tokens may be generated; what was asked for must fit, a default is cut to what does."""
        limits = self._limits
        room = min(limits.context_length, limits.pool_tokens) - prompt_len
        if room < 1:
            raise PromptTooLongError(
                f"the prompt of {prompt_len} tokens does not fit the KV pool of {limits.pool_tokens} tokens with one new token; "
                "shorten it or raise max_total_tokens",
                param="prompt",
            )
        if params.max_tokens is None:
            return min(default, room)
        if params.max_tokens > room:
            raise PromptTooLongError(
                f"{PARAM}={params.max_tokens} with a prompt of {prompt_len} tokens is above the limit of {prompt_len + room} tokens "
                f"(context {limits.context_length}, KV pool {limits.pool_tokens}); ask for at most {room}",
                param="max_new_tokens",
            )
        return params.max_tokens

    def _eos(self) -> frozenset[int]:
        return (
            self._limits.eos_token_ids
            if self._tokenizer is None
            else self._limits.eos_token_ids | self._tokenizer.eos_token_ids
        )

    def _text_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(f"{PARAM} is text, but this engine has no tokenizer; give input_ids", param=param)
        return self._tokenizer

    def _check_bias(self, sampling: ResolvedSampling, stops: frozenset[int]) -> None:
        vocab = self._limits.vocab_size
        for param, ids in (
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            wrong = [token for token in ids if token >= vocab]
            if wrong:
                text = f"{param} holds the token id {wrong[0]}, outside 0..{vocab - 1}; use this model's ids"
                raise InvalidRequestError(text, param=param)
        room = MAX_BIAS - len(sampling.logit_bias)
        if sampling.min_tokens > 0 and len(stops) > room:
            text = f"min_tokens={sampling.min_tokens} forbids {len(stops)} stop ids, with room for {room}; name fewer stop_token_ids"
            raise InvalidRequestError(text, param="min_tokens")


def _params_of(said: GenerateReqInput) -> SamplingParams:
    """The sampling parameters, whichever way they were given; `max_new_tokens` beside them must agree."""
    given = said.sampling_params
    params = (
        given
        if isinstance(given, SamplingParams)
        else SamplingParams.from_dict({} if given is None else _mapping(given))
    )
    if said.max_new_tokens is None:
        return params
    if params.max_tokens is not None and params.max_tokens != said.max_new_tokens:
        text = f"{PARAM}={short_repr(said.max_new_tokens)}, but sampling_params say {params.max_tokens}; say it once"
        raise InvalidRequestError(text, param="max_new_tokens", code="conflicting_parameters")
    try:
        return dataclasses.replace(params, max_tokens=said.max_new_tokens)
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
        raise error.renamed("max_new_tokens") from error


def _mapping(given: object) -> Mapping[str, object]:
    if not isinstance(given, Mapping):
        text = f"sampling_params={short_repr(given)} must be SamplingParams or a mapping such as {{'temperature': 0.7}}"
        raise InvalidRequestError(text, param="sampling_params")
    return given


def _as_integers(ids: object) -> np.ndarray:
    """Token ids as int64; refuses what only looks like an integer."""
    if isinstance(ids, np.ndarray):
        array = ids
    else:
        parts: list[Any] | None = list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str | bytes) else None
        if parts is None or not all(_is_id(part) for part in parts):
            raise InvalidRequestError(
                f"{PARAM}={short_repr(ids)} must be a list of token ids, or a list of such lists", param="input_ids"
            )
        array = np.asarray(parts, np.int64)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"{PARAM} of shape {array.shape} and type {array.dtype} must be a row of integers", param="input_ids"
        )
    return array.astype(np.int64)


def _is_id(part: object) -> bool:
    return isinstance(part, int | np.integer) and not isinstance(part, bool) and abs(int(part)) < 1 << 62


def is_nested(input_ids: object) -> bool:
    """Do these token ids stand in several rows, one a prompt."""
    if isinstance(input_ids, np.ndarray):
        return input_ids.ndim > 1
    listed: Sequence[object] = input_ids if isinstance(input_ids, list | tuple) else ()
    return len(listed) > 0 and all(isinstance(part, list | tuple | range | np.ndarray) for part in listed)


def _check_flags(said: GenerateReqInput) -> None:
    """What decides how a call is run and whose pages it may share."""
    for param, flag in (("stream", said.stream), ("return_logprob", said.return_logprob)):
        if not isinstance(flag, bool):
            raise InvalidRequestError(f"{param}={short_repr(flag)} must be True or False", param=param)
    key = said.extra_key
    if key is not None and not isinstance(key, str):
        raise InvalidRequestError(
            f"extra_key={short_repr(key)} must be text: requests of equal keys share cached prefixes", param="extra_key"
        )


def _check_count(param: str, count: int) -> None:
    if not 1 <= count <= MAX_PROMPTS:
        raise InvalidRequestError(f"{PARAM} holds {count} prompts; send 1 to {MAX_PROMPTS} in a call", param=param)


def _check_logprobs(said: GenerateReqInput, start: int, prompt_len: int) -> None:
    top = said.top_logprobs_num
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs_num={short_repr(top)} must be 0..{MAX_TOP_LOGPROBS}", param="top_logprobs_num"
        )
    if isinstance(start, bool) or not isinstance(start, int) or not -1 <= start < prompt_len:
        text = f"logprob_start_len={short_repr(start)} must be -1 (none of the prompt) or 0..{prompt_len - 1}"
        raise InvalidRequestError(text, param="logprob_start_len")
