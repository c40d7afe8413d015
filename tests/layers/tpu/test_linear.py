"""TPU projections, interpreted, against NumPy; matrices of other layers are NaN, or have scales of NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from routed_experts.layers.kernels import float32_product
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.quantized import CODE_DTYPES, QuantizedWeight
from routed_experts.layers.tpu.codes import MOST_EXPONENT, MatrixBlock
from routed_experts.layers.tpu.linear import TOKEN_TILE, layered_linear
from support.tpu_aot import compile_tpu, tpu_mesh

pytestmark = pytest.mark.usefixtures("fast_compilation")

RUN = jax.jit(functools.partial(layered_linear, interpret=True), static_argnums=3)


@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [(1, 8, 5), (TOKEN_TILE + 13, 16, 300), (7, 8192, 700)],
    ids=["one row", "tiles of rows", "parts"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_projection_is_the_product_with_its_layers_matrix(num_tokens, inputs, outputs, dtype):
    rng = np.random.default_rng(0)
    weights = np.full((3, inputs, outputs), np.nan, np.float32)
    weights[1] = rng.standard_normal((inputs, outputs)) / inputs**0.5
    x, low = jnp.asarray(rng.standard_normal((num_tokens, inputs)), dtype), jnp.asarray(weights, dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(low[1], np.float64)
    for result in (jnp.float32, dtype):
        out = RUN(x, low, jnp.asarray(1, jnp.int32), result)
        assert out.dtype == result
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03 if result == jnp.bfloat16 else 1e-5)


def test_a_transposed_array_of_one_layer_is_multiplied():
    rng = np.random.default_rng(1)
    x, table = rng.standard_normal((4, 8)).astype(np.float32), rng.standard_normal((11, 8)).astype(np.float32)
    out = RUN(jnp.asarray(x), jnp.asarray(table).T[None], 0, jnp.float32)
    np.testing.assert_allclose(out, x @ table.T, atol=1e-5)


FORMATS = "e4m3", "int4", "e2m1"
HALVES = {  # by code
    "int4": np.arange(-8.0, 8.0),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
}


def random_codes(rng, stack, inputs, outputs, group, form="e4m3"):
    """Every finite code, and scales of float32 numbers; NaN but for matrix 1."""
    if form == "e4m3":
        finite = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)
        codes = np.full((stack, inputs, outputs), 0x7F, np.uint8)
        codes[1 % stack] = rng.choice(finite, (inputs, outputs))
    else:
        assert inputs % 2 == 0, inputs
        codes = rng.integers(0, 256, (stack, inputs // 2, outputs)).astype(np.uint8)
    scales = np.full((stack, -(-inputs // group), outputs), np.nan, np.float32)
    scales[1 % stack] = rng.uniform(0.5, 2, scales.shape[1:])
    codes = jnp.asarray(codes.view(CODE_DTYPES[form]))
    return QuantizedWeight(codes=codes, scales=jnp.asarray(scales), group=group, format=form)


def values_of(codes, form):
    """What codes [..., I, O] or [..., I / 2, O] are, float64."""
    if form == "e4m3":
        return np.asarray(codes, np.float64)
    whole = np.asarray(codes).view(np.uint8)
    values = np.empty((*whole.shape[:-2], 2 * whole.shape[-2], whole.shape[-1]))
    values[..., 0::2, :], values[..., 1::2, :] = HALVES[form][whole % 16], HALVES[form][whole // 16]
    return values


def float64_of(weights, layer):
    scales = np.repeat(np.asarray(weights.scales[layer], np.float64), weights.group, axis=0)
    return values_of(weights.codes[layer], weights.format) * scales[: weights.shape[1]]


# N, R, D, O, group
CODED = {
    "one row, less than a group": (1, 3, 8, 5, 16),
    "one row, many groups": (1, 3, 2300, 130, 16),
    "short group": (7, 3, 300, 70, 128),
    "two groups a chunk": (5, 3, 576, 33, 64),
    "more than a tile of rows and a block of outputs": (TOKEN_TILE + 13, 3, 300, 1100, 32),
    "one layer": (16, 1, 130, 200, 32),
}
IN_EVERY_RUN = {  # each shape in one format, and what formats do not have in common: the cases that follow
    "e4m3": ("one row, less than a group", "one row, many groups", "more than a tile of rows and a block of outputs"),
    "int4": ("one row, less than a group", "short group", "one layer"),
    "e2m1": ("one row, less than a group", "two groups a chunk"),
}
CODED_BY_FORMAT = {
    f"{form}: {name}": (form, *shape)
    if name in IN_EVERY_RUN[form]
    else pytest.param(form, *shape, marks=pytest.mark.thorough)
    for form in FORMATS
    for name, shape in CODED.items()
}
CODED_BY_FORMAT |= {
    "e4m3: an odd number of inputs": ("e4m3", 16, 1, 129, 200, 32),
    "int4: a tile and a short one": ("int4", 7, 3, 160, 70, 32),
    "e2m1: groups that end in a tile": pytest.param("e2m1", 5, 2, 192, 70, 128, marks=pytest.mark.thorough),
    "e2m1: eight groups a chunk": ("e2m1", 33, 2, 208, 40, 16),
}


@pytest.mark.parametrize(
    ("form", "num_tokens", "stack", "inputs", "outputs", "group"), CODED_BY_FORMAT.values(), ids=CODED_BY_FORMAT
)
def test_a_projection_by_codes_rounds_no_weight(form, num_tokens, stack, inputs, outputs, group):
    rng = np.random.default_rng(2)
    weights = random_codes(rng, stack, inputs, outputs, group, form)
    x = jnp.asarray(rng.standard_normal((num_tokens, inputs)), jnp.bfloat16)
    out = RUN(x, weights, jnp.asarray(1 % stack, jnp.int32), jnp.float32)
    exact, matrix = np.asarray(x, np.float64), float64_of(weights, 1 % stack)
    bound = np.abs(exact) @ np.abs(matrix)
    assert np.all(np.abs(out - exact @ matrix) <= 1e-6 * bound)
    rounded = exact @ np.asarray(jnp.asarray(matrix, jnp.bfloat16), np.float64)
    assert np.max(np.abs(rounded - exact @ matrix) / bound) > 1e-5, "as exact with rounded weights: the bound is loose"
    assert RUN(x, weights, jnp.asarray(1 % stack, jnp.int32), jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("group", "form"),
    [
        pytest.param(group, form, marks=[] if (row + column) % 3 == 0 else pytest.mark.thorough)
        for row, group in enumerate([128, 64, 32, 16])
        for column, form in enumerate(FORMATS)
    ],
)
def test_a_row_with_one_input_gives_its_codes_times_their_scales_to_the_bit(form, group):
    weights = random_codes(np.random.default_rng(3), 2, 200, 140, group, form)
    for dtype in (jnp.bfloat16, jnp.float32):
        out = RUN(jnp.eye(200, dtype=dtype), weights, jnp.asarray(1, jnp.int32), jnp.float32)
        assert np.array_equal(out, float64_of(weights, 1).astype(np.float32))
    assert len(np.unique(values_of(weights.codes[1], form))) == {"e4m3": 253, "int4": 16, "e2m1": 15}[form]


def with_powers(weights, rng, largest=30):
    """The same codes, with scales that are powers of two; NaN but for matrix 1."""
    scales, own = np.array(weights.scales), 1 % len(weights.scales)
    scales[own] = 2.0 ** rng.integers(-largest, largest + 1, scales.shape[1:]) * rng.choice([-1, 1], scales.shape[1:])
    return dataclasses.replace(weights, scales=jnp.asarray(scales))


@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs", "group"),
    [
        (9, 6, 5, 16),
        pytest.param(21, 2300, 130, 16, marks=pytest.mark.thorough),
        (40, 160, 70, 32),
        pytest.param(33, 320, 300, 64, marks=pytest.mark.thorough),
        (TOKEN_TILE + 13, 300, 1100, 128),
    ],
    ids=str,
)
def test_numbers_of_e2m1_with_powers_of_two_are_multiplied_at_once_and_not_rounded(num_tokens, inputs, outputs, group):
    rng = np.random.default_rng(8)
    weights = with_powers(random_codes(rng, 3, inputs, outputs, group, "e2m1"), rng)
    x = jnp.asarray(rng.standard_normal((num_tokens, inputs)), jnp.bfloat16)
    one = jnp.eye(inputs, dtype=jnp.bfloat16)[rng.permutation(inputs)[:num_tokens]]
    exact, matrix = np.asarray(x, np.float64), float64_of(weights, 1)
    for scale in (1.0, 1.5):  # of one group of one output, the last; the rest are powers of two
        made = dataclasses.replace(weights, scales=weights.scales.at[1, -1, -1].multiply(scale))
        matrix = float64_of(made, 1)
        out = RUN(x, made, jnp.asarray(1, jnp.int32), jnp.float32)
        assert np.all(np.abs(out - exact @ matrix) <= 1e-6 * (np.abs(exact) @ np.abs(matrix)))
        assert np.array_equal(RUN(one, made, jnp.asarray(1, jnp.int32), jnp.float32), np.asarray(one, float) @ matrix)


def test_scales_of_a_blocks_own_groups_and_outputs_are_examined():
    """Of groups 5 to 13 of 16 and outputs to 130 of 256; others may be anything."""

    def kernel(scales, first, out):
        block = MatrixBlock(values=None, scales=scales, group=32, num_outputs=130)
        out[...] = jnp.full(out.shape, jnp.where(block.has_powers_of_two(first[0, 0], 9), 1, 0))

    @jax.jit
    def examine(scales):
        shape = jax.ShapeDtypeStruct((8, 128), jnp.int32)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(scales, jnp.full((1, 1), 5, jnp.int32))[0, 0]

    own = np.full((1, 16, 256), np.nan, np.float32)
    own[0, 5:14, :130] = 0.25
    beyond, after_one = 2.0 ** (MOST_EXPONENT + 1), np.nextafter(np.float32(1), np.float32(2))
    powers = (0.25, 1.0, -4.0, 2.0**MOST_EXPONENT, 2.0**-MOST_EXPONENT)
    others = (1.5, after_one, beyond, 1 / beyond, 2.0**-127, 0.0, np.inf, np.nan)
    for group, output in ((5, 0), (13, 129), (8, 64)):
        for scale in (*powers, *others):
            changed = own.copy()
            changed[0, group, output] = scale
            assert int(examine(jnp.asarray(changed))) == (scale in powers), (group, output, scale)


@pytest.mark.parametrize("form", ["int4", "e2m1"])
def test_a_nan_of_a_row_stays_there_beside_halves_of_a_tile_that_are_no_inputs(form):
    """A tile of bytes is 64 inputs; here 40 are the matrix's."""
    weights = random_codes(np.random.default_rng(5), 3, 40, 6, 16, form)
    x = np.random.default_rng(6).standard_normal((4, 40)).astype(np.float32)
    broken = np.array(x)
    broken[2, 39] = np.nan
    clean, out = (RUN(jnp.asarray(rows), weights, jnp.asarray(1, jnp.int32), jnp.float32) for rows in (x, broken))
    assert np.all(np.isfinite(clean)) and np.all(np.isnan(out[2]))
    assert np.array_equal(np.delete(out, 2, axis=0), np.delete(clean, 2, axis=0))


@pytest.mark.parametrize("inputs", [32, 40], ids=["whole tiles of codes", "not"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_of_nan_gives_nan_in_its_output_alone(inputs, code):
    weights = random_codes(np.random.default_rng(4), 2, inputs, 6, 16)
    codes = weights.codes.view(jnp.uint8).at[1, 21, 3].set(code).view(jnp.float8_e4m3fn)
    x = jnp.ones((2, inputs), jnp.bfloat16)
    out = RUN(x, dataclasses.replace(weights, codes=codes), jnp.asarray(1, jnp.int32), jnp.float32)
    assert np.array_equal(np.isnan(out), np.tile(np.arange(6) == 3, (2, 1)))


@pytest.mark.tpu_aot
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_products_with_a_float32_matrix_keep_its_precision(dtype):
    """A router's: an accelerator's default would round it to bfloat16 or TF32, and decide near ties otherwise."""
    x, router = jax.ShapeDtypeStruct((16, 256), dtype), jax.ShapeDtypeStruct((3, 256, 128), "float32")
    for product in (lambda x, w: reference_linear(x, w, 1, jnp.float32), lambda x, w: float32_product(x, w[1])):
        text = compile_tpu(product, x, router, mesh=tpu_mesh("v5e")).as_text()
        assert "operand_precision={highest,highest}" in text
    half = jax.ShapeDtypeStruct((3, 256, 128), "bfloat16")
    text = compile_tpu(lambda x, w: float32_product(x, w[1]), x, half, mesh=tpu_mesh("v5e")).as_text()
    assert "operand_precision={highest,highest}" not in text
