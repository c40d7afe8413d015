"""Experts for training on an accelerator: tiles of many rows, and every gather's gradient is a gather or a product,
never a scatter. The same sums as `grouped_experts`, so gradients do not depend on the order in which threads add.

Rows are permuted into tiles of one expert each and back. Both are permutations, so the gradient of either is the
other. A tile's weights are picked by a product with rows of the identity, which is exact, and whose gradient adds in
float32. Dims: N tokens, K experts per token, E experts, D hidden, F expert width, T rows of a tile, P tile rows of
all tiles."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from routed_experts.layers.moe import (
    ALL_EXPERTS,
    ExpertCall,
    MoeBackend,
    TilePlan,
    biased,
    combine,
    gated,
    neighbours,
    plan_tiles,
)

LARGEST_TILE, SMALLEST_TILE = 256, 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _RowMaps:
    """The tile row of each slot, and the slot of each tile row; -1 where it is none."""

    row: Int[Array, "N K"]
    slot: Int[Array, " P"]


@jax.custom_vjp
def _permute(x: Float[Array, "N D"], maps: _RowMaps) -> Float[Array, "P D"]:
    """The token of each tile row; rows that are no slot are 0."""
    token = jnp.maximum(maps.slot, 0) // maps.row.shape[1]
    return jnp.where(maps.slot[:, None] < 0, 0, jnp.take(x, token, axis=0))


def _permute_forward(x: Float[Array, "N D"], maps: _RowMaps) -> tuple[Float[Array, "P D"], _RowMaps]:
    return _permute(x, maps), maps


def _permute_backward(maps: _RowMaps, gradient: Float[Array, "P D"]) -> tuple[Float[Array, "N D"], None]:
    mine = jnp.take(gradient, maps.row, axis=0)  # [N, K, D]
    return jnp.sum(mine.astype(jnp.float32), axis=1).astype(gradient.dtype), None


_permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def _unpermute(rows: Float[Array, "P D"], maps: _RowMaps) -> Float[Array, "N K D"]:
    """The tile row of each slot."""
    return jnp.take(rows, maps.row, axis=0)


def _unpermute_forward(rows: Float[Array, "P D"], maps: _RowMaps) -> tuple[Float[Array, "N K D"], _RowMaps]:
    return _unpermute(rows, maps), maps


def _unpermute_backward(maps: _RowMaps, gradient: Float[Array, "N K D"]) -> tuple[Float[Array, "P D"], None]:
    flat = gradient.reshape(-1, gradient.shape[-1])
    return jnp.where(maps.slot[:, None] < 0, 0, jnp.take(flat, jnp.maximum(maps.slot, 0), axis=0)), None


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def _row_maps(plan: TilePlan, shape: tuple[int, int], tile: int) -> _RowMaps:
    """Both ways of the permutation. A tile row past its expert's last is no slot: that slot's own row is elsewhere."""
    at = (plan.tile_start[:, None] + jnp.arange(tile)).reshape(-1)
    slot = jnp.take(plan.order, jnp.minimum(at, plan.order.shape[0] - 1))
    used = jnp.repeat(jnp.arange(plan.tile_start.shape[0]) < plan.num_tiles, tile)
    own = used & (jnp.take(plan.row, slot) == jnp.arange(slot.shape[0]))
    return _RowMaps(plan.row.reshape(shape), jnp.where(own, slot, -1))


def tile_size(num_slots: int, num_experts: int) -> int:
    """Rows of a tile: the mean load of an expert as a power of two, within 16 and 256."""
    rows = SMALLEST_TILE
    while rows < LARGEST_TILE and 2 * rows * num_experts <= num_slots:
        rows *= 2
    return rows


def permuted_experts(call: ExpertCall) -> Float[Array, "N D"]:
    """Run the chosen experts. Differentiable in x, weights and expert weights, once (no forward mode)."""
    shape, width = call.ids.shape, call.x.shape[1]
    tile = tile_size(call.ids.size, call.num_experts)
    plan = plan_tiles(call.ids, call.valid, num_experts=call.num_experts, tile=tile)
    maps = _row_maps(plan, (shape[0], shape[1]), tile)
    expert = jnp.where(jnp.arange(plan.tile_expert.shape[0]) < plan.num_tiles, plan.tile_expert, 0)

    def of_tiles(weights: Float[Array, "E A B"]) -> Float[Array, "tiles A B"]:
        picks = jax.nn.one_hot(expert, call.num_experts, dtype=weights.dtype)
        return jnp.einsum("ie,eab->iab", picks, weights, precision=lax.Precision.HIGHEST)

    at = call.first_expert + expert[:, None]
    gate_up, down = (neighbours(weights, call.first_expert, call.num_experts) for weights in (call.gate_up, call.down))
    rows = _permute(call.x, maps).reshape(-1, tile, width)
    hidden = jnp.einsum("itd,idf->itf", rows, of_tiles(gate_up))
    hidden = gated(biased(hidden, call.gate_up_bias, at), call.activation)
    outputs = jnp.einsum("itf,ifd->itd", hidden, of_tiles(down))
    outputs = biased(outputs, call.down_bias, at).reshape(-1, width)
    return combine(_unpermute(outputs, maps), call.weights, call.valid)


PERMUTED = MoeBackend(name="permuted", run=permuted_experts, takes_stacked=False, features=ALL_EXPERTS)
