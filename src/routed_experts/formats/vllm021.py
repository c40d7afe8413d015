"""vLLM 0.21: a pair of int16 arrays [P, M, K] and [G, M, K], the rows of the prompt and those of generated tokens.

Dims: P prompt rows, G generated rows, M MoE layers, K experts per token."""

from typing import Any

import numpy as np
from jaxtyping import Int, Int16

from routed_experts.core.error_text import short_repr
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.layout import (
    SequenceInfo,
    check_fits,
    check_ids,
    refuse,
    require_complete,
    to_int_array,
    to_record,
)


def encode(record: RoutedExperts) -> tuple[Int16[np.ndarray, "P M K"], Int16[np.ndarray, "G M K"]]:
    """Encode as two arrays. Raises RoutingFormatError for rows that are not known."""
    require_complete(record, "vllm021")
    check_ids(record)
    dtype = check_fits(record.num_experts, np.int16)
    return record.prompt.ids.astype(dtype), record.generated.ids.astype(dtype)


def decode(payload: tuple[Int[Any, "P M K"], Int[Any, "G M K"]], info: SequenceInfo) -> RoutedExperts:
    """Decode the pair: a row for each prompt token from `start` on, and one for each generated token or one less; where
    nothing was generated, the prompt may have one less. A row of -1 is not known."""
    if not isinstance(payload, tuple | list) or len(payload) != 2:
        refuse("vllm021", short_repr(payload), "the pair (prompt, generated)")
    row = (info.spec.num_moe_layers, info.spec.top_k)
    prompt, generated = (to_int_array(rows, "vllm021", row) for rows in payload)
    num_rows = sum(len(rows) for rows in (prompt, generated) if rows.ndim)
    expected = min(max(info.num_prompt_tokens - info.start, 0), num_rows)  # where all is prompt, its last row may lack
    if prompt.shape[:1] != (expected,) or prompt.shape[1:] != generated.shape[1:]:
        received = f"arrays are {list(prompt.shape)} and {list(generated.shape)}"
        refuse(
            "vllm021", received, f"{expected} rows of the prompt, one a token from {info.start} on, and alike others"
        )
    return to_record(np.concatenate([prompt, generated]), info, layout="vllm021", columns="moe")
