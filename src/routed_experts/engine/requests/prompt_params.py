"""The sampling parameters of one prompt of a call, in the forms that callers have, and its logprobs."""

import dataclasses
import functools
from collections.abc import Mapping

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError, raise_as
from routed_experts.core.integers import to_int
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.core.sampling_params import FIELDS, MAX_TOP_LOGPROBS, SamplingParams, sent_names
from routed_experts.engine.requests.prompt_lists import PromptCalls


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptParams:
    """The sampling parameters of a prompt. `names`: of those that were sent by name, as they were; `is_own`: other
    prompts have theirs."""

    values: SamplingParams
    names: Mapping[str, str]
    is_own: bool

    @property
    def own_fields(self) -> set[str]:
        """The fields of this prompt alone, by both names."""
        fields = [field for field in FIELDS if self.is_own and getattr(self.values, field) is not None]
        return {*fields, *(self.names.get(field, field) for field in fields)}


def sampling_params_of(split: PromptCalls, index: int) -> PromptParams:
    """The sampling parameters of a prompt in either form; `max_new_tokens` beside them must agree."""
    request = split.calls[index]
    has_own = "sampling_params" in split.lists
    try:
        params = request.sampling_params
        if not isinstance(params, SamplingParams):
            params = SamplingParams.from_dict({} if params is None else _check_mapping(params))
        names = sent_names(request.sampling_params)
        if request.max_new_tokens is not None:
            names["max_tokens"] = "max_new_tokens"
            params = _with_length(params, request.max_new_tokens, names)
    except InvalidRequestError as error:
        raise_as(error, split.error_at(error, index, (error.param,) if has_own else ()))
    return PromptParams(values=params, names=names, is_own=has_own)


def _with_length(params: SamplingParams, max_new_tokens: int, names: Mapping[str, str]) -> SamplingParams:
    """Sampling parameters with a length that was given beside them."""
    if params.max_tokens is not None and params.max_tokens != max_new_tokens:
        text = f"{PARAM}={short_repr(max_new_tokens)}, but sampling_params have {params.max_tokens}; give it once"
        raise InvalidRequestError(text, param="max_new_tokens", code="conflicting_parameters")
    try:
        return dataclasses.replace(params, max_tokens=max_new_tokens)
    except InvalidRequestError as error:
        raise_as(error, error.with_names(names))


def _check_mapping(params: object) -> Mapping[str, object]:
    if not isinstance(params, Mapping):
        text = f"{PARAM}={short_repr(params)} must be SamplingParams or a mapping such as {{'temperature': 0.7}}"
        raise InvalidRequestError(text, param="sampling_params")
    return params


def logprob_options(request: GenerateReqInput, params: SamplingParams, prompt_len: int) -> tuple[bool, int, int]:
    """Whether logprobs are returned, the prompt token that they start at (-1: none), and how many alternatives."""
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    start = 0 if params.prompt_logprobs is not None else start
    top = 0 if request.top_logprobs_num is None else request.top_logprobs_num
    top_error = functools.partial(InvalidRequestError, param="top_logprobs_num")
    top = to_int(PARAM, top, 0, MAX_TOP_LOGPROBS, error=top_error)
    start_error = functools.partial(InvalidRequestError, param="logprob_start_len", depends_on_prompt=True)
    start = to_int(PARAM, start, -1, prompt_len - 1, error=start_error, meaning=" (-1: none of the prompt)")
    if not (request.return_logprob or params.logprobs is not None or params.prompt_logprobs is not None):
        return False, -1, 0
    return True, start, max(top, params.logprobs or 0, params.prompt_logprobs or 0)
