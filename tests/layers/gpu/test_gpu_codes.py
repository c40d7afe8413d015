"""Products with codes and scales on the GPU's kernels: interpreted against float64 and plain code, and on a GPU at the
sizes of Qwen3-30B-A3B.

Matrices of other layers are NaN, codes and scales. Dims: N tokens, K experts per token, E experts, D hidden, F expert
width, I inputs, O outputs, R matrices of a stack."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from routed_experts.core.errors import ConfigError
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.gpu.expert_tiles import (
    CODE_TILES,
    E2M1_TILES,
    INT4_TILES,
    MoeTiles,
    Tile,
    choose_tiles,
    tiles_for,
)
from routed_experts.layers.gpu.linear import LinearTile, choose_codes_tile, linear_in_place, partial_sums
from routed_experts.layers.gpu.moe import slot_outputs
from routed_experts.layers.gpu.operands import MatrixKind, addressable_matrices
from routed_experts.layers.gpu.scaled_rows import scale_rows
from routed_experts.layers.gpu.sums import part_unit
from routed_experts.layers.kernels import RouterBiases, SharedExperts, SlotOutputs, StreamNorm
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.moe import ACTIVATIONS, ExpertCall, combine, gated, reference_experts, tiled_experts
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.quantized import QuantizedWeight
from routed_experts.layers.routing import RouterSpec, replay_topk
from support.gpu_cases import LISTS, SLOTS, distance, random_ids

pytestmark = pytest.mark.usefixtures("fast_compilation")

F32, HALF = jnp.float32, jnp.bfloat16
BOUNDS = {F32: 3e-6, HALF: 2e-2}  # in the 2-norm: activations are rounded to the dtype
SUMS = 2e-6  # of the sum of |x| |w|: float32 sums of up to 256 exact products


def as_codes(numbers) -> jax.Array:
    """Bytes as codes of e4m3; those of NaN become 0."""
    return lax.bitcast_convert_type(jnp.where(numbers & 127 == 127, jnp.uint8(0), numbers), jnp.float8_e4m3fn)


def generator(key) -> np.random.Generator:
    """Of NumPy, whose numbers of a new shape compile nothing."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def random_rows(key, shape, dtype) -> jax.Array:
    return jnp.asarray(generator(key).standard_normal(shape), dtype)


def only(real, array) -> np.ndarray:
    """The matrices in the slice `real`, or all; others are NaN."""
    if real is None:
        return array
    others = np.full_like(array, np.nan)
    others[real] = array[real]
    return others


def random_weight(key, stack, inputs, outputs, group, *, span=1, real=None) -> QuantizedWeight:
    """Matrices with numbers of about 1 / sqrt(I); those of the stack that are not in the slice `real` are NaN."""
    rng = generator(key)
    codes = rng.integers(0, 254, (stack, outputs, inputs), np.uint8)
    codes += codes >= 127  # 127 and 255 are NaN
    shape = (stack, -(-inputs // group), outputs // span)
    scales = rng.uniform(0.5, 1.5, shape).astype(np.float32) / np.float32(100 * math.sqrt(inputs))
    codes, scales = only(real, codes.view(jnp.float8_e4m3fn)), only(real, scales)
    return QuantizedWeight(
        codes=jnp.asarray(codes), scales=jnp.asarray(scales), group=group, span=span, outputs_first=True
    )


def random_halves(key, stack, inputs, outputs, group, *, form, run, real=None) -> QuantizedWeight:
    """The same with codes of 4 bits, whose bits are all numbers: only scales of other matrices are NaN. Scales are
    bfloat16, as in checkpoints, and of e2m1 powers of two."""
    rng = generator(key)
    codes = rng.integers(0, 256, (stack, outputs, inputs // 2), np.uint8)
    scales = rng.uniform(0.5, 1.5, (stack, -(-inputs // group), outputs)) / (4 * math.sqrt(inputs))
    if form == "e2m1":
        scales = np.exp2(np.floor(np.log2(scales)))
    return QuantizedWeight(
        codes=jnp.asarray(codes.view(np.int8) if form == "int4" else codes),
        scales=jnp.asarray(only(real, scales), HALF),
        group=group,
        format=form,
        outputs_first=True,
        run=run,
    )


VALUES = {
    "int4": [code - 8.0 for code in range(16)],
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6],
}


def values_of(weight: QuantizedWeight, index: int) -> np.ndarray:
    """What the codes of a matrix [O, I] are, in float64; of codes of 4 bits, byte by byte."""
    if weight.format == "e4m3":
        return np.asarray(weight.codes)[index].astype(np.float64)
    stored, run = np.asarray(weight.codes)[index].view(np.uint8), weight.run
    values = np.empty((len(stored), 2 * stored.shape[1]))
    for byte, column in enumerate(stored.T):
        first = byte // run * 2 * run + byte % run
        values[:, first] = [VALUES[weight.format][code] for code in column % 16]
        values[:, first + run] = [VALUES[weight.format][code] for code in column // 16]
    return values


def numbers(weight: QuantizedWeight, index: int) -> np.ndarray:
    """A matrix [I, O] in float64."""
    codes = values_of(weight, index).T
    scales = np.repeat(np.asarray(weight.scales)[index].astype(np.float64), weight.group, axis=0)
    return codes * np.repeat(scales, weight.span, axis=1)[: len(codes)]


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def relative_errors(actual, x, matrix) -> float:
    """The largest difference from x times the matrix, over the sum of |x| |w| of the same row and column."""
    x = wide(x)
    return float(np.max(np.abs(np.asarray(actual, np.float64) - x @ matrix) / (np.abs(x) @ np.abs(matrix) + 1e-300)))


SMALL = LinearTile(rows=16, out=32, inner=128, warps=2, stages=2)
SCALED = dataclasses.replace(SMALL, scaled=True)
FEW = LinearTile(rows=1, out=8, inner=256, warps=4, stages=1)
# rows, inputs, outputs, group, tile (None: that of the table)
LINEAR = {
    "group 128, whole blocks": (16, 256, 64, 128, SCALED),
    "group 128, the last one short": (5, 160, 50, 128, SCALED),
    "group 64 of 192": (1, 192, 33, 64, SCALED),
    "group 32 of 160, plain rows": (7, 160, 40, 32, SMALL),
    "group 16 of 72, the last one short": (19, 72, 23, 16, dataclasses.replace(SCALED, inner=64)),
    "steps shorter than a group": (3, 256, 32, 128, dataclasses.replace(SCALED, inner=32)),
    "steps of eight groups": (9, 512, 70, 32, dataclasses.replace(SCALED, inner=256)),
    "steps of two of twelve groups": (12, 384, 64, 32, dataclasses.replace(SCALED, inner=64)),
    "as many groups as no step has": (12, 416, 64, 32, dataclasses.replace(SCALED, inner=256)),
    "parts": (40, 256, 40, 64, dataclasses.replace(SCALED, splits=4)),
    "parts, blocks of eight rows": (19, 256, 40, 64, dataclasses.replace(SCALED, rows=8, splits=4)),
    "one row, one step": (1, 160, 50, 32, FEW),
    "four of seven rows, parts": (7, 288, 40, 16, dataclasses.replace(FEW, rows=4, inner=64, splits=2)),
    "one of two rows, a loop of steps, the last group short": (2, 362, 9, 64, dataclasses.replace(FEW, inner=64)),
    "steps of few rows shorter than a group": (2, 288, 9, 64, dataclasses.replace(FEW, rows=2, inner=32)),
    "the table, parts": (5, 1024, 70, 64, None),
    "the table, many rows": (65, 320, 70, 64, None),
}


# The same, whose outputs are spans that share scales
SPANS = {
    "spans": (16, 256, 256, 128, SCALED),
    "spans, parts": (19, 256, 128, 64, dataclasses.replace(SCALED, rows=8, splits=4)),
    "spans, one row": (1, 160, 128, 32, FEW),
    "spans, the table": (5, 1024, 384, 128, None),
}


IN_FLOAT32 = {  # in every run; rows of float32 are never scaled, so that what differs is the loop of steps
    "group 128, the last one short",
    "steps shorter than a group",
    "steps of eight groups",
    "parts",
    "one row, one step",
    "one of two rows, a loop of steps, the last group short",
    "spans, parts",
    "the table, parts",
}


def thorough_unless(in_every_run):
    return () if in_every_run else pytest.mark.thorough


def product_cases():
    for name in LINEAR | SPANS:
        yield pytest.param(name, HALF, id=f"{name}-bfloat16")
        yield pytest.param(name, F32, id=f"{name}-float32", marks=thorough_unless(name in IN_FLOAT32))


@pytest.mark.parametrize(("name", "dtype"), list(product_cases()))
def test_products_with_codes_equal_float64(name, dtype):
    rows, inputs, outputs, group, tile = (LINEAR | SPANS)[name]
    keys = jax.random.split(jax.random.key(rows), 2)
    x = random_rows(keys[0], (rows, inputs), dtype)
    span = 128 if name in SPANS else 1
    weight = random_weight(keys[1], 3, inputs, outputs, group, span=span, real=slice(1, 2))
    parts = jax.jit(lambda x, w: partial_sums(x, w, jnp.int32(1), tile=tile, interpret=True))(x, weight)
    expected_tile = tile or choose_codes_tile(rows, inputs, outputs, group)
    assert parts.shape == (expected_tile.splits, rows, outputs)
    total = np.sum(np.asarray(parts), axis=0)
    assert relative_errors(total, x, numbers(weight, 1)) < SUMS
    plain = jax.jit(lambda x, w: reference_linear(x, w, 1, F32))(x, weight)
    reach = np.abs(wide(x)) @ np.abs(numbers(weight, 1))
    assert np.max(np.abs(total - np.asarray(plain)) / reach) < 2 * SUMS


# rows, inputs, outputs, group, run, tile (None: that of the table)
HALVES = {
    "group 128, runs of 64": (16, 256, 64, 128, 64, SCALED),
    "group 128, runs of 16": (16, 288, 33, 128, 16, SCALED),
    "group 32, steps shorter than asked": (5, 320, 50, 32, 32, dataclasses.replace(SCALED, inner=128)),
    "group 16": (7, 160, 40, 16, 16, SMALL),
    "group 64": (9, 384, 40, 64, 64, SCALED),
    "group 32, parts": (19, 256, 40, 32, 32, dataclasses.replace(SCALED, rows=8, splits=4)),
    "steps shorter than a pair": (3, 256, 32, 128, 64, dataclasses.replace(SCALED, inner=32)),
    "group 32, steps of three pairs, plain rows": (9, 576, 40, 32, 32, dataclasses.replace(SMALL, inner=256)),
    "group 128, pairs of one scale, plain rows": (9, 576, 33, 128, 32, SMALL),
    "one row, one step, its end missing": (1, 320, 50, 32, 32, dataclasses.replace(FEW, inner=512)),
    "one row, group 128": (1, 256, 50, 128, 64, FEW),
    "four of seven rows, parts": (7, 384, 40, 64, 32, dataclasses.replace(FEW, rows=4, inner=64, splits=2)),
    "one of two rows, a loop of steps": (2, 416, 9, 16, 16, dataclasses.replace(FEW, inner=64)),
    "the table, parts": (5, 1024, 70, 32, 32, None),
    "the table, one row": (1, 576, 70, 32, 32, None),
    "the table, many rows": (65, 320, 70, 64, 32, None),
}


def half_cases():
    """In every run each case once, in turn of one format and dtype; of plain rows and of the table in both formats."""
    dtypes = {"bfloat16": HALF, "float32": F32}
    for indices in itertools.product(range(len(HALVES)), range(2), range(2)):
        name, form, dtype = ((*HALVES,)[indices[0]], ("int4", "e2m1")[indices[1]], (*dtypes,)[indices[2]])
        is_in_turn = indices[0] // 2 % 2 == indices[1] or name.startswith("the table") or name.endswith("plain rows")
        marks = thorough_unless(sum(indices) % 2 == 0 and is_in_turn)
        yield pytest.param(HALVES[name], form, dtypes[dtype], id=f"{name}-{form}-{dtype}", marks=marks)


@pytest.mark.parametrize(("case", "form", "dtype"), list(half_cases()))
def test_products_with_codes_of_4_bits_equal_float64(case, form, dtype):
    rows, inputs, outputs, group, run, tile = case
    keys = jax.random.split(jax.random.key(rows), 2)
    x = random_rows(keys[0], (rows, inputs), dtype)
    weight = random_halves(keys[1], 3, inputs, outputs, group, form=form, run=run, real=slice(1, 2))
    parts = jax.jit(lambda x, w: partial_sums(x, w, jnp.int32(1), tile=tile, interpret=True))(x, weight)
    total = np.sum(np.asarray(parts), axis=0)
    assert relative_errors(total, x, numbers(weight, 1)) < SUMS
    plain = jax.jit(lambda x, w: reference_linear(x, w, 1, F32))(x, weight)
    reach = np.abs(wide(x)) @ np.abs(numbers(weight, 1))
    assert np.max(np.abs(total - np.asarray(plain)) / reach) < 2 * SUMS


def num_scalings(rows, weight, tile) -> int:
    """Products of a block of sums by numbers, in a program of one step."""
    jaxpr = jax.make_jaxpr(lambda x, w: partial_sums(x, w, 1, tile=tile, interpret=True))(rows, weight)

    def count(jaxpr) -> int:
        total = 0
        for equation in jaxpr.eqns:
            is_sums = equation.primitive.name == "mul" and equation.outvars[0].aval.shape == (tile.out, tile.rows)
            total += is_sums + sum(map(count, jax.extend.core.jaxprs_in_params(equation.params)))
        return total

    return count(jaxpr.jaxpr)


def test_rows_of_bfloat16_are_multiplied_by_codes_of_e2m1_times_scales():
    """In place of two products of each pair of groups by scales; what is left is the unit. Of int4 they are not: its
    scales are any numbers."""
    x = jnp.ones((16, 128), HALF)
    counts = {
        form: num_scalings(x, random_halves(jax.random.key(0), 2, 128, 32, 32, form=form, run=32), SMALL)
        for form in ("int4", "e2m1")
    }
    assert counts == {"int4": 4, "e2m1": 1}
    weight = random_halves(jax.random.key(0), 2, 128, 32, 32, form="e2m1", run=32)
    assert num_scalings(x, weight, SCALED) >= 4, "of rows that are scaled they are not"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=thorough_unless((row + column) % 2))
        for row, name in enumerate(["the table, one row", "the table, parts", "the table, many rows"])
        for column, form in enumerate(["int4", "e2m1"])
    ],
)
def test_scales_of_bfloat16_have_the_bits_of_the_same_in_float32(name, form):
    rows, inputs, outputs, group, run, tile = HALVES[name]
    keys = jax.random.split(jax.random.key(rows), 2)
    x = random_rows(keys[0], (rows, inputs), HALF)
    weight = random_halves(keys[1], 2, inputs, outputs, group, form=form, run=run)
    assert weight.scales.dtype == HALF
    wide = dataclasses.replace(weight, scales=weight.scales.astype(F32))
    product = jax.jit(lambda x, w: partial_sums(x, w, jnp.int32(1), tile=tile, interpret=True))
    np.testing.assert_array_equal(product(x, weight), product(x, wide))


def test_a_part_of_a_sum_begins_where_a_group_does():
    for inputs, group in ((2048, 128), (576, 64), (320, 64), (192, 16), (160, 32), (1100, 128)):
        for rows in (1, 16, 100, 512):
            tile = choose_codes_tile(rows, inputs, 5120, group)
            assert tile.splits == 1 or inputs % (tile.splits * group) == 0
    assert choose_codes_tile(16, 2048, 5120, 128).splits == 4, "sums are short where rows are few"
    assert choose_codes_tile(1, 4096, 2048, 128).splits == 2, "and of few rows a block is all of a part"
    tile, weight = dataclasses.replace(SMALL, splits=4), random_weight(jax.random.key(0), 1, 160, 16, 64)
    with pytest.raises(AssertionError, match="splits=4"):
        partial_sums(jnp.zeros((1, 160), HALF), weight, 0, tile=tile, interpret=True)


def test_projections_of_few_and_of_many_rows_have_no_other_path():
    """A stack of one matrix and rows above the limit of plain matrices."""
    keys = jax.random.split(jax.random.key(2), 2)
    x, weight = random_rows(keys[0], (520, 64), HALF), random_weight(keys[1], 1, 64, 48, 64)
    result = jax.jit(lambda x, w: linear_in_place(x, w, 0, F32, interpret=True))(x, weight)
    assert relative_errors(result, x, numbers(weight, 0)) < SUMS


def test_rows_of_float16_are_multiplied_as_they_are():
    keys = jax.random.split(jax.random.key(2), 2)
    x, weight = random_rows(keys[0], (3, 160), jnp.float16), random_weight(keys[1], 1, 160, 24, 64)
    parts = jax.jit(lambda x, w: partial_sums(x, w, 0, tile=SCALED, interpret=True))(x, weight)
    assert relative_errors(parts[0], x, numbers(weight, 0)) < SUMS


LEAST_NORMAL = 2.0**-126
LARGE_ROWS = {
    "near the largest": lambda row: row / np.abs(row).max() * 3.3e38,
    "one huge": lambda row: np.where(np.arange(row.size) == 3, 3.0e38, row),
    "large": lambda row: row * 2.0**60,
    "plain": lambda row: row,
}
SMALL_ROWS = {
    "zeros": lambda row: 0 * row,
    "tiny": lambda row: row * 2.0**-115,
    "one of many is large": lambda row: np.where(np.arange(row.size) == 3, 1.0, row * 2.0**-20),
    "small": lambda row: row * 2.0**-60,
}


ONE_TO_ONE = {"before": SCALED, "few rows": dataclasses.replace(FEW, rows=4, inner=32)}


def run_rows_of_any_size(tile, *, interpret):
    rng, weight = np.random.default_rng(0), random_weight(jax.random.key(3), 1, 96, 40, 32)
    run = jax.jit(lambda x, w: partial_sums(x, w, 0, tile=tile, interpret=interpret)[0])
    for edits, factor in ((LARGE_ROWS, 1e-3), (SMALL_ROWS, 1e3)):  # no sum overflows, and none is a subnormal number
        x = jnp.asarray(np.stack([edit(rng.standard_normal(96)) for edit in edits.values()]), HALF)
        own = dataclasses.replace(weight, scales=weight.scales * factor)
        rows, matrix, result = wide(x), numbers(own, 0), np.asarray(run(x, own))
        lost = 2.0**-39 * np.abs(rows).max(axis=1, keepdims=True) * np.abs(matrix).sum(axis=0)
        allowed = SUMS * np.abs(rows) @ np.abs(matrix) + np.array([[name == "one huge"] for name in edits]) * lost
        for name, error, most in zip(edits, np.abs(result - rows @ matrix), allowed, strict=True):
            assert np.isfinite(error).all() and (error <= most).all(), name


@pytest.mark.parametrize("tile", ONE_TO_ONE.values(), ids=ONE_TO_ONE)
def test_rows_of_any_size_keep_their_sums(tile):
    """Up to what float16 loses: 2^-39 of a row's largest number, of each number below 2^-31 of it."""
    run_rows_of_any_size(tile, interpret=True)


@pytest.mark.parametrize("tile", ONE_TO_ONE.values(), ids=ONE_TO_ONE)
def test_rows_that_are_not_finite_have_no_finite_sums_and_others_are_as_they_were(tile):
    """Also a number of another step than the one that is not finite, and the largest number of bfloat16 alone."""
    weight = random_weight(jax.random.key(5), 1, 96, 40, 32)
    weight = dataclasses.replace(weight, codes=jnp.where(weight.codes == 0, jnp.float8_e4m3fn(1), weight.codes))
    largest = float(jnp.finfo(HALF).max)
    rows = np.asarray(wide(random_rows(jax.random.key(6), (6, 96), HALF)))
    rows[1, 40], rows[2, 90], rows[3, 3], rows[4], rows[5] = np.nan, np.inf, -np.inf, 0, 0
    rows[4, 70] = largest
    run = jax.jit(lambda x, w: partial_sums(x, w, 0, tile=tile, interpret=True)[0])
    result = np.asarray(run(jnp.asarray(rows, HALF), dataclasses.replace(weight, scales=weight.scales * 2.0**-8)))
    assert np.isnan(result[1]).all() and not np.isfinite(result[2:4]).any() and not result[5].any()
    expected = rows[[0, 4]] @ (numbers(weight, 0) * 2.0**-8)
    np.testing.assert_allclose(result[[0, 4]], expected, rtol=1e-4, atol=1e-5)


def test_sums_of_few_rows_keep_small_numbers_of_other_steps():
    """A huge number in one step; rows that are scaled before lose what is below 2^-39 of it, few rows do not: each of
    their steps is scaled by itself."""
    weight = random_weight(jax.random.key(3), 1, 96, 40, 32)
    weight = dataclasses.replace(weight, scales=weight.scales.at[:, 0].set(0.0))
    x = np.asarray(wide(random_rows(jax.random.key(7), (4, 96), HALF)))
    x[:, 3] = 2.0**60
    x, run = jnp.asarray(x, HALF), lambda tile: partial_sums(x, weight, 0, tile=tile, interpret=True)[0]
    few, before = run(ONE_TO_ONE["few rows"]), run(SCALED)
    matrix = numbers(weight, 0)
    reach = np.abs(wide(x))[:, 32:] @ np.abs(matrix)[32:]
    assert np.max(np.abs(np.asarray(few) - wide(x) @ matrix) / reach) < SUMS
    assert not np.asarray(before).any()


def test_scaled_rows_are_exact_from_a_small_part_of_the_largest_on():
    """Each row's largest is in [2^14, 2^15); numbers from 2^-31 of it on are exact, others are off by 2^-39 of it."""
    rng = np.random.default_rng(1)
    powers = rng.integers(-45, 1, (40, 70)) + rng.integers(-60, 80, (40, 1))
    x = jnp.asarray(rng.choice([-1, 1], powers.shape) * rng.uniform(1, 2, powers.shape) * 2.0**powers, HALF)
    scaled = jax.jit(functools.partial(scale_rows, interpret=True))(x)
    largest = np.abs(wide(x)).max(axis=1, keepdims=True)
    top = np.abs(wide(scaled.values)).max(axis=1)
    assert scaled.values.dtype == jnp.float16 and (top >= 2**14).all() and (top < 2**15).all()
    error = np.abs(wide(scaled.values) * np.asarray(scaled.inverse, np.float64).T - wide(x)) / largest
    assert not error[np.abs(wide(x)) >= 2.0**-31 * largest].any() and 0 < error.max() <= 2.0**-39


def test_scales_of_rows_without_a_largest_number():
    """Rows of zeros and of the smallest numbers have a finite inverse; a row that is not finite stays so."""
    rows = np.zeros((4, 20))
    rows[1], rows[2, 4], rows[3, 5] = LEAST_NORMAL, np.inf, np.nan
    scaled = jax.jit(functools.partial(scale_rows, interpret=True))(jnp.asarray(rows, HALF))
    back = wide(scaled.values) * np.asarray(scaled.inverse, np.float64).T
    np.testing.assert_array_equal(back[:2], rows[:2])
    assert np.isfinite(np.asarray(scaled.inverse[:, :3])).all()
    assert not np.isfinite(back[2:]).all(axis=1).any()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A call in the second of three layers, and its shared experts: None, or their width and whether they are codes."""

    sizes: tuple[int, int, int, int, int]  # N, K, E, D, F
    groups: tuple[int, int]  # of gate_up and of down
    dtype: object
    kind: str = "spread"
    activation: str = "silu"
    biased: bool = False
    shared_width: int = 0
    shared_codes: bool = True
    form: str = "e4m3"
    run: int = 0  # of codes of 4 bits
    span: int = 1  # of codes of 8 bits

    def matrices(self, key, stack, inputs, outputs, group, *, real) -> QuantizedWeight:
        """A stack of them in the form."""
        if self.form == "e4m3":
            return random_weight(key, stack, inputs, outputs, group, span=self.span, real=real)
        return random_halves(key, stack, inputs, outputs, group, form=self.form, run=self.run, real=real)

    @property
    def call(self) -> ExpertCall:
        rows, top_k, experts, dim, width = self.sizes
        rng, keys = np.random.default_rng(rows), jax.random.split(jax.random.key(rows), 6)
        own = slice(experts, 2 * experts)
        valid = rng.random(rows) < (0.7 if self.kind == "padding" else 2)
        valid[0] = True
        biases = [
            jnp.asarray(only(own, generator(key).standard_normal((3 * experts, size))), self.dtype)
            for key, size in zip(keys[:2], (2 * width, dim), strict=True)
        ]
        return ExpertCall(
            x=random_rows(keys[2], (rows, dim), self.dtype),
            ids=jnp.asarray(random_ids(rng, rows, experts, top_k, self.kind), jnp.int32),
            weights=jnp.asarray(rng.random((rows, top_k)) + 0.1, F32),
            valid=jnp.asarray(valid),
            gate_up=self.matrices(keys[3], 3 * experts, dim, 2 * width, self.groups[0], real=own),
            down=self.matrices(keys[4], 3 * experts, width, dim, self.groups[1], real=own),
            first_expert=jnp.int32(1),
            num_experts=experts,
            gate_up_bias=biases[0] if self.biased else None,
            down_bias=biases[1] if self.biased else None,
            activation=self.activation,
        )

    @property
    def shared(self) -> SharedExperts | None:
        if not self.shared_width:
            return None
        dim, keys, own = self.sizes[3], jax.random.split(jax.random.key(9), 2), slice(1, 2)
        gate_up = self.matrices(keys[0], 3, dim, 2 * self.shared_width, self.groups[0], real=own)
        down = self.matrices(keys[1], 3, self.shared_width, dim, self.groups[1], real=own)
        if self.shared_codes:
            return SharedExperts(gate_up=gate_up, down=down)
        plain = jax.jit(lambda weight: weight.dequantize().astype(self.dtype))
        return SharedExperts(gate_up=plain(gate_up), down=plain(down))


def at_first(call: ExpertCall) -> ExpertCall:
    """The call as array code takes it: `first_expert` counts experts, and biases are float32 as its products are."""
    biases = (None if bias is None else bias.astype(F32) for bias in (call.gate_up_bias, call.down_bias))
    gate_up, down = biases
    first = call.first_expert * call.num_experts
    return dataclasses.replace(call, first_expert=first, gate_up_bias=gate_up, down_bias=down)


ONES = {
    "silu": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "clamped swiglu": lambda gate, up: (
        np.minimum(gate, 7) / (1 + np.exp(-1.702 * np.minimum(gate, 7))) * (np.clip(up, -7, 7) + 1)
    ),
    "tanh gelu": lambda gate, up: 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up,
}


def network(x, gate_up, down, activation, biases=(0.0, 0.0)):
    gate, up = np.split(x @ gate_up + biases[0], 2, axis=-1)
    return ONES[activation](gate, up) @ down + biases[1]


def in_float64(call: ExpertCall) -> np.ndarray:
    """Each token's experts, one by one."""
    x, out = wide(call.x), np.zeros(call.x.shape)
    matrices = functools.cache(lambda index: (numbers(call.gate_up, index), numbers(call.down, index)))
    for row, top_k in enumerate(np.asarray(call.ids)):
        for k, expert in enumerate(top_k):
            index = int(call.first_expert) * call.num_experts + int(expert)
            biases = (0.0, 0.0)
            if call.gate_up_bias is not None and call.down_bias is not None:
                biases = (wide(call.gate_up_bias)[index], wide(call.down_bias)[index])
            value = network(x[row], *matrices(index), call.activation, biases)
            out[row] += float(call.weights[row, k]) * value
    return np.where(np.asarray(call.valid)[:, None], out, 0)


SORTED, UNSORTED = (dataclasses.replace(tiles, scaled=True) for tiles in (LISTS, SLOTS))
ONE_ROW = Tile(rows=1, out=16, inner=64, warps=4, stages=1)
ROWS_SORTED = dataclasses.replace(LISTS, gate_up=dataclasses.replace(ONE_ROW, rows=2), down=ONE_ROW)
ROWS_UNSORTED = dataclasses.replace(SLOTS, gate_up=ONE_ROW, down=dataclasses.replace(ONE_ROW, inner=32))
EXPERTS = {
    "lists, short groups": (Experts(sizes=(13, 3, 5, 72, 40), groups=(16, 32), dtype=F32, kind="padding"), SORTED),
    "slots, biased": (
        Experts(sizes=(3, 2, 4, 40, 24), groups=(32, 16), dtype=F32, activation="clamped swiglu", biased=True),
        UNSORTED,
    ),
    "lists, biased": (
        Experts(sizes=(9, 2, 4, 40, 24), groups=(16, 16), dtype=HALF, activation="tanh gelu", biased=True),
        SORTED,
    ),
    "shared experts, lists": (
        Experts(sizes=(6, 2, 4, 40, 24), groups=(32, 16), dtype=F32, shared_width=50, kind="padding"),
        SORTED,
    ),
    "shared experts, slots": (Experts(sizes=(2, 2, 4, 40, 24), groups=(32, 16), dtype=HALF, shared_width=50), UNSORTED),
    "plain shared experts": (
        Experts(sizes=(6, 2, 4, 40, 24), groups=(32, 16), dtype=HALF, shared_width=50, shared_codes=False),
        SORTED,
    ),
    "two rows and one, lists, shared experts": (
        Experts(sizes=(7, 2, 4, 72, 40), groups=(16, 32), dtype=HALF, shared_width=50, kind="padding"),
        ROWS_SORTED,
    ),
    "one row, slots, biased": (
        Experts(sizes=(3, 2, 4, 40, 24), groups=(32, 16), dtype=F32, activation="clamped swiglu", biased=True),
        ROWS_UNSORTED,
    ),
    "spans, lists, shared experts": (
        Experts(sizes=(9, 2, 4, 128, 128), groups=(128, 64), dtype=HALF, span=128, shared_width=128),
        SORTED,
    ),
    "spans, one row, slots": (Experts(sizes=(3, 2, 4, 256, 128), groups=(64, 32), dtype=F32, span=128), ROWS_UNSORTED),
    "int4, lists, shared experts": (
        Experts(sizes=(7, 2, 4, 96, 64), groups=(32, 32), dtype=HALF, form="int4", run=16, shared_width=32),
        SORTED,
    ),
    "e2m1, slots, biased": (
        Experts(
            sizes=(3, 2, 4, 64, 128),
            groups=(32, 32),
            dtype=F32,
            activation="clamped swiglu",
            biased=True,
            form="e2m1",
            run=32,
        ),
        UNSORTED,
    ),
    "e2m1, one row, slots, biased": (
        Experts(sizes=(3, 2, 4, 64, 128), groups=(32, 32), dtype=HALF, biased=True, form="e2m1", run=32),
        ROWS_UNSORTED,
    ),
    "int4, the table, few": (Experts(sizes=(2, 2, 4, 192, 64), groups=(64, 64), dtype=HALF, form="int4", run=32), None),
    "e2m1, the table, 40 rows": (
        Experts(sizes=(40, 2, 4, 192, 64), groups=(32, 32), dtype=HALF, form="e2m1", run=32),
        None,
    ),
    "the table, few": (Experts(sizes=(2, 2, 4, 160, 48), groups=(128, 32), dtype=HALF), None),
    "the table, 40 rows": (Experts(sizes=(40, 2, 4, 160, 48), groups=(128, 64), dtype=HALF), None),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_codes_equal_float64_and_plain_code(name):
    case, tiles = EXPERTS[name]
    call, shared, (rows, top_k, _, dim, _) = case.call, case.shared, case.sizes
    tiles = tiles or tiles_for(call, shared)

    def kernel(call, shared):
        outputs = slot_outputs(call, tiles, shared, stride=call.num_experts, interpret=True)
        routed = combine(outputs[: rows * top_k].reshape(rows, top_k, dim), call.weights, call.valid)
        return routed, outputs[rows * top_k :]

    shared_arrays = None if shared is None else (shared.gate_up, shared.down)
    run = jax.jit(lambda call, own: kernel(call, own and SharedExperts(gate_up=own[0], down=own[1])))
    routed, of_shared = run(call, shared_arrays)
    bound = BOUNDS[case.dtype]
    assert distance(wide(routed), in_float64(call)) < bound
    assert distance(wide(routed), wide(jax.jit(lambda call: tiled_experts(at_first(call)))(call))) < 2 * bound
    if shared is not None:
        matrices = [
            numbers(part, 1) if isinstance(part, QuantizedWeight) else wide(part[1])
            for part in (shared.gate_up, shared.down)
        ]
        assert distance(wide(of_shared), network(wide(call.x), *matrices, "silu")) < bound


def test_every_activation_has_its_formula_here():
    assert set(ONES) == set(ACTIVATIONS)


def test_the_bundle_takes_codes_as_checkpoints_have_them():
    kernels = gpu_kernels(interpret=True)
    assert kernels.code_formats == {"e4m3", "int4", "e2m1"} and kernels.outputs_first
    assert kernels.code_spans == (128, 1)
    weight = random_weight(jax.random.key(0), 1, 32, 16, 16)
    swapped = dataclasses.replace(weight, codes=jnp.swapaxes(weight.codes, 1, 2), outputs_first=False)
    with pytest.raises(ConfigError, match=r"codes are e4m3 \[R, I, O\]"):
        kernels.linear.run(jnp.zeros((1, 32), HALF), swapped, 0, HALF)
    neighbours = random_halves(jax.random.key(0), 1, 32, 16, 16, form="int4", run=1)
    with pytest.raises(ConfigError, match=r"codes are int4 \[R, O, I\], in runs of 1; .*runs of 64, 32, 16"):
        kernels.linear.run(jnp.zeros((1, 32), HALF), neighbours, 0, HALF)


def test_a_stack_that_32_bits_do_not_address_is_refused():
    """By shape alone: from 2 to 4 GiB of codes; a padded stack is longer than that."""
    assert addressable_matrices(5 * 128, 2048 * 1536) == 5 * 128, "below 2 GiB"
    assert addressable_matrices(512, 2048 * 2048) == 512, "2 GiB"
    assert addressable_matrices(513, 2048 * 2048) == 1025
    assert addressable_matrices(1024, 2048 * 2048) == 1025, "4 GiB still have 32 bits"
    assert addressable_matrices(48 * 128, 2048 * 1536) == 48 * 128, "Qwen3-30B-A3B"

    def stack(count):
        codes = jax.ShapeDtypeStruct((count, 1536, 2048), jnp.float8_e4m3fn)
        scales = jax.ShapeDtypeStruct((count, 16, 1536), F32)
        return QuantizedWeight(codes=codes, scales=scales, group=128, outputs_first=True)

    product = functools.partial(partial_sums, interpret=True)
    x, layer = jax.ShapeDtypeStruct((4, 2048), HALF), jax.ShapeDtypeStruct((), jnp.int32)
    needed = addressable_matrices(7 * 128, 2048 * 1536)
    with pytest.raises(ConfigError, match=f'tp_size or ep_size.*quantization="none".*pad them to {needed}'):
        jax.eval_shape(product, x, stack(7 * 128), layer)
    for count in (5 * 128, needed, 48 * 128):
        assert jax.eval_shape(product, x, stack(count), layer).shape[1:] == (4, 1536)


def test_a_layer_in_few_kernels_equals_plain_code():
    """All that a fused step multiplies by codes: a projection, the output's with the residual stream behind it, the
    router, which is plain, and the experts."""
    rows, dim, experts, top_k, dtype = 5, 64, 6, 2, F32
    case = Experts(sizes=(rows, top_k, experts, dim, 40), groups=(32, 16), dtype=dtype, shared_width=24)
    call, shared, keys = case.call, case.shared, jax.random.split(jax.random.key(4), 6)
    assert shared is not None
    first, last = (random_weight(key, 3, dim, dim, 32, real=slice(1, 2)) for key in keys[:2])
    stream, router = (
        random_rows(keys[2], (rows, dim), dtype),
        random_rows(keys[3], (3, dim, experts), dtype),
    )
    scales, layer = jnp.ones((3, dim), dtype), jnp.int32(1)
    spec, norm = (
        RouterSpec(num_experts=experts, top_k=top_k, renormalize=True),
        StreamNorm(scales=scales, layer=layer, eps=1e-6),
    )
    fused = gpu_kernels(interpret=True).fused_layer
    assert fused is not None

    @jax.jit
    def by_kernels(x, first, last, call, gate_up, down):
        mixed = jnp.sum(fused.product(x, first, layer), axis=0).astype(dtype)
        x, normed, logits = fused.add_parts(x, fused.product(mixed, last, layer), None, norm, router)
        routing, _ = fused.route(logits, None, None, layer, spec, RouterBiases(layer=layer))
        own = SharedExperts(gate_up=gate_up, down=down)
        call = dataclasses.replace(call, x=normed.plain, ids=routing.ids, weights=routing.weights)
        slots, _ = fused.slots(call, own, normed.scaled)
        outputs = SlotOutputs(slots=slots, weights=routing.weights, valid=call.valid, inputs=normed.plain, shared=own)
        x, normed = fused.add_slots(x, outputs, norm)
        return x, normed.plain, routing.ids

    @jax.jit
    def by_array_code(x, first, last, call, gate_up, down):
        mixed = reference_linear(x, first, 1, F32).astype(dtype)
        x = x + reference_linear(mixed, last, 1, F32).astype(dtype)
        normed = rms_norm(x, scales[1], eps=1e-6)
        routing = replay_topk(jnp.dot(normed, router[1], preferred_element_type=F32), None, spec=spec)
        call = dataclasses.replace(call, x=normed, ids=routing.ids, weights=routing.weights)
        hidden = gated(reference_linear(normed, gate_up, 1, F32).astype(dtype))
        own = reference_linear(hidden, down, 1, F32).astype(dtype)
        x = x + (reference_experts(at_first(call)) + own)
        return x, rms_norm(x, scales[1], eps=1e-6), routing.ids

    args = (stream, first, last, call, shared.gate_up, shared.down)
    actual, expected = by_kernels(*args), by_array_code(*args)
    np.testing.assert_array_equal(actual[2], expected[2])
    for left, right in zip(actual[:2], expected[:2], strict=True):
        assert distance(wide(left), wide(right)) < BOUNDS[dtype]


SCALINGS = {"scaled": True, "bfloat16": False}

# On a GPU. Array code in full precision is the oracle there: float32 numbers of codes are exact products.


def in_full_precision(function, *args):
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("rows", [1, 16, 33, 256, 3000])
@pytest.mark.parametrize(
    ("inputs", "outputs", "group", "span"), [(2048, 5120, 128, 128), (4096, 2048, 128, 1), (576, 1000, 64, 1)]
)
def test_compiled_products_with_codes(rows, inputs, outputs, group, span, scaled):
    keys = jax.random.split(jax.random.key(rows), 2)
    x = random_rows(keys[0], (rows, inputs), HALF)
    weight = random_weight(keys[1], 3, inputs, outputs, group, span=span)
    tile = dataclasses.replace(choose_codes_tile(rows, inputs, outputs, group), scaled=scaled)
    actual = jax.jit(lambda x, w: linear_in_place(x, w, jnp.int32(1), F32, tile=tile))(x, weight)
    assert (
        distance(wide(actual), wide(in_full_precision(lambda x, w: reference_linear(x, w, 1, F32), x, weight))) < 2e-6
    )


ON_GPU = {
    "Qwen3-30B-A3B": dict(sizes=(8, 128, 2048, 768), groups=(128, 128), span=128),
    "a shard of it": dict(sizes=(8, 128, 2048, 192), groups=(128, 64)),
    "ragged": dict(sizes=(3, 60, 1000, 72), groups=(128, 16), kind="padding"),
    "shared": dict(sizes=(6, 64, 2048, 1408), groups=(128, 128), shared_width=2816),
    "shared, spans": dict(sizes=(6, 64, 2048, 1408), groups=(128, 128), shared_width=2816, span=128),
    "biased": dict(sizes=(4, 32, 2880, 2880), groups=(32, 32), activation="clamped swiglu", biased=True),
    "Qwen3-30B-A3B, int4": dict(sizes=(8, 128, 2048, 768), groups=(128, 128), form="int4", run=64),
    "a shard of it, int4": dict(sizes=(8, 128, 2048, 192), groups=(128, 64), form="int4", run=32),
    "groups of 32, int4": dict(sizes=(8, 64, 2048, 1408), groups=(32, 32), form="int4", run=32, shared_width=2816),
    "GPT-OSS-20b, e2m1": dict(
        sizes=(4, 32, 2880, 2880), groups=(32, 32), form="e2m1", run=32, activation="clamped swiglu", biased=True
    ),
}
ONE_WHOLE_ROW = Tile(rows=1, out=8, inner=2048, warps=8, stages=1)
EVERY_TILE = [
    choose_tiles(1, 128, 2048, 768, MatrixKind.E4M3),
    choose_tiles(1, 128, 2048, 768, MatrixKind.INT4),
    *CODE_TILES,
    *INT4_TILES,
    *E2M1_TILES,
    MoeTiles(rows=1, gate_up=ONE_WHOLE_ROW, down=dataclasses.replace(ONE_WHOLE_ROW, inner=256), sorted_slots=False),
    MoeTiles(rows=2, gate_up=dataclasses.replace(ONE_WHOLE_ROW, rows=2), down=ONE_WHOLE_ROW),
    MoeTiles(
        rows=8,
        gate_up=Tile(rows=8, out=64, inner=128, warps=2, stages=4),
        down=Tile(rows=8, out=32, inner=128, warps=2, stages=5),
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 129, 777])
@pytest.mark.parametrize("name", ON_GPU)
def test_compiled_experts_of_codes(name, rows):
    options = dict(ON_GPU[name])
    case = Experts(**{**options, "sizes": (rows, *options["sizes"]), "dtype": HALF})
    call, shared, top_k, dim = case.call, case.shared, case.sizes[1], case.sizes[3]
    tiles = tiles_for(call, shared)
    own = None if shared is None else (shared.gate_up, shared.down)

    def kernel(call, own):
        shared = own and SharedExperts(gate_up=own[0], down=own[1])
        return slot_outputs(call, tiles, shared, stride=call.num_experts, interpret=False)

    outputs = jax.jit(kernel)(call, own)
    routed = combine(outputs[: rows * top_k].reshape(rows, top_k, dim), call.weights, call.valid)
    # A loop over tiles that hold rows keeps one matrix of float32 at a time.
    assert distance(wide(routed), wide(in_full_precision(tiled_experts, at_first(call)))) < BOUNDS[HALF]
    if shared is not None:
        expected = in_full_precision(
            lambda x, own: reference_linear(gated(reference_linear(x, own[0], 1, F32)), own[1], 1, F32), call.x, own
        )
        assert distance(wide(outputs[rows * top_k :]), wide(expected)) < BOUNDS[HALF]


FORMS = {
    "e4m3": dict(groups=(128, 128)),
    "e4m3, spans": dict(groups=(128, 128), span=128),
    "int4": dict(groups=(128, 128), form="int4", run=64),
    "e2m1": dict(groups=(32, 32), form="e2m1", run=32),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiles", EVERY_TILE, ids=lambda tiles: f"up to {tiles.rows} rows")
def test_compiled_experts_in_every_tile(tiles, form):
    """In every scaling of the rows."""
    call = Experts(sizes=(16, 8, 32, 2048, 768), dtype=HALF, **FORMS[form]).call
    expected = wide(in_full_precision(tiled_experts, at_first(call)))
    for scaled in SCALINGS.values():
        own = dataclasses.replace(tiles, scaled=scaled)
        run = jax.jit(lambda call, own=own: slot_outputs(call, own, stride=call.num_experts, interpret=False))
        outputs = run(call).reshape(16, 8, -1)
        assert distance(wide(combine(outputs, call.weights, call.valid)), expected) < BOUNDS[HALF]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "e2m1"])
@pytest.mark.parametrize("scaled", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("rows", [1, 16, 33, 3000])
@pytest.mark.parametrize(
    ("inputs", "outputs", "group", "run"), [(2048, 5120, 128, 64), (2880, 1000, 32, 32), (576, 1000, 64, 16)]
)
def test_compiled_products_with_codes_of_4_bits(rows, inputs, outputs, group, run, scaled, form):
    keys = jax.random.split(jax.random.key(rows), 2)
    x = random_rows(keys[0], (rows, inputs), HALF)
    weight = random_halves(keys[1], 3, inputs, outputs, group, form=form, run=run, real=slice(1, 2))
    tile = dataclasses.replace(choose_codes_tile(rows, inputs, outputs, part_unit(weight), packed=True), scaled=scaled)
    actual = jax.jit(lambda x, w: linear_in_place(x, w, jnp.int32(1), F32, tile=tile))(x, weight)
    assert (
        distance(wide(actual), wide(in_full_precision(lambda x, w: reference_linear(x, w, 1, F32), x, weight))) < 2e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "matrices", [682, addressable_matrices(700, 2048 * 1536), 13 * 128], ids=["2 GB", "padded", "5 GB"]
)
def test_compiled_products_reach_both_ends_of_a_long_stack(matrices):
    """The last matrices of a stack just below 2 GiB, of one padded above 4 GiB, and of a longer one."""

    def codes_of(key):
        return as_codes(jax.random.bits(key, (1536, 2048), jnp.uint8))

    codes = jax.jit(lambda keys: lax.map(codes_of, keys))(jax.random.split(jax.random.key(0), matrices))
    scales = jnp.full((matrices, 16, 1536), 1e-3, F32)
    weight = QuantizedWeight(codes=codes, scales=scales, group=128, outputs_first=True)
    x = random_rows(jax.random.key(1), (16, 2048), HALF)
    run = jax.jit(lambda x, w, layer: linear_in_place(x, w, layer, F32))
    for index in (0, matrices // 2, matrices - 1):
        own = dataclasses.replace(weight, codes=weight.codes[index][None], scales=weight.scales[index][None])
        assert relative_errors(run(x, weight, jnp.int32(index)), x, numbers(own, 0)) < 2 * SUMS


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ONE_TO_ONE.values(), ids=ONE_TO_ONE)
def test_compiled_rows_of_any_size_keep_their_sums(tile):
    run_rows_of_any_size(tile, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["e4m3", "e4m3, spans", "int4", "e2m1"])
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize(("inputs", "group", "splits"), [(2048, 128, 1), (4096, 128, 2), (576, 64, 1)])
def test_compiled_products_of_few_rows(rows, inputs, group, splits, form):
    """In one step, in an unrolled loop and in a loop."""
    keys = jax.random.split(jax.random.key(rows), 2)
    x = random_rows(keys[0], (rows, inputs), HALF)
    if form.startswith("e4m3"):
        outputs, span = (1024, 128) if form.endswith("spans") else (1000, 1)
        weight = random_weight(keys[1], 2, inputs, outputs, group, span=span)
    else:
        weight = random_halves(keys[1], 2, inputs, 1000, group, form=form, run=32)
    expected = wide(in_full_precision(lambda x, w: reference_linear(x, w, 1, F32), x, weight))
    for inner, own in ((2048, min(rows, 4)), (512, 1), (64, 1)):
        tile = LinearTile(rows=1 if own == 1 else 4, out=8, inner=inner, warps=8, stages=1, splits=splits)
        actual = jax.jit(lambda x, w, t=tile: linear_in_place(x, w, jnp.int32(1), F32, tile=t))(x, weight)
        assert distance(wide(actual), expected) < 2e-6
