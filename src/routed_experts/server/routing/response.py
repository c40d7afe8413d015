"""Where routed experts stand in an answer of /v1: the places and defaults of each dialect. Knows payloads, not how they
are made.

The version of the weights is always in choices[i].meta_info. Rows: (b) int32 and ref: there too. (c) list: prompt rows
beside the choices, the others in the choice. (d) npy: in the choice."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import numpy as np

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import RoutingOptions, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.formats.wire import (
    PROMPT_KEY,
    START_KEY,
    drop_checksum,
    encode_as_lists,
    encode_meta_info,
    encode_ref,
    encode_routed_experts,
)
from routed_experts.server.limits import MAX_EVENT_PAYLOAD, MAX_LISTED_IDS, ServerSettings
from routed_experts.server.protocol import RoutingFields
from routed_experts.server.routing.store import KeptRows

_DIALECTS: Mapping[str, tuple[bool, str]] = MappingProxyType(
    {"sglang": (False, "int32"), "vllm021": (True, "list"), "vllm": (True, "npy")}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """Fields of one choice, and fields that stand beside the choices."""

    choice: dict[str, object]
    response: dict[str, object]


def openai_defaults(settings: ServerSettings) -> RoutingDefaults:
    """What /v1 returns when a request does not say."""
    asked, usual = _DIALECTS[settings.routed_experts_dialect]
    form = settings.routed_experts_format or usual
    return RoutingDefaults(enabled=asked, format=form, npy_layers="all", refs=settings.routing_store_bytes > 0)


def native_defaults(settings: ServerSettings) -> RoutingDefaults:
    """What /generate returns when a request does not say."""
    return RoutingDefaults(refs=settings.routing_store_bytes > 0)


def routing_keywords(body: RoutingFields, *, asked: bool | None) -> dict[str, Any]:
    """The routing fields of a body as keywords of the engine; `asked`: are rows wanted. Raises for what this release
    does not do."""
    return {
        "return_routed_experts": asked,
        "routed_experts_start_len": body.routed_experts_start_len,
        "routed_experts_prompt_start": body.routed_experts_prompt_start,
        "routed_experts_format": body.routed_experts_format,
        "routed_experts_layers": body.routed_experts_layers,
        "routed_experts_stream": body.routed_experts_stream,
        "routed_experts_include_last": body.routed_experts_include_last,
    }


def check_list(requests: Sequence[TokenizedGenerateReqInput], capture: CaptureSpec | None) -> None:
    """Refuse format list where it cannot serve: several prompts, or more ids than JSON should carry."""
    first = next((request for request in requests if request.routed_experts.enabled), None)
    if first is None:
        return
    rows = first.input_ids.size - first.routed_experts.start + len(requests) * first.sampling.max_tokens
    check_listed(first.routed_experts, capture, prompts=sum(request.choice == 0 for request in requests), rows=rows)


def check_listed(wanted: RoutingOptions, capture: CaptureSpec | None, *, prompts: int, rows: int) -> None:
    """Refuse format list for several prompts, or for too many ids of `rows` rows."""
    if not wanted.enabled or wanted.format != "list" or capture is None:
        return
    columns = capture.num_hidden_layers if wanted.layers == "all" else capture.num_moe_layers
    worst = math.prod((rows, columns, capture.top_k))
    if prompts > 1 or worst > MAX_LISTED_IDS:
        why = f"{prompts} prompts in one call" if prompts > 1 else f"up to {worst} ids, above {MAX_LISTED_IDS}"
        text = f"routed_experts_format='list' with {why}; choose npy or ref, or return_routed_experts false"
        raise InvalidRequestError(text, param="routed_experts_format", code="list_unsuitable")


def rows_of(answer: SequenceState, *, prompt_only: bool) -> RoutedExperts:
    """The record of an ended answer. `prompt_only`: the token that the engine had to generate is not part of the
    sequence, so that every token of it was fed and has a row."""
    return answer.rows_of_prompt() if prompt_only else answer.rows


def ref_url(request_id: str, choice: int) -> str:
    """Where the rows of a choice are fetched."""
    return f"/v1/routing/{quote(request_id)}?choice={choice}"


def routing_fields(
    record: RoutedExperts, wanted: RoutingOptions, *, aborted: bool, url: str, weight_version: int, beside: bool
) -> Placed:
    """Put rows where clients of their format look. `beside`: may prompt rows of a list stand beside the choices (once
    an answer)."""
    layers = "moe" if wanted.layers == "moe" else "all"
    version = {"weight_version": str(weight_version)}
    if wanted.format == "list":
        fields = encode_as_lists(record, layers=layers, aborted=aborted)
        prompt = fields.pop(PROMPT_KEY)
        told = drop_checksum(fields) if wanted.stream else fields
        return Placed({**told, "meta_info": version}, {PROMPT_KEY: prompt} if beside else {})
    if wanted.format == "npy":
        fields = encode_routed_experts(record, payload_format="npy", layers=layers, aborted=aborted)
        return Placed({**(drop_checksum(fields) if wanted.stream else fields), "meta_info": version}, {})
    if wanted.format == "ref":
        meta: dict[str, object] = {START_KEY: record.start, **encode_ref(record, url=url)}
    else:
        meta = encode_meta_info(record, payload_format="int32", layers=layers, aborted=aborted)
        meta = drop_checksum(meta) if wanted.stream else meta
    return Placed({"meta_info": {**meta, **version}}, {})


def increments(record: RoutedExperts, wanted: RoutingOptions) -> list[RoutedExperts]:
    """A record in pieces whose payloads stay below the limit of one event; one piece unless rows are streamed."""
    if not wanted.stream or record.num_rows == 0:
        return [record]
    row = max(1, payload_bytes(record, wanted) // record.num_rows)
    step = max(1, MAX_EVENT_PAYLOAD // (row + 1))
    end = record.start + record.num_rows
    return [record[low : min(low + step, end)] for low in range(record.start, end, step)]


def to_stored(answer: SequenceState, record: RoutedExperts, *, owner: str) -> KeptRows:
    """What the store keeps of an ended answer."""
    tokens = np.concatenate([answer.request.input_ids, np.asarray(answer.token_ids, np.int32)])[: record.num_tokens]
    return KeptRows(record=record, token_ids=tokens.astype(np.int32), owner=owner)


def payload_bytes(record: RoutedExperts, wanted: RoutingOptions) -> int:
    """About how many bytes the rows will be on the wire."""
    if wanted.format == "int32":
        columns = record.num_hidden_layers if wanted.layers == "all" else len(record.layer_ids)
        return math.prod((record.num_rows, columns, record.top_k, 16)) // 3
    return record.ids.size * (4 if wanted.format == "list" else 2)
