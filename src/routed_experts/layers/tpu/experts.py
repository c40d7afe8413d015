"""Experts on TPU, without a copy of their weights: the arrays of all layers go in whole, and a grid step fetches its
expert's matrices at its layer's offset.

Up to FEW_ROWS tokens (all of a decode step) a visited expert runs on every row at once and each row takes what it
chose: reading the experts takes longer than multiplying all rows, so nothing is sorted, gathered or scattered.
Above, slots are sorted by expert and cut into tiles (group_metadata.py); rows of a tile that belong to another
expert are left to that expert's grid step. Results are accumulated in float32. Outputs that a row did not choose are
selected away, not multiplied by 0, and so may be NaN. Dims: N tokens, K experts per token, E experts of a layer, R
layers of the stack, D hidden, F expert width, T rows of a tile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.core.errors import ConfigError
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.tpu.group_metadata import BEGIN, END, EXPERT, TILE, PlanForm, grid_steps

FEW_ROWS = 256  # a chip multiplies about 240 rows (v5e) to 560 (v6e) in the time that it takes to read an expert
ROW_TILE = 128
LANES = 128
WEIGHT_BYTES = 20 << 20  # of one visit's part of an expert; two are in VMEM at a time
VMEM_BYTES = 60 << 20  # a v5p has 64 MiB, a v5e and a v6e 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Widths:
    """How an expert is cut: `split` columns of F at a time, gate and up apart; or whole, gate and up side by side."""

    width: int
    part: int
    split: bool


def fused_experts(call: ExpertCall, *, interpret: Any = False) -> Float[Array, "N D"]:
    """Run the chosen experts of a step in one kernel, both products and the activation between them."""
    run = few_rows_experts if call.x.shape[0] <= FEW_ROWS else sorted_experts
    return run(call, interpret=interpret)


def few_rows_experts(
    call: ExpertCall, *, weight_bytes: int = WEIGHT_BYTES, interpret: Any = False
) -> Float[Array, "N D"]:
    """Every expert that was chosen, on all rows; each row adds up what it chose."""
    (num_tokens, top_k), dim = call.ids.shape, call.x.shape[1]
    form = PlanForm(num_experts=call.num_experts, max_visits=min(call.num_experts, call.ids.size), tile=0)
    ids, valid = call.ids.T, call.valid.astype(jnp.int32)[None]
    plan, num_visits = grid_steps(ids, valid, form, interpret=interpret)

    def whole(rows: int, columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, columns), lambda visit, part, first, plan: (0, 0))

    scratch = [pltpu.VMEM((num_tokens, top_k), jnp.int32), pltpu.VMEM((num_tokens, top_k), jnp.float32)]
    return _visit(
        _few_rows_kernel,
        _widths(call, weight_bytes),
        call,
        plan,
        num_visits,
        [call.x, ids, call.weights.T.astype(jnp.float32), valid],
        [whole(num_tokens, dim), whole(top_k, num_tokens), whole(top_k, num_tokens), whole(1, num_tokens)],
        whole(num_tokens, dim),
        [pltpu.VMEM((num_tokens, dim), jnp.float32), *scratch],
        interpret,
    )


def sorted_experts(
    call: ExpertCall, *, weight_bytes: int = WEIGHT_BYTES, interpret: Any = False
) -> Float[Array, "N D"]:
    """Slots sorted by expert, in tiles of T rows; each expert runs on the tiles that hold its rows."""
    (num_tokens, top_k), dim = call.ids.shape, call.x.shape[1]
    keys = jnp.where(call.valid, call.ids.T, call.num_experts)
    slots = keys.size
    form = PlanForm(num_experts=call.num_experts, max_visits=pl.cdiv(slots, ROW_TILE) + call.num_experts, tile=ROW_TILE)
    plan, num_visits = grid_steps(call.ids.T, call.valid.astype(jnp.int32)[None], form, interpret=interpret)
    assert slots * (call.num_experts + 1) < 2**31, (slots, call.num_experts)
    numbers = jnp.arange(slots, dtype=jnp.int32)  # slot k*N + n
    order = lax.rem(lax.sort(keys.reshape(-1) * slots + numbers, is_stable=False), slots)
    _, place = lax.sort((order, numbers), num_keys=1, is_stable=False)
    rows = jnp.take(call.x, lax.rem(order, num_tokens), axis=0, mode="clip")
    tile = pl.BlockSpec((ROW_TILE, dim), lambda visit, part, first, plan: (plan[TILE, visit], 0))
    outputs = _visit(
        _sorted_kernel,
        _widths(call, weight_bytes),
        call,
        plan,
        num_visits,
        [rows],
        [tile],
        tile,
        [pltpu.VMEM((ROW_TILE, dim), jnp.float32)],
        interpret,
    )
    outputs = jnp.take(outputs, place, axis=0, mode="clip").reshape(top_k, num_tokens, dim)
    mixed = jnp.zeros(call.x.shape, jnp.float32)
    for k in range(top_k):  # one sum over k would hold all of it in memory in float32
        mixed += outputs[k].astype(jnp.float32) * call.weights[:, k, None]
    return jnp.where(call.valid[:, None], mixed, 0.0).astype(call.x.dtype)


def _widths(call: ExpertCall, weight_bytes: int) -> _Widths:
    """The widest part of an expert that VMEM holds twice. Only whole tiles of columns can be fetched apart."""
    dim, width = call.x.shape[1], call.down.shape[1]
    if width % LANES:
        whole = 6 * dim * width * call.gate_up.dtype.itemsize  # two experts
        if whole > VMEM_BYTES // 2:
            raise ConfigError(
                f"experts of {dim} by {width} do not fit twice into {VMEM_BYTES // 2:,} bytes, and {width} columns are "
                "no multiple of "
                f"{LANES}, so that they cannot be cut; choose moe_backend='tiled'"
            )
        return _Widths(width=width, part=width, split=False)
    most = max(LANES, weight_bytes // (3 * dim * call.gate_up.dtype.itemsize))
    part = max(part for part in range(LANES, width + 1, LANES) if width % part == 0 and part <= most)
    return _Widths(width=width, part=part, split=True)


def _visit(
    kernel: Any,
    widths: _Widths,
    call: ExpertCall,
    plan: Int[Array, "R V"],
    num_visits: Int[Array, ""],
    operands: list[Any],
    specs: list[pl.BlockSpec],
    out_spec: pl.BlockSpec,
    scratch: list[Any],
    interpret: Any,
) -> Array:
    """Run a kernel over the visits of a plan and the parts of each expert, which the pipeline fetches one visit
    ahead."""
    dim, parts = call.x.shape[1], widths.width // widths.part

    def gate(offset: int) -> pl.BlockSpec:
        columns = widths.part if widths.split else 2 * widths.width
        return pl.BlockSpec(
            (1, dim, columns), lambda visit, part, first, plan: (first[0] + plan[EXPERT, visit], 0, offset + part)
        )

    down = pl.BlockSpec(
        (1, widths.part, dim), lambda visit, part, first, plan: (first[0] + plan[EXPERT, visit], part, 0)
    )
    gates = [gate(0), gate(parts)] if widths.split else [gate(0)]
    return pl.pallas_call(
        functools.partial(kernel, widths=widths),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_visits, parts),
            in_specs=[*specs, *gates, down],
            out_specs=out_spec,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(operands[0].shape, call.x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_cost(call, rows=operands[0].shape[0], visits=plan.shape[1]),
        interpret=interpret,
        name="fused_experts",
    )(call.first_expert.reshape(1), plan, *operands, *[call.gate_up] * len(gates), call.down)


def _cost(call: ExpertCall, *, rows: int, visits: int) -> pl.CostEstimate:
    """At most: every visit reads an expert, once. For the compiler, which cannot inspect a kernel."""
    dim, width = call.x.shape[1], call.down.shape[1]
    experts = 3 * min(visits, call.num_experts) * dim * width * call.gate_up.dtype.itemsize
    multiplied = min(rows, ROW_TILE) if rows > FEW_ROWS else rows
    return pl.CostEstimate(
        flops=6 * visits * multiplied * dim * width,
        bytes_accessed=experts + 2 * rows * dim * call.x.dtype.itemsize,
        transcendentals=visits * multiplied * width,
    )


def _run_part(x: Float[Array, "T D"], gate_refs: Any, down_ref: Any, widths: _Widths) -> Float[Array, "T D"]:
    """One part of an expert on some rows, in float32."""
    mixed = [jnp.dot(x, ref[0], preferred_element_type=jnp.float32) for ref in gate_refs]
    gate, up = mixed if widths.split else (mixed[0][:, : widths.width], mixed[0][:, widths.width :])
    hidden = (gate * jax.nn.sigmoid(gate) * up).astype(x.dtype)
    return jnp.dot(hidden, down_ref[0], preferred_element_type=jnp.float32)


def _few_rows_kernel(
    _: Any, plan_ref: Any, x_ref: Any, ids_ref: Any, weights_ref: Any, valid_ref: Any, *refs: Any, widths: _Widths
) -> None:
    *gate_refs, down_ref, out_ref, sum_ref, row_ids_ref, row_weights_ref = refs
    visit, part = pl.program_id(0), pl.program_id(1)

    @pl.when((visit == 0) & (part == 0))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        row_ids_ref[...] = jnp.where(valid_ref[...] != 0, ids_ref[...], -1).T
        row_weights_ref[...] = weights_ref[...].T

    mine: Bool[Array, "N K"] = row_ids_ref[...] == plan_ref[EXPERT, visit]
    chosen = jnp.sum(jnp.where(mine, 1.0, 0.0), axis=1, keepdims=True) > 0.0
    weight = jnp.sum(jnp.where(mine, row_weights_ref[...], 0.0), axis=1, keepdims=True)
    outputs = _run_part(x_ref[...], gate_refs, down_ref, widths)
    sum_ref[...] += jnp.where(chosen, weight * outputs, 0.0)

    @pl.when((visit == pl.num_programs(0) - 1) & (part == pl.num_programs(1) - 1))
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _sorted_kernel(_: Any, plan_ref: Any, x_ref: Any, *refs: Any, widths: _Widths) -> None:
    *gate_refs, down_ref, out_ref, sum_ref = refs
    visit, part = pl.program_id(0), pl.program_id(1)
    tile = plan_ref[TILE, visit]

    @pl.when((part == 0) & ((visit == 0) | (tile != plan_ref[TILE, jnp.maximum(visit - 1, 0)])))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    place = tile * ROW_TILE + lax.broadcasted_iota(jnp.int32, (ROW_TILE, 1), 0)
    mine = (place >= plan_ref[BEGIN, visit]) & (place < plan_ref[END, visit])
    outputs = _run_part(x_ref[...], gate_refs, down_ref, widths)
    sum_ref[...] += jnp.where(mine, outputs, 0.0)

    @pl.when(part == pl.num_programs(1) - 1)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
