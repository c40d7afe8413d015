"""Expert selection under capacity as one TPU kernel: all experts by all tokens in VMEM, no sort, gather or scatter.
Decides as `admission.choose_by_rounds` does.

The cutoff iteration over all ranks at once. In a round every token walks its experts with the experts' cutoffs: K
masked minima. Each expert with more requests than room then lowers its cutoff to behind its last admitted request,
found by a prefix count, which is a product with a triangle of ones. The round that changes nothing is the sequential
result: at most f + 1 rounds, f = experts that fill, and one more where experts have no room at all. Tokens are
lanes. A cost is a score reversed in the total order of floats, so lower is better. Dims: N tokens, E experts, K
experts per token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.balanced_selection.admission import ExpertChoice, order_keys

LANES, SUBLANES = 128, 8
MAX_CELLS = 1 << 17  # E * N, as [256, 512]
VMEM_BYTES = 4 << 20
NEVER = jnp.iinfo(jnp.int32).max  # the cost of what cannot be chosen
CUT, NUM_REQUESTS, FULL_RANK, NEED = (slice(column, column + 1) for column in range(4))


def fits(num_tokens: int, num_experts: int, top_k: int) -> bool:
    """Whether a batch of that size fits in VMEM."""
    return _padded(num_experts, SUBLANES) * _padded(num_tokens, LANES) <= MAX_CELLS and top_k <= LANES


def choose_by_tpu_kernel(
    scores: Float[Array, "N E"], room: Int[Array, " E"], valid: Bool[Array, " N"], top_k: int, *, interpret: Any = False
) -> ExpertChoice:
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
            pltpu.VMEM((rows, lanes), jnp.float32),
            pltpu.VMEM((rows, 4), jnp.float32),
            pltpu.VMEM((rows, LANES), jnp.float32),
            *[pltpu.VMEM((2, lanes), jnp.int32)] * 2,
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="choose_experts",
    )(costs, jnp.pad(jnp.minimum(room, top_k * lanes), (0, rows - num_experts)).astype(jnp.float32)[:, None])
    return ExpertChoice(ids.T[:num_tokens], jnp.sum(beyond, dtype=jnp.int32), rounds[0, 0])


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


@dataclasses.dataclass(frozen=True, slots=True)
class _Refs:
    """Buffers in VMEM. `last`: cost and id of the expert that each token took last; `worst`: the same of the last of
    its K best, ignoring capacities."""

    costs: Any  # [E, N]
    room: Any  # [E, 1], float32 as all counts, whole and below 2^22: exact
    ids: Any  # [K, N], out
    beyond: Any  # [1, N], out: how many a token took outside its K best
    rounds: Any  # [1, 1], out
    rank: Any  # [E, N]: the rank at which a token took an expert, K where it did not
    # [E, 4]: cutoff, requests, the rank whose requests fill the expert, how many requests of that rank are admitted
    facts: Any
    upto: Any  # [E, LANES]: lane k counts the requests of ranks 0 .. k
    last: Any  # [2, N]
    worst: Any  # [2, N]


def _kernel(*parts: Any) -> None:
    """Repeat rounds until no expert has more requests than room. The first round is without cutoffs: it finds each
    token's K best."""
    refs = _Refs(*parts)
    top_k, lanes = refs.ids.shape
    refs.facts[...] = jnp.full(refs.facts.shape, top_k * lanes, jnp.float32)
    refs.worst[...] = jnp.full(refs.worst.shape, NEVER, jnp.int32)
    _walk(refs)
    refs.worst[...] = refs.last[...]
    refs.rounds[...] = jnp.ones((1, 1), jnp.int32)

    def run_round(_: Array) -> Array:
        _lower_cutoffs(refs)
        _walk(refs)
        refs.rounds[...] += 1
        return _has_overflow(refs)

    lax.while_loop(lambda overflows: overflows > 0, run_round, _has_overflow(refs))


def _has_overflow(refs: _Refs) -> Int[Array, ""]:
    """Give 1 if any expert has more requests than room."""
    return jnp.max((refs.facts[:, NUM_REQUESTS] > refs.room[...]).astype(jnp.int32))


def _walk(refs: _Refs) -> None:
    """Let every token take its K best experts whose cutoff is after it, one block of lanes after another; then
    count."""

    def block(index: Array, _: None) -> None:
        _walk_block(refs, pl.multiple_of(index * LANES, LANES))

    refs.upto[...] = jnp.zeros(refs.upto.shape, jnp.float32)
    lax.fori_loop(0, refs.costs.shape[1] // LANES, block, None)
    _count(refs)


def _walk_block(refs: _Refs, first: Array) -> None:
    (top_k, lanes), block = refs.ids.shape, pl.ds(first, LANES)
    experts = lax.broadcasted_iota(jnp.int32, (refs.costs.shape[0], LANES), 0)
    tokens = (first + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)).astype(jnp.float32)
    column = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    worst, worst_id = refs.worst[0:1, block], refs.worst[1:2, block]
    left, ahead = refs.costs[:, block], refs.facts[:, CUT] - tokens
    rank, beyond = jnp.full(experts.shape, top_k, jnp.float32), jnp.zeros((1, LANES), jnp.int32)
    for k in range(top_k):
        left = jnp.where(ahead > float(k * lanes), left, NEVER)  # what is closed at a rank is closed at the next
        best = jnp.min(left, axis=0, keepdims=True)
        expert = jnp.min(jnp.where(left == best, experts, NEVER), axis=0, keepdims=True)
        expert = jnp.where(best < NEVER, expert, -1)
        takes = experts == expert
        left, rank = jnp.where(takes, NEVER, left), jnp.where(takes, float(k), rank)
        refs.upto[...] += _product(jnp.where(takes, 1.0, 0.0), column >= k)
        refs.ids[k : k + 1, block] = expert
        beyond += ((expert >= 0) & ((best > worst) | ((best == worst) & (expert > worst_id)))).astype(jnp.int32)
        refs.last[0:1, block], refs.last[1:2, block] = best, expert
    refs.rank[:, block] = rank
    refs.beyond[:, block] = beyond


def _count(refs: _Refs) -> None:
    """Count each expert's requests, and find the rank that fills it: lane k of `upto` counts the requests of ranks 0 ..
    k."""
    upto, room = refs.upto[...], refs.room[...]
    before = jnp.max(jnp.where(upto < room, upto, 0.0), axis=1, keepdims=True)
    refs.facts[:, NUM_REQUESTS] = jnp.max(upto, axis=1, keepdims=True)
    refs.facts[:, FULL_RANK] = jnp.sum(jnp.where(upto < room, 1.0, 0.0), axis=1, keepdims=True)
    refs.facts[:, NEED] = room - before


def _product(counts: Float[Array, "E T"], ones: Bool[Array, "T T"]) -> Float[Array, "E T"]:
    """Multiply small whole numbers (exact in bfloat16) by zeros and ones, summed in float32: exact."""
    return jnp.dot(counts.astype(jnp.bfloat16), ones.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def _lower_cutoffs(refs: _Refs) -> None:
    """Where an expert has more requests than room, put its cutoff behind the last that fits; without room it is 0."""
    lanes, room, rank = float(refs.ids.shape[1]), refs.room[...], refs.facts[:, FULL_RANK]
    lowered = rank * lanes + _token_index(refs, rank, refs.facts[:, NEED]) + 1
    is_over = refs.facts[:, NUM_REQUESTS] > room
    refs.facts[:, CUT] = jnp.where(room == 0, 0.0, jnp.where(is_over, lowered, refs.facts[:, CUT]))


def _token_index(refs: _Refs, rank: Float[Array, "E 1"], need: Float[Array, "E 1"]) -> Float[Array, "E 1"]:
    """Find each expert's `need`-th token, from 1 on, among those that took it at `rank`."""
    upto = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0) <= lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    index, before = jnp.zeros((rank.shape[0], LANES), jnp.float32), jnp.zeros(rank.shape, jnp.float32)
    for first in range(0, refs.rank.shape[1], LANES):
        took = jnp.where(refs.rank[:, first : first + LANES] == rank, 1.0, 0.0)
        number = before + _product(took, upto)
        tokens = (first + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)).astype(jnp.float32)
        index += jnp.where(took * number == need, tokens, 0.0)
        before = number[:, LANES - 1 :]
    return jnp.sum(index, axis=1, keepdims=True)
