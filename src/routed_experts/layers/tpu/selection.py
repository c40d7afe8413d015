"""Sequential expert selection under capacity as one TPU kernel: all experts by all tokens in VMEM, no sort, gather or scatter.
Knows nothing of instances; decides as layers.selection_rounds does.

The cutoff iteration over all ranks at once. In a round every token walks its experts with the experts' cutoffs: K masked minima. Each
expert with more takers than room then lowers its cutoff to behind its last admitted taker, found by a prefix count, which is a product
with a triangle of ones. The round that changes nothing is the sequential result: at most f + 1 rounds, f = experts that fill, and one
more where experts have no room at all. Tokens are lanes. A cost is a score turned upside down in the total order of floats, so lower is
better. Dims: N tokens, E experts, K experts per token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.selection_rounds import Chosen, order_keys

LANES, SUBLANES = 128, 8
MAX_CELLS = 1 << 17  # E * N, as [256, 512]
VMEM_BYTES = 4 << 20
NEVER = jnp.iinfo(jnp.int32).max  # the cost of what cannot be chosen


def fits(num_tokens: int, num_experts: int) -> bool:
    """Say whether a batch of that size can lie in VMEM whole."""
    return _padded(num_experts, SUBLANES) * _padded(num_tokens, LANES) <= MAX_CELLS


def choose_by_kernel(
    scores: Float[Array, "N E"], room: Int[Array, " E"], valid: Bool[Array, " N"], top_k: int, *, interpret: Any = False
) -> Chosen:
    """Choose as the sequential algorithm does. `scores` is float32 without NaN; -inf is never chosen."""
    num_tokens, num_experts = scores.shape
    rows, lanes = _padded(num_experts, SUBLANES), _padded(num_tokens, LANES)
    costs = jnp.where(valid[:, None], ~order_keys(scores), NEVER).T
    costs = jnp.pad(costs, ((0, rows - num_experts), (0, lanes - num_tokens)), constant_values=NEVER)
    ids, beyond, rounds = pl.pallas_call(
        _kernel,
        out_shape=[
            jax.ShapeDtypeStruct((top_k, lanes), jnp.int32),
            jax.ShapeDtypeStruct((1, lanes), jnp.int32),
            jax.ShapeDtypeStruct((1, 1), jnp.int32),
        ],
        scratch_shapes=[
            pltpu.VMEM((rows, lanes), jnp.int32),
            pltpu.VMEM((rows, 1), jnp.int32),
            pltpu.VMEM((rows, top_k), jnp.int32),
            pltpu.VMEM((2, lanes), jnp.int32),
            pltpu.VMEM((2, lanes), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="choose_experts",
    )(costs, jnp.pad(room, (0, rows - num_experts))[:, None])
    return Chosen(ids.T[:num_tokens], jnp.sum(beyond, dtype=jnp.int32), rounds[0, 0])


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


@dataclasses.dataclass(frozen=True, slots=True)
class _Refs:
    """What lies in VMEM. `last`: cost and id of the last that each token took; `worst`: the same of its K best, by any room."""

    costs: Any  # [E, N]
    room: Any  # [E, 1]
    ids: Any  # [K, N], out
    beyond: Any  # [1, N], out: how many a token took outside its K best
    rounds: Any  # [1, 1], out
    rank: Any  # [E, N]: the rank at which a token took an expert, K where it did not
    cut: Any  # [E, 1]
    takers: Any  # [E, K]: by rank
    last: Any  # [2, N]
    worst: Any  # [2, N]


def _kernel(*parts: Any) -> None:
    """Repeat rounds until no expert has more takers than room. The first is without cutoffs: it tells each token's K best."""
    refs = _Refs(*parts)
    top_k, lanes = refs.ids.shape
    refs.cut[...] = jnp.full(refs.cut.shape, top_k * lanes, jnp.int32)
    refs.worst[...] = jnp.full(refs.worst.shape, NEVER, jnp.int32)
    _walk(refs)
    refs.worst[...] = refs.last[...]
    refs.rounds[...] = jnp.ones((1, 1), jnp.int32)

    def one_round(_: Array) -> Array:
        _lower_cutoffs(refs)
        _walk(refs)
        refs.rounds[...] += 1
        return _has_overflow(refs)

    lax.while_loop(lambda overflows: overflows > 0, one_round, _has_overflow(refs))


def _has_overflow(refs: _Refs) -> Int[Array, ""]:
    """Give 1 if any expert has more takers than room."""
    takers = jnp.sum(refs.takers[...], axis=1, keepdims=True)
    return jnp.max((takers > refs.room[...]).astype(jnp.int32))


def _walk(refs: _Refs) -> None:
    """Let every token take its K best experts whose cutoff lies behind it, one block of lanes after another."""
    refs.takers[...] = jnp.zeros(refs.takers.shape, jnp.int32)

    def block(index: Array, _: None) -> None:
        _walk_block(refs, pl.multiple_of(index * LANES, LANES))

    lax.fori_loop(0, refs.costs.shape[1] // LANES, block, None)


def _walk_block(refs: _Refs, first: Array) -> None:
    (top_k, lanes), block = refs.ids.shape, pl.ds(first, LANES)
    experts = lax.broadcasted_iota(jnp.int32, (refs.costs.shape[0], LANES), 0)
    tokens = first + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    ranks = lax.broadcasted_iota(jnp.int32, refs.takers.shape, 1)
    worst, worst_id = refs.worst[0:1, block], refs.worst[1:2, block]
    rank, beyond = jnp.full(experts.shape, top_k, jnp.int32), jnp.zeros((1, LANES), jnp.int32)
    for k in range(top_k):
        is_open = (rank == top_k) & (k * lanes + tokens < refs.cut[...])
        costs = jnp.where(is_open, refs.costs[:, block], NEVER)
        best = jnp.min(costs, axis=0, keepdims=True)
        place = jnp.min(jnp.where((costs == best) & (costs < NEVER), experts, NEVER), axis=0, keepdims=True)
        takes, found = experts == place, place < NEVER
        rank = jnp.where(takes, k, rank)
        refs.ids[k : k + 1, block] = jnp.where(found, place, -1)
        beyond += (found & ((best > worst) | ((best == worst) & (place > worst_id)))).astype(jnp.int32)
        count = jnp.sum(takes.astype(jnp.float32), axis=1, keepdims=True).astype(jnp.int32)
        refs.takers[...] += jnp.where(ranks == k, count, 0)
        refs.last[0:1, block], refs.last[1:2, block] = best, place
    refs.rank[:, block] = rank
    refs.beyond[:, block] = beyond


def _lower_cutoffs(refs: _Refs) -> None:
    """Where an expert has more takers than room, put its cutoff behind the last that fits; without room it is 0."""
    (top_k, lanes), room = refs.ids.shape, refs.room[...]
    before, rank, need = (jnp.zeros(room.shape, jnp.int32) for _ in range(3))
    for k in range(top_k):
        upto = before + refs.takers[:, k : k + 1]
        fills = (before < room) & (upto >= room)
        rank, need, before = jnp.where(fills, k, rank), jnp.where(fills, room - before, need), upto
    lowered = rank * lanes + _place_of(refs, rank, need) + 1
    refs.cut[...] = jnp.where(room == 0, 0, jnp.where(before > room, lowered, refs.cut[...]))


def _place_of(refs: _Refs, rank: Int[Array, "E 1"], need: Int[Array, "E 1"]) -> Int[Array, "E 1"]:
    """Find each expert's `need`-th token, from 1 on, among those that took it at `rank`."""
    upto = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0) <= lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    triangle, wanted = upto.astype(jnp.float32), need.astype(jnp.float32)

    def block(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        place, before = state
        first = pl.multiple_of(index * LANES, LANES)
        took = refs.rank[:, pl.ds(first, LANES)] == rank
        number = before + jnp.dot(took.astype(jnp.float32), triangle, preferred_element_type=jnp.float32)
        tokens = first + lax.broadcasted_iota(jnp.int32, number.shape, 1)
        here = jnp.where(took & (number == wanted), tokens.astype(jnp.float32), 0.0)
        return place + jnp.sum(here, axis=1, keepdims=True), number[:, LANES - 1 :]

    nothing = jnp.zeros(rank.shape, jnp.float32)
    return lax.fori_loop(0, refs.rank.shape[1] // LANES, block, (nothing, nothing))[0].astype(jnp.int32)
