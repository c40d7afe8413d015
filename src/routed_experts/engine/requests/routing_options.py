"""Routing options of a request: resolved from the request and its sampling parameters, validated, defaults applied."""

import dataclasses
import functools
import numbers
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import OWN_NAMES, CaptureDisabledError, InvalidRequestError
from routed_experts.core.integers import to_int
from routed_experts.core.io_struct import GenerateReqInput, RoutingOptions
from routed_experts.core.sampling_params import ROUTED_EXPERTS_FORMATS, ROUTED_EXPERTS_LAYERS, SamplingParams

# What a request without rows may still name: values that change nothing.
_UNUSED: Mapping[str, object] = MappingProxyType(
    {
        "return_routed_experts_weights": False,
        "routed_experts_start_len": 0,
        "routed_experts_prompt_start": 0,
        "routed_experts_format": "int32",
        "routed_experts_layers": "all",
        "routed_experts_stream": False,
        "routed_experts_include_last": False,
    }
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDefaults:
    """What a surface returns when a request leaves an option unset. `refs`: rows may be stored for a later fetch."""

    enabled: bool = False
    format: str = "int32"
    npy_layers: str = "moe"  # of format npy; int32 and packed have all layers, list and ref the MoE layers
    refs: bool = False


SGLANG_DEFAULTS = RoutingDefaults()


def resolve_routing_options(
    request: GenerateReqInput,
    params: SamplingParams,
    *,
    prompt_len: int,
    capture: CaptureSpec | None,
    defaults: RoutingDefaults = SGLANG_DEFAULTS,
    names: Mapping[str, str] = OWN_NAMES,
) -> RoutingOptions:
    """Resolve the routing options of a request to an engine that records `capture`. `names`: of sampling parameters as
    they were sent. Raises InvalidRequestError naming the field, or CaptureDisabledError."""
    enabled = _merge_field("return_routed_experts", request.return_routed_experts, params.return_routed_experts)
    weights = _merge_field(
        "return_routed_experts_weights", request.return_routed_experts_weights, params.return_routed_experts_weights
    )
    start_param, start = _start_len(request, names)
    start = _merge_field(start_param, start, params.routed_experts_start_len)
    form = _merge_field("routed_experts_format", request.routed_experts_format, params.routed_experts_format)
    layers = _merge_field("routed_experts_layers", request.routed_experts_layers, params.routed_experts_layers)
    last = _merge_field(
        "routed_experts_include_last", request.routed_experts_include_last, params.routed_experts_include_last
    )
    if _checked_bool("return_routed_experts", enabled) is None:
        enabled = defaults.enabled and capture is not None
    if not enabled:
        _check_unused(
            {
                "return_routed_experts_weights": weights,
                start_param: start,
                "routed_experts_format": form,
                "routed_experts_layers": layers,
                "routed_experts_stream": request.routed_experts_stream,
                "routed_experts_include_last": last,
            }
        )
        return RoutingOptions()
    if capture is None:
        raise CaptureDisabledError(
            "return_routed_experts=True, but this engine records none; build it with Engine(..., "
            "enable_return_routed_experts=True), "
            "or serve with --enable-return-routed-experts",
            param="return_routed_experts",
        )
    weights = _checked_bool("return_routed_experts_weights", weights) is True
    if weights and capture.weights_dtype is None:
        raise CaptureDisabledError(
            "return_routed_experts_weights=True, but this engine records no combine weights; build it with Engine(..., "
            "enable_return_routed_experts_weights=True), or serve with --enable-return-routed-experts-weights",
            param="return_routed_experts_weights",
        )
    start = _checked_start(start_param, start, prompt_len)
    form = _checked_format(form, defaults)
    usual_layers = {"int32": "all", "packed": "all", "npy": defaults.npy_layers}.get(form, "moe")
    return RoutingOptions(
        enabled=True,
        start=start,
        format=form,
        layers=usual_layers if layers is None else _checked_word("layers", layers, ROUTED_EXPERTS_LAYERS),
        include_last=_checked_bool("routed_experts_include_last", last) is True,
        stream=_checked_stream(request, form),
        weights=weights,
    )


def _start_len(request: GenerateReqInput, names: Mapping[str, str]) -> tuple[str, object]:
    """The name that a request has for the start of the rows, beside its sampling parameters or else in them, and the
    start beside them."""
    start, alias = request.routed_experts_start_len, request.routed_experts_prompt_start
    if start is not None and alias is not None and start != alias:
        text = (
            f"routed_experts_prompt_start={short_repr(alias)} and "
            f"routed_experts_start_len={short_repr(start)} differ; give one"
        )
        raise InvalidRequestError(text, param="routed_experts_start_len", code="conflicting_parameters")
    if start is None and alias is not None:
        return "routed_experts_prompt_start", alias
    name = "routed_experts_start_len"
    return (name if start is not None else names.get(name, name)), start


def _checked_start(param: str, start: object, prompt_len: int) -> int:
    error = functools.partial(InvalidRequestError, param=param, code="invalid_start", depends_on_prompt=True)
    start = 0 if start is None else start
    if isinstance(start, numbers.Integral) and int(start) > prompt_len:  # clients of SGLang read these words
        text = f"{param}={short_repr(int(start))} is higher than the number of input tokens: it must be an integer in"
        raise error(f"{text} 0..{prompt_len}, the prompt's length; lower it")
    return to_int(param, start, 0, prompt_len, error=error, meaning=", the prompt's length")


def _checked_format(form: object, defaults: RoutingDefaults) -> str:
    form = defaults.format if form is None else _checked_word("format", form, ROUTED_EXPERTS_FORMATS)
    if form == "ref" and not defaults.refs:
        text = (
            "routed_experts_format='ref' is for servers that keep rows, and here none are kept; choose int32, npy, "
            "packed or list, or serve with --routing-store-bytes above 0"
        )
        raise InvalidRequestError(text, param="routed_experts_format", code="ref_unavailable")
    return form


def _checked_stream(request: GenerateReqInput, form: str) -> bool:
    """Whether the rows are streamed."""
    if _checked_bool("routed_experts_stream", request.routed_experts_stream) is not True:
        return False
    if not request.stream:
        text = "routed_experts_stream=True without stream=True; set stream, or drop it and read the rows of the answer"
        raise InvalidRequestError(text, param="routed_experts_stream", code="stream_required")
    if form == "ref":
        text = (
            "routed_experts_stream=True with format 'ref', whose rows are fetched whole; choose int32, npy, packed or "
            "list"
        )
        raise InvalidRequestError(text, param="routed_experts_stream", code="conflicting_parameters")
    return True


def _check_unused(fields: Mapping[str, object]) -> None:
    """A request without rows may name no option of them but with its default."""
    for param, value in fields.items():
        default = _UNUSED[param]
        if value is not None and (type(value) is not type(default) or value != default):
            text = (
                f"{param}={short_repr(value)} without return_routed_experts=True has no effect; set it or drop {param}"
            )
            raise InvalidRequestError(text, param=param, code="routing_not_requested")


def _merge_field(param: str, value: object, in_params: object) -> object:
    """A field that may be given beside the sampling parameters or in them."""
    if value is not None and in_params is not None and value != in_params:
        text = f"{param}={short_repr(value)}, but sampling_params have {short_repr(in_params)}; give it once"
        raise InvalidRequestError(text, param=param, code="conflicting_parameters")
    return in_params if value is None else value


def _checked_bool(param: str, value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequestError(f"{param}={short_repr(value)} must be true or false", param=param)


def _checked_word(name: str, value: object, known: Sequence[str]) -> str:
    param = f"routed_experts_{name}"
    if not isinstance(value, str) or value not in known:
        text = f"{param}={short_repr(value)} is unknown; choose one of {', '.join(known)}"
        code = "unknown_format" if name == "format" else "unknown_layers"
        raise InvalidRequestError(text, param=param, code=code)
    return value
