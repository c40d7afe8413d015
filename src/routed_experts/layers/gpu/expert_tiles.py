"""Block sizes of the experts' products on a GPU, by rows an expert and by what the matrices are; and whether products
read scaled rows. Dims: N tokens, K experts per token, E experts, D hidden, F expert width, T rows of a tile."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from routed_experts.layers.gpu.blocks import power_of_two
from routed_experts.layers.gpu.operands import MatrixKind, shared_kind
from routed_experts.layers.gpu.sums import UNROLLED_STEPS
from routed_experts.layers.kernels import RoutingSize, SharedExperts
from routed_experts.layers.moe import ExpertCall
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
