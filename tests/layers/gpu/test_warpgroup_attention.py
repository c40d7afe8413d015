"""Attention of prompts by warpgroups: tiles of queries against a loop, the kernel against plain code in JAX's
interpreter of Mosaic GPU kernels, lowered for CUDA, and on a Hopper GPU."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import reference_variant
from routed_experts.layers.gpu.attention import gpu_attention
from routed_experts.layers.gpu.query_tiles import find_query_rows, find_query_tiles
from routed_experts.layers.gpu.warpgroup_attention import suits_warpgroup_attention, warpgroup_attention
from routed_experts.layers.gpu.warpgroups import Warpgroups, find_warpgroups
from routed_experts.layers.kv_format import KV_CODES
from support.abstract_gpu import hopper_mesh
from support.gpu_cases import Sequences, attention_inputs, bound, distance

pytestmark = pytest.mark.usefixtures("fast_compilation", "one_program")

INTERPRETED = Warpgroups(num_programs=2, interpret=InterpretGPUParams())
HOPPER = Warpgroups(num_programs=132)
PLAIN = AttentionFeatures()


def make_batch(lengths, positions, num_tokens, *, page_table=None, decode=False, max_queries=0) -> PagedBatch:
    """Requests of so many tokens, the first of each at `positions`."""
    starts = np.cumsum([0, *lengths])
    at = np.zeros(num_tokens, np.int32)
    for start, length, first in zip(starts, lengths, positions, strict=False):
        at[start : start + length] = first + np.arange(length)
    return PagedBatch(
        positions=jnp.asarray(at),
        token_rows=jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32),
        valid=jnp.arange(num_tokens) < starts[-1],
        query_starts=jnp.asarray(starts, jnp.int32),
        seq_lens=jnp.asarray(np.add(positions, lengths), jnp.int32),
        page_table=jnp.zeros((len(lengths), 4), jnp.int32) if page_table is None else page_table,
        decode=decode,
        max_queries=max_queries,
    )


@hypothesis.given(
    size=st.sampled_from([8, 104, 304]),
    spare=st.integers(0, 7),
    cuts=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    positions=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    shape=st.sampled_from([(2, 1), (16, 1), (64, 8), (128, 8)]),
)
def test_query_tiles_are_those_of_a_loop(size, spare, cuts, positions, shape):
    """Also where a step has no padding but that to a multiple of 8 tokens: the table has room for all. Six requests
    divide a step of few sizes, each of which is compiled."""
    total = size - spare
    (tile, aligned), lengths = shape, np.diff([0, *sorted(int(cut * total) for cut in cuts), total]).tolist()
    spans, batch = list(zip(lengths, positions, strict=True)), make_batch(lengths, positions, size)
    expected, start = [], 0
    for request, (length, position) in enumerate(spans):
        token = start // aligned * aligned
        while length and token < start + length:
            expected.append((request, token, start, start + length, position + token - start))
            token += tile
        start += length
    tiles = jax.jit(find_query_tiles, static_argnums=(1, 2))(batch, tile, aligned)
    assert int(tiles.total[0]) == len(expected) <= len(tiles.columns)
    np.testing.assert_array_equal(tiles.columns[: len(expected)], np.reshape(expected, (-1, 5)))


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (12, (1, False, 64, 64, 2)),
        (5, (1, True, 64, 128, 1)),
        (8, (8, True, 8, 16, 8)),
        (16, (16, True, 4, 8, 16)),
        (32, (32, True, 2, 4, 32)),
        (64, (64, True, 1, 2, 64)),
        (128, (1, False, 64, 64, 2)),
    ],
)
def test_rows_are_the_heads_of_a_group_where_these_are_8_16_32_or_64(share, expected):
    rows = find_query_rows(share)
    assert (rows.heads, rows.apart, rows.tokens, rows.tile, rows.block_heads) == expected


RAGGED = ((0, 75), (21, 3), (150, 40), (5, 1))  # a page in part, several steps of keys, tiles that start unaligned
SHORT = ((0, 13), (21, 3))
CASES = {  # heads, kv heads, features, sinks, slots of a page, requests
    "heads of a group, window, sinks": (16, 1, AttentionFeatures(window=30), True, 16, RAGGED),
    "pairs of heads, own scale": (2, 1, AttentionFeatures(scale=0.3), False, 8, RAGGED),
    "one head, chunks, sinks": (1, 1, AttentionFeatures(chunk=32), True, 128, RAGGED),
    "one token a warpgroup, sinks": (64, 1, AttentionFeatures(), True, 16, SHORT),
}


def run_case(heads, groups, features, has_sinks, warpgroups, *, spans=RAGGED, dim=64, page=16, dtype=jnp.bfloat16):
    """The kernel and plain code in float32, for real tokens. Slots without an owner are NaN. JAX's interpreter refuses
    copies past an array's end, so that interpreted steps end with padding of a tile."""
    padding = 128 if warpgroups.interpret else 0
    padding += -sum(new for _, new in spans) % 8
    seqs = Sequences(spans=spans, padding=padding, heads=heads, groups=groups, head_dim=dim, page=page)
    rng = np.random.default_rng(heads)
    pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=False, dtype=dtype)
    queries = jnp.asarray(2 * rng.standard_normal((batch.positions.shape[0], heads, dim)), dtype)
    sinks = jnp.asarray(2 * rng.standard_normal(heads), dtype) if has_sinks else None
    run = jax.jit(lambda q, p, b, s: warpgroup_attention(q, p, first, b, features, warpgroups, sinks=s))
    actual = run(queries, pool, batch, sinks)
    expected = dataclasses.replace(features, sinks=None if sinks is None else sinks.astype(jnp.float32))
    plain = jax.jit(lambda q, p, b: reference_variant(q, p, first, b, expected))
    exact = plain(queries.astype(jnp.float32), pool.astype(jnp.float32), batch)
    return actual[:num_tokens], exact[:num_tokens]


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_plain_code(case):
    *model, page, spans = CASES[case]
    actual, expected = run_case(*model, INTERPRETED, page=page, spans=spans)
    assert distance(actual, expected) < bound(jnp.bfloat16)


def test_a_layer_of_a_stack_attends_to_its_own_pages_with_its_own_sinks():
    """As layers in a loop call it: the first page counts in layers, and sinks are of all layers. One of them has no
    weight: its last query of a tile sees no key of the first step. The pool of the other layer is NaN."""
    features = AttentionFeatures(window=30)
    seqs = Sequences(spans=((0, 21), (21, 3), (0, 96)), padding=136, heads=8, groups=1, head_dim=64, page=16)
    rng = np.random.default_rng(3)
    pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=False, dtype=jnp.bfloat16)
    queries = jnp.asarray(rng.standard_normal((len(batch.positions), 8, 64)), jnp.bfloat16)
    sinks = jnp.asarray(rng.standard_normal((2, 8)), jnp.bfloat16).at[1, 2].set(-jnp.inf)
    options = dict(sinks=(sinks, 1), stride=int(first), warpgroups=INTERPRETED)
    actual = jax.jit(lambda: gpu_attention(queries, pool, jnp.int32(1), batch, features, **options))()
    own = dataclasses.replace(features, sinks=sinks[1].astype(jnp.float32))
    expected = reference_variant(queries.astype(jnp.float32), pool.astype(jnp.float32), first, batch, own)
    assert distance(actual[:num_tokens], expected[:num_tokens]) < bound(jnp.bfloat16)


SHAPES = {  # heads, kv heads, head dim
    "Qwen3-30B-A3B": (32, 4, 128),
    "Qwen3-235B-A22B": (64, 4, 128),
    "GPT-OSS": (64, 8, 64),
    "GLM-4.5-Air": (96, 8, 128),
    "MiniMax-M2": (48, 8, 128),
    "Mixtral": (32, 8, 128),
    "OLMoE": (16, 16, 128),
    "Llama 4": (40, 8, 128),
}


def make_step(shape, *, lengths=(700, 324), page=16, dtype=jnp.bfloat16, pool_dtype=None, **options):
    """Shapes of a step's queries and pool, and its batch."""
    heads, groups, dim = shape
    queries = jax.ShapeDtypeStruct((sum(lengths), heads, dim), dtype)
    pool = jax.ShapeDtypeStruct((512, page, 2 * groups, dim), pool_dtype or dtype)
    return queries, pool, make_batch(lengths, [0] * len(lengths), sum(lengths), **options)


def lowered_kernels(queries, pool, batch, features=PLAIN, warpgroups=HOPPER) -> str:
    """The program of a step, for CUDA."""

    def run(queries, pool, batch):
        return gpu_attention(queries, pool, jnp.int32(3), batch, features, warpgroups=warpgroups)

    with jax.sharding.use_abstract_mesh(hopper_mesh()):
        return jax.jit(run).trace(queries, pool, batch).lower(lowering_platforms=("cuda",)).as_text()


SAME_ROWS = {"MiniMax-M2", "Mixtral", "OLMoE"}  # as GLM-4.5-Air, which has two heads a block, or as Llama 4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name in SAME_ROWS else ()) for name in SHAPES]
)
def test_prompts_of_published_shapes_are_computed_by_warpgroups(name):
    features = AttentionFeatures(window=128, sinks=jnp.ones(64, jnp.bfloat16)) if name == "GPT-OSS" else None
    chunk = AttentionFeatures(chunk=8192) if name == "Llama 4" else AttentionFeatures()
    text = lowered_kernels(*make_step(SHAPES[name]), features or chunk)
    assert text.count("@mosaic_gpu") == 1 and "extend_attention" not in text


QWEN = SHAPES["Qwen3-30B-A3B"]


@pytest.mark.parametrize(
    ("step", "is_warpgroups"),
    [
        (make_step(QWEN), True),
        (make_step(QWEN, page=256), True),
        (make_step(QWEN, lengths=(1,) * 64), True),
        (make_step(SHAPES["Mixtral"], lengths=(64,) * 4), True),
        (make_step(SHAPES["Mixtral"], lengths=(1,) * 64), False),  # few tokens a request
        (make_step(SHAPES["Mixtral"], lengths=(1024, *(0,) * 31)), False),  # the batch has room for 32
        (make_step(QWEN, dtype=jnp.float32), False),
        (make_step(QWEN, pool_dtype=KV_CODES), False),
        (make_step(QWEN, page=4), False),
        (make_step(QWEN, page=24), False),
        (make_step(QWEN, lengths=(700, 325)), False),  # no multiple of 8 tokens
        (make_step((16, 2, 256)), False),
        (make_step((16, 2, 96)), False),
    ],
)
def test_steps_that_suit(step, is_warpgroups):
    queries, pool, batch = step
    assert suits_warpgroup_attention(queries, pool, batch) is is_warpgroups


def test_decode_verify_and_other_gpus_keep_the_triton_kernels():
    decode = make_step(QWEN, lengths=(1,) * 64, decode=True)
    assert "decode_attention" in lowered_kernels(*decode)
    verify = make_step(QWEN, lengths=(4,) * 64, max_queries=4)
    assert "verify_attention" in lowered_kernels(*verify)
    assert "extend_attention" in lowered_kernels(*make_step(QWEN), warpgroups=None)
    masks_wrongly = dataclasses.replace(HOPPER, can_mask=False)
    assert "extend_attention" in lowered_kernels(*make_step(QWEN), warpgroups=masks_wrongly)


ON_GPU = {
    "Qwen3": (32, 4, 128, AttentionFeatures(), False),
    "GPT-OSS, window, sinks": (64, 8, 64, AttentionFeatures(window=100), True),
    "GPT-OSS, sinks": (64, 8, 64, AttentionFeatures(), True),
    "GLM": (96, 8, 128, AttentionFeatures(scale=0.1), False),
    "Llama 4": (40, 8, 128, AttentionFeatures(chunk=256), False),
    "OLMoE, sinks": (16, 16, 128, AttentionFeatures(), True),
    "16 heads a group": (32, 2, 64, AttentionFeatures(window=300), False),
    "32 heads a group": (32, 1, 128, AttentionFeatures(), True),
    "64 heads a group": (64, 1, 64, AttentionFeatures(chunk=256), False),
}
LONG = ((0, 400), (5, 3), (100, 77), (16, 130), (0, 64), (33, 30), (700, 1), (300, 100))
MOST_DISTANCE = {jnp.bfloat16: bound(jnp.bfloat16), jnp.float16: 2e-3}  # float16 has 3 more bits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("page", [8, 16, 128, 256])
@pytest.mark.parametrize("case", ON_GPU)
def test_compiled_kernel_equals_plain_code(case, page, dtype):
    heads, groups, dim, features, has_sinks = ON_GPU[case]
    warpgroups = find_warpgroups()
    assert warpgroups is not None, "a Hopper GPU"
    options = dict(spans=LONG, dim=dim, page=page, dtype=dtype)
    actual, expected = run_case(heads, groups, features, has_sinks, warpgroups, **options)
    assert np.isfinite(np.asarray(actual, np.float32)).all()
    assert distance(actual, expected) < MOST_DISTANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU)
def test_bits_of_a_request_do_not_depend_on_the_others(case):
    heads, groups, dim, features, has_sinks = ON_GPU[case]
    warpgroups = find_warpgroups()
    assert warpgroups is not None, "a Hopper GPU"
    padding = 8 - sum(new for _, new in LONG) % 8  # the kernel takes multiples of 8 tokens
    seqs = Sequences(spans=LONG, padding=padding, heads=heads, groups=groups, head_dim=dim, page=16)
    rng = np.random.default_rng(1)
    pool, first, batch, num_tokens = attention_inputs(rng, seqs, decode=False, dtype=jnp.bfloat16)
    queries = jnp.asarray(rng.standard_normal((batch.positions.shape[0], heads, dim)), jnp.bfloat16)
    sinks = jnp.asarray(rng.standard_normal(heads), jnp.float32) if has_sinks else None
    run = jax.jit(lambda q, p, b: warpgroup_attention(q, p, first, b, features, warpgroups, sinks=sinks))
    together = np.asarray(run(queries, pool, batch)[:num_tokens])
    starts, size = np.asarray(batch.query_starts), 400  # of every step: one program
    for request, (before, new) in enumerate(LONG):
        own = slice(starts[request], starts[request + 1])
        alone = make_batch([new], [before], size, page_table=batch.page_table[request][None])
        padded = jnp.zeros((size, heads, dim), jnp.bfloat16).at[:new].set(queries[own])
        np.testing.assert_array_equal(run(padded, pool, alone)[:new], together[own])
