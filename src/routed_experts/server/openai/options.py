"""What chat and text completions both read from a body: options of the call, logprobs, sampling parameters, and how a
long prompt is cut."""

import dataclasses
from collections.abc import Mapping

from starlette.requests import Request

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.sampling_params import SamplingParams, clamp_biases
from routed_experts.server.body import ParsedBody, ignored_params_header
from routed_experts.server.errors import ApiError
from routed_experts.server.generation_handler import CallOptions, to_seed, usage_in_stream
from routed_experts.server.limits import MAX_OPENAI_STOPS
from routed_experts.server.middleware import request_owner, resolve_request_id
from routed_experts.server.openai.logprobs import LogprobOptions
from routed_experts.server.openai.structured import grammar_of
from routed_experts.server.protocol import OpenAIRequest
from routed_experts.server.state import ServerState

MAX_LOGPROBS = 20
_SAMPLING_FIELDS = (
    "temperature top_p top_k min_p n stop stop_token_ids min_tokens ignore_eos presence_penalty frequency_penalty "
    "repetition_penalty logit_bias allowed_token_ids bad_words skip_special_tokens include_stop_str_in_output "
    "speculative"
).split()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions(CallOptions):
    """Options of a call of /v1: whether its stream ends with the usage, and whether every chunk has it; logprobs."""

    include_usage: bool
    continuous_usage: bool
    logprobs: LogprobOptions


def parse_options(
    request: Request,
    server: ServerState,
    body: ParsedBody[OpenAIRequest],
    *,
    prefix: str,
    fields: Mapping[str, str],
    logprobs: int | None,
) -> OpenAIOptions:
    """Read the options of a call. `logprobs`: alternatives of generated tokens; None without logprobs. Raises for
    options that need a stream, or forbid one."""
    call = body.value
    include_usage, continuous_usage = usage_in_stream(server.settings, call.stream_options, stream=call.stream)
    if call.rid is not None and call.request_id is not None and call.rid != call.request_id:
        text = "rid and request_id differ; send one"
        raise ApiError(text, status=400, code="conflicting_parameters", param="request_id")
    server.metrics.ignored(body.ignored)
    return OpenAIOptions(
        request_id=resolve_request_id(request, call.request_id or call.rid, prefix=prefix, param=id_field(call)),
        owner=request_owner(request),
        fields=fields,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=_logprob_options(server, call, logprobs),
        headers=ignored_params_header(body.ignored),
    )


def id_field(call: OpenAIRequest) -> str:
    """Return the field with the id of a call, of the two that may have it."""
    return "rid" if not call.request_id and call.rid is not None else "request_id"


def _logprob_options(server: ServerState, call: OpenAIRequest, logprobs: int | None) -> LogprobOptions:
    prompt = call.prompt_logprobs
    if prompt is not None and not 0 <= prompt <= MAX_LOGPROBS:
        text = f"prompt_logprobs={short_repr(prompt)} must be 0..{MAX_LOGPROBS}"
        raise InvalidRequestError(text, param="prompt_logprobs")
    if prompt is not None and call.stream is True:
        text = "prompt_logprobs with stream; set stream to false"
        raise ApiError(text, status=400, code="conflicting_parameters", param="prompt_logprobs")
    as_ids = call.return_tokens_as_token_ids
    return LogprobOptions(
        enabled=logprobs is not None,
        top=logprobs or 0,
        prompt=prompt,
        as_ids=server.settings.return_tokens_as_token_ids if as_ids is None else as_ids,
        echo=logprobs is not None and call.echo is True,
    )


def given_ids(body: OpenAIRequest, logprobs: LogprobOptions) -> list[int] | None:
    """Return the ids whose logprobs a body asks for. Raises ApiError without logprobs."""
    if body.logprob_token_ids and not logprobs.enabled:
        text = "logprob_token_ids without logprobs; set logprobs"
        raise ApiError(text, status=400, code="invalid_request", param="logprob_token_ids")
    return body.logprob_token_ids


def truncate_prompt(body: OpenAIRequest, ids: list[int], *, context_length: int, max_tokens: int | None) -> list[int]:
    """Return the part of a prompt that the body asks for; all of it where it asks for none. `max_tokens`: of the
    answer, for which -1 leaves room. Raises InvalidRequestError."""
    length, side = body.truncate_prompt_tokens, body.truncation_side
    if side not in (None, "left", "right"):
        text = f"truncation_side={short_repr(side)} must be left or right"
        raise InvalidRequestError(text, param="truncation_side")
    if length is None:
        return ids
    if length == -1:
        length = context_length - max(1, max_tokens or 1)
    if not 1 <= length < context_length:
        text = f"truncate_prompt_tokens={length} must be -1 or 1 to {context_length - 1}, this model's context but one"
        raise InvalidRequestError(text, param="truncate_prompt_tokens")
    return ids[:length] if side == "right" else ids[-length:]


def to_sampling_params(body: OpenAIRequest, max_tokens: int | None) -> SamplingParams:
    """Build the sampling parameters of a body. `max_tokens` 0 computes the prompt only: the engine generates one token,
    which is left out. Raises InvalidRequestError."""
    if isinstance(body.stop, list) and len(body.stop) > MAX_OPENAI_STOPS:
        text = f"stop has {len(body.stop)} strings, above the limit of {MAX_OPENAI_STOPS}; send fewer"
        raise InvalidRequestError(text, param="stop")
    values: dict[str, object] = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    values |= {"seed": to_seed(body.seed), "max_tokens": max_tokens, "structured_outputs": grammar_of(body)}
    if body.logit_bias is not None:
        values["logit_bias"] = clamp_biases(body.logit_bias)
    if max_tokens == 0:
        values |= {"max_tokens": 1, "min_tokens": None}
    return SamplingParams.from_dict(values)
