"""The fields of a response that carry routed experts, and the defaults of each dialect.

In /v1 the weight versions are in choices[i].meta_info beside rows. Rows in int32 and ref are there too; in npy they are
fields of the choice; in list the prompt's rows are fields of the response and the others of the choice. A choice whose
prompt rows differ from those of the response has them itself: between choices weights may change, and capacities or the
rounding of another batch shape may choose other experts."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

import numpy as np

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import RoutingOptions, TokenizedGenerateReqInput
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.requests.routing_options import RoutingDefaults
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.formats.wire import PROMPT_KEY, START_KEY, encode_ref, encode_rows
from routed_experts.server.limits import MAX_EVENT_PAYLOAD, MAX_LISTED_IDS, ServerSettings
from routed_experts.server.protocol import RoutingFields
from routed_experts.server.routing_store import StoredRows

_DIALECTS: Mapping[str, tuple[bool, str]] = MappingProxyType(  # enabled, format
    {"sglang": (False, "int32"), "vllm021": (True, "list"), "vllm": (True, "npy")}
)
PromptRowsIn = Literal["response", "choice"]  # the fields that have the prompt rows of format list
_NPY_HEADER_BYTES = 128  # of three dims
_PACKED_KEYS_BYTES = 128  # of a packed payload without its data, at most
_MAX_FLOAT_CHARS = 24  # of a float in JSON


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseRouting:
    """Fields of one choice, and fields of the response."""

    choice: dict[str, object]
    response: dict[str, object]


def openai_defaults(settings: ServerSettings) -> RoutingDefaults:
    """Return what /v1 returns unless the request overrides it."""
    enabled, usual_format = _DIALECTS[settings.routed_experts_dialect]
    payload_format = settings.routed_experts_format or usual_format
    refs = settings.routing_store_bytes > 0
    return RoutingDefaults(enabled=enabled, format=payload_format, npy_layers="all", refs=refs)


def sglang_defaults(settings: ServerSettings) -> RoutingDefaults:
    """Return what /generate returns unless the request overrides it."""
    return RoutingDefaults(refs=settings.routing_store_bytes > 0)


def to_routing_params(body: RoutingFields, *, enabled: bool | list[bool] | None) -> dict[str, Any]:
    """Return the routing fields of a body as fields of GenerateReqInput."""
    return {
        "return_routed_experts": enabled,
        "routed_experts_start_len": body.routed_experts_start_len,
        "routed_experts_prompt_start": body.routed_experts_prompt_start,
        "routed_experts_format": body.routed_experts_format,
        "routed_experts_layers": body.routed_experts_layers,
        "routed_experts_stream": body.routed_experts_stream,
        "routed_experts_include_last": body.routed_experts_include_last,
        "return_routed_experts_weights": body.return_routed_experts_weights,
    }


def check_list_format(requests: Sequence[TokenizedGenerateReqInput], capture: CaptureSpec | None) -> None:
    """Raise InvalidRequestError for format list with several prompts, or with more ids than JSON should carry. Prompt
    rows count once: choices seldom have their own."""
    first = next((request for request in requests if request.routed_experts.enabled), None)
    if first is None:
        return
    options, new = first.routed_experts, first.sampling.max_tokens
    in_prompt = first.input_ids.size - options.start
    counts = {"num_rows": in_prompt + len(requests) * new, "num_weight_rows": len(requests) * (in_prompt + new)}
    check_list_size(options, capture, num_prompts=sum(request.choice == 0 for request in requests), **counts)


def check_list_size(
    options: RoutingOptions, capture: CaptureSpec | None, *, num_prompts: int, num_rows: int, num_weight_rows: int
) -> None:
    """Raise InvalidRequestError for format list with several prompts, or with too many numbers: ids of `num_rows` rows,
    and weights of `num_weight_rows`, which every choice has for all of its rows."""
    if not options.enabled or options.format != "list" or capture is None:
        return
    num_columns = capture.num_hidden_layers if options.layers == "all" else capture.num_moe_layers
    num_ids = math.prod((num_rows, num_columns, capture.top_k))
    num_ids += math.prod((num_weight_rows, capture.num_moe_layers, capture.top_k)) if options.weights else 0
    if num_prompts > 1 or num_ids > MAX_LISTED_IDS:
        why = (
            f"{num_prompts} prompts in one call"
            if num_prompts > 1
            else f"up to {num_ids} numbers, above {MAX_LISTED_IDS}"
        )
        text = f"routed_experts_format='list' with {why}; choose npy or ref, or return_routed_experts false"
        raise InvalidRequestError(text, param="routed_experts_format", code="list_unsuitable")


def ref_url(settings: ServerSettings, request_id: str, choice: int) -> str:
    """Return the path at which the rows of a choice are fetched, with the prefix of a proxy if there is one."""
    return f"{settings.root_path}/v1/routing/{quote(request_id)}?choice={choice}"


def routing_fields(
    record: RoutedExperts,
    options: RoutingOptions,
    *,
    aborted: bool,
    url: str,
    meta: Mapping[str, object],
    prompt_rows_in: PromptRowsIn | None,
) -> ResponseRouting:
    """Return rows in the fields where clients of their format look for them. `meta`: further fields of `meta_info`,
    such as the weight versions. `prompt_rows_in`: None where another choice has the same prompt rows. Of a record in
    parts, those behind the prompt have no field for it."""
    is_ref = options.format == "ref"
    fields = encode_ref(record, url=url) if is_ref else encode_rows(record, options, aborted=aborted)
    if options.format in ("int32", "ref"):
        return ResponseRouting({"meta_info": {START_KEY: record.start, **fields, **meta}}, {})
    prompt_rows = {PROMPT_KEY: fields.pop(PROMPT_KEY)} if options.format == "list" else {}
    if record.start > options.start and not prompt_rows.get(PROMPT_KEY):
        prompt_rows = {}
    of_choice = prompt_rows if prompt_rows_in == "choice" else {}
    of_response = prompt_rows if prompt_rows_in == "response" else {}
    return ResponseRouting({**fields, **of_choice, "meta_info": {**meta}}, of_response)


def split_for_events(record: RoutedExperts, options: RoutingOptions) -> list[RoutedExperts]:
    """Split a record whose rows are streamed into parts of at most MAX_EVENT_PAYLOAD bytes as they are sent, or of one
    row."""
    if not options.stream or record.num_rows == 0:
        return [record]
    if options.format == "ref":  # its rows are in no event
        return [record]
    counts = range(1, record.num_rows + 1)
    step = bisect.bisect_right(
        counts, MAX_EVENT_PAYLOAD, key=lambda count: _encoded_bytes(record, options, num_rows=count)
    )
    step, end = max(1, step), record.start + record.num_rows
    return [record[low : min(low + step, end)] for low in range(record.start, end, step)]


def to_stored(sequence: SequenceState, record: RoutedExperts, *, owner: str) -> StoredRows:
    """Return what the store keeps of a finished sequence."""
    tokens = np.concatenate([sequence.request.input_ids, np.asarray(sequence.token_ids, np.int32)])
    return StoredRows(record=record, token_ids=tokens[: record.num_tokens].astype(np.int32), owner=owner)


def payload_bytes(record: RoutedExperts, options: RoutingOptions) -> int:
    """Return the size of the rows and weights in the response as they are sent; of lists an upper bound. Of format ref,
    what is kept for fetching."""
    return record.nbytes if options.format == "ref" else _encoded_bytes(record, options, num_rows=record.num_rows)


def _encoded_bytes(record: RoutedExperts, options: RoutingOptions, *, num_rows: int) -> int:
    """Return the size of so many of the record's rows, with their weights, in JSON."""
    num_columns = record.num_hidden_layers if options.layers == "all" else len(record.layer_ids)
    weights_shape = (num_rows, len(record.layer_ids), record.top_k)
    if options.format == "list":
        id_chars = max(2, len(str(record.num_experts - 1)))  # -1 in a dense column
        size = _list_bytes((num_rows, num_columns, record.top_k), id_chars)
        return size if record.weights is None else size + _list_bytes(weights_shape, _MAX_FLOAT_CHARS)
    size = math.prod((num_rows, num_columns, record.top_k))
    if options.format == "int32":
        size = _base64_bytes(4 * size)
    elif options.format == "packed":  # SkyRL's reader has signed ids
        itemsize = record.ids.itemsize if record.num_experts <= 2**15 else 4
        size = _PACKED_KEYS_BYTES + _base64_bytes(itemsize * size)
    else:
        size = _base64_bytes(_NPY_HEADER_BYTES + record.ids.itemsize * size)
    if record.weights is not None:
        size += _base64_bytes(_NPY_HEADER_BYTES + record.weights.itemsize * math.prod(weights_shape))
    return size


def _base64_bytes(num_bytes: int) -> int:
    return 4 * math.ceil(num_bytes / 3)


def _list_bytes(shape: tuple[int, int, int], number_chars: int) -> int:
    """Return an upper bound: numbers of so many characters, each with a comma, and the brackets of three levels."""
    num_rows, num_columns, num_slots = shape
    return 2 + num_rows * (3 + num_columns * (3 + num_slots * (number_chars + 1)))
