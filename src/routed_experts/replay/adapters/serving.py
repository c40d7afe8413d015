"""Adapters of serving engines: what SGLang and vLLM send, both ways. Rows are those of one sequence, arrays of NumPy.

sglang   int32 [R, L, K], a column for each hidden layer; dense ones -1 here, 0 in SGLang's torch engine
vllm     uint8 or uint16 [R, L, K], dense 0
vllm021  int16 [prompt rows, M, K] and int16 [generated rows, M, K]"""

import numpy as np
from jaxtyping import Int, Int16, Int32, UInt

from routed_experts.core.errors import RoutingAlignmentError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.wire import decode_base64
from routed_experts.replay.adapters.foreign import Origin, narrow, record_of_rows, require_complete, spread


def to_sglang(record: RoutedExperts, *, dense_fill: int = -1) -> Int32[np.ndarray, "R L K"]:
    """A writable array; rows that are not known are refused, because the form has no word for them."""
    return spread(require_complete(record, "sglang"), np.int32, dense=dense_fill)


def from_sglang(payload: str | bytes | Int[np.ndarray, "..."], origin: Origin) -> RoutedExperts:
    """Read base64 of raw int32, the flat array that SGLang's clients decode, or [R, L, K]."""
    array = np.frombuffer(decode_base64(payload), "<i4") if isinstance(payload, str | bytes) else np.asarray(payload)
    spec = origin.spec
    if array.ndim == 1:
        row = spec.num_hidden_layers * spec.top_k
        if array.size % row:
            raise RoutingAlignmentError(
                f"sglang: {array.size} ids are no whole rows of {spec.num_hidden_layers} layers x {spec.top_k} experts; "
                f"wanted a multiple of {row}"
            )
        array = array.reshape(-1, spec.num_hidden_layers, spec.top_k)
    return record_of_rows(array, origin, target="sglang")


def to_vllm(record: RoutedExperts) -> UInt[np.ndarray, "R L K"]:
    """A writable array of the smallest dtype; rows that are not known are refused."""
    return spread(require_complete(record, "vllm"), record.ids.dtype, dense=0)


def from_vllm(rows: UInt[np.ndarray, "R columns K"], origin: Origin) -> RoutedExperts:
    """Read [R, L, K] (or [R, M, K]); of a base64 .npy, what np.load(..., allow_pickle=False) gave."""
    return record_of_rows(np.asarray(rows), origin, target="vllm")


def to_vllm021(record: RoutedExperts) -> tuple[Int16[np.ndarray, "P M K"], Int16[np.ndarray, "G M K"]]:
    """Prompt rows and generated rows; rows that are not known are refused."""
    dtype = narrow(record.num_experts, np.int16)
    known = require_complete(record, "vllm021")
    return known.prompt.ids.astype(dtype), known.generated.ids.astype(dtype)


def from_vllm021(
    prompt: Int[np.ndarray, "P M K"], generated: Int[np.ndarray, "G M K"], origin: Origin
) -> RoutedExperts:
    """Join prompt rows and generated rows (one a generated token, or one less); a row of -1 is not known."""
    if prompt.shape[:1] != (origin.num_prompt_tokens - origin.start,):
        wanted = origin.num_prompt_tokens - origin.start
        text = f"vllm021: {list(prompt.shape)} rows of the prompt; wanted {wanted}, one a prompt token from {origin.start} on"
        raise RoutingAlignmentError(text)
    return record_of_rows(np.concatenate([prompt, generated]), origin, target="vllm021")
