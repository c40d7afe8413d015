"""Rows whose parts have powers of their own, interpreted: products read them in float64's numbers, and attention scales
each head where it makes it.

Dims: N rows, D numbers of a row, P parts of a row, H query heads, C head dim."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.gpu.test_gpu_codes import HALF, SUMS, numbers, random_halves, random_rows, random_weight, wide
from routed_experts.layers.gpu.linear import LinearTile, partial_sums
from routed_experts.layers.gpu.paged_softmax import scales_heads
from routed_experts.layers.gpu.scaled_rows import scale_rows
from routed_experts.layers.gpu.split_attention import decode_attention, verify_attention
from routed_experts.layers.quantized import ScaledRows
from support.gpu_cases import Sequences, attention_inputs

pytestmark = pytest.mark.usefixtures("fast_compilation")

TILE = LinearTile(rows=16, out=32, inner=128, warps=2, stages=2, scaled=True)
SPLIT = dataclasses.replace(TILE, splits=2)
# numbers of a part, inputs, group, tile
E4M3 = {
    "a group a part": (128, 384, 128, TILE),
    "two parts a group": (64, 256, 128, TILE),
    "a part of two groups": (256, 512, 128, dataclasses.replace(TILE, inner=256)),
    "steps of four groups": (64, 256, 32, TILE),
    "a part of three halves of a group": (192, 384, 128, TILE),
    "parts of a sum": (128, 512, 128, SPLIT),
    "a part longer than that of a sum": (256, 512, 128, dataclasses.replace(TILE, splits=4)),
}
# and the length of a run
PACKED = {
    "a pair a part": (64, 384, 32, 32, TILE),
    "half a pair a part": (64, 384, 128, 64, TILE),
    "two pairs of one group a part": (128, 384, 128, 32, TILE),
    "parts of a sum": (128, 512, 32, 32, SPLIT),
}


def in_parts(x, part, *, interpret=True) -> ScaledRows:
    """Each part as a row of its own."""
    rows = jax.jit(functools.partial(scale_rows, interpret=interpret))(x.reshape(-1, part))
    return ScaledRows(rows.values.reshape(x.shape), rows.inverse.reshape(x.shape[0], -1).T)


def uneven(x, part) -> jax.Array:
    """The rows, whose parts are of all magnitudes."""
    powers = 2.0 ** np.random.default_rng(5).integers(-60, 60, (x.shape[0], x.shape[1] // part))
    return jnp.asarray(wide(x) * np.repeat(powers, part, axis=1), HALF)


def check_product(weight, part, tile, *, interpret=True):
    """Sums of all magnitudes; rows past a whole tile, and columns, are missing."""
    x = uneven(random_rows(jax.random.key(3), (19, weight.shape[1]), HALF), part)
    run = functools.partial(partial_sums, tile=tile, interpret=interpret)
    parts = jax.jit(lambda x, w: run(x, w, jnp.int32(1)))(in_parts(x, part, interpret=interpret), weight)
    matrix = numbers(weight, 1)
    reach = np.abs(wide(x)) @ np.abs(matrix)
    assert np.max(np.abs(np.sum(np.asarray(parts, np.float64), axis=0) - wide(x) @ matrix) / reach) < SUMS


def e4m3(name):
    part, inputs, group, tile = E4M3[name]
    return random_weight(jax.random.key(1), 3, inputs, 40, group, real=slice(1, 2)), part, tile


def packed(name, form):
    part, inputs, group, run, tile = PACKED[name]
    key = jax.random.key(1)
    return random_halves(key, 3, inputs, 40, group, form=form, run=run, real=slice(1, 2)), part, tile


@pytest.mark.parametrize("name", E4M3)
def test_products_of_parts_equal_float64(name):
    check_product(*e4m3(name))


@pytest.mark.parametrize("form", ["int4", "e2m1"])
@pytest.mark.parametrize("name", PACKED)
def test_products_of_parts_with_codes_of_4_bits_equal_float64(name, form):
    check_product(*packed(name, form))


@pytest.mark.gpu
@pytest.mark.parametrize("name", E4M3)
def test_compiled_products_of_parts_equal_float64(name):
    check_product(*e4m3(name), interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "e2m1"])
@pytest.mark.parametrize("name", PACKED)
def test_compiled_products_of_parts_with_codes_of_4_bits_equal_float64(name, form):
    check_product(*packed(name, form), interpret=False)


def test_a_part_keeps_its_numbers_beside_a_huge_one():
    """A row with one power loses what is below 2^-39 of its largest number; here the matrix ignores that."""
    weight = random_weight(jax.random.key(1), 2, 256, 32, 128)
    weight = dataclasses.replace(weight, scales=weight.scales.at[:, 0].set(0.0))
    x = np.array(wide(random_rows(jax.random.key(3), (16, 256), HALF)))
    x[:, 5] = 2.0**60
    x, matrix = jnp.asarray(x, HALF), numbers(weight, 1)
    run = jax.jit(lambda x: partial_sums(x, weight, jnp.int32(1), tile=TILE, interpret=True)[0])
    reach = np.abs(wide(x))[:, 128:] @ np.abs(matrix[128:])
    assert np.max(np.abs(wide(run(in_parts(x, 128))) - wide(x) @ matrix) / reach) < SUMS
    assert not np.asarray(run(x)).any()


# requests of few and of many keys, one of a single key and one of none
SEQS = Sequences(spans=((30, 1), (0, 1), (7, 1)), empty=1, heads=6, groups=2, page=4)
VERIFY = dataclasses.replace(SEQS, spans=((30, 3), (0, 1), (7, 2)))


def check_heads(kernel, splits, dim, *, interpret):
    """Bitwise: the numbers are those that it stores without scaling, scaled by `scale_rows`."""
    seqs = dataclasses.replace(SEQS if kernel == "decode" else VERIFY, head_dim=dim)
    rng = np.random.default_rng(dim + splits)
    pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=kernel == "decode", dtype=HALF)
    pool = pool * jnp.asarray([1.0, 2.0**-40, 1.0, 2.0**30], HALF)[:, None]  # keys and values of each group
    queries = jnp.asarray(rng.standard_normal((batch.positions.shape[0], seqs.heads, dim)), HALF)
    if kernel == "verify":
        batch = dataclasses.replace(batch, max_queries=3)
    attend = functools.partial(
        decode_attention if kernel == "decode" else verify_attention, splits=splits, interpret=interpret
    )
    plain, scaled = (
        jax.jit(lambda q, p, b, scaled=scaled: attend(q, p, first, b, scaled=scaled))(queries, pool, batch)
        for scaled in (False, True)
    )
    rows = np.asarray(plain[:num_tokens].reshape(num_tokens, -1))
    expected = in_parts(jnp.asarray(rows), dim, interpret=interpret)
    np.testing.assert_array_equal(np.asarray(scaled.values[:num_tokens]), np.asarray(expected.values))
    np.testing.assert_array_equal(np.asarray(scaled.inverse[:, :num_tokens]), np.asarray(expected.inverse))
    assert scaled.inverse.shape == (seqs.heads, queries.shape[0]) and np.ptp(np.log2(expected.inverse)) > 60


def test_heads_are_scaled_whose_values_a_block_has():
    assert [dim for dim in (16, 32, 64, 80, 96, 128, 192, 256, 512) if scales_heads(dim)] == [64, 128]


def heads(function):
    kernels = pytest.mark.parametrize(("kernel", "splits"), [("decode", 1), ("decode", 4), ("verify", 2)])
    return kernels(pytest.mark.parametrize("dim", [64, 128])(function))


@heads
def test_attention_scales_each_head_as_its_own_row(kernel, splits, dim):
    check_heads(kernel, splits, dim, interpret=True)


@pytest.mark.gpu
@heads
def test_compiled_attention_scales_each_head_as_its_own_row(kernel, splits, dim):
    check_heads(kernel, splits, dim, interpret=False)
