"""CaptureSpec: the routing of a model, whose shapes every capture buffer and record follow.

Invariant: layer_ids ascend within [0, num_hidden_layers); column m of a record is hidden layer layer_ids[m].
Dims: M MoE layers, K experts per token, E experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from routed_experts.core.errors import CaptureUnsupportedError

MAX_NUM_EXPERTS = 65_535
MAX_HIDDEN_LAYERS = 1_024  # of a model or a record: checked before anything is made for each layer

ExpertIdDType = np.dtype[np.uint8] | np.dtype[np.uint16]
WeightsDType = Literal["float32", "bfloat16"]  # of recorded combine weights
WEIGHTS_DTYPES: tuple[WeightsDType, ...] = get_args(WeightsDType)
_WEIGHT_BYTES: Mapping[WeightsDType, int] = MappingProxyType({"float32": 4, "bfloat16": 2})


def expert_id_dtype(num_experts: int) -> ExpertIdDType:
    """Return the smallest unsigned dtype for logical ids: uint8 up to 256 experts, else uint16."""
    if not 1 <= num_experts <= MAX_NUM_EXPERTS:
        raise CaptureUnsupportedError(
            f"{num_experts} experts cannot be captured; expected 1 to {MAX_NUM_EXPERTS}, so that an id fits two bytes; "
            "build without capture"
        )
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSpec:
    """The routing of one model. `router` is a fingerprint of its routers, or None; replay refuses another.
    `weights_dtype`: of the combine weights that are recorded beside the ids; None: they are not."""

    num_hidden_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    router: str | None = None
    weights_dtype: WeightsDType | None = None

    def __post_init__(self) -> None:
        expert_id_dtype(self.num_experts)
        if self.num_hidden_layers > MAX_HIDDEN_LAYERS:
            raise CaptureUnsupportedError(
                f"num_hidden_layers {self.num_hidden_layers} cannot be captured; expected at most {MAX_HIDDEN_LAYERS}; "
                "build without capture"
            )
        if not self.layer_ids:
            raise CaptureUnsupportedError(
                "a model without MoE layers has no routing; expected at least one layer id; build without capture"
            )
        if not all(a < b for a, b in pairwise((-1, *self.layer_ids, self.num_hidden_layers))):
            raise CaptureUnsupportedError(
                f"layer_ids {self.layer_ids} cannot be captured; expected ascending indices in "
                f"0..{self.num_hidden_layers - 1}"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise CaptureUnsupportedError(
                f"top_k {self.top_k} cannot be captured; expected 1 to {self.num_experts}, the number of experts"
            )

    @property
    def dtype(self) -> ExpertIdDType:
        """uint8 or uint16: the dtype of a filed or returned id."""
        return expert_id_dtype(self.num_experts)

    @property
    def num_moe_layers(self) -> int:
        """M, the columns of a record."""
        return len(self.layer_ids)

    @property
    def row_ids(self) -> int:
        """Ids of one token's row, M * K."""
        return self.num_moe_layers * self.top_k

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row, M * K ids."""
        return self.row_ids * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of the combine weights of one token's row as they are stored, whole words; 0 where none are
        recorded."""
        if self.weights_dtype is None:
            return 0
        return -(-self.row_ids * _WEIGHT_BYTES[self.weights_dtype] // 4) * 4

    @property
    def stored_bytes(self) -> int:
        """Bytes of one token's row as it is stored: ids and combine weights."""
        return self.row_bytes + self.weight_bytes

    @property
    def id_words(self) -> int:
        """32-bit words of the ids of one token's packed row, the first id in the lowest byte; zeros fill the last
        word."""
        return -(-self.row_bytes // 4)

    @property
    def row_words(self) -> int:
        """32-bit words of one token's packed row: those of its ids, then those of its combine weights, filled alike."""
        return self.id_words + self.weight_bytes // 4
