"""What a request wants of its routing: resolved from the two places where it may say so, or a typed error. Knows no
payloads."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from routed_experts.core.errors import CaptureDisabledError, InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput, RoutedExpertsRequest
from routed_experts.core.sampling_params import (
    ROUTED_EXPERTS_FORMATS,
    ROUTED_EXPERTS_LAYERS,
    SamplingParams,
    short_repr,
)

_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"start_len": 0, "format": "int32", "layers": "all", "stream": False, "include_last": False}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDefaults:
    """What a surface returns when the request does not say. `refs`: rows may be kept for fetching."""

    asked: bool = False
    format: str = "int32"
    npy_layers: str = "moe"  # of format npy; int32 has all layers, list and ref the MoE layers
    refs: bool = False


NATIVE = RoutingDefaults()


def resolve_routing_options(
    said: GenerateReqInput,
    params: SamplingParams,
    *,
    prompt_len: int,
    capture: bool,
    defaults: RoutingDefaults = NATIVE,
) -> RoutedExpertsRequest:
    """Resolve the routing fields of a request. Raises InvalidRequestError naming the field, or CaptureDisabledError."""
    asked = _one_of("return_routed_experts", said.return_routed_experts, params.return_routed_experts)
    start = _one_of("routed_experts_start_len", said.routed_experts_start_len, params.routed_experts_start_len)
    form = _one_of("routed_experts_format", said.routed_experts_format, params.routed_experts_format)
    layers = _one_of("routed_experts_layers", said.routed_experts_layers, params.routed_experts_layers)
    last = _one_of("routed_experts_include_last", said.routed_experts_include_last, params.routed_experts_include_last)
    stream = said.routed_experts_stream
    if asked is not None and not isinstance(asked, bool):
        raise InvalidRequestError(
            f"return_routed_experts={short_repr(asked)} must be true or false", param="return_routed_experts"
        )
    if asked is None:
        asked = defaults.asked and capture
    if not asked:
        _check_nothing_is_said(
            {"start_len": start, "format": form, "layers": layers, "stream": stream, "include_last": last}
        )
        return RoutedExpertsRequest()
    if not capture:
        raise CaptureDisabledError(
            "return_routed_experts=True, but this engine records none; build it with Engine(..., enable_return_routed_experts=True), "
            "or serve with --enable-return-routed-experts",
            param="return_routed_experts",
        )
    start = 0 if start is None else start
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= prompt_len:
        text = (
            f"routed_experts_start_len={short_repr(start)} must be an integer in 0..{prompt_len}, the prompt's length"
        )
        raise InvalidRequestError(text, param="routed_experts_start_len", code="invalid_start")
    form = (
        defaults.format
        if form is None
        else _word("routed_experts_format", form, ROUTED_EXPERTS_FORMATS, "unknown_format")
    )
    if form == "ref" and not defaults.refs:
        text = "routed_experts_format='ref' is for servers that keep rows: here the array is already in this process; choose int32 or npy"
        raise InvalidRequestError(text, param="routed_experts_format", code="ref_unavailable")
    usual = {"int32": "all", "npy": defaults.npy_layers}.get(form, "moe")
    layers = (
        usual if layers is None else _word("routed_experts_layers", layers, ROUTED_EXPERTS_LAYERS, "unknown_layers")
    )
    if last is not None and not isinstance(last, bool):
        raise InvalidRequestError(
            f"routed_experts_include_last={short_repr(last)} must be true or false", param="routed_experts_include_last"
        )
    stream = _checked_stream(said, form)
    return RoutedExpertsRequest(
        asked=True, start=start, format=form, layers=layers, stream=stream, include_last=last is True
    )


def _checked_stream(said: GenerateReqInput, form: str) -> bool:
    """Does the request want its rows as they come."""
    stream = said.routed_experts_stream
    if stream is None or stream is False:
        return False
    if stream is not True:
        raise InvalidRequestError(
            f"routed_experts_stream={short_repr(stream)} must be true or false", param="routed_experts_stream"
        )
    if not said.stream:
        text = "routed_experts_stream=True without stream=True; set stream, or drop it and read the rows of the answer"
        raise InvalidRequestError(text, param="routed_experts_stream", code="stream_required")
    if form == "ref":
        text = "routed_experts_stream=True with format 'ref', whose rows are fetched whole; choose int32, npy or list"
        raise InvalidRequestError(text, param="routed_experts_stream", code="conflicting_parameters")
    return True


def _check_nothing_is_said(fields: Mapping[str, object]) -> None:
    """A request that wants no rows may say nothing about them but the defaults."""
    for name, value in fields.items():
        default = _DEFAULTS[name]
        if value is not None and (type(value) is not type(default) or value != default):
            param = f"routed_experts_{name}"
            text = (
                f"{param}={short_repr(value)} without return_routed_experts=True says nothing; set it or drop {param}"
            )
            raise InvalidRequestError(text, param=param, code="routing_not_requested")


def _one_of(param: str, here: object, there: object) -> object:
    """A field that may stand beside the sampling parameters or among them."""
    if here is not None and there is not None and here != there:
        text = f"{param}={short_repr(here)}, but sampling_params say {short_repr(there)}; say it once"
        raise InvalidRequestError(text, param=param, code="conflicting_parameters")
    return there if here is None else here


def _word(param: str, value: object, known: Sequence[str], code: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise InvalidRequestError(
            f"{param}={short_repr(value)} is unknown; choose one of {', '.join(known)}", param=param, code=code
        )
    return value
