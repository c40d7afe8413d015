"""vLLM: uint8 or uint16 [R, L, K], a column for each hidden layer, dense layers 0.

Dims: R rows, L hidden layers, K experts per token."""

import io

import numpy as np
from jaxtyping import UInt

from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.layout import SequenceInfo, refuse, require_complete, scatter_to_all_layers, to_record
from routed_experts.formats.wire import NPY_ERRORS, NPY_MAGIC, decode_base64


def encode(record: RoutedExperts) -> UInt[np.ndarray, "R L K"]:
    """Encode as a writable array of the smallest dtype. Raises RoutingFormatError for rows that are not known."""
    require_complete(record, "vllm")
    return scatter_to_all_layers(record, record.ids.dtype, fill=0)


def decode(payload: str | bytes | UInt[np.ndarray, "R L K"], info: SequenceInfo) -> RoutedExperts:
    """Decode the array, or the base64 of its .npy as vLLM's servers send it."""
    if isinstance(payload, str | bytes):
        encoded = decode_base64(payload)
        if not encoded.startswith(NPY_MAGIC):  # NumPy would read a zip, too
            refuse(
                "vllm", f"{len(encoded)} bytes begin with {encoded[:6]!r}", f"a .npy, which begins with {NPY_MAGIC!r}"
            )
        try:
            payload = np.lib.format.read_array(io.BytesIO(encoded), allow_pickle=False)
        except NPY_ERRORS as cause:
            raise RoutingFormatError(f"vllm: {len(encoded)} bytes are no .npy ({cause})") from cause
    return to_record(payload, info, layout="vllm", columns="all")
