"""How products with e4m3 codes by warpgroups (warpgroup_codes.py) are cut into blocks.

Dims: N rows, I inputs, O outputs, T rows of a tile."""

import dataclasses
import itertools
from typing import NamedTuple

GROUP = 128  # inputs of a group, and outputs of a span of scales
COLUMNS = 128  # of a set: 64 of each of two warpgroups


class _ExpertTile(NamedTuple):
    """The tile of experts with up to `rows` rows on average."""

    rows: float
    tile: int
    gate_up_groups: int
    down_groups: int
    down_sets: int


class _MatrixTile(NamedTuple):
    """The tile of one matrix; a program takes `group_us` for a group of inputs."""

    tile: int
    groups: int
    group_us: float


# Measured on an H200 by scripts that are not committed: experts with 128 of 2048 x 768, top-8, for 256 to 4096 tokens;
# matrices of 2048 x 5120 and 4096 x 2048 for 64 to 2048 rows.
_EXPERTS = (_ExpertTile(24, 32, 2, 2, 1), _ExpertTile(40, 64, 1, 1, 2), _ExpertTile(float("inf"), 72, 1, 1, 2))
_TILES = (_MatrixTile(64, 2, 0.5), _MatrixTile(88, 2, 0.66), _MatrixTile(128, 1, 0.94))
_PART_US = 3e-6  # to write and read a float32 number of a sum in parts
_SPLITS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodesPlan:
    """Blocks of `tile` rows, a multiple of 8 up to 256, by `sets` of 128 columns: those of gate and of up, or
    neighbours. A step is `groups` groups of inputs, and sums are made in `splits` parts."""

    tile: int
    sets: int = 1
    groups: int = 1
    splits: int = 1

    def __post_init__(self) -> None:
        assert self.tile % 8 == 0 and 0 < self.tile <= 256, self


def plan_gate_up(expert_rows: float, inputs: int) -> CodesPlan:
    """Plan the first product of experts with so many rows on average."""
    own = next(own for own in _EXPERTS if expert_rows <= own.rows)
    return CodesPlan(tile=own.tile, sets=2, groups=_dividing(own.gate_up_groups, inputs))


def plan_down(expert_rows: float, inputs: int, outputs: int) -> CodesPlan:
    """Plan the second product; its tiles have as many rows as those of the first."""
    own = next(own for own in _EXPERTS if expert_rows <= own.rows)
    return CodesPlan(tile=own.tile, sets=_dividing(own.down_sets, outputs), groups=_dividing(own.down_groups, inputs))


def _dividing(count: int, numbers: int) -> int:
    """`count` where `numbers` is a multiple of `count` times 128, else 1."""
    return count if numbers % (count * GROUP) == 0 else 1


def plan_matrix(num_rows: int, inputs: int, outputs: int, num_programs: int) -> CodesPlan:
    """Plan the product with one matrix, for 64 rows or more: the plan whose last program should end first."""

    def microseconds(own: _MatrixTile, splits: int) -> float:
        blocks = -(-num_rows // own.tile) * (outputs // COLUMNS) * splits
        groups = -(-blocks // num_programs) * (inputs // GROUP // splits)
        return groups * own.group_us + (splits * num_rows * outputs * _PART_US if splits > 1 else 0.0)

    assert num_rows >= _TILES[0].tile, num_rows
    fitting = (
        (own, splits)
        for own, splits in itertools.product(_TILES, _SPLITS)
        if own.tile <= num_rows and inputs % (splits * GROUP) == 0
    )
    chosen, splits = min(fitting, key=lambda pair: microseconds(*pair))
    return CodesPlan(tile=chosen.tile, groups=_dividing(chosen.groups, inputs // splits), splits=splits)
