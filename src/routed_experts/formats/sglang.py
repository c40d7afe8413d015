"""SGLang: int32 [R, L, K], a column for each hidden layer. Dense layers are -1 here and 0 in SGLang's torch engine.

Dims: R rows, L hidden layers, K experts per token."""

import numpy as np
from jaxtyping import Int, Int32

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.integers import is_integer
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.layout import (
    SequenceInfo,
    refuse,
    require_complete,
    scatter_to_all_layers,
    to_int_array,
    to_record,
)
from routed_experts.formats.wire import decode_base64


def encode(record: RoutedExperts, *, dense_fill: int = -1) -> Int32[np.ndarray, "R L K"]:
    """Encode as a writable array. Raises RoutingFormatError for rows that are not known, and for a `dense_fill` that is
    no int32."""
    require_complete(record, "sglang")
    limits = np.iinfo(np.int32)
    if not is_integer(dense_fill) or not limits.min <= dense_fill <= limits.max:
        raise RoutingFormatError(
            f"sglang: dense_fill={short_repr(dense_fill)}; expected an int32: -1, or 0 as in SGLang's torch engine"
        )
    return scatter_to_all_layers(record, np.int32, fill=dense_fill)


def decode(payload: str | bytes | Int[np.ndarray, "..."], info: SequenceInfo) -> RoutedExperts:
    """Decode base64 of raw int32, the flat array that SGLang's clients decode, or [R, L, K]."""
    if isinstance(payload, str | bytes):
        encoded = decode_base64(payload)
        if len(encoded) % 4:
            refuse("sglang", f"{len(encoded)} bytes", "int32, a multiple of 4")
        payload = np.frombuffer(encoded, np.dtype("<i4"))
    array, spec = to_int_array(payload, "sglang"), info.spec
    if array.ndim == 1:
        row_ids = spec.num_hidden_layers * spec.top_k
        if array.size % row_ids:
            layers = f"{spec.num_hidden_layers} layers x {spec.top_k} experts"
            refuse("sglang", f"{array.size} ids are no whole rows of {layers}", f"a multiple of {row_ids}")
        array = array.reshape(-1, spec.num_hidden_layers, spec.top_k)
    return to_record(array, info, layout="sglang", columns="all")
