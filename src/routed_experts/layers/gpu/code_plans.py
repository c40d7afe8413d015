"""How products with e4m3 codes by warpgroups (warpgroup_codes.py) are cut into blocks.

Dims: N rows, I inputs, O outputs, T rows of a tile."""

import dataclasses
import itertools

GROUP = 128  # inputs of a group, and outputs of a span of scales
COLUMNS = 128  # of a set: 64 of each of two warpgroups
# Of experts, by their rows, up to so many on average: (rows, T, groups of a step of gate and up, those of `down`, sets
# of `down`). Measured best on an H200 with 128 experts of 2048 x 768, top-8, for 256 to 4096 tokens.
_EXPERTS = ((24, 32, 2, 2, 1), (40, 64, 1, 1, 2), (float("inf"), 72, 1, 1, 2))
# Of one matrix: (T, groups of a step, us that a program takes for a group of inputs), and us that a float32 number of a
# sum in parts takes to be written and read. Measured on an H200 with 2048 x 5120 and 4096 x 2048, for 64 to 2048 rows.
_TILES = ((64, 2, 0.5), (88, 2, 0.66), (128, 1, 0.94))
_US_A_NUMBER = 3e-6
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
    """Of the first product of experts with so many rows on average."""
    _, tile, groups, _, _ = next(row for row in _EXPERTS if expert_rows <= row[0])
    return CodesPlan(tile=tile, sets=2, groups=_dividing(groups, inputs))


def plan_down(expert_rows: float, inputs: int, outputs: int) -> CodesPlan:
    """Of the second product; its tiles have as many rows as those of the first."""
    _, tile, _, groups, sets = next(row for row in _EXPERTS if expert_rows <= row[0])
    return CodesPlan(tile=tile, sets=_dividing(sets, outputs), groups=_dividing(groups, inputs))


def _dividing(count: int, numbers: int) -> int:
    """`count` where `numbers` is a multiple of `count` times 128, else 1."""
    return count if numbers % (count * GROUP) == 0 else 1


def plan_matrix(num_rows: int, inputs: int, outputs: int, num_programs: int) -> CodesPlan:
    """Of one matrix, for 64 rows or more: the plan whose last program should end first."""

    def microseconds(tile: int, us_a_group: float, splits: int) -> float:
        blocks = -(-num_rows // tile) * (outputs // COLUMNS) * splits
        groups = -(-blocks // num_programs) * (inputs // GROUP // splits)
        return groups * us_a_group + (splits * num_rows * outputs * _US_A_NUMBER if splits > 1 else 0.0)

    assert num_rows >= _TILES[0][0], num_rows
    fitting = (
        (tile, groups, us_a_group, splits)
        for (tile, groups, us_a_group), splits in itertools.product(_TILES, _SPLITS)
        if tile <= num_rows and inputs % (splits * GROUP) == 0
    )
    tile, groups, _, splits = min(fitting, key=lambda own: microseconds(own[0], *own[2:]))
    return CodesPlan(tile=tile, groups=_dividing(groups, inputs // splits), splits=splits)
