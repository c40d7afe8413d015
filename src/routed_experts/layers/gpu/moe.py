"""Experts on a GPU: one kernel gathers rows and activates gate and up, one multiplies by `down`; K slots are summed
afterwards. Biases are added where the product is stored. Shared experts are further tiles of both kernels.

Expert weights of the whole stack are read in place: expert e of the layer is row first_expert + e of the arrays.
Slots (n*K + k) are sorted by expert in order of n, so no result depends on the order in which blocks run; there are
no atomics. With few slots nothing is sorted: each slot is a tile of its own. Weights pass once through the chip at
small N, where they are all the traffic. Dims: N tokens, K experts per token, E experts of a layer, R layers of the
stack, D hidden, F expert width, T rows of a tile, M tiles."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from routed_experts.layers.gpu.activations import activate
from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero, rounded, scaled_step
from routed_experts.layers.gpu.expert_rows import tile_limit
from routed_experts.layers.gpu.expert_tiles import MoeTiles, Tile, tiles_for
from routed_experts.layers.gpu.operands import Inputs, MatrixKind, check_weights, shared_kind
from routed_experts.layers.gpu.scaled_rows import Rows, ScaledRows, rows_for_codes
from routed_experts.layers.gpu.slot_lists import sort_slots
from routed_experts.layers.gpu.sums import FEWEST_ROWS, sum_products
from routed_experts.layers.gpu.warpgroup_experts import suits_warpgroups, warpgroup_experts
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.kernels import SharedExperts
from routed_experts.layers.moe import ExpertCall, combine
from routed_experts.layers.quantized import Weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """What a product is compiled for. `shared_chunks`: columns of the shared experts are worked on in so many parts of
    the experts' width; 0 without shared experts."""

    tile: Tile
    top_k: int
    sorted_slots: bool
    stride: int
    activation: str
    biased: bool
    num_rows: int
    shared_chunks: int
    interpret: bool

    @property
    def shared_tiles(self) -> int:
        """Tiles of the shared experts, which come before all others."""
        return self.shared_chunks * pl.cdiv(self.num_rows, self.tile.rows)


def _with_tile(refs: tuple[Any, ...], static: KernelConfig, body: Callable[[Array, Array, Array], None]) -> None:
    """Run `body(expert, slots, mask)` for the block's tile, if it has one."""
    first, valid, ids, table, order = refs
    tile, index = static.tile, pl.program_id(1) - static.shared_tiles
    is_routed = index >= 0
    index = jnp.maximum(index, 0)
    if not static.sorted_slots:
        expert = ids[index]
        rows = jnp.arange(tile.rows)

        @pl.when(valid[index // static.top_k] & is_routed)
        def _() -> None:
            body(first[0] * static.stride + expert, jnp.where(rows == 0, index, ids.shape[0]), rows == 0)

        return
    expert, start, end = (table[index, column] for column in range(3))

    @pl.when((start < end) & is_routed)
    def _() -> None:
        positions = start + jnp.arange(tile.rows)
        mask = positions < end
        body(first[0] * static.stride + expert, plgpu.load(order.at[positions], mask=mask, other=order.shape[0]), mask)


def _with_shared_tile(static: KernelConfig, body: Callable[[Array, Array, Array], None]) -> None:
    """Run `body(part, rows, mask)` for the block's tile of the shared experts, if it has one."""
    index = pl.program_id(1)

    @pl.when(index < static.shared_tiles)
    def _() -> None:
        rows = index // static.shared_chunks * static.tile.rows + jnp.arange(static.tile.rows)
        body(index % static.shared_chunks, rows, rows < static.num_rows)


def _arrays(refs: tuple[Any, ...], static: KernelConfig) -> tuple[Any, Any, Any, list[Any]]:
    """Rows, weights, biases or None, and the others."""
    rows, weights, *rest = refs[5:]
    return (rows, weights, rest[0], rest[1:]) if static.biased else (rows, weights, None, rest)


def _plus_bias(total: Array, biases: Any, expert: Array, columns: Array, mask: Array | None, dtype: Any) -> Array:
    """The sums in the model's dtype, as float32, with the expert's bias; rounded as one product and one addition."""
    total = rounded(total, dtype)
    if biases is None:
        return total
    own = load_or_zero(biases.at[expert, columns[None, :]], mask)
    return rounded(total + own.astype(jnp.float32), dtype)


def _sums(
    x: Any,
    weights: Any,
    matrix: Array,
    rows: Array,
    mask: Array,
    columns: tuple[Array, ...],
    real: Array | None,
    static: KernelConfig,
) -> list[Array]:
    """Rows of x times one matrix, for each of some sets of columns; float32."""
    inputs = Inputs(length=weights.shape[1], size=static.tile.inner)
    return sum_products(
        x,
        weights,
        matrix,
        rows,
        mask[:, None],
        columns,
        real,
        inputs=inputs,
        interpret=static.interpret,
    )


def _gate_up(*refs: Any, static: KernelConfig) -> None:
    """Activated gate and up of the block's rows and columns, written under the slot; those of the shared experts under
    the row of an array of their own."""
    x, weights, biases, rest = _arrays(refs, static)
    tile, width = static.tile, weights.shape[2] // 2
    columns = pl.program_id(0) * tile.out + jnp.arange(tile.out)
    real = None if width % tile.out == 0 else (columns < width)[None, :]
    out = rest[-2] if static.shared_chunks else rest[-1]

    def body(expert: Array, slots: Array, mask: Array) -> None:
        both = (columns, width + columns)
        gate, up = _sums(x, weights, expert, slots // static.top_k, mask, both, real, static)
        gate = _plus_bias(gate, biases, expert, columns, real, out.dtype)
        up = _plus_bias(up, biases, expert, width + columns, real, out.dtype)
        hidden = activate(gate, up, static.activation, out.dtype)
        plgpu.store(
            out.at[slots[:, None], columns[None, :]],
            hidden.astype(out.dtype),
            mask=combine_masks(mask[:, None], real),
        )

    _with_tile(refs[:5], static, body)
    if not static.shared_chunks:
        return
    shared, shared_out = rest[0], rest[-1]
    shared_width = shared.shape[2] // 2

    def shared_body(part: Array, rows: Array, mask: Array) -> None:
        own = part * (pl.cdiv(width, tile.out) * tile.out) + columns
        is_own = (own < shared_width)[None, :]
        gate, up = _sums(x, shared, refs[0][0], rows, mask, (own, shared_width + own), is_own, static)
        hidden = activate(rounded(gate, out.dtype), rounded(up, out.dtype), "silu", out.dtype)
        plgpu.store(shared_out.at[rows[:, None], own[None, :]], hidden.astype(out.dtype), mask=mask[:, None] & is_own)

    _with_shared_tile(static, shared_body)


def _down(*refs: Any, static: KernelConfig) -> None:
    """The second product of the block's rows and columns, written under the slot; that of the shared experts behind
    all slots."""
    hidden, weights, biases, rest = _arrays(refs, static)
    tile, width, out = static.tile, weights.shape[2], rest[-1]
    columns = pl.program_id(0) * tile.out + jnp.arange(tile.out)
    real = None if width % tile.out == 0 else (columns < width)[None, :]

    def body(expert: Array, slots: Array, mask: Array) -> None:
        (total,) = _sums(hidden, weights, expert, slots, mask, (columns,), real, static)
        total = _plus_bias(total, biases, expert, columns, real, out.dtype)
        plgpu.store(
            out.at[slots[:, None], columns[None, :]], total.astype(out.dtype), mask=combine_masks(mask[:, None], real)
        )

    _with_tile(refs[:5], static, body)
    if not static.shared_chunks:
        return
    shared, shared_hidden = rest[:2]

    def shared_body(_: Array, rows: Array, mask: Array) -> None:
        (total,) = _sums(shared_hidden, shared, refs[0][0], rows, mask, (columns,), real, static)
        slots = static.num_rows * static.top_k + rows
        plgpu.store(
            out.at[slots[:, None], columns[None, :]], total.astype(out.dtype), mask=combine_masks(mask[:, None], real)
        )

    _with_shared_tile(static, shared_body)


def slot_outputs(
    call: ExpertCall,
    tiles: MoeTiles,
    shared: SharedExperts | None = None,
    *,
    scaled_x: ScaledRows | None = None,
    stride: int = 1,
    interpret: bool,
) -> Float[Array, "NKN D"]:
    """Each slot's expert applied to its row; slots of padding rows are not written. `scaled_x`: the rows scaled, where
    they are at hand; not all tiles read them. `first_expert` counts in steps of `stride`: a product of two scalars is a
    launch where a kernel does not make it. Shared experts are further tiles of the same two kernels, so they add no
    launch; their outputs are N more rows. They ask for a `stride` of E: `first_expert` is then the layer of the run,
    which is theirs."""
    (num_rows, top_k), dim, width = call.ids.shape, call.x.shape[1], call.down.shape[1]
    slots, flat = num_rows * top_k, call.ids.reshape(-1)
    assert shared is None or stride == call.num_experts, "shared experts are found by the layer's number"
    if tiles.sorted_slots:
        rows = sorted({tiles.gate_up.rows, tiles.down.rows})
        order, listed = sort_slots(call.ids, call.valid, num_experts=call.num_experts, rows=rows, interpret=interpret)
        tables = dict(zip(rows, listed, strict=True))
    else:
        order, tables = flat, {}  # not read
    first = call.first_expert.reshape(1)
    matrices = [call.gate_up, call.down] + ([] if shared is None else [shared.gate_up, shared.down])
    check_weights(*matrices)
    scaled = tiles.scaled and shared_kind(*matrices) is not MatrixKind.NUMBERS

    def prepared(rows: Float[Array, "N D"], tile: Tile) -> Rows:
        return rows_for_codes(rows, interpret=interpret) if scaled and tile.rows >= FEWEST_ROWS else rows

    def product(
        kernel: Callable[..., None],
        name: str,
        tile: Tile,
        arrays: list[Rows | Weight | None],
        shapes: list[tuple[int, int]],
        chunks: int,
    ) -> list[Array]:
        present = [array for array in arrays if array is not None]
        tile = dataclasses.replace(tile, inner=scaled_step(tile.inner, call.x.dtype))
        static = KernelConfig(
            tile=tile,
            top_k=top_k,
            sorted_slots=tiles.sorted_slots,
            stride=stride,
            activation=call.activation,
            biased=call.gate_up_bias is not None,
            num_rows=num_rows,
            shared_chunks=chunks,
            interpret=interpret,
        )
        most = tile_limit(slots, call.num_experts, tile.rows) if tiles.sorted_slots else slots
        return pl.pallas_call(
            functools.partial(kernel, static=static),
            [jax.ShapeDtypeStruct(shape, call.x.dtype) for shape in shapes],
            grid=(pl.cdiv(shapes[0][1], tile.out), static.shared_tiles + most),
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name=name,
        )(first, call.valid, flat, tables.get(tile.rows, flat), order, *present)

    is_scaled = scaled_x is not None and scaled and tiles.gate_up.rows >= FEWEST_ROWS
    x = scaled_x if is_scaled else prepared(call.x, tiles.gate_up)
    gate_up, down = [x, call.gate_up, call.gate_up_bias], [call.down, call.down_bias]
    assert (call.gate_up_bias is None) == (call.down_bias is None), "both products have biases, or none"
    if shared is None:
        (hidden,) = product(_gate_up, "experts_gate_up", tiles.gate_up, gate_up, [(slots, width)], 0)
        return product(_down, "experts_down", tiles.down, [prepared(hidden, tiles.down), *down], [(slots, dim)], 0)[0]
    shared_width, block = shared.down.shape[1], pl.cdiv(width, tiles.gate_up.out) * tiles.gate_up.out
    shapes, chunks = [(slots, width), (num_rows, shared_width)], pl.cdiv(shared_width, block)
    hidden, own = product(_gate_up, "experts_gate_up", tiles.gate_up, [*gate_up, shared.gate_up], shapes, chunks)
    arrays = [prepared(hidden, tiles.down), *down, shared.down, prepared(own, tiles.down)]
    return product(_down, "experts_down", tiles.down, arrays, [(slots + num_rows, dim)], 1)[0]


def gpu_experts(
    call: ExpertCall, *, warpgroups: Warpgroups | None = None, interpret: bool = False
) -> Float[Array, "N D"]:
    """The whole expert computation of a layer; by warpgroups where the GPU has them and the call suits them."""
    if warpgroups is not None and suits_warpgroups(call):
        return warpgroup_experts(call, warpgroups, interpret=interpret)
    num_rows, top_k = call.ids.shape
    outputs = slot_outputs(call, tiles_for(call), interpret=interpret)
    return combine(outputs.reshape(num_rows, top_k, -1), call.weights, call.valid)
