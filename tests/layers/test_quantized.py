"""Codes and scales: the law of numbers, products by array code, and blocks that are quantised, against NumPy in float64
that is written apart."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.layers.linear import reference_linear
from routed_experts.layers.moe import MOE_BACKENDS, ExpertCall
from routed_experts.layers.quantized import QuantizedWeight, pack_runs, packed_run, quantize_blocks, through_grid

pytestmark = pytest.mark.usefixtures("fast_compilation")

LINEAR = jax.jit(reference_linear, static_argnums=3)
E4M3 = ml_dtypes.float8_e4m3fn
GRID = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
GRID = np.unique(GRID[np.isfinite(GRID)])  # sorted, without a second zero


HALVES = {
    "int4": [code - 8.0 for code in range(16)],
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6],
}


def drawn_halves(rng, form, stack, inputs, outputs, group):
    """The same of codes of 4 bits, two neighbouring inputs a byte."""
    codes = rng.integers(0, 256, (stack, inputs // 2, outputs)).astype(np.uint8)
    scales = rng.uniform(1e-3, 1e-1, (stack, math.ceil(inputs / group), outputs)).astype(np.float32)
    numbers = np.empty((stack, inputs, outputs))
    for i in range(inputs):
        nibbles = codes[:, i // 2] // 16 if i % 2 else codes[:, i // 2] % 16
        values = np.array([HALVES[form][nibble] for nibble in nibbles.ravel()]).reshape(nibbles.shape)
        numbers[:, i] = values * scales[:, i // group].astype(np.float64)
    return codes.view(np.int8) if form == "int4" else codes, scales, numbers


def drawn(rng, stack, inputs, outputs, group, span=1):
    """Codes, scales and their numbers by a loop."""
    codes = rng.choice(np.setdiff1d(np.arange(256), [0x7F, 0xFF]), (stack, inputs, outputs)).astype(np.uint8).view(E4M3)
    scales = rng.uniform(1e-3, 1e-1, (stack, math.ceil(inputs / group), outputs // span)).astype(np.float32)
    numbers, spans = np.empty((stack, inputs, outputs)), np.arange(outputs) // span
    for i in range(inputs):
        numbers[:, i] = codes[:, i].astype(np.float64) * scales[:, i // group, spans].astype(np.float64)
    return codes, scales, numbers


def weight(codes, scales, *, outputs_first=False):
    codes = jnp.asarray(np.ascontiguousarray(codes.swapaxes(1, 2)) if outputs_first else codes)
    return QuantizedWeight.create(codes, jnp.asarray(scales), outputs_first=outputs_first)


@jax.jit
def three_ways(stack):
    """Numbers of all matrices, of the last two, and of matrices by index."""
    chosen = stack, stack.slice(1, 2), stack.take(jnp.array([2, 0, 2]))
    return [part.dequantize() for part in chosen]


FEW = settings(max_examples=8)  # each shape compiles


@FEW
@given(
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 40),
    group=st.sampled_from((128, 64, 32, 16)),
    outputs_first=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numbers_are_codes_times_scales_rounded_once(inputs, outputs, group, outputs_first, seed):
    codes, scales, numbers = drawn(np.random.default_rng(seed), 3, inputs, outputs, group)
    stack = weight(codes, scales, outputs_first=outputs_first)
    assert stack.shape == (3, inputs, outputs) and (stack.group == group or scales.shape[1] == 1)
    expected = numbers.astype(np.float32)
    for numbers_of, own in zip(three_ways(stack), (slice(None), slice(1, None), [2, 0, 2]), strict=True):
        assert np.array_equal(numbers_of, expected[own])


@pytest.mark.parametrize("outputs_first", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(128, 128, 128), (300, 384, 64), (17, 256, 16)])
def test_outputs_may_share_scales(inputs, outputs, group, outputs_first):
    codes, scales, numbers = drawn(np.random.default_rng(outputs), 3, inputs, outputs, group, 128)
    stack = weight(codes, scales, outputs_first=outputs_first)
    assert stack.shape == (3, inputs, outputs) and stack.span == 128
    expected = numbers.astype(np.float32)
    for numbers_of, own in zip(three_ways(stack), (slice(None), slice(1, None), [2, 0, 2]), strict=True):
        assert np.array_equal(numbers_of, expected[own])


def test_scales_of_no_span_are_not_taken():
    codes, scales, _ = drawn(np.random.default_rng(1), 1, 64, 256, 64)
    for wrong in (scales[..., :4], scales[..., :128], scales[..., :1]):
        with pytest.raises(AssertionError):
            weight(codes, wrong)


@pytest.mark.parametrize("form", ["int4", "e2m1"])
@pytest.mark.parametrize("outputs_first", [False, True])
@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (128, 128), (150, 16), (2, 16)])
def test_numbers_of_4_bits_are_codes_times_scales(form, outputs_first, inputs, group):
    codes, scales, numbers = drawn_halves(np.random.default_rng(6), form, 3, inputs, 20, group)
    stack = weight(codes, scales, outputs_first=outputs_first)
    assert stack.format == form and stack.shape == (3, inputs, 20) and (stack.group == group or len(scales[0]) == 1)
    expected = numbers.astype(np.float32)
    for numbers_of, own in zip(three_ways(stack), (slice(None), slice(1, None), [2, 0, 2]), strict=True):
        assert np.array_equal(numbers_of, expected[own])
    x = np.random.default_rng(7).standard_normal((5, inputs)).astype(np.float32)
    exact = x.astype(np.float64) @ numbers[1]
    bound = inputs * 2**-24 * (np.abs(x.astype(np.float64)) @ np.abs(numbers[1])).max()
    assert np.abs(LINEAR(x, stack, 1, jnp.float32) - exact).max() <= bound


@pytest.mark.parametrize("run", [2, 16, 64])
@pytest.mark.parametrize("form", HALVES)
def test_codes_in_runs_have_the_numbers_of_neighbours(form, run):
    """Packed by `pack_runs`, and byte by byte by a loop."""
    rng, inputs, group = np.random.default_rng(run), 256, 64
    codes, scales, numbers = drawn_halves(rng, form, 3, inputs, 5, group)
    stored = np.ascontiguousarray(codes.swapaxes(1, 2))  # [R, O, bytes]
    nibbles = np.stack([stored.view(np.uint8) % 16, stored.view(np.uint8) // 16], axis=-1).reshape(3, 5, inputs)
    expected = np.empty_like(stored.view(np.uint8))
    for byte in range(inputs // 2):
        first = byte // run * 2 * run + byte % run
        expected[..., byte] = nibbles[..., first] + 16 * nibbles[..., first + run]
    packed = pack_runs(stored, run)
    np.testing.assert_array_equal(packed.view(np.uint8), expected)
    assert packed.dtype == stored.dtype
    stack = QuantizedWeight.create(jnp.asarray(packed), jnp.asarray(scales), outputs_first=True, runs=(run,))
    assert stack.run == run and stack.shape == (3, inputs, 5)
    np.testing.assert_array_equal(jax.jit(lambda w: w.dequantize())(stack), numbers.astype(np.float32))


def test_the_longest_run_that_a_group_and_the_inputs_hold_is_chosen():
    runs = (64, 32, 16)
    assert [packed_run(inputs, group, runs) for inputs, group in ((256, 128), (192, 128), (256, 32), (2880, 32))] == [
        *(64, 32, 32, 32)
    ]
    assert packed_run(160, 32, runs) == 16, "160 is no multiple of two runs of 32"
    assert packed_run(48, 16, runs) is None and packed_run(48, 16, (1,)) == 1
    assert packed_run(128, 16, runs) == 16, "a run is within a group"


@pytest.mark.parametrize("outputs_first", [False, True])
def test_a_projection_by_codes_is_that_by_their_numbers(outputs_first):
    rng = np.random.default_rng(0)
    codes, scales, numbers = drawn(rng, 2, 200, 24, 64)
    x = rng.standard_normal((5, 200)).astype(np.float32)
    stack = weight(codes, scales, outputs_first=outputs_first)
    y = jax.jit(lambda x: reference_linear(x, stack, jnp.int32(1), jnp.float32))(x)
    exact = x.astype(np.float64) @ numbers[1]
    assert np.abs(y - exact).max() <= 200 * 2**-24 * (np.abs(x.astype(np.float64)) @ np.abs(numbers[1])).max()
    assert reference_linear(x.astype(ml_dtypes.bfloat16), stack, 1, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("backend", MOE_BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_codes_are_those_of_their_numbers(backend, dtype):
    rng, experts, (tokens, hidden, width) = np.random.default_rng(1), 6, (9, 96, 40)
    gate_up, down = drawn(rng, 2 * experts, hidden, 2 * width, 32), drawn(rng, 2 * experts, width, hidden, 16)
    stacked = MOE_BACKENDS[backend].takes_stacked
    own = slice(None) if stacked else slice(experts, None)

    def call(up, below, dtype):
        return ExpertCall(
            x=jnp.asarray(np.random.default_rng(2).standard_normal((tokens, hidden)), dtype),
            ids=jnp.asarray(rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :2]),
            weights=jnp.full((tokens, 2), 0.5, jnp.float32),
            valid=jnp.arange(tokens) < tokens - 1,
            gate_up=up,
            down=below,
            first_expert=jnp.int32(experts if stacked else 0),
            num_experts=experts,
        )

    rng = np.random.default_rng(3)
    coded = MOE_BACKENDS[backend].run(
        call(weight(gate_up[0][own], gate_up[1][own]), weight(down[0][own], down[1][own]), dtype)
    )
    rng = np.random.default_rng(3)
    plain = call(*(jnp.asarray(part[2][own], jnp.float32) for part in (gate_up, down)), dtype)
    expected = MOE_BACKENDS[backend].run(ExpertCall(**{**plain.__dict__, "x": plain.x.astype(jnp.float32)}))
    assert coded.dtype == jnp.dtype(dtype)
    assert np.array_equal(coded, expected.astype(dtype))


def nearest(values):
    """The nearest number of e4m3 to each value, ties to the even code, by a search; values within the grid's range."""
    right = np.clip(np.searchsorted(GRID, values), 1, len(GRID) - 1)
    low, high = GRID[right - 1], GRID[right]
    even = (high.astype(E4M3).view(np.uint8) & 1) == 0
    up = (high - values < values - low) | ((high - values == values - low) & even)
    return np.where(up, high, low)


def blocks(numbers, segments):
    """Codes and the scale of each number, block by block."""
    codes, scales = np.empty_like(numbers), np.empty_like(numbers)
    edges = [0, *np.cumsum(segments)]
    for first, last in itertools.pairwise(edges):
        for o in range(first, last, 128):
            for i in range(0, len(numbers), 128):
                part = (slice(i, i + 128), slice(o, min(o + 128, last)))
                peak = np.abs(numbers[part]).max()
                scale = np.float32(peak) / np.float32(448) if peak else np.float32(1)
                scales[part] = scale
                ratio = (numbers[part].astype(np.float32) / scale).astype(np.float64)
                codes[part] = nearest(np.clip(ratio, -448, 448))
    return codes, scales


@pytest.mark.parametrize(
    ("inputs", "segments", "group", "outputs_first", "dtype"),
    [
        (128, (128,), 128, False, "float32"),
        (1, (1,), 16, True, "float32"),
        (300, (130, 7), 64, True, "bfloat16"),
        (192, (160, 160), 32, False, "bfloat16"),
        (257, (5, 129, 128), 128, True, "float16"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_are_quantised_as_a_loop_does(inputs, segments, group, outputs_first, dtype, seed):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((2, inputs, sum(segments))) * np.exp2(rng.integers(-12, 4, (2, inputs, 1)))
    numbers[:, rng.random(inputs) < 0.2] = 0
    numbers = numbers.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    codes, scales = quantize_blocks(jnp.asarray(numbers), segments=segments, group=group, outputs_first=outputs_first)
    codes = np.asarray(codes).swapaxes(1, 2) if outputs_first else np.asarray(codes)
    for matrix in range(2):
        expected, by_number = blocks(numbers[matrix].astype(np.float64), segments)
        assert np.array_equal(codes[matrix].astype(np.float64), expected)
        assert np.array_equal(np.repeat(scales[matrix], group, axis=0)[:inputs], by_number.astype(np.float32))


@pytest.mark.parametrize(("segments", "group", "outputs_first"), [((128, 256), 128, False), ((256,), 32, True)])
def test_blocks_of_whole_spans_have_one_scale_each(segments, group, outputs_first):
    numbers = np.random.default_rng(3).standard_normal((2, 300, sum(segments))).astype(np.float32)
    codes, scales = quantize_blocks(
        jnp.asarray(numbers), segments=segments, group=group, span=128, outputs_first=outputs_first
    )
    assert scales.shape == (2, math.ceil(300 / group), sum(segments) // 128)
    for matrix in range(2):
        expected, by_number = blocks(numbers[matrix].astype(np.float64), segments)
        own = np.asarray(codes[matrix].T if outputs_first else codes[matrix])
        assert np.array_equal(own.astype(np.float64), expected)
        shown = np.repeat(np.repeat(scales[matrix], group, axis=0)[:300], 128, axis=1)
        assert np.array_equal(shown, by_number.astype(np.float32))


# The mantissas m for which 448 m = 7 * 2^6 m has 24 bits at most; with a power of two they make every float32 scale of
# which 448 times is exact.
MANTISSAS = st.integers(1, (2**24 - 1) // 7)


@settings(max_examples=40)
@given(
    shape=st.sampled_from([(128, (128,)), (256, (192,)), (300, (130, 7)), (1, (1,)), (140, (5, 129, 128))]),
    mantissa=MANTISSAS,
    exponent=st.integers(-117, 80),
    outputs_first=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_quantised_numbers_are_a_fixed_point(shape, mantissa, exponent, outputs_first, seed):
    """Where a block's largest number is exactly 448 of its scale, quantising it again changes no bit.

    One block has the drawn scale, the others their own; the least number, 2^-9 of a scale, is a normal one."""
    rng, (inputs, segments) = np.random.default_rng(seed), shape
    outputs = sum(segments)
    codes = rng.choice(np.setdiff1d(np.arange(256), [0x7F, 0xFF]), (1, inputs, outputs)).astype(np.uint8)
    scales = np.empty((1, math.ceil(inputs / 128), outputs), np.float32)
    columns = [range(o, min(o + 128, end)) for first, end in ends(segments) for o in range(first, end, 128)]
    for block, outputs_of in itertools.product(range(scales.shape[1]), columns):
        own = np.ldexp(rng.integers(1, 2**24 // 7 + 1), rng.integers(-117, 80))
        scale = np.ldexp(mantissa, exponent) if (block, outputs_of) == (0, columns[0]) else own
        scales[0, block, outputs_of] = scale
        assert np.float64(scales[0, block, outputs_of[0]]) == scale, "float32 holds it"
        row = rng.integers(128 * block, min(128 * block + 128, inputs))
        codes[0, row, rng.choice(outputs_of)] = rng.choice([0x7E, 0xFE])  # 448 and -448
    codes = codes.view(E4M3)
    by_number = np.repeat(scales, 128, axis=1)[:, :inputs]
    numbers = codes.astype(np.float64) * by_number.astype(np.float64)
    again, same = quantize_blocks(
        jnp.asarray(numbers.astype(np.float32)), segments=segments, group=128, outputs_first=outputs_first
    )
    again = np.asarray(again).swapaxes(1, 2) if outputs_first else np.asarray(again)
    assert np.array_equal(same, scales)
    assert np.array_equal(again.view(np.uint8), codes.view(np.uint8))


def ends(segments):
    edges = np.cumsum([0, *segments]).tolist()
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize(("span", "outputs_first"), [(1, False), (1, True), (128, False)])
def test_a_block_of_zeros_is_zeros_with_the_scale_1(span, outputs_first):
    """Beside a block of numbers, which do not change it, and with zeros of both signs."""
    numbers = np.random.default_rng(6).standard_normal((1, 256, 256)).astype(np.float32)
    numbers[:, 128:, :128] = 0
    numbers[:, 128:, 64:128] = -0.0
    codes, scales = quantize_blocks(
        jnp.asarray(numbers), segments=(256,), group=128, span=span, outputs_first=outputs_first
    )
    stored = np.asarray(codes).swapaxes(1, 2) if outputs_first else np.asarray(codes)
    own = stored.view(np.uint8)[0, 128:, :128]
    assert not own[:, :64].any() and (own[:, 64:] == 0x80).all(), "zeros, not NaN, with their signs"
    by_output = np.repeat(scales, span, axis=2)
    assert (by_output[0, 1, :128] == 1).all() and (by_output[0, 0] < 0.1).all() and (by_output[0, 1, 128:] < 0.1).all()
    stack = QuantizedWeight.create(codes, scales, outputs_first=outputs_first)
    retained = stack.dequantize()
    assert np.isfinite(retained).all() and not np.asarray(retained)[0, 128:, :128].any()
    grid = np.asarray(through_grid(jnp.asarray(numbers), (256,)))
    assert np.array_equal(grid, retained)
    assert np.isfinite(LINEAR(np.ones((2, 256), np.float32), stack, 0, jnp.float32)).all()


def test_one_large_number_leaves_the_others_of_its_block_what_the_grid_can_hold():
    numbers = np.full((1, 128, 128), 9e-4, np.float32)
    numbers[0, 5, 7] = 448.0
    retained = np.asarray(through_grid(jnp.asarray(numbers), (128,)))
    assert retained[0, 5, 7] == 448.0 and set(np.unique(retained[numbers < 1])) == {
        0.0
    }  # below half of the least code, 2^-9
    numbers[0, 5, 7] = 4.48
    retained = np.asarray(through_grid(jnp.asarray(numbers), (128,)))
    assert np.allclose(retained[numbers < 1], 9e-4, rtol=2**-4)


def test_gradients_pass_the_grid_as_they_are():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((1, 130, 20)), jnp.float32)
    slope = jax.grad(lambda x: (through_grid(x, (12, 8)) * jnp.arange(20.0)).sum())(x)
    assert np.array_equal(slope, np.broadcast_to(np.arange(20.0, dtype=np.float32), x.shape))
