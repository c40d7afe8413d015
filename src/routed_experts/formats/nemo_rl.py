"""NeMo-RL: int32 [S-1, L, K], a column for each hidden layer, dense layers 0; a whole row of -1 is left to the router.

Dims: S tokens of a sequence, L hidden layers, K experts per token."""

import numpy as np
from jaxtyping import Int, Int32

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.layout import (
    TO_LIVE_ROUTER,
    Missing,
    SequenceInfo,
    check_missing,
    new_rows,
    refuse,
    require_whole,
    scatter_to_all_layers,
    to_int_array,
    to_record,
)


def encode(record: RoutedExperts, *, missing: Missing = "error") -> Int32[np.ndarray, "S-1 L K"]:
    """Encode the S - 1 rows of a rollout. Rows that are not known raise RoutingFormatError, or are -1 throughout with
    missing="gate"."""
    check_missing(record, "nemo_rl", missing)
    require_whole(record, "nemo_rl", cut=missing, fix=TO_LIVE_ROUTER)
    num_rows = max(record.num_tokens - 1, 0)
    record = record[:num_rows]
    rows = scatter_to_all_layers(record, np.int32, fill=0)
    rows[~record.known] = -1
    if len(rows) == num_rows:
        return rows
    whole = new_rows((num_rows, *rows.shape[1:]), -1, rows.dtype)
    whole[: len(rows)] = rows
    return whole


def decode(array: Int[np.ndarray, "S-1 L K"], info: SequenceInfo) -> RoutedExperts:
    """Decode rows of which some may be -1 throughout; a row that is -1 in part raises RoutingFormatError."""
    rows, spec = to_int_array(array, "nemo_rl"), info.spec
    if rows.ndim == 3 and rows.shape[1] == spec.num_hidden_layers:
        absent = rows[:, spec.layer_ids] == -1
        partial = np.flatnonzero(absent.any(axis=(1, 2)) & ~absent.all(axis=(1, 2)))
        if partial.size:
            ids = rows[partial[0], spec.layer_ids].tolist()
            refuse(
                "nemo_rl", f"the ids {ids} of token {info.start + partial[0]} are -1 in part", "all or none of a row"
            )
    return to_record(rows, info, layout="nemo_rl", columns="all")
