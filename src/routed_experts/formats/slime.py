"""slime and Miles: int32 [S-1, L, K], a column for each hidden layer, dense layers 0.

Dims: S tokens of a sequence, L hidden layers, K experts per token."""

import numpy as np
from jaxtyping import Int, Int32

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.layout import (
    SequenceInfo,
    refuse,
    require_complete,
    require_whole,
    scatter_to_all_layers,
    to_int_array,
    to_record,
)


def encode(record: RoutedExperts) -> Int32[np.ndarray, "S-1 L K"]:
    """Encode as `Sample.rollout_routed_experts`: the S - 1 rows of a rollout, also of a record that has S. Raises
    RoutingFormatError for rows that are not known, and for those that do not begin with token 0 or end too early."""
    require_complete(record, "slime")
    require_whole(record, "slime")
    return scatter_to_all_layers(record[: max(record.num_tokens - 1, 0)], np.int32, fill=0)


def decode(array: Int[np.ndarray, "S-1 L K"], info: SequenceInfo) -> RoutedExperts:
    """Decode exactly S - 1 rows; a row of zeros raises RoutingFormatError, as slime rejects it."""
    array, num_rows = to_int_array(array, "slime"), max(info.num_tokens - 1, 0)
    if array.shape[:1] != (num_rows,) or info.start != 0:
        received = f"{list(array.shape)} rows from token {info.start} on"
        refuse("slime", received, f"{num_rows} from 0 on")
    return to_record(array, info, layout="slime", columns="all", strict=True)
