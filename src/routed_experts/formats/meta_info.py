"""Read the routing of an answer: flat int32 for trainers, or the record.

Invariant: one array for every wire format; the metadata drives the reading. Without metadata, as other servers send it,
a payload is raw int32, or packed, whose dense layers are as they were sent.
Dims: R rows, L hidden layers, K experts per token."""

from collections.abc import Mapping
from typing import cast

import numpy as np
from jaxtyping import Int32

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats import packed
from routed_experts.formats.layout import scatter_to_all_layers
from routed_experts.formats.wire import (
    INFO_KEY,
    NPY_MAGIC,
    PAYLOAD_KEY,
    PROMPT_KEY,
    REF_KEY,
    WEIGHTS_KEY,
    decode_base64,
    decode_routed_experts,
)

_SHOWN_CHOICES = 8  # of a response, in an error


def extract_routed_experts_from_meta_info(data: Mapping[str, object]) -> Int32[np.ndarray, " R*L*K"] | None:
    """Return flat, writable int32 of [R, L, K], dense layers -1, from a /generate result or one OpenAI choice.

    None when the rows are absent or null. Rows marked missing are -1 throughout. Raises RoutingFormatError on anything
    that does not decode to what its metadata says, and on a ref, which is fetched from its URL instead."""
    holder = _holder(data)
    if holder.get(PAYLOAD_KEY) is not None and holder.get(INFO_KEY) is None:
        payload = holder[PAYLOAD_KEY]
        if isinstance(payload, Mapping):  # packed, as prime-rl and SkyRL send it
            return packed.decode(cast("object", payload)).astype(np.int32).reshape(-1)
        return _bare_int32(payload)
    record = _record(holder, data)
    if record is None:
        return None
    ids = scatter_to_all_layers(record, np.int32, fill=-1)
    if record.valid is not None:
        ids[~record.valid] = -1
    return ids.reshape(-1)


def record_from_meta_info(data: Mapping[str, object]) -> RoutedExperts | None:
    """Return the record of a /generate result or one OpenAI choice, ids [rows, layers, K]; None when the rows are
    absent or null. Raises RoutingFormatError for rows or metadata in no known form."""
    return _record(_holder(data), data)


def record_from_response(response: Mapping[str, object], choice: int = 0) -> RoutedExperts | None:
    """Return the record of choice `choice` of an OpenAI response, or of a /generate result (choice 0), ids [rows,
    layers, K]; None when the rows are absent or null. Raises RoutingFormatError for another number of such choices than
    one, and for rows or metadata in no known form."""
    choices = choices_of(response)
    if choices is None and choice == 0:
        return record_from_meta_info(response)
    choice_list = cast("list[Mapping[str, object]]", choices) if isinstance(choices, list) else []
    for entry in choice_list:
        _require_mapping(entry)
    indices = [entry.get("index", position) for position, entry in enumerate(choice_list)]
    chosen = [entry for entry, index in zip(choice_list, indices, strict=True) if index == choice]
    if choices is None:
        text = f"choice={choice} of one answer of /generate, which has no choices"
        raise RoutingFormatError(f"{text}; leave choice out, or give 0")
    if len(chosen) != 1:
        listed = ", ".join(map(short_repr, indices[:_SHOWN_CHOICES])) or "none"
        text = f"choice={choice} names {len(chosen)} of the {len(choice_list)} choices of the response"
        raise RoutingFormatError(f"{text}, whose indices are {listed}; expected exactly one: give its index")
    return record_from_meta_info({PROMPT_KEY: response.get(PROMPT_KEY), **chosen[0]})


def choices_of(response: Mapping[str, object]) -> object:
    """Return `choices` of an OpenAI response. None for a /generate result, also for one that was written beside a field
    of that name of its prompt."""
    _require_mapping(response)
    is_result = isinstance(response.get("meta_info"), Mapping) and "output_ids" in response
    return None if is_result else response.get("choices")


def _holder(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return meta_info when it holds the rows, else the choice itself."""
    _require_mapping(data)
    meta_info = data.get("meta_info")
    if isinstance(meta_info, Mapping) and (PAYLOAD_KEY in meta_info or REF_KEY in meta_info):
        return cast("Mapping[str, object]", meta_info)
    return data


def _require_mapping(data: object) -> None:
    if not isinstance(data, Mapping):
        raise RoutingFormatError(
            f"received a {type(data).__name__}; expected a /generate result or a choice as a dict (choice.model_dump())"
        )


def _record(holder: Mapping[str, object], data: Mapping[str, object]) -> RoutedExperts | None:
    if holder.get(REF_KEY) is not None:
        raise RoutingFormatError(
            f"the rows are kept at {holder[REF_KEY]}; GET that URL and read the body with record_from_npy, or with "
            "combine weights GET it with &format=safetensors and read the body with decode_record"
        )
    payload = holder.get(PAYLOAD_KEY)
    if payload is None:
        return None
    if holder.get(INFO_KEY) is None:
        raise RoutingFormatError(
            f"{PAYLOAD_KEY} without {INFO_KEY}; expected both, for a bare int32 payload does not say its shape"
        )
    prompt_payload = holder.get(PROMPT_KEY, data.get(PROMPT_KEY))
    return decode_routed_experts(
        payload, holder[INFO_KEY], weights=holder.get(WEIGHTS_KEY), prompt_payload=prompt_payload
    )


def _bare_int32(payload: object) -> Int32[np.ndarray, " R*L*K"]:
    encoded = decode_base64(payload)
    if encoded.startswith(NPY_MAGIC):
        raise RoutingFormatError(f"{PAYLOAD_KEY} is a .npy without {INFO_KEY}; expected raw int32, or that metadata")
    if len(encoded) % 4:
        raise RoutingFormatError(f"int32 payload holds {len(encoded)} bytes; expected a multiple of 4")
    return np.frombuffer(encoded, np.dtype("<i4")).astype(np.int32)
