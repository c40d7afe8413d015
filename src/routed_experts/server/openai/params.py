"""The fields that chat and text completions share, as the engine takes them. Knows no route.

A body's numbers are checked by SamplingParams and the engine's door; here only what OpenAI means differently is
turned."""

import dataclasses
from collections.abc import Mapping

from starlette.requests import Request

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.server.errors import ApiError
from routed_experts.server.fields import ignored_params_header
from routed_experts.server.limits import MAX_OPENAI_STOPS, REQUEST_ID, RESERVED_IDS
from routed_experts.server.openai.handler import CallOptions
from routed_experts.server.protocol import OpenAIRequest
from routed_experts.server.state import ServerState

_SAME = (
    "temperature top_p top_k min_p n stop stop_token_ids min_tokens ignore_eos presence_penalty frequency_penalty repetition_penalty "
    "logit_bias skip_special_tokens include_stop_str_in_output"
).split()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How many tokens were asked for; 0 computes the prompt only, for which the engine generates one that is left
    out."""

    max_tokens: int | None

    @property
    def prompt_only(self) -> bool:
        """Is nothing to be generated."""
        return self.max_tokens == 0


def to_sampling_params(body: OpenAIRequest, length: Length) -> SamplingParams:
    """The sampling parameters of a body. Raises InvalidRequestError."""
    if isinstance(body.stop, list) and len(body.stop) > MAX_OPENAI_STOPS:
        text = f"stop has {len(body.stop)} strings, above the limit of {MAX_OPENAI_STOPS}; send fewer"
        raise InvalidRequestError(text, param="stop")
    values: dict[str, object] = {name: getattr(body, name) for name in _SAME}
    values["seed"] = seed_of(body.seed)
    values["max_tokens"] = 1 if length.prompt_only else length.max_tokens
    if length.prompt_only:
        values["min_tokens"] = None
    return SamplingParams.from_dict(values)


def seed_of(seed: int | None) -> int | None:
    """Any int64 as a seed of the engine, which are 63 bits; negative ones keep their own values apart."""
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise InvalidRequestError(f"seed is {short_repr(seed)}, but must be an integer of 64 bits", param="seed")
    return None if seed is None else seed % 2**63


def resolve_request_id(request: Request, said: str | None, *, prefix: str, param: str = "request_id") -> str:
    """The id of a call: the body's, the header's, or a new one. It is the id of the response and its X-Request-Id."""
    state: Mapping[str, object] = request.scope["state"]
    if said is not None:
        if not REQUEST_ID.fullmatch(said) or said in RESERVED_IDS:
            raise InvalidRequestError(
                f"{param}={short_repr(said)} must be 1 to 64 of A-Z a-z 0-9 . _ -; change it", param=param
            )
        named = said
    elif state.get("is_named"):
        named = str(state["request_id"])
    else:
        named = prefix + str(state["request_id"])
    request.scope["state"]["request_id"] = named
    return named


def parse_options(
    request: Request, service: ServerState, body: OpenAIRequest, ignored: list[str], *, prefix: str
) -> CallOptions:
    """What a call is beside its prompts. Raises for options that need a stream."""
    streams = body.stream is True
    options = body.stream_options
    if options is not None and not streams and (options.include_usage or options.continuous_usage_stats):
        raise ApiError(
            "stream_options without stream; set stream to true",
            status=400,
            code="stream_required",
            param="stream_options",
        )
    if body.rid is not None and body.request_id is not None and body.rid != body.request_id:
        raise ApiError(
            "rid and request_id differ; send one", status=400, code="conflicting_parameters", param="request_id"
        )
    service.metrics.ignored(ignored)
    continuous = options is not None and options.continuous_usage_stats is True
    return CallOptions(
        request_id=resolve_request_id(request, body.request_id or body.rid, prefix=prefix),
        owner=str(request.scope["state"]["owner"]),
        include_usage=options is not None and options.include_usage is True,
        continuous_usage=continuous,
        headers=ignored_params_header(ignored),
    )
