"""Norms, angles and the write to the pool as one TPU kernel, interpreted, against array code and against a loop;
untouched places of the pool keep what they held, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.attention import FusedQKV, PagedBatch
from routed_experts.layers.rotary import RotarySpec
from routed_experts.layers.stack_traits import StackTraits
from routed_experts.layers.tpu.qk_norm_rope import TOKEN_TILE, prepare, prepare_plainly
from support.head_angles import head_cos_sin

pytestmark = pytest.mark.usefixtures("fast_compilation")

PAGE_SIZE, NUM_PAGES, LAYERS = 8, 24, 3


INTERPRETED = functools.partial(prepare, interpret=True)


def run(projected, *rest, program=INTERPRETED):
    return jax.jit(program)(projected, *rest)


def make(requests, *, heads, groups, head_dim, padded, dtype=jnp.float32, seed=0):
    """Requests of (tokens before, new tokens), in random pages; norms of other layers are NaN."""
    rng = np.random.default_rng(seed)
    rows, width = len(requests) + 1, 1 + max(-(-(before + new) // PAGE_SIZE) for before, new in requests)
    free, table = list(rng.permutation(np.arange(1, NUM_PAGES))), np.zeros((rows, width), np.int32)
    positions, token_rows, starts = np.zeros(padded, np.int32), np.zeros(padded, np.int32), [0]
    for row, (before, new) in enumerate(requests):
        table[row] = [free.pop() for _ in range(width)]
        at = starts[-1]
        positions[at : at + new], token_rows[at : at + new] = np.arange(before, before + new), row
        starts.append(at + new)
    starts, total = [*starts, starts[-1]], starts[-1]
    batch = PagedBatch(
        *(
            jnp.asarray(array)
            for array in (positions, token_rows, np.arange(padded) < total, np.array(starts, np.int32))
        ),
        jnp.asarray([*[before + new for before, new in requests], 0], jnp.int32),
        jnp.asarray(table),
        decode=False,
    )
    norms = np.full((2, LAYERS, head_dim), np.nan, np.float32)
    norms[:, 1] = 1 + 0.3 * rng.standard_normal((2, head_dim))
    cos, sin = head_cos_sin(batch.positions, head_dim=head_dim, theta=1e4)
    qkv = jnp.asarray(rng.standard_normal((padded, (heads + 2 * groups) * head_dim)), dtype)
    q_norm, k_norm = (jnp.asarray(norm, dtype) for norm in norms)
    projected = FusedQKV(
        qkv=qkv, q_norm=q_norm, k_norm=k_norm, layer=jnp.asarray(1, jnp.int32), cos=cos, sin=sin, eps=1e-6
    )
    pool = jnp.asarray(rng.standard_normal((LAYERS * NUM_PAGES, PAGE_SIZE, 2 * groups, head_dim)), dtype)
    return projected, pool, jnp.asarray(NUM_PAGES, jnp.int32), batch, total


def loop(projected, pool, first_page, batch, total):
    """One token and one head at a time, in float64."""
    pool, groups = np.array(pool, np.float64), pool.shape[2] // 2
    head_dim = pool.shape[3]
    qkv = np.asarray(projected.qkv, np.float64).reshape(projected.qkv.shape[0], -1, head_dim)
    heads = qkv.shape[1] - 2 * groups
    queries = np.zeros((total, heads, head_dim))
    frequencies = 1e4 ** (-np.arange(0, head_dim, 2) / head_dim)

    def turned(row, norm, position):
        row = row / np.sqrt(np.mean(row**2) + 1e-6) * np.asarray(norm, np.float64)[1]
        pairs = (row[: head_dim // 2] + 1j * row[head_dim // 2 :]) * np.exp(1j * position * frequencies)
        return np.concatenate([pairs.real, pairs.imag])

    for n in range(total):
        position = int(batch.positions[n])
        for head in range(heads):
            queries[n, head] = turned(qkv[n, head], projected.q_norm, position)
        page = int(first_page) + int(batch.page_table[batch.token_rows[n], position // PAGE_SIZE])
        for group in range(groups):
            pool[page, position % PAGE_SIZE, 2 * group] = turned(qkv[n, heads + group], projected.k_norm, position)
            pool[page, position % PAGE_SIZE, 2 * group + 1] = qkv[n, heads + groups + group]
    return queries, pool


SIZES = {  # requests, query heads, kv heads, head dim, padded tokens
    "one token": ([(13, 1)], 2, 1, 16, 1),
    "prefill and decode, padded": ([(0, 9), (20, 1), (7, 3)], 4, 2, 8, 16),
    "two tiles, the second ragged": ([(0, TOKEN_TILE - 5), (3, 20)], 3, 3, 8, TOKEN_TILE + 30),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_queries_and_the_pool_are_those_of_the_loop(sizes):
    requests, heads, groups, head_dim, padded = sizes
    *made, total = make(requests, heads=heads, groups=groups, head_dim=head_dim, padded=padded)
    queries, pool = run(*made)
    expected_queries, expected_pool = loop(*made, total)
    np.testing.assert_allclose(queries[:total], expected_queries, atol=2e-5)
    np.testing.assert_allclose(pool, expected_pool, atol=2e-5)
    untouched = expected_pool == np.asarray(made[1], np.float64)
    assert (
        np.array_equal(np.asarray(pool)[untouched], np.asarray(made[1])[untouched]) and untouched.sum() < untouched.size
    )
    assert np.all(np.isfinite(pool))


def test_bfloat16_rounds_as_array_code_does():
    *made, total = make([(0, 9), (20, 1)], heads=4, groups=2, head_dim=16, padded=12, dtype=jnp.bfloat16)
    queries, pool = (np.asarray(array, np.float32) for array in run(*made))
    plain_queries, plain_pool = (np.asarray(array, np.float32) for array in run(*made, program=prepare_plainly))
    pages = int(made[2]) + np.arange(1, NUM_PAGES)  # but page 0, which takes padding in array code
    for own, plain in ((queries[:total], plain_queries[:total]), (pool[pages], plain_pool[pages])):
        np.testing.assert_allclose(own, plain, atol=0.04)
        assert np.mean(own == plain) > 0.98


def rotary(spec, batch, head_dim):
    """The oracle's rotary: complex numbers of each pair, on the first dims."""

    def turn(row, position):
        size = 2 * len(spec.inverse)
        first, second = (row[0:size:2], row[1:size:2]) if spec.interleaved else np.split(row[:size], 2)
        pairs = (first + 1j * second) * np.exp(1j * position * np.array(spec.inverse))
        out = row.copy()
        if spec.interleaved:
            out[0:size:2], out[1:size:2] = pairs.real, pairs.imag
        else:
            out[:size] = np.concatenate([pairs.real, pairs.imag])
        return out

    return turn


def loop_of_traits(projected, pool, first_page, batch, total, turn):
    """One token at a time, in float64, with any norm and any order."""
    pool, groups, head_dim = np.array(pool, np.float64), pool.shape[2] // 2, projected.head_dim
    qkv, traits = np.asarray(projected.qkv, np.float64).reshape(len(projected.qkv), -1, head_dim), projected.traits
    if traits.gated:  # a gate behind each query
        qkv = np.delete(qkv, np.arange(1, qkv.shape[1] - 2 * groups, 2), axis=1)
    heads = qkv.shape[1] - 2 * groups
    queries = np.zeros((total, heads, head_dim))

    def normed(part, norms):
        if not traits.qk_norm:
            return part
        scale = 1.0 if norms is None else np.asarray(norms, np.float64)[1] + traits.qk_norm_offset
        if traits.qk_norm == "whole":
            flat = part.reshape(-1)
            return (flat / np.sqrt(np.mean(flat**2) + 1e-6) * scale).reshape(part.shape)
        return part / np.sqrt(np.mean(part**2, axis=1, keepdims=True) + 1e-6) * scale

    for n in range(total):
        position = int(batch.positions[n])

        def prepared(part, norms, position=position):
            def turned(part):
                return np.stack([turn(row, position) for row in part]) if traits.rotary else part

            return normed(turned(part), norms) if traits.norm_after_rope else turned(normed(part, norms))

        queries[n] = prepared(qkv[n, :heads], projected.q_norm)
        slot = int(first_page) + int(batch.page_table[batch.token_rows[n], position // PAGE_SIZE]), position % PAGE_SIZE
        pool[slot][0::2, :head_dim] = prepared(qkv[n, heads : heads + groups], projected.k_norm)
        pool[slot][1::2, :head_dim] = qkv[n, heads + groups :]
        pool[slot][:, head_dim:] = 0
    return queries, pool


def angles_of(count, **fields):
    return RotarySpec(inverse=tuple(1e4 ** (-np.arange(count) / count)), **fields)


# Traits; rotary; query heads, kv heads, head dim and the width of the pool's rows. 96: heads lie across tiles of lanes.
FAMILIES = {
    "GPT-OSS: no norm, half the lanes": (dict(qk_norm=""), angles_of(32), (4, 2, 64, 128)),
    "GLM-4.5: head norm, half of the dims": (dict(), angles_of(8), (3, 1, 32, 32)),
    "OLMoE: one norm, all dims": (dict(qk_norm="whole"), angles_of(8), (4, 2, 16, 16)),
    "MiniMax-M2: one norm, half of the dims, beside zeros": (dict(qk_norm="whole"), angles_of(16), (4, 2, 64, 128)),
    "Ernie 4.5: pairs": (dict(qk_norm="", interleaved=True), angles_of(8, interleaved=True), (2, 2, 16, 16)),
    "partial pairs": (dict(interleaved=True), angles_of(16, interleaved=True), (2, 1, 64, 128)),
    "an offset norm, across tiles": (dict(qk_norm_offset=1.0), angles_of(48), (2, 1, 96, 128)),
    "Qwen3-Next: gates, an offset norm, part of the dims": (
        dict(gated=True, qk_norm_offset=1.0),
        angles_of(8),
        (4, 2, 64, 64),
    ),
    "HunYuan: norm after positions": (dict(norm_after_rope=True), angles_of(8), (2, 1, 16, 16)),
    "Llama 4: bare norm after pairs": (
        dict(qk_norm="bare", norm_after_rope=True, interleaved=True),
        angles_of(8, interleaved=True),
        (2, 1, 16, 16),
    ),
    "no positions": (dict(qk_norm="", rotary=False), angles_of(0), (2, 1, 16, 16)),
}


def make_family(name, dtype=jnp.float32):
    """A step of a family in the kernel's terms: what prepare takes, the number of tokens, and the rotary."""
    fields, spec, (heads, groups, head_dim, width) = FAMILIES[name]
    rng, traits = np.random.default_rng(1), StackTraits(**fields)
    projected, _, first_page, batch, total = make(
        [(0, 9), (20, 1), (7, 3)],
        heads=heads * (2 if traits.gated else 1),
        groups=groups,
        head_dim=head_dim,
        padded=16,
        dtype=dtype,
    )
    sizes = {"head": (head_dim,) * 2, "whole": (heads * head_dim, groups * head_dim)}.get(traits.qk_norm)
    norms = [None, None]
    if sizes is not None:
        norms = [np.full((LAYERS, size), np.nan, np.float32) for size in sizes]
        for norm in norms:
            norm[1] = 1 - traits.qk_norm_offset + 0.3 * rng.standard_normal(norm.shape[1])
        norms = [jnp.asarray(norm, dtype) for norm in norms]
    cos, sin = spec.cos_sin(batch.positions)
    if not spec.interleaved and 2 * len(spec.inverse) == head_dim:
        cos, sin = (jnp.concatenate([part, part], axis=1) for part in (cos, sin))
    projected = dataclasses.replace(
        projected, q_norm=norms[0], k_norm=norms[1], cos=cos, sin=sin, traits=traits, head_dim=head_dim
    )
    pool = jnp.asarray(rng.standard_normal((LAYERS * NUM_PAGES, PAGE_SIZE, 2 * groups, width)), dtype)
    return (projected, pool, first_page, batch), total, rotary(spec, batch, head_dim)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_families_have_is_that_of_the_loop(name):
    made, total, turn = make_family(name)
    queries, pool = run(*made)
    expected_queries, expected_pool = loop_of_traits(*made, total, turn)
    head_dim = made[0].head_dim
    np.testing.assert_allclose(queries[:total, :, :head_dim], expected_queries, atol=3e-5)
    assert not np.any(queries[:total, :, head_dim:])
    np.testing.assert_allclose(pool, expected_pool, atol=3e-5)


@pytest.mark.parametrize(
    "name",
    [  # of the others each part is in one of the three
        name if name.startswith(("GPT", "Llama", "Qwen")) else pytest.param(name, marks=pytest.mark.thorough)
        for name in FAMILIES
        if name.startswith(("GPT", "Mini", "an off", "Llama", "Qwen"))
    ],
)
def test_what_families_have_rounds_as_array_code_does_in_bfloat16(name):
    made, total, _ = make_family(name, jnp.bfloat16)
    options = {"xla_allow_excess_precision": False}  # else XLA may leave out a rounding between two operations
    own, plain = (jax.jit(program, compiler_options=options)(*made) for program in (INTERPRETED, prepare_plainly))
    queries, pool = (np.asarray(array, np.float32) for array in own)
    plain_queries, plain_pool = (np.asarray(array, np.float32) for array in plain)
    pages = int(made[2]) + np.arange(1, NUM_PAGES)
    for own, plain in ((queries[:total], plain_queries[:total]), (pool[pages], plain_pool[pages])):
        np.testing.assert_allclose(own, plain, atol=0.04)
        assert np.mean(own == plain) > 0.98


def test_heads_narrower_than_the_pool_take_array_code_where_the_projection_is_no_whole_tile():
    projected, pool, first_page, batch, total = make([(4, 6)], heads=2, groups=1, head_dim=8, padded=8)
    wide, projected = (
        jnp.pad(pool, ((0, 0), (0, 0), (0, 0), (0, 8))),
        dataclasses.replace(projected, head_dim=8),
    )
    queries, written = run(projected, wide, first_page, batch)
    expected_queries, expected_pool = loop(projected, pool, first_page, batch, total)
    np.testing.assert_allclose(queries[:total, :, :8], expected_queries, atol=2e-5)
    assert not np.any(queries[:total, :, 8:])
    own = [int(page) + int(first_page) for page in np.asarray(batch.page_table)[0]]
    np.testing.assert_allclose(written[jnp.asarray(own), ..., :8], expected_pool[own], atol=2e-5)
