"""The native kernels with matrices of codes and scales: products against loops in float64, bits that do not depend on
the other rows, each code by itself, runs of layers with any mix of plain matrices and codes, and what is refused."""

import ctypes
import dataclasses
import functools
import itertools
import math
import platform
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.test_moe import biased_loop, oracle, random_call, with_rows
from layers.test_native_batch_invariance import bits
from layers.test_native_layer_stack import build_case
from routed_experts.layers.attention import FusedQKV
from routed_experts.layers.native import toolchain
from routed_experts.layers.native.ops import (
    NATIVE_KERNELS,
    native_exact_linear,
    native_experts,
    native_fused_attention,
    native_gated,
    native_linear,
    native_rms_norm,
    native_router,
)
from routed_experts.layers.quantized import CODE_DTYPES, E2M1, E4M3, INT4, QuantizedWeight
from support.tile_libraries import FEW_OPTIMISATIONS

pytestmark = pytest.mark.usefixtures("fast_compilation")

DTYPES = "float32", "bfloat16", "float16"
GROUPS = 16, 32, 64, 128
COUNTS = 1, 2, 5, 7, 24, 25, 31, 70
ROUNDING = {
    "float32": 2.0**-17,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
}  # relative to the sum of sizes: of sums, of rows
EXPERTS = jax.jit(native_experts)
LINEAR = jax.jit(native_linear, static_argnames="dtype")
FORMATS = E4M3, INT4, E2M1
FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
HALVES = {  # by code
    INT4: np.arange(-8.0, 8.0),
    E2M1: np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
}
LARGEST = {E4M3: 120.0, INT4: 5.0, E2M1: 3.0}  # usual sizes of codes


def as_codes(array, form=E4M3):
    return jnp.asarray(array.view(CODE_DTYPES[form]))


def coded(rng, stack, depth, cols, group, dtype="float32", size=1.0, own=None, form=E4M3, span=1):
    """Random finite codes, and scales; of matrices that are not `own` the scales are NaN. Codes of 4 bits are of an
    even number of inputs."""
    scales = rng.uniform(0.5, 1.5, (stack, math.ceil(depth / group), cols // span)) * size / LARGEST[form]
    if own is not None:
        scales[[index for index in range(stack) if index not in own]] = np.nan
    if form == E4M3:
        codes = rng.choice(FINITE, (stack, depth, cols))
    else:
        assert depth % 2 == 0, depth
        codes = rng.integers(0, 256, (stack, depth // 2, cols)).astype(np.uint8)
    return QuantizedWeight(
        codes=as_codes(codes, form),
        scales=jnp.asarray(scales, jnp.float32),
        group=group,
        span=span,
        format=form,
        dtype=jnp.dtype(dtype),
    )


def by_output(weight):
    """The same numbers with a scale of its own for each output."""
    return dataclasses.replace(weight, span=1, scales=jnp.repeat(weight.scales, weight.span, axis=2))


def in_bfloat16(weight):
    """The weight with scales that are rounded to bfloat16, and held in it."""
    return dataclasses.replace(weight, scales=weight.scales.astype(jnp.bfloat16))


def in_float32(weight):
    """The same numbers with scales in float32."""
    return dataclasses.replace(weight, scales=weight.scales.astype(jnp.float32))


def values_of(codes, form):
    """What the codes [I, O] or [I / 2, O] are, float64."""
    if form == E4M3:
        return np.asarray(codes, np.float64)
    codes = np.asarray(codes).view(np.uint8)
    values = np.empty((2 * codes.shape[0], codes.shape[1]))
    for row, both in enumerate(codes):
        values[2 * row], values[2 * row + 1] = HALVES[form][both % 16], HALVES[form][both // 16]
    return values


def looped(x, weight, index):
    """One group and one matrix at a time; and the sum of the sizes of what is added."""
    codes, scales = (np.asarray(array)[index] for array in (weight.codes, weight.scales))
    codes, scales = values_of(codes, weight.format), np.repeat(scales.astype(np.float64), weight.span, axis=1)
    y = size = 0.0
    for j, scale in enumerate(scales):
        inputs = slice(j * weight.group, (j + 1) * weight.group)
        y = y + scale * (x[:, inputs] @ codes[inputs])
        size = size + scale * (np.abs(x[:, inputs]) @ np.abs(codes[inputs]))
    return y, size


@functools.partial(jax.jit, static_argnames=("counts", "dtype"))
def products_of_first_rows(x, weight, counts, dtype):
    """By number of rows, the products of the first rows, also of rows as they are; and those of all rows in a dtype."""
    float32 = [
        (native_linear(x[:count], weight, 1, jnp.float32), native_exact_linear(x[:count], weight, 1, jnp.float32))
        for count in counts
    ]
    return float32, native_linear(x, weight, 1, dtype)


@jax.jit
def products_of_rows(x, weight, orders):
    """The products of all rows, and of the rows of each order."""
    return native_linear(x, weight, 0, jnp.float32), [native_linear(x[r], weight, 0, jnp.float32) for r in orders]


SHAPES = [(64, 64), (7, 5), (130, 200), (33, 17), (1040, 48), (200, 112), (17, 96), (258, 320)]
SHAPES_OF_HALVES = [(64, 64), (6, 5), (130, 200), (1040, 48), (208, 112)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "depth", "cols"),
    [
        *((E4M3, *shape) for shape in SHAPES),
        *((form, *shape) for form in (INT4, E2M1) for shape in SHAPES_OF_HALVES),
    ],
)
def test_products_equal_the_loop(dtype, form, depth, cols):
    rng = np.random.default_rng(1)
    for group, fed in itertools.product(GROUPS, sorted({"float32", dtype})):
        weight = coded(rng, 3, depth, cols, group, dtype, own=[1], form=form)
        x = jnp.asarray(rng.standard_normal((70, depth)), fed)
        expected, size = looped(np.asarray(x, np.float64), weight, 1)
        counts = 1, 3, 70
        products, half = products_of_first_rows(x, weight, counts, dtype)
        for rows, (got, exact) in zip(counts, products, strict=True):
            rounding = ROUNDING["bfloat16" if dtype == "bfloat16" and fed == "float32" else "float32"]
            assert np.all(np.abs(np.asarray(got, np.float64) - expected[:rows]) <= rounding * size[:rows])
            assert np.all(np.abs(np.asarray(exact, np.float64) - expected[:rows]) <= ROUNDING["float32"] * size[:rows])
        assert half.dtype == dtype
        np.testing.assert_array_equal(half, np.asarray(products[-1][0]).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "depth", "cols", "group"),
    [(E4M3, 200, 384, 128), (E4M3, 1040, 128, 64), (E4M3, 96, 2176, 32), (INT4, 258, 256, 32), (E2M1, 64, 128, 16)],
)
def test_outputs_that_share_scales_have_the_bits_of_those_with_their_own(dtype, form, depth, cols, group):
    rng = np.random.default_rng(10)
    weight = coded(rng, 3, depth, cols, group, dtype, own=[1], form=form, span=128)
    x, counts = jnp.asarray(rng.standard_normal((70, depth)), dtype), (1, 2, 7, 25, 33, 70)
    shared, own = (products_of_first_rows(x, one, counts, dtype) for one in (weight, by_output(weight)))
    for left, right in zip(jax.tree.leaves(shared), jax.tree.leaves(own), strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))
    expected, size = looped(np.asarray(x, np.float64), weight, 1)
    assert np.all(np.abs(np.asarray(shared[0][-1][1], np.float64) - expected) <= ROUNDING["float32"] * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "depth", "cols", "group", "span"),
    [(INT4, 258, 256, 32, 1), (INT4, 258, 256, 32, 128), (E2M1, 96, 389, 16, 1), (INT4, 64, 5, 64, 1)],
)
def test_scales_of_bfloat16_have_the_bits_of_the_same_in_float32(dtype, form, depth, cols, group, span):
    """Of few rows and of many, and of columns that are no whole vectors."""
    rng = np.random.default_rng(11)
    half = in_bfloat16(coded(rng, 3, depth, cols, group, dtype, form=form, span=span))
    x, counts = jnp.asarray(rng.standard_normal((70, depth)), dtype), (1, 2, 7, 25, 33, 70)
    short, wide = (products_of_first_rows(x, one, counts, dtype) for one in (half, in_float32(half)))
    for left, right in zip(jax.tree.leaves(short), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(np.asarray(left, np.float32), np.asarray(right, np.float32))
    expected, size = looped(np.asarray(x, np.float64), in_float32(half), 1)
    assert np.all(np.abs(np.asarray(short[0][-1][1], np.float64) - expected) <= ROUNDING["float32"] * size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "depth", "cols"),
    [
        *((E4M3, *shape) for shape in [(96, 320), (1040, 48), (33, 48), (72, 40)]),
        *((form, *shape) for form in (INT4, E2M1) for shape in [(1040, 112), (72, 40)]),
    ],
)
def test_a_row_of_a_product_is_its_own(dtype, form, depth, cols):
    rng = np.random.default_rng(2)
    for group in GROUPS:
        weight = coded(rng, 1, depth, cols, group, dtype, form=form)
        x = jnp.asarray(rng.standard_normal((70, depth)), dtype)
        orders = [rng.permutation(70)[:count] for count in COUNTS]
        expected, products = products_of_rows(x, weight, orders)
        for rows, product in zip(orders, products, strict=True):
            np.testing.assert_array_equal(bits(product), bits(expected)[rows])


@given(
    depth=st.integers(1, 150),
    cols=st.integers(1, 150),
    rows=st.integers(1, 40),
    group=st.sampled_from(GROUPS),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60)
def test_any_product_equals_the_loop_and_its_rows_are_their_own(depth, cols, rows, group, dtype, form, seed):
    rng = np.random.default_rng(seed)
    depth = depth if form == E4M3 else 2 * math.ceil(depth / 2)
    weight = coded(rng, 2, depth, cols, group, dtype, own=[1], form=form)
    x = jnp.asarray(rng.standard_normal((rows, depth)), dtype)
    got, last = jax.jit(lambda x: [native_linear(part, weight, 1, jnp.float32) for part in (x, x[-1:])])(x)
    expected, size = looped(np.asarray(x, np.float64), weight, 1)
    assert np.all(np.abs(np.asarray(got, np.float64) - expected) <= ROUNDING["float32"] * size)
    np.testing.assert_array_equal(bits(last), bits(got)[-1:])


def test_every_code_is_decoded_exactly():
    """Rows of an identity select each; in pairs and in floats, for few rows and for many."""
    shifted = np.stack([np.roll(FINITE, -shift) for shift in range(64)], axis=1)  # [254, 64]: each code in every column
    for dtype, count in itertools.product(DTYPES, (254, 9, 4, 1)):
        ones = jnp.ones((1, math.ceil(254 / 16), 64), jnp.float32)
        weight = QuantizedWeight(codes=as_codes(shifted[None]), scales=ones, group=16, dtype=jnp.dtype(dtype))
        values = np.asarray(weight.codes[0], np.float32)
        for start in range(0, 254, 61):
            rows = (start + np.arange(count)) % 254
            got = LINEAR(jnp.eye(254, dtype=dtype)[rows], weight, 0, dtype=jnp.float32)
            np.testing.assert_array_equal(got, values[rows])


@pytest.mark.parametrize("form", [INT4, E2M1])
def test_every_byte_of_two_codes_is_decoded_exactly(form):
    """Each in every column, with lines of four vectors and of one."""
    shifted = np.stack([np.roll(np.arange(256, dtype=np.uint8), -shift) for shift in range(80)], axis=1)
    for dtype, count in itertools.product(DTYPES, (512, 9, 1)):
        ones = jnp.ones((1, 32, 80), jnp.float32)
        weight = QuantizedWeight(
            codes=as_codes(shifted[None], form), scales=ones, group=16, format=form, dtype=jnp.dtype(dtype)
        )
        values = values_of(shifted, form)
        for start in range(0, 512, 101):
            rows = (start + np.arange(count)) % 512
            got = LINEAR(jnp.eye(512, dtype=dtype)[rows], weight, 0, dtype=jnp.float32)
            np.testing.assert_array_equal(got, values[rows])


def expert_call(dtype, shape, group, *, layers=1, layer=0, forms=(E4M3, E4M3), span=1):
    call, rng = random_call(3, shape, layers=layers, layer=layer), np.random.default_rng(4)
    (_, _, count, dim, width), own = shape, range(layer * shape[2], (layer + 1) * shape[2])
    stacks = {
        "gate_up": coded(rng, layers * count, dim, 2 * width, group, dtype, dim**-0.5, own, forms[0], span),
        "down": coded(rng, layers * count, width, dim, group, dtype, width**-0.5, own, forms[1], span),
    }
    return dataclasses.replace(call, x=call.x.astype(dtype), **stacks)


DEQUANTIZE = jax.jit(QuantizedWeight.dequantize)


def dequantized(call):
    return dataclasses.replace(call, gate_up=DEQUANTIZE(call.gate_up), down=DEQUANTIZE(call.down))


BOUNDS = {"float32": 2e-5, "float16": 2e-2, "bfloat16": 1.2e-1}  # of values around 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("shape", [(1, 4, 8, 32, 16), (40, 3, 5, 70, 33), (300, 4, 8, 64, 48), (150, 1, 1, 130, 20)])
def test_experts_equal_the_loop(dtype, group, shape):
    call = expert_call(dtype, shape, group, layers=2, layer=1)
    out = EXPERTS(call)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(dequantized(call)), atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forms", [(INT4, INT4), (E2M1, E2M1), (INT4, E4M3), (E2M1, INT4)], ids="-".join)
@pytest.mark.parametrize("shape", [(1, 4, 8, 64, 16), (40, 3, 5, 70, 34), (300, 4, 8, 64, 48)])
def test_experts_of_any_two_formats_equal_the_loop(dtype, forms, shape):
    call = expert_call(dtype, shape, 32, layers=2, layer=1, forms=forms)
    out = EXPERTS(call)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(dequantized(call)), atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 4, 256, 128), (64, 2, 2, 256, 384), (40, 3, 5, 128, 256)])  # parts, and whole
def test_experts_whose_outputs_share_scales_have_the_bits_of_those_with_their_own(dtype, shape):
    call = expert_call(dtype, shape, 64, layers=2, layer=1, span=128)
    own = dataclasses.replace(call, gate_up=by_output(call.gate_up), down=by_output(call.down))
    out = EXPERTS(call)
    np.testing.assert_array_equal(bits(out), bits(EXPERTS(own)))
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(dequantized(call)), atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 4, 256, 128), (40, 3, 5, 70, 34)])
def test_experts_with_scales_of_bfloat16_have_the_bits_of_the_same_in_float32(dtype, shape):
    call = expert_call(dtype, shape, 32, layers=2, layer=1, forms=(INT4, E2M1))
    short, wide = (
        dataclasses.replace(call, gate_up=cast(in_bfloat16(call.gate_up)), down=cast(in_bfloat16(call.down)))
        for cast in (in_bfloat16, in_float32)
    )
    np.testing.assert_array_equal(bits(EXPERTS(short)), bits(EXPERTS(wide)))
    np.testing.assert_allclose(np.asarray(EXPERTS(short), np.float64), oracle(dequantized(wide)), atol=BOUNDS[dtype])


@pytest.mark.parametrize("activation", ["clamped swiglu", "tanh gelu"])
def test_biased_experts_with_another_activation_equal_the_loop(activation):
    call, rng = expert_call("float32", (19, 3, 6, 80, 48), 32, layers=3, layer=1), np.random.default_rng(8)
    biases = [jnp.asarray(rng.standard_normal((18, size)), jnp.float32) for size in (96, 80)]
    call = dataclasses.replace(call, x=call.x * 6, gate_up_bias=biases[0], down_bias=biases[1], activation=activation)
    np.testing.assert_allclose(EXPERTS(call), biased_loop(dequantized(call)), atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("forms", "shape"),
    [
        *(((E4M3, E4M3), shape) for shape in [(256, 272), (64, 48), (40, 24)]),  # D, F: parts, whole experts, no pairs
        ((INT4, E2M1), (256, 272)),
    ],
)
def test_a_row_of_experts_is_its_own(dtype, forms, shape):
    call = dataclasses.replace(expert_call(dtype, (64, 2, 4, *shape), 32, forms=forms), valid=jnp.ones(64, bool))
    expected, rng = bits(EXPERTS(call)), np.random.default_rng(5)
    for count in (1, 2, 3, 8, 25, 40):
        order, rows = rng.permutation(64), rng.permutation(64)[:count]
        arrays = {name: np.asarray(vars(call)[name])[rng.permutation(64)] for name in ("x", "ids", "weights")}
        for name, array in arrays.items():
            array[order[:count]] = np.asarray(vars(call)[name])[rows]
        out = EXPERTS(with_rows(call, **arrays, valid=np.isin(np.arange(64), order[:count])))
        np.testing.assert_array_equal(bits(out)[order[:count]], expected[rows])


def test_an_id_that_no_expert_has_is_an_error():
    call = dataclasses.replace(expert_call("float32", (4, 2, 3, 16, 8), 16), valid=jnp.ones(4, bool))
    for wrong in (-1, 3, 2**30):
        ids = np.array(call.ids)
        ids[2, 1] = wrong
        with pytest.raises(jax.errors.JaxRuntimeError, match="an expert id is outside"):
            jax.block_until_ready(EXPERTS(with_rows(call, ids=ids)))


def scaled_rows(weight, rows):
    return dataclasses.replace(weight, scales=weight.scales[:, :rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: dataclasses.replace(w, group=24), "a group of weights is 24 inputs, not 16, 32, 64 or 128"),
        (lambda w: dataclasses.replace(w, group=64), r"scales of weights are \[2, 3, 32\], not \[2, 2, 32\]"),
        (lambda w: scaled_rows(w, 2), r"scales of weights are \[2, 2, 32\], not \[2, 3, 32\]"),
        (lambda w: dataclasses.replace(w, scales=w.scales[..., :16]), r"scales of weights are \[2, 3, 16\], not"),
        (
            lambda w: dataclasses.replace(w, scales=w.scales.astype(jnp.float16)),
            "scales of weights are float32 or bfloat16",
        ),
        (lambda w: dataclasses.replace(w, codes=w.codes.astype(jnp.float32)), "weights are not codes, but have scales"),
        (
            lambda w: dataclasses.replace(w, codes=w.codes.astype(jnp.float8_e5m2)),
            "weights are not codes, but have scales",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(change, message):
    weight = coded(np.random.default_rng(6), 2, 70, 32, 32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(native_linear(jnp.ones((3, 70)), change(weight), 0, jnp.float32))


def test_experts_that_do_not_fit_are_an_error():
    call = expert_call("float32", (4, 2, 3, 48, 16), 16)
    for changes, message in (
        ({"down": call.down.dequantize()}, "gate_up and down have one dtype"),
        ({"gate_up": scaled_rows(call.gate_up, 1)}, r"scales of gate_up are \[3, 1, 32\], not \[3, 3, 32\]"),
        ({"down": dataclasses.replace(call.down, group=8)}, "a group of down is 8 inputs"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(EXPERTS(dataclasses.replace(call, **changes)))
    half = dataclasses.replace(call, x=call.x.astype(jnp.bfloat16), gate_up_bias=jnp.zeros(5))
    with pytest.raises(jax.errors.JaxRuntimeError, match="biases are"):
        jax.block_until_ready(EXPERTS(half))


def test_codes_of_another_form_are_refused():
    weight = coded(np.random.default_rng(6), 1, 32, 32, 32)
    for changes in ({"outputs_first": True}, {"format": "e2m1"}):
        with pytest.raises(AssertionError):
            native_linear(jnp.ones((3, 32)), dataclasses.replace(weight, **changes), 0, jnp.float32)
    assert NATIVE_KERNELS.code_formats == set(FORMATS) and not NATIVE_KERNELS.outputs_first


MATRICES = ("qkv", "out", "gate_up", "down", "shared_gate_up", "shared_down")
MIXES = [
    MATRICES,
    ("qkv",),
    ("out", "shared_down"),
    ("gate_up", "down"),
    ("qkv", "out", "shared_gate_up"),
    (),
]


MIXED = {"qkv": INT4, "out": E2M1, "gate_up": INT4, "down": E2M1, "shared_gate_up": E4M3, "shared_down": INT4}


def stack_case(mix, dtype, group=32):
    """A run of two layers with shared experts, of which the named matrices are codes; `mix` may give their formats."""
    forms = mix if isinstance(mix, dict) else dict.fromkeys(mix, E4M3)
    case, rng = build_case(dtype=jnp.dtype(dtype), hidden=80, width=48, dim=16), np.random.default_rng(7)
    shapes = {name: getattr(case.arrays, name).shape for name in MATRICES[:4]}
    shapes |= {"shared_gate_up": (2, 80, 96), "shared_down": (2, 48, 80)}
    weights = {
        name: coded(rng, *shape, group, dtype, shape[1] ** -0.5, form=forms.get(name, E4M3))
        for name, shape in shapes.items()
    }
    weights = {name: w if name in mix else w.dequantize().astype(dtype) for name, w in weights.items()}
    return dataclasses.replace(case, arrays=dataclasses.replace(case.arrays, **weights))


def by_layers(case):
    """The same run by the kernels of its parts: stream, norm and pool."""
    arrays, step, batch = case.arrays, case.step, case.attend.batch
    x, pool = case.x.astype(jnp.float32), case.pool
    for layer in range(2):
        normed = native_rms_norm(x, arrays.input_norm[layer], eps=arrays.eps)
        projected = FusedQKV(
            qkv=native_linear(normed, arrays.qkv, layer, jnp.float32),
            q_norm=arrays.q_norm,
            k_norm=arrays.k_norm,
            layer=jnp.int32(layer),
            cos=step.cos,
            sin=step.sin,
            eps=arrays.eps,
        )
        mixed, pool = native_fused_attention(projected, pool, jnp.int32(layer), batch, case.attend.num_pages)
        x = x + native_linear(mixed.reshape(len(x), -1), arrays.out, layer, jnp.float32)
        normed = native_rms_norm(x, arrays.post_norm[layer], eps=arrays.eps)
        logits = native_exact_linear(normed, arrays.router, layer, jnp.float32)
        routing, _ = native_router(logits, None, None, jnp.int32(layer), case.spec)
        first = jnp.int32(layer * case.spec.num_experts)
        experts = routed_call(normed, routing, step.valid, arrays, first, case.spec.num_experts)
        shared = native_gated(native_linear(normed, arrays.shared_gate_up, layer, jnp.float32))
        x = x + EXPERTS(experts) + native_linear(shared, arrays.shared_down, layer, jnp.float32)
    return x, native_rms_norm(x, arrays.next_norm, eps=arrays.eps), pool


def routed_call(x, routing, valid, arrays, first, count):
    call = random_call(0, (1, 1, 1, 1, 1))
    return dataclasses.replace(
        call,
        x=x,
        ids=routing.ids,
        weights=routing.weights,
        valid=valid,
        gate_up=arrays.gate_up,
        down=arrays.down,
        first_expert=first,
        num_experts=count,
    )


@pytest.mark.parametrize("mix", [*MIXES, MIXED], ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_with_any_mix_equals_its_layers(mix, dtype):
    """They multiply and round alike; what is between, as norms, may differ in the last place of a float32, and now and
    then a rounding with it."""
    case = stack_case(mix, dtype)
    real, (stream, normed, pool) = int(np.sum(case.step.valid)), by_layers(case)
    got = case.run(x=case.x.astype(jnp.float32))
    bound = 3e-5 if dtype == "float32" else 2e-2
    for actual, expected in ((got[0][:real], stream[:real]), (got[2], pool)):
        difference = np.abs(np.asarray(actual) - np.asarray(expected))
        assert np.nanmax(difference) < bound and np.nanmean(difference) < 0.05 * bound
    np.testing.assert_allclose(got[1][:real].astype(np.float32), normed[:real].astype(np.float32), atol=bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_scales_of_bfloat16_has_the_bits_of_the_same_in_float32(dtype):
    case = stack_case(MIXED, dtype)
    outs = []
    for cast in (in_bfloat16, in_float32):
        arrays = {name: cast(in_bfloat16(getattr(case.arrays, name))) for name in MIXED if MIXED[name] != E4M3}
        own = dataclasses.replace(case, arrays=dataclasses.replace(case.arrays, **arrays))
        outs.append(own.run(x=case.x.astype(jnp.float32)))
    for short, wide in zip(*(jax.tree.leaves(out) for out in outs), strict=True):
        np.testing.assert_array_equal(np.asarray(short, np.float32), np.asarray(wide, np.float32))


@pytest.mark.parametrize("mix", [MATRICES, MIXED], ids="+".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_codes_follows_the_numbers(mix, dtype):
    """The run of the same numbers, in float32."""
    case = stack_case(mix, dtype)
    numbers = {name: getattr(case.arrays, name).dequantize() for name in MATRICES}
    plain = stack_case((), "float32")
    wide = dataclasses.replace(plain, arrays=dataclasses.replace(plain.arrays, **numbers))
    real = int(np.sum(case.step.valid))
    got, expected = (each.run(x=case.x.astype(jnp.float32))[0][:real] for each in (case, wide))
    difference = np.abs(got - expected)
    assert np.mean(difference) < (1e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down": lambda w: w.dequantize()}, "its matrices may be codes, gate_up and down both"),
        (
            {"out": lambda w: scaled_rows(w, 1)},
            r"scales of out of layer 0 of the pattern are \[2, 1, 80\], not \[2, 2, 80\]",
        ),
        ({"qkv": lambda w: dataclasses.replace(w, group=20)}, "a group of qkv of layer 0 of the pattern is 20 inputs"),
        ({"shared_down": lambda w: w.codes.astype(jnp.float16)}, "the weights of a stack have one dtype"),
        (
            {"shared_gate_up": lambda w: dataclasses.replace(w, scales=w.scales.astype(jnp.float16))},
            "scales of shared_gate_up of layer 0 of the pattern are float32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_whose_codes_do_not_fit_is_an_error(changes, message):
    case = stack_case(MATRICES, "float32")
    changed = {name: change(getattr(case.arrays, name)) for name, change in changes.items()}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        dataclasses.replace(case, arrays=dataclasses.replace(case.arrays, **changed)).run()


GEMM_ALONE = """
#include "bf16_gemm.h"
#define PRODUCT(name, Row)                                                                              \\
  extern "C" void name(int64_t rows, int64_t depth, int64_t cols, int64_t group, int shift,             \\
                       const Row* x, rex::Format format, const uint8_t* codes, rex::ScaleDtype dtype,   \\
                       const void* scales, float* out) {                                                \\
    const rex::Codes w{format, codes, {scales, dtype, cols >> shift, shift}, group};                    \\
    rex::multiply(rex::RowMatrix<const Row>{x, rows, depth, false}, w, cols, cols, out, cols);          \\
  }
PRODUCT(in_floats, float)
PRODUCT(in_pairs, rex::bf16)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="leaves instructions of x86-64 out")
@pytest.mark.parametrize(
    "without",
    [
        pytest.param((), marks=pytest.mark.thorough),  # as the library is compiled, whose products other tests compare
        pytest.param(("-mno-avx512bf16", "-mno-avx512vbmi"), marks=pytest.mark.thorough),
        ("-mno-avx512f",),
        pytest.param(("-mno-avx2", "-mno-fma", "-mno-f16c"), marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_processors_that_know_less_have_the_same_products(tmp_path, without, is_thorough):
    """Compiled without the instructions that look codes up, multiply pairs, have registers of 16 floats, or convert
    numbers; but in scripts/thorough with few optimisations. Also of rows 2^40 and 2^-40 times as large."""
    source, made = tmp_path / "gemm.cpp", tmp_path / "gemm.so"
    source.write_text(GEMM_ALONE)
    command = [*(toolchain.compiler() or ()), *toolchain.FLAGS, *toolchain.simd_flags(), *without]
    command += [] if is_thorough else FEW_OPTIMISATIONS
    command += [f"-I{toolchain.HERE}", str(source), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    library, rng = ctypes.CDLL(str(made)), np.random.default_rng(9)
    shapes = [(1040, 112, 0), (258, 64, 0), (258, 256, 7)]
    for form, (depth, cols, shift), group in itertools.product(FORMATS, shapes, GROUPS):
        weight, is_bf16 = coded(rng, 1, depth, cols, group, form=form, span=1 << shift), form == INT4
        weight = in_bfloat16(weight) if is_bf16 else weight
        codes, scales = (np.ascontiguousarray(array[0]) for array in (weight.codes, weight.scales))
        for name, dtype in (("in_floats", np.float32), ("in_pairs", jnp.bfloat16)):
            multiply = getattr(library, name)
            kinds = (
                ctypes.c_int,
                *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
                *(ctypes.c_void_p,) * 2,
            )
            multiply.argtypes, multiply.restype = (ctypes.c_int64,) * 4 + kinds, None
            x, products = rng.standard_normal((64, depth)).astype(dtype), []
            expected, size = looped(x.astype(np.float64), weight, 0)
            for rows, power in itertools.product((64, 1, 2, 3, 5, 6, 9, 25), (0, 40, -40)):
                product = np.full((rows, cols), np.nan, np.float32)
                scaled = np.ldexp(x[:rows].astype(np.float32), power).astype(dtype)
                pointers = (scaled.ctypes.data, FORMATS.index(form), codes.ctypes.data, is_bf16, scales.ctypes.data)
                multiply(rows, depth, cols, group, shift, *pointers, product.ctypes.data)
                products.append(np.ldexp(product, -power))
                np.testing.assert_array_equal(bits(products[-1]), bits(products[0])[:rows])
            assert np.all(np.abs(products[0] - expected) <= ROUNDING["float32"] * size)
