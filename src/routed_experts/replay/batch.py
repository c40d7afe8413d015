"""RoutedBatch: rows to replay, laid out like the tokens of a training batch.

Dims: B sequences, S positions of a row, M MoE layers, K experts per token."""

import dataclasses
from collections.abc import Collection

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, UInt

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import RoutingAlignmentError


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

    def check(self, spec: CaptureSpec, *, repeats_in_layers: Collection[int] = ()) -> None:
        """Raise RoutingAlignmentError naming the first position that is both valid and pad, or the first valid row with
        an id that is no expert of this model, or with one expert twice, but in the hidden layers `repeats_in_layers`.

        `forward` calls it outside jit; under jit, where it cannot, an id that is no expert gives logits that are NaN.
        `align` gives checked batches."""
        ids, valid = np.asarray(self.ids), np.asarray(self.valid)
        both = valid & np.asarray(self.pad)
        if both.any():
            row, column = np.argwhere(both)[0]
            raise RoutingAlignmentError(
                f"row {row}, position {column} is valid and pad; a position without a token has no row: mark it as not "
                "valid"
            )
        if ids.size == 0:
            return
        outside = ((ids < 0) | (ids >= spec.num_experts)) & valid[..., None, None]
        if outside.any():
            row, column, layer, slot = np.argwhere(outside)[0]
            raise RoutingAlignmentError(
                f"row {row}, position {column}, hidden layer {spec.layer_ids[layer]}, slot {slot}: id "
                f"{ids[row, column, layer, slot]}; expected 0 to {spec.num_experts - 1}; give logical ids of this "
                "model, or mark the position as not valid"
            )
        in_order = np.sort(ids, axis=-1)
        repeats = (in_order[..., 1:] == in_order[..., :-1]).any(-1) & valid[..., None]
        repeats &= ~np.isin(spec.layer_ids, tuple(repeats_in_layers))
        if repeats.any():
            row, column, layer = np.argwhere(repeats)[0]
            raise RoutingAlignmentError(
                f"row {row}, position {column}, hidden layer {spec.layer_ids[layer]}: experts "
                f"{ids[row, column, layer].tolist()}; a token has an expert once at most; give rows as they were "
                "recorded, or mark the position as not valid"
            )
