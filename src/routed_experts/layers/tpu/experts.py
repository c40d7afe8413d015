"""Experts on TPU, without a copy of their weights: the arrays of all layers go in whole, and a grid step fetches its
expert's matrices at its layer's offset.

Up to FEW_ROWS tokens (all of a decode step) a visited expert runs on every row at once and each row takes what it
chose: reading the experts takes longer than multiplying all rows, so nothing is sorted, gathered or scattered.
Above, slots are sorted by expert and cut into tiles (group_metadata.py); rows of a tile that belong to another
expert are left to that expert's grid step. Results are accumulated in float32, and biases are added to them there.
Outputs that a row did not choose are selected away, not multiplied by 0, and so may be NaN.

An expert that VMEM does not hold twice is cut. Where F is a multiple of the lanes, a part is the same columns of gate
and up, and those rows of down. Else (GPT-OSS: 2,880) columns of gate and up cannot be fetched in pairs: first all of
them are multiplied, by parts of the matrix, then parts of down. Of codes, a part of down begins on the border of a
group and of a tile, and its last part may be short. Dims: N tokens, K experts per token, E experts of a layer, R layers
of the stack, D hidden, F expert width, T rows of a tile."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.core.errors import ConfigError
from routed_experts.layers.moe import ACTIVATIONS, ExpertCall
from routed_experts.layers.tpu.codes import (
    CODE_ROWS,
    MatrixBlock,
    column_bytes,
    fetched_rows,
    group_of,
    inputs_of_row,
    rows_of_inputs,
    weight_arrays,
)
from routed_experts.layers.tpu.group_metadata import BEGIN, END, EXPERT, TILE, PlanForm, grid_steps

FEW_ROWS = 256  # a chip multiplies about 240 rows (v5e) to 560 (v6e) in the time that it takes to read an expert
ROW_TILE = 128
LANES = 128
PACKED_ROWS = 16  # rows of a tile of bfloat16; a multiple of those of float32
WEIGHT_BYTES = 20 << 20  # of one visit's part of an expert; two are in VMEM at a time
VMEM_BYTES = 60 << 20  # a v5p has 64 MiB, a v5e and a v6e 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How an expert is cut. `columns` of gate|up are fetched at a time, and `rows` of down. `paired`: each time the
    same columns of gate and of up, apart; else `columns` are of both, side by side, and all are multiplied before
    down."""

    width: int
    columns: int
    rows: int
    paired: bool

    @property
    def gate_steps(self) -> int:
        """Parts of gate|up."""
        return pl.cdiv(self.width if self.paired else 2 * self.width, self.columns)

    @property
    def down_steps(self) -> int:
        """Parts of down."""
        return pl.cdiv(self.width, self.rows)

    @property
    def short_rows(self) -> int:
        """Rows of the last part of down, where it has fewer than the others; else 0."""
        return self.width % self.rows

    @property
    def steps(self) -> int:
        """Grid steps of one expert."""
        return self.gate_steps if self.paired or self.is_whole else self.gate_steps + self.down_steps

    @property
    def is_whole(self) -> bool:
        """One step an expert."""
        return self.gate_steps == self.down_steps == 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What is static in one part of an expert; its matrices, gate and up or both in one, and down; and references:
    biases, if any, and for an expert that is not cut in pairs, what its columns gave and the activated rows of each
    part of down."""

    cut: _Cut
    activation: str
    expert: Any  # in the arrays of all layers
    step: Any
    gates: tuple[MatrixBlock, ...]
    down: MatrixBlock
    gate_biases: tuple[Any, ...]
    down_bias: Any
    mixed: Any  # [gate_steps T columns]
    hidden: Any  # [down_steps T rows]


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

    def full_block(rows: int, columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, columns), lambda visit, part, first, plan: (0, 0))

    scratch = [pltpu.VMEM((num_tokens, top_k), jnp.int32), pltpu.VMEM((num_tokens, top_k), jnp.float32)]
    return _visit(
        _few_rows_kernel,
        _cut(call, weight_bytes),
        call,
        plan,
        num_visits,
        [call.x, ids, call.weights.T.astype(jnp.float32), valid],
        [
            full_block(num_tokens, dim),
            full_block(top_k, num_tokens),
            full_block(top_k, num_tokens),
            full_block(1, num_tokens),
        ],
        full_block(num_tokens, dim),
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
    _, inverse = lax.sort((order, numbers), num_keys=1, is_stable=False)
    rows = jnp.take(call.x, lax.rem(order, num_tokens), axis=0, mode="clip")
    tile = pl.BlockSpec((ROW_TILE, dim), lambda visit, part, first, plan: (plan[TILE, visit], 0))
    outputs = _visit(
        _sorted_kernel,
        _cut(call, weight_bytes),
        call,
        plan,
        num_visits,
        [rows],
        [tile],
        tile,
        [pltpu.VMEM((ROW_TILE, dim), jnp.float32)],
        interpret,
    )
    outputs = jnp.take(outputs, inverse, axis=0, mode="clip").reshape(top_k, num_tokens, dim)
    mixed = jnp.zeros(call.x.shape, jnp.float32)
    for k in range(top_k):  # one sum over k would hold all of it in memory in float32
        mixed += outputs[k].astype(jnp.float32) * call.weights[:, k, None]
    return jnp.where(call.valid[:, None], mixed, 0.0).astype(call.x.dtype)


def _cut(call: ExpertCall, weight_bytes: int) -> _Cut:
    """The largest parts of an expert that VMEM holds twice. Columns can be fetched by whole tiles, rows by whole packed
    tiles, rows of codes by whole tiles and groups.

    Raises ConfigError for an expert that does not fit and has no such parts, which one of codes always has."""
    dim, width = call.x.shape[1], call.down.shape[1]
    # Of a column, and of a row without its scales: those of all rows of down are fetched
    row_bytes = weight_arrays(call.down)[0].dtype.itemsize * dim // inputs_of_row(call.down)
    line_bytes = max(column_bytes(call.gate_up), row_bytes)
    if group_of(call.gate_up) or group_of(call.down):
        weight_bytes -= weight_bytes // 4  # for the rows and sums of `MatrixBlock.product`
        weight_bytes -= sum(4 * rows * dim for rows in fetched_rows(call.down)[1:])
    if width % LANES == 0:
        part = _largest_part(width, LANES, weight_bytes // (3 * line_bytes))
        assert part, width
        return _Cut(width=width, columns=part, rows=part, paired=True)
    if 3 * width * line_bytes <= weight_bytes:
        return _Cut(width=width, columns=2 * width, rows=width, paired=False)
    most = weight_bytes // (2 * line_bytes)
    group = group_of(call.down)
    unit = max(CODE_ROWS * inputs_of_row(call.down), group) if group else PACKED_ROWS
    rows = _largest_part(width, unit, most)
    if group and not rows:  # the last part is short
        rows = max(unit, most // unit * unit)
    if not rows:
        raise ConfigError(
            f"experts of {dim} by {width} do not fit twice into {2 * weight_bytes:,} bytes, and {width} is no multiple "
            f"of {PACKED_ROWS}, so that they cannot be cut; choose moe_backend='tiled'"
        )
    gate_steps = pl.cdiv(2 * width, max(LANES, most // LANES * LANES))
    columns = pl.cdiv(pl.cdiv(2 * width, gate_steps), LANES) * LANES  # all parts but the last have as many
    return _Cut(width=width, columns=columns, rows=min(rows, width), paired=False)


def _largest_part(width: int, unit: int, most: int) -> int:
    """The largest multiple of `unit` that divides the width and is at most `most`, or the smallest; 0 for none."""
    parts = [part for part in range(unit, width + 1, unit) if width % part == 0]
    return max((part for part in parts if part <= most), default=parts[0] if parts else 0)


def _visit(
    kernel: Any,
    cut: _Cut,
    call: ExpertCall,
    plan: Int[Array, "R V"],
    num_visits: Int[Array, ""],
    operands: list[Any],
    specs: list[pl.BlockSpec],
    out_spec: pl.BlockSpec,
    scratch: list[Any],
    interpret: Any,
) -> Array:
    """Run a kernel over the visits of a plan and the parts of each expert, which the pipeline fetches one step
    ahead."""
    tile_rows = scratch[0].shape[0]
    weights, weight_specs = _weights(call, cut)
    if cut.steps > cut.gate_steps:
        scratch = [
            *scratch,
            pltpu.VMEM((cut.gate_steps, tile_rows, cut.columns), jnp.float32),
            pltpu.VMEM((cut.down_steps, tile_rows, cut.rows), call.x.dtype),
        ]
    flags = {"gate_biased": call.gate_up_bias is not None, "down_biased": call.down_bias is not None}
    flags |= {"gate_group": group_of(call.gate_up), "down_group": group_of(call.down)}
    return pl.pallas_call(
        functools.partial(kernel, part_of=functools.partial(_part, cut=cut, activation=call.activation, **flags)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_visits, cut.steps),
            in_specs=[*specs, *weight_specs],
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
    )(call.first_expert.reshape(1), plan, *operands, *weights)


def _weights(call: ExpertCall, cut: _Cut) -> tuple[list[Array], list[pl.BlockSpec]]:
    """The arrays of an expert's matrices and biases, in the order of `_part`, and what a grid step fetches of each."""
    dim = call.x.shape[1]

    def gate_step(step: Any) -> Any:
        return jnp.minimum(step, cut.gate_steps - 1)

    def down_step(step: Any) -> Any:
        return step if cut.steps == cut.gate_steps else jnp.maximum(step - cut.gate_steps, 0)

    def matrix(rows: int, columns: int, part: Callable[[Any], tuple[Any, Any]]) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, rows, columns), lambda visit, step, first, plan: (first[0] + plan[EXPERT, visit], *part(step))
        )

    def bias(values: Float[Array, "RE O"], columns: int, column_step: Callable[[Any], Any]) -> pl.BlockSpec:
        rows = min(PACKED_ROWS, values.shape[0])
        return pl.BlockSpec(
            (rows, columns),
            lambda visit, step, first, plan: (lax.div(first[0] + plan[EXPERT, visit], rows), column_step(step)),
        )

    weights, specs = [], []
    offsets = [0, cut.gate_steps] if cut.paired else [0]
    for offset in offsets:
        weights += weight_arrays(call.gate_up)
        specs += [
            matrix(rows, cut.columns, lambda step, offset=offset: (0, offset + gate_step(step)))
            for rows in fetched_rows(call.gate_up)
        ]
    weights += weight_arrays(call.down)
    specs.append(matrix(rows_of_inputs(call.down, cut.rows), dim, lambda step: (down_step(step), 0)))
    # Scales of all parts at once: those of one part may be no whole tile.
    specs += [matrix(rows, dim, lambda _: (0, 0)) for rows in fetched_rows(call.down)[1:]]
    if (gate_up_bias := call.gate_up_bias) is not None:
        weights += [gate_up_bias] * len(offsets)
        specs += [
            bias(gate_up_bias, cut.columns, lambda step, offset=offset: offset + gate_step(step)) for offset in offsets
        ]
    if (down_bias := call.down_bias) is not None:
        weights.append(down_bias)
        specs.append(bias(down_bias, dim, lambda _: 0))
    return weights, specs


def _part(
    first: Any,
    plan: Any,
    refs: list[Any],
    *,
    cut: _Cut,
    activation: str,
    gate_biased: bool,
    down_biased: bool,
    gate_group: int,
    down_group: int,
) -> tuple[_Part, list[Any]]:
    """Sort a kernel's references: those of a part of an expert, and the others."""
    rest, count = list(refs), 2 if cut.paired else 1

    step, num_columns = pl.program_id(1), None
    if not cut.paired:  # the last columns are short
        num_columns = 2 * cut.width - jnp.minimum(step, cut.gate_steps - 1) * cut.columns

    def next_matrix(group: int, num_outputs: Any) -> MatrixBlock:
        scales = rest.pop(1) if group else None
        return MatrixBlock(values=rest.pop(0), scales=scales, group=group, num_outputs=num_outputs)

    gates, down = tuple(next_matrix(gate_group, num_columns) for _ in range(count)), next_matrix(down_group, None)
    gate_biases = tuple(rest.pop(0) for _ in range(count)) if gate_biased else ()
    down_bias = rest.pop(0) if down_biased else None
    hidden, mixed = (rest.pop(), rest.pop()) if cut.steps > cut.gate_steps else (None, None)
    part = _Part(
        cut=cut,
        activation=activation,
        expert=first[0] + plan[EXPERT, pl.program_id(0)],
        step=step,
        gates=gates,
        down=down,
        gate_biases=gate_biases,
        down_bias=down_bias,
        mixed=mixed,
        hidden=hidden,
    )
    return part, rest


def _cost(call: ExpertCall, *, rows: int, visits: int) -> pl.CostEstimate:
    """At most: every visit reads an expert, once. For the compiler, which cannot inspect a kernel."""
    dim, width = call.x.shape[1], call.down.shape[1]
    expert_bytes = 2 * width * column_bytes(call.gate_up) + dim * column_bytes(call.down)
    multiplied = min(rows, ROW_TILE) if rows > FEW_ROWS else rows
    return pl.CostEstimate(
        flops=6 * visits * multiplied * dim * width,
        bytes_accessed=min(visits, call.num_experts) * expert_bytes + 2 * rows * dim * call.x.dtype.itemsize,
        transcendentals=visits * multiplied * width,
    )


def _run_part(part: _Part, x: Float[Array, "T D"], add: Callable[[Float[Array, "T D"]], None]) -> None:
    """One part of an expert on some rows; `add` takes what it gives to the sum, float32."""
    cut, step = part.cut, part.step
    if part.mixed is None:
        mixed = [_gate_columns(part, x, index) for index in range(len(part.gates))]
        gate, up = mixed if cut.paired else (mixed[0][:, : cut.width], mixed[0][:, cut.width :])
        add(_down_rows(part, ACTIVATIONS[part.activation](gate, up).astype(x.dtype), step))
        return

    @pl.when(step < cut.gate_steps)
    def _() -> None:
        part.mixed[jnp.minimum(step, cut.gate_steps - 1)] = _gate_columns(part, x, 0)

    @pl.when(step == cut.gate_steps - 1)
    def _() -> None:
        columns = jnp.concatenate([part.mixed[index] for index in range(cut.gate_steps)], axis=1)
        gate, up = columns[:, : cut.width], columns[:, cut.width : 2 * cut.width]
        hidden = ACTIVATIONS[part.activation](gate, up).astype(x.dtype)
        for index in range(cut.down_steps):
            rows = hidden[:, index * cut.rows : (index + 1) * cut.rows]
            part.hidden[index, :, : rows.shape[1]] = rows

    @pl.when((step >= cut.gate_steps) & (step < cut.steps - bool(cut.short_rows)))
    def _() -> None:
        index = jnp.maximum(step - cut.gate_steps, 0)
        add(_down_rows(part, part.hidden[index], index))

    if cut.short_rows:  # what is fetched beside them is not defined
        last = cut.down_steps - 1

        @pl.when(step == cut.steps - 1)
        def _() -> None:
            add(_down_rows(part, part.hidden[last, :, : cut.short_rows], last))


def _gate_columns(part: _Part, x: Float[Array, "T D"], index: int) -> Float[Array, "T O"]:
    """One product of a part with gate or up, or with both."""
    mixed = part.gates[index].product(x)
    return mixed + _bias_row(part, part.gate_biases[index]) if part.gate_biases else mixed


def _down_rows(part: _Part, hidden: Float[Array, "T F"], index: Any) -> Float[Array, "T D"]:
    """The product with a part of down; the first one with the bias."""
    first_group = index * (part.cut.rows // part.down.group) if part.down.group else 0
    outputs = part.down.product(hidden, first_group)
    if part.down_bias is None:
        return outputs
    return outputs + jnp.where(index == 0, _bias_row(part, part.down_bias), 0.0)


def _bias_row(part: _Part, bias_ref: Any) -> Float[Array, "1 O"]:
    """The bias of this visit's expert: by selection, because no row of packed numbers can be read at an index that is
    known only at run time."""
    row = lax.rem(part.expert, bias_ref.shape[0])
    rows = lax.broadcasted_iota(jnp.int32, bias_ref.shape, 0)
    return jnp.sum(jnp.where(rows == row, bias_ref[...].astype(jnp.float32), 0.0), axis=0, keepdims=True)


def _few_rows_kernel(
    first_ref: Any,
    plan_ref: Any,
    x_ref: Any,
    ids_ref: Any,
    weights_ref: Any,
    valid_ref: Any,
    *refs: Any,
    part_of: Callable[..., tuple[_Part, list[Any]]],
) -> None:
    part, (out_ref, sum_ref, row_ids_ref, row_weights_ref) = part_of(first_ref, plan_ref, list(refs))
    visit, step = pl.program_id(0), pl.program_id(1)

    @pl.when((visit == 0) & (step == 0))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        row_ids_ref[...] = jnp.where(valid_ref[...] != 0, ids_ref[...], -1).T
        row_weights_ref[...] = weights_ref[...].T

    def add(outputs: Float[Array, "N D"]) -> None:
        is_chosen: Bool[Array, "N K"] = row_ids_ref[...] == plan_ref[EXPERT, visit]
        chosen = jnp.sum(jnp.where(is_chosen, 1.0, 0.0), axis=1, keepdims=True) > 0.0
        weight = jnp.sum(jnp.where(is_chosen, row_weights_ref[...], 0.0), axis=1, keepdims=True)
        sum_ref[...] += jnp.where(chosen, weight * outputs, 0.0)

    _run_part(part, x_ref[...], add)

    @pl.when((visit == pl.num_programs(0) - 1) & (step == pl.num_programs(1) - 1))
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _sorted_kernel(
    first_ref: Any, plan_ref: Any, x_ref: Any, *refs: Any, part_of: Callable[..., tuple[_Part, list[Any]]]
) -> None:
    part, (out_ref, sum_ref) = part_of(first_ref, plan_ref, list(refs))
    visit, step = pl.program_id(0), pl.program_id(1)
    tile = plan_ref[TILE, visit]

    @pl.when((step == 0) & ((visit == 0) | (tile != plan_ref[TILE, jnp.maximum(visit - 1, 0)])))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(outputs: Float[Array, "T D"]) -> None:
        positions = tile * ROW_TILE + lax.broadcasted_iota(jnp.int32, (ROW_TILE, 1), 0)
        is_row = (positions >= plan_ref[BEGIN, visit]) & (positions < plan_ref[END, visit])
        sum_ref[...] += jnp.where(is_row, outputs, 0.0)

    _run_part(part, x_ref[...], add)

    @pl.when(step == pl.num_programs(1) - 1)
    def _() -> None:
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)
