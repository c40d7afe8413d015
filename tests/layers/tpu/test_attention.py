"""TPU attention, interpreted, against a NumPy loop over tokens on random page tables; what a request does not own is
NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.layers.attention import PagedBatch, write_kv
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.tpu.attention import PLAIN, ragged_attention

pytestmark = pytest.mark.usefixtures("fast_compilation")

# Small blocks and tiles, so that a step has several of each: 64 keys, 16 rows of a product (4 or 8 tokens).
RUN = jax.jit(functools.partial(ragged_attention, key_block=64, query_rows=16, interpret=True))
EXACT = {jnp.float32: 2e-5, jnp.bfloat16: 0.03}
LAYERS, LAYER = 3, 1


@dataclasses.dataclass
class Step:
    """A step of requests (keys before, new tokens), padded; `keys` and `values` are each request's own, whole."""

    queries: np.ndarray
    pool: np.ndarray
    batch: PagedBatch
    first_page: int
    keys: list[np.ndarray]
    values: list[np.ndarray]
    num_tokens: int


def make_step(requests, *, heads=4, groups=2, head_dim=16, page_size=16, padded=None, rows=None, decode=False, seed=0):
    rng = np.random.default_rng(seed)
    lengths = [before + new for before, new in requests]
    total, rows = sum(new for _, new in requests), rows or len(requests)
    padded, width = padded or total, max(-(-length // page_size) for length in lengths) + 1
    num_pages = 2 + sum(-(-length // page_size) for length in lengths)
    free = list(rng.permutation(np.arange(1, num_pages)))
    pool = np.full((LAYERS * num_pages, page_size, 2 * groups, head_dim), np.nan, np.float32)
    table = np.zeros((rows, width), np.int32)
    positions, token_rows = np.zeros(padded, np.int32), np.zeros(padded, np.int32)
    keys, values, at = [], [], 0
    for row, ((before, new), length) in enumerate(zip(requests, lengths, strict=True)):
        pages = [free.pop() for _ in range(-(-length // page_size))]
        table[row, : len(pages)] = pages
        own = [rng.standard_normal((length, groups, head_dim)).astype(np.float32) for _ in range(2)]
        for t in range(length):
            slot = LAYER * num_pages + pages[t // page_size], t % page_size
            pool[slot][0::2], pool[slot][1::2] = own[0][t], own[1][t]
        keys.append(own[0])
        values.append(own[1])
        positions[at : at + new], token_rows[at : at + new] = np.arange(before, length), row
        at += new
    starts = np.cumsum([0, *[new for _, new in requests], *[0] * (rows - len(requests))]).astype(np.int32)
    batch = PagedBatch(
        positions=jnp.asarray(positions),
        token_rows=jnp.asarray(token_rows),
        valid=jnp.arange(padded) < total,
        query_starts=jnp.asarray(starts),
        seq_lens=jnp.asarray([*lengths, *[0] * (rows - len(requests))], jnp.int32),
        page_table=jnp.asarray(table),
        decode=decode,
    )
    queries = rng.standard_normal((padded, heads, head_dim)).astype(np.float32)
    return Step(queries, pool, batch, LAYER * num_pages, keys, values, total)


def oracle(step, dtype, features=PLAIN):
    """One token and one head at a time, in float64, on the numbers as `dtype` holds them."""

    def as_stored(x):
        return np.asarray(jnp.asarray(x, dtype), np.float64)

    heads, groups = step.queries.shape[1], step.keys[0].shape[1]
    queries, out = as_stored(step.queries), np.zeros(step.queries.shape)
    positions, rows = np.asarray(step.batch.positions), np.asarray(step.batch.token_rows)
    for n in range(step.num_tokens):
        first = max(0, positions[n] + 1 - features.window) if features.window else 0
        first = max(first, positions[n] // features.chunk * features.chunk) if features.chunk else first
        keys, values = (as_stored(part[rows[n]][first : positions[n] + 1]) for part in (step.keys, step.values))
        for head in range(heads):
            group = head // (heads // groups)
            scores = keys[:, group] @ queries[n, head] * (features.scale or queries.shape[2] ** -0.5)
            sink = -np.inf if features.sinks is None else float(features.sinks[head])
            top = max(scores.max(), sink)
            weights = np.exp(scores - top)
            out[n, head] = (weights / (weights.sum() + np.exp(sink - top))) @ values[:, group]
    return out


def attend(step, dtype=jnp.float32, run=RUN, features=PLAIN):
    first = jnp.asarray(step.first_page, jnp.int32)
    arrays = jnp.asarray(step.queries, dtype), jnp.asarray(step.pool, dtype)
    return np.asarray(run(*arrays, first, step.batch, features), np.float64)


FAR_IN = "prefill and decode, a chunk far in"  # in every run the step of the features
RAGGED = {  # (keys before, new tokens) of each request
    "one token": [(0, 1)],
    FAR_IN: [(0, 20), (45, 1), (9, 1), (0, 3), (300, 40)],
    "around the tile and the block": [(0, 7), (0, 8), (63, 1), (64, 1), (55, 9), (127, 2)],
}


@pytest.mark.parametrize(
    "requests",
    [pytest.param(RAGGED[name], id=name, marks=pytest.mark.thorough if name == FAR_IN else []) for name in RAGGED],
)
def test_a_ragged_step_equals_the_loop(requests):
    step = make_step(requests)
    np.testing.assert_allclose(attend(step), oracle(step, jnp.float32), atol=EXACT[jnp.float32])


# query heads, kv heads, head dim
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        pytest.param((4, 4, 8), jnp.bfloat16, marks=pytest.mark.thorough),
        ((2, 1, 16), jnp.float32),
        pytest.param((6, 2, 128), jnp.bfloat16, marks=pytest.mark.thorough),
        ((2, 2, 256), jnp.bfloat16),
    ],
    ids=str,
)
def test_any_number_of_heads_will_do(sizes, dtype):
    heads, groups, head_dim = sizes
    step = make_step([(70, 9), (0, 30), (101, 1)], heads=heads, groups=groups, head_dim=head_dim, padded=48, rows=5)
    out = attend(step, dtype)
    np.testing.assert_allclose(out, oracle(step, dtype), atol=EXACT[dtype])
    assert not np.any(out[step.num_tokens :])


@pytest.mark.parametrize("page_size", [pytest.param(8, marks=pytest.mark.thorough), 200])  # others have 16, or 64
def test_any_page_size_will_do(page_size):
    step = make_step([(140, 9), (0, 30), (201, 1)], page_size=page_size, padded=41, rows=4)
    np.testing.assert_allclose(attend(step), oracle(step, jnp.float32), atol=EXACT[jnp.float32])


@pytest.mark.parametrize(
    ("decode", "dtype"),
    [
        pytest.param(True, jnp.float32, marks=pytest.mark.thorough),
        (True, jnp.bfloat16),
        (False, jnp.float32),
    ],
    ids=str,
)
def test_a_decode_step_equals_the_loop_in_either_form(decode, dtype):
    requests = [(length, 1) for length in (0, 63, 64, 200, 5, 17, 127, 128, 1, 33, 90)]  # two tiles of decode
    step = make_step(requests, padded=13, rows=13, decode=decode)
    np.testing.assert_allclose(attend(step, dtype), oracle(step, dtype), atol=EXACT[dtype])


def test_a_step_of_padding_alone_is_zero():
    step = make_step([(3, 2)], padded=8)
    batch = dataclasses.replace(
        step.batch, query_starts=jnp.zeros_like(step.batch.query_starts), seq_lens=jnp.zeros_like(step.batch.seq_lens)
    )
    assert not np.any(attend(dataclasses.replace(step, batch=batch)))


def test_the_blocks_an_engine_uses_give_the_same():
    step = make_step([(700, 40), (600, 1), (0, 90)], page_size=64)
    out = attend(step, run=jax.jit(functools.partial(ragged_attention, interpret=True)))
    np.testing.assert_allclose(out, oracle(step, jnp.float32), atol=EXACT[jnp.float32])


@pytest.mark.thorough  # heads of 64 with sinks and a window stand so in every run
def test_heads_narrower_than_the_pool_stand_beside_zeros():
    step, dtype = make_step([(70, 9), (20, 1)], head_dim=8), jnp.bfloat16
    wide = np.pad(step.pool, ((0, 0), (0, 0), (0, 0), (0, 8)))
    np.testing.assert_allclose(
        attend(dataclasses.replace(step, pool=wide), dtype), oracle(step, dtype), atol=EXACT[dtype]
    )


FEATURES = {  # of 4 heads
    "a window": AttentionFeatures(window=9),
    "a window of several blocks": AttentionFeatures(window=150),
    "a chunk": AttentionFeatures(chunk=48),
    "all": AttentionFeatures(sinks=jnp.asarray([2.0, 0.5, -1.0, 0.0]), window=33, chunk=64, scale=0.7),
}


def without_keys_before_the_window(step, features):
    """The same pool with NaN in place of all keys and values that no token of the step sees."""
    pool, starts = np.array(step.pool), np.asarray(step.batch.query_starts)
    for row in range(len(step.keys)):
        position = int(step.batch.positions[starts[row]])
        first = max(0, position + 1 - features.window) if features.window else 0
        first = max(first, position // features.chunk * features.chunk) if features.chunk else first
        for t in range(first):
            pool[step.first_page + int(step.batch.page_table[row, t // 16]), t % 16] = np.nan
    return dataclasses.replace(step, pool=pool)


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("a window of several blocks", False),
        pytest.param("a chunk", False, marks=pytest.mark.thorough),  # all features have a chunk and a window
        ("all", False),
        pytest.param("a window", True, marks=pytest.mark.thorough),
        ("all", True),
    ],
    ids=str,
)
def test_features_equal_the_loop_and_keys_that_are_not_seen_may_be_nan(name, decode):
    features = FEATURES[name]
    ragged = [(0, 20), (45, 1), (9, 1), (0, 3), (300, 40), (63, 2)]
    requests = [(length, 1) for length in (0, 63, 64, 200, 5, 300, 48)] if decode else ragged
    step = make_step(requests, padded=72, rows=8, decode=decode)
    expected = oracle(step, jnp.float32, features)
    out = attend(without_keys_before_the_window(step, features), features=features)
    np.testing.assert_allclose(out, expected, atol=EXACT[jnp.float32])
    assert not np.any(out[step.num_tokens :])


def test_heads_of_64_beside_zeros_with_sinks_and_a_window_equal_the_loop_in_bfloat16():
    """As GPT-OSS has them: 8 heads a group."""
    features = AttentionFeatures(sinks=jnp.linspace(-1.0, 3.0, 16), window=128)
    step, dtype = make_step([(0, 30), (200, 1), (130, 9)], heads=16, head_dim=64, padded=48), jnp.bfloat16
    wide = dataclasses.replace(step, pool=np.pad(step.pool, ((0, 0), (0, 0), (0, 0), (0, 64))))
    np.testing.assert_allclose(attend(wide, dtype, features=features), oracle(step, dtype, features), atol=EXACT[dtype])


def test_what_was_just_written_is_what_is_read():
    step = make_step([(20, 5), (3, 1)], padded=8)
    rng = np.random.default_rng(1)
    new = [rng.standard_normal((8, 2, 16)).astype(np.float32) for _ in range(2)]
    first = jnp.asarray(step.first_page, jnp.int32)
    pool = write_kv(jnp.asarray(step.pool), jnp.asarray(new[0]), jnp.asarray(new[1]), first, step.batch)
    for row, (start, end, before) in enumerate(((0, 5, 20), (5, 6, 3))):
        step.keys[row][before:], step.values[row][before:] = new[0][start:end], new[1][start:end]
    np.testing.assert_allclose(
        attend(dataclasses.replace(step, pool=np.asarray(pool))), oracle(step, jnp.float32), atol=2e-5
    )


def test_a_pool_that_the_kernel_cannot_read_is_refused():
    step = make_step([(3, 2)])
    with pytest.raises(ConfigError, match=r"float16.*bfloat16 or float32"):
        attend(step, jnp.float16)
