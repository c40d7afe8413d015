"""The grid schedule of a grouped matmul: which expert runs next, on which tile of rows. One TPU kernel; nothing is
sorted here.

A grid step is one expert on one tile. Either all rows are one tile, and each chosen expert has one step; or slots
are sorted by expert in tiles of T rows, and an expert has a step for each tile that holds rows of its own, as in
megablox (Gale et al. 2022). Counts are summed in float32, which is exact below 2^24 slots. Dims: N tokens, K experts
per token, E experts, V grid steps at most, T rows of a tile, R rows of the plan."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

TOKEN_TILE = 1024
PLAN_ROWS = 8
EXPERT, TILE, BEGIN, END = range(4)  # rows of a plan; BEGIN and END are sorted positions of the expert's slots


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanForm:
    """What is static in a plan; `tile` 0: all rows are one tile."""

    num_experts: int
    max_visits: int
    tile: int


def grid_steps(
    ids: Int[Array, "K N"], valid: Int[Array, "1 N"], form: PlanForm, *, interpret: Any = False
) -> tuple[Int[Array, "R V"], Int[Array, ""]]:
    """List the visits in order of expert and tile, and how many there are: at least one, because a kernel of no steps
    writes nothing; where no expert was chosen, the one visit has no rows. A token that is not `valid` (0) is
    padding."""
    top_k, num_tokens = ids.shape
    tile = min(TOKEN_TILE, num_tokens)
    plan, total = pl.pallas_call(
        functools.partial(_kernel, form=form, num_tokens=num_tokens),
        grid=(pl.cdiv(num_tokens, tile),),
        in_specs=[
            pl.BlockSpec((top_k, tile), lambda index: (0, index)),
            pl.BlockSpec((1, tile), lambda index: (0, index)),
        ],
        out_specs=[
            pl.BlockSpec((PLAN_ROWS, form.max_visits), lambda index: (0, 0)),
            pl.BlockSpec((1, 1), lambda index: (0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((PLAN_ROWS, form.max_visits), jnp.int32),
            jax.ShapeDtypeStruct((1, 1), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((form.num_experts, 1), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="grid_steps",
    )(ids, valid)
    return plan, total.reshape(())


def _kernel(
    ids_ref: Any, valid_ref: Any, plan_ref: Any, total_ref: Any, counts_ref: Any, *, form: PlanForm, num_tokens: int
) -> None:
    """Add one tile of tokens to the counts; after the last, write the plan."""
    index, tile = pl.program_id(0), ids_ref.shape[1]

    @pl.when(index == 0)
    def _() -> None:
        counts_ref[...] = jnp.zeros_like(counts_ref)

    experts = lax.broadcasted_iota(jnp.int32, (form.num_experts, tile), 0)
    inside = lax.broadcasted_iota(jnp.int32, (1, tile), 1) < num_tokens - index * tile
    counted = inside & (valid_ref[...] != 0)
    hits = jnp.zeros((form.num_experts, tile), jnp.float32)
    for k in range(ids_ref.shape[0]):
        hits += jnp.where((experts == ids_ref[k : k + 1, :]) & counted, 1.0, 0.0)
    counts_ref[...] += jnp.sum(hits, axis=1, keepdims=True)

    @pl.when(index == pl.num_programs(0) - 1)
    def _() -> None:
        plan, total = _plan(counts_ref[...], form)
        plan_ref[...] = plan.astype(jnp.int32)
        total_ref[...] = jnp.maximum(total, 1.0).astype(jnp.int32)


def _plan(counts: Float[Array, "E 1"], form: PlanForm) -> tuple[Float[Array, "R V"], Float[Array, "1 1"]]:
    """Turn counts, one an expert, into the list, one row of V visits a fact; and the number of visits."""
    starts = _sum_before(counts)
    first, visits = jnp.zeros_like(counts), jnp.where(counts > 0, 1.0, 0.0)
    if form.tile:
        first = jnp.floor(starts / form.tile)
        last = jnp.floor((starts + counts - 1.0) / form.tile)
        visits = jnp.where(counts > 0, last - first + 1.0, 0.0)
    before = _sum_before(visits)
    shape = (form.num_experts, form.max_visits)
    index = lax.broadcasted_iota(jnp.int32, shape, 1).astype(jnp.float32)
    is_visit = (before <= index) & (index < before + visits)

    def pick(column: Float[Array, "E 1"]) -> Float[Array, "1 V"]:
        return jnp.sum(jnp.where(is_visit, column, 0.0), axis=0, keepdims=True)

    expert = pick(lax.broadcasted_iota(jnp.int32, counts.shape, 0).astype(jnp.float32))
    tile = pick(first - before + index) if form.tile else jnp.zeros_like(expert)
    facts = [expert, tile, pick(starts), pick(starts + counts)]
    rows = jnp.concatenate([*facts, *[jnp.zeros_like(expert)] * (PLAN_ROWS - len(facts))], axis=0)
    return rows, jnp.sum(visits, axis=0, keepdims=True)


def _sum_before(column: Float[Array, "E 1"]) -> Float[Array, "E 1"]:
    """Sum of the entries above each one. Over [E, E] masks: nothing is transposed, and each sum is of whole numbers."""
    shape = (column.shape[0], column.shape[0])
    above, below = lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)
    row = jnp.sum(jnp.where(above == below, column, 0.0), axis=0, keepdims=True)  # [E, 1] -> [1, E]
    return jnp.sum(jnp.where(below < above, row, 0.0), axis=1, keepdims=True)
