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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.gpu.activations import activate
from routed_experts.layers.gpu.blocks import combine_masks, load_or_zero, power_of_two, rounded, scaled_step
from routed_experts.layers.gpu.expert_rows import load_experts
from routed_experts.layers.gpu.operands import Inputs, MatrixKind, check_weights, shared_kind
from routed_experts.layers.gpu.scaled_rows import Rows, ScaledRows, rows_for_codes
from routed_experts.layers.gpu.sums import FEWEST_ROWS, UNROLLED_STEPS, sum_products
from routed_experts.layers.gpu.warpgroup_experts import suits_warpgroups, warpgroup_experts
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.kernels import RoutingSize, SharedExperts
from routed_experts.layers.moe import ExpertCall, combine
from routed_experts.layers.quantized import Weight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Block sizes of one product: T rows, `out` columns, steps of `inner`; warps and stages of the Triton compiler. Up
    to 4 rows are multiplied by codes without the tensor cores, and a step may then be all inputs."""

    rows: int
    out: int
    inner: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeTiles:
    """What both products use up to `rows` rows an expert, on average. `sorted_slots` False: a slot is a tile. `scaled`:
    whether rows become float16 first, which codes are decoded to; where all matrices are codes."""

    rows: float
    gate_up: Tile
    down: Tile
    sorted_slots: bool = True
    scaled: bool = False


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


def _tile(rows: int, out: int, inner: int, warps: int, stages: int) -> Tile:
    return Tile(rows=rows, out=out, inner=inner, warps=warps, stages=stages)


FEW_SLOTS = 16  # up to so many, nothing is sorted
FEW_CODED_SLOTS = 32  # the same of codes
_MOST_UNSORTED_ROWS = 0.5  # and of codes of 4 bits up to so many rows an expert, on average
_UNSORTED = MoeTiles(rows=0, gate_up=_tile(16, 64, 128, 4, 4), down=_tile(16, 64, 64, 4, 6), sorted_slots=False)
# Measured best on an H200: 128 experts of 2048 x 768, top-8 (1 to 16384 tokens), 64 of 2048 x 1024, top-8, 32 of
# 2880 x 2880, top-4, and 8 of 4096 x 14336, top-2 (64 and 256 tokens). Each tile of an expert's rows reads its weights.
TILES = (
    MoeTiles(rows=8, gate_up=_tile(16, 128, 64, 4, 3), down=_tile(16, 256, 64, 4, 3)),
    MoeTiles(rows=20, gate_up=_tile(32, 128, 64, 4, 3), down=_tile(32, 256, 64, 4, 3)),
    MoeTiles(rows=48, gate_up=_tile(64, 64, 64, 4, 3), down=_tile(64, 256, 64, 4, 3)),
    MoeTiles(rows=256, gate_up=_tile(128, 64, 64, 4, 3), down=_tile(64, 256, 64, 4, 3)),
    MoeTiles(rows=float("inf"), gate_up=_tile(128, 128, 64, 8, 3), down=_tile(128, 256, 64, 8, 3)),
)
# For codes. Measured on an H200 with 128 experts of 2048 x 768, top-8, for 8 to 256 tokens, and on an H100 for 1024 and
# 4096. Rows are scaled before the product; blocks that scaled their own were no faster.
CODE_TILES = (
    MoeTiles(rows=0.5, gate_up=_tile(8, 64, 128, 4, 3), down=_tile(8, 64, 256, 4, 2), scaled=True),
    MoeTiles(rows=5, gate_up=_tile(8, 64, 256, 4, 2), down=_tile(8, 64, 256, 4, 2), scaled=True),
    MoeTiles(rows=10, gate_up=_tile(16, 64, 128, 2, 3), down=_tile(16, 64, 128, 2, 3), scaled=True),
    MoeTiles(rows=20, gate_up=_tile(16, 64, 128, 2, 2), down=_tile(16, 64, 128, 2, 2), scaled=True),
    MoeTiles(rows=96, gate_up=_tile(64, 64, 128, 4, 4), down=_tile(32, 64, 128, 2, 3), scaled=True),
    MoeTiles(rows=float("inf"), gate_up=_tile(128, 64, 64, 8, 3), down=_tile(64, 128, 128, 4, 3), scaled=True),
)
# For codes of 4 bits, in groups of 32, whose steps are pairs of 32 inputs. Measured on an H200: int4 with 128 experts
# of 2048 x 768, top-8, for 16 to 1024 tokens, e2m1 with 32 of 2880 x 2880, top-4, for 16 to 4096. Not measured: the
# last row of int4, and the row of e2m1 for up to 40 rows with fewer than 32.
INT4_TILES = (
    MoeTiles(rows=5, gate_up=_tile(8, 128, 64, 4, 3), down=_tile(8, 64, 128, 2, 3), scaled=True),
    MoeTiles(rows=20, gate_up=_tile(16, 64, 64, 2, 3), down=_tile(16, 64, 64, 2, 3), scaled=True),
    MoeTiles(rows=256, gate_up=_tile(64, 64, 64, 4, 3), down=_tile(64, 128, 64, 4, 3), scaled=True),
    MoeTiles(rows=float("inf"), gate_up=_tile(128, 64, 64, 4, 3), down=_tile(128, 64, 64, 4, 3), scaled=True),
)
# With many rows, codes are multiplied by their scales instead of sums, and rows are read as they are.
E2M1_TILES = (
    MoeTiles(rows=2, gate_up=_tile(8, 64, 64, 2, 3), down=_tile(8, 64, 192, 2, 2), scaled=True),
    MoeTiles(rows=5, gate_up=_tile(8, 64, 64, 4, 3), down=_tile(8, 64, 192, 2, 3), scaled=True),
    MoeTiles(rows=20, gate_up=_tile(16, 64, 64, 2, 3), down=_tile(16, 64, 192, 2, 3), scaled=True),
    MoeTiles(rows=40, gate_up=_tile(64, 64, 64, 4, 3), down=_tile(64, 64, 64, 4, 3)),
    MoeTiles(rows=float("inf"), gate_up=_tile(128, 64, 64, 4, 3), down=_tile(128, 64, 64, 4, 3)),
)
_TILES_AT_ONCE = 32  # that a program writes
# Up to how many slots nothing is sorted, and the tiles of more
_TABLES = {
    MatrixKind.NUMBERS: (FEW_SLOTS, TILES),
    MatrixKind.E4M3: (FEW_CODED_SLOTS, CODE_TILES),
    MatrixKind.INT4: (FEW_CODED_SLOTS, INT4_TILES),
    MatrixKind.E2M1: (FEW_CODED_SLOTS, E2M1_TILES),
}
# Of a slot's product with codes: the fewest inputs of a step, and the most by bits of a code. A block has as many steps
# as are unrolled where they fit, and a thread 64 bytes of codes in its registers. Measured on an H200, for 1 to 8
# tokens, with experts of 2048 x 768, 2048 x 1024, 4096 x 14336 and 7168 x 2048, and of 4 bits with 2048 x 768 and
# 2880 x 2880. Inputs that are no whole steps are unrolled in any case: a loop with masks was slower.
_LEAST_STEP, _MOST_STEP, _MOST_PACKED_STEP, _WARP_BYTES = 256, 512, 1024, 2048


def _list_slots(
    ids: Any,
    valid: Any,
    order: Any,
    *tables: Any,
    slots: int,
    num_experts: int,
    top_k: int,
    chunk: int,
    rows: list[int],
) -> None:
    """Program e: the slots that chose expert e, behind those of all lower experts, and its tiles."""
    expert = pl.program_id(0)

    chosen = functools.partial(load_experts, ids, valid, slots=slots, top_k=top_k, chunk=chunk)

    def count(index: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        _, expert_ids = chosen(index)
        is_slot = expert_ids >= 0
        below, matches = sums
        return below + jnp.sum((is_slot & (expert_ids < expert)).astype(jnp.int32)), matches + jnp.sum(
            (expert_ids == expert).astype(jnp.int32)
        )

    steps = -(-slots // chunk)
    zero = jnp.zeros((), jnp.int32)
    start, total = lax.fori_loop(0, steps, count, (zero, zero))
    for table, tile_rows in zip(tables, rows, strict=True):
        _list_tiles(table, expert, start, total, slots=slots, num_experts=num_experts, rows=tile_rows)

    def write(index: Array, offset: Array) -> Array:
        slot_ids, expert_ids = chosen(index)
        matches = (expert_ids == expert).astype(jnp.int32)
        positions = offset + jnp.cumsum(matches) - matches
        plgpu.store(order.at[jnp.where(matches > 0, positions, slots)], slot_ids, mask=matches > 0)
        return offset + jnp.sum(matches)

    lax.fori_loop(0, steps, write, start)


def _list_tiles(
    table: Any, expert: Array, start: Array, total: Array, *, slots: int, num_experts: int, rows: int
) -> None:
    """The tiles of an expert whose slots are `total` from `start` on. They need no counts of other experts: first tiles
    are so far apart that there is room for the tiles of any counts. Tiles in between have no rows, nor has the rest
    behind the last expert."""
    num_tiles = table.shape[0]
    if num_tiles == slots:
        first, following = start, start + total
    else:
        first, following = start // rows + expert, (start + total) // rows + expert + 1
    following = jnp.where(expert == num_experts - 1, num_tiles, following)

    def write(index: Array, carry: None) -> None:
        tile = first + index * _TILES_AT_ONCE + jnp.arange(_TILES_AT_ONCE)
        position, is_own = start + (tile - first) * rows, tile < following
        for column, numbers in enumerate((expert, position, jnp.maximum(start + total, position))):
            plgpu.store(table.at[tile, column], jnp.broadcast_to(numbers, tile.shape), mask=is_own)

    lax.fori_loop(0, pl.cdiv(following - first, _TILES_AT_ONCE), write, None)


def _num_tiles(slots: int, num_experts: int, rows: int) -> int:
    """Tiles of so many rows that so many slots have, at most."""
    return min(slots, slots // rows + num_experts)


def sort_slots(
    ids: Int[Array, "N K"], valid: Bool[Array, " N"], *, num_experts: int, rows: list[int], interpret: bool
) -> tuple[Int[Array, " NK"], list[Int[Array, "M 3"]]]:
    """List the slots expert by expert; slots of padding rows are left out. And, for each of some tile sizes, the tiles:
    the expert, where its first slot is in that list, and where the expert's last one ends, which is the same place for
    a tile without rows."""
    slots = ids.size
    chunk = min(power_of_two(slots), 4096)
    sizes = dict(slots=slots, num_experts=num_experts, top_k=ids.shape[1], chunk=chunk, rows=rows)
    kernel = functools.partial(_list_slots, **sizes)
    tables = [jax.ShapeDtypeStruct((_num_tiles(slots, num_experts, own), 3), jnp.int32) for own in rows]
    shapes = (jax.ShapeDtypeStruct((slots,), jnp.int32), *tables)
    call = pl.pallas_call(
        kernel,
        shapes,
        grid=(num_experts,),
        compiler_params=plgpu.CompilerParams(num_warps=8 if chunk >= 2048 else 4, num_stages=1),
        interpret=interpret,
        name="sort_slots",
    )
    order, *listed = call(ids.reshape(-1), valid)
    return order, listed


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


def _slot_tile(inputs: int, column_sets: int, *, packed: bool) -> Tile:
    """The tile of a slot's product with so many sets of columns of codes."""
    unrolled = max(power_of_two(inputs) // UNROLLED_STEPS, _LEAST_STEP)
    step = min(unrolled, _MOST_PACKED_STEP if packed else _MOST_STEP)
    if inputs % step:
        step = unrolled
    columns = 16 if packed and column_sets == 1 and step >= _MOST_PACKED_STEP else 8
    code_bytes = column_sets * columns * step // (2 if packed else 1)
    return _tile(1, columns, step, max(code_bytes // _WARP_BYTES, 1), 1)


def _sorts_slots(slots: int, num_experts: int, kind: MatrixKind) -> bool:
    """Whether a tile has rows of one expert; else a slot is a tile."""
    few, _ = _TABLES[kind]
    return slots > (min(few, int(_MOST_UNSORTED_ROWS * num_experts)) if kind.is_packed else few)


def _sorted_tiles(slots: int, num_experts: int, kind: MatrixKind) -> MoeTiles:
    _, table = _TABLES[kind]
    return next(tiles for tiles in table if slots <= tiles.rows * num_experts)


def choose_tiles(slots: int, num_experts: int, dim: int, width: int, kind: MatrixKind = MatrixKind.NUMBERS) -> MoeTiles:
    """The tiles for this many slots of so many experts of those sides, whose matrices are of that kind."""
    if _sorts_slots(slots, num_experts, kind):
        return _sorted_tiles(slots, num_experts, kind)
    if kind is MatrixKind.NUMBERS:
        return _UNSORTED
    gate_up, down = (_slot_tile(*product, packed=kind.is_packed) for product in ((dim, 2), (width, 1)))
    return MoeTiles(rows=0, gate_up=gate_up, down=down, sorted_slots=False)


def takes_scaled_rows(num_rows: int, dtype: Any, weights: Weight | None, experts: RoutingSize | None = None) -> bool:
    """Whether products of `num_rows` rows of that dtype with these matrices read scaled rows: on the tensor cores with
    codes, and of `experts` where their tiles say so."""
    if weights is None or num_rows == 1 or dtype != jnp.bfloat16:
        return False
    kind = shared_kind(weights)
    if kind is MatrixKind.NUMBERS or experts is None:
        return kind is not MatrixKind.NUMBERS
    slots = num_rows * experts.top_k
    if not _sorts_slots(slots, experts.num_experts, kind):
        return False
    return _sorted_tiles(slots, experts.num_experts, kind).scaled


def tiles_for(call: ExpertCall, shared: SharedExperts | None = None) -> MoeTiles:
    """The tiles for this call. Those of codes suit no numbers beside them: their blocks of few rows are too wide."""
    matrices = [call.gate_up, call.down] + ([] if shared is None else [shared.gate_up, shared.down])
    _, width, dim = call.down.shape
    return choose_tiles(call.ids.size, call.num_experts, dim, width, shared_kind(*matrices))


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
        given = [array for array in arrays if array is not None]
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
        num_tiles = _num_tiles(slots, call.num_experts, tile.rows) if tiles.sorted_slots else slots
        return pl.pallas_call(
            functools.partial(kernel, static=static),
            [jax.ShapeDtypeStruct(shape, call.x.dtype) for shape in shapes],
            grid=(pl.cdiv(shapes[0][1], tile.out), static.shared_tiles + num_tiles),
            compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
            interpret=interpret,
            name=name,
        )(first, call.valid, flat, tables.get(tile.rows, flat), order, *given)

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
