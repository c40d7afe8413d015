"""RoutedBatch: rows to replay, laid out like the tokens of a training batch.

Dims: B sequences, S positions of a row, M MoE layers, K experts per token."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Float32, UInt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutedBatch:
    """Rows to replay, aligned with the tokens of a batch; shard it as the tokens are. Ids of an invalid row are
    never read; such a token goes to the live router. `pad` marks positions that hold no token, on either side, and that
    no token attends to; a position is never both valid and pad. `weights` replay the combine weights too, without
    gradient: leave them out to train the router."""

    ids: UInt[Array, "B S M K"]
    valid: Bool[Array, "B S"]
    pad: Bool[Array, "B S"]
    weights: Float32[Array, "B S M K"] | None = None
