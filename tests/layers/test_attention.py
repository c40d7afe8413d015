"""Attention backends against a NumPy loop over tokens on random page tables; whatever a request does not own is
poisoned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.attention import KEY_BLOCK, QUERY_TILE, PagedBatch, causal_attention, write_kv
from support.kernels import ATTENTION

pytestmark = pytest.mark.usefixtures("fast_compilation")

BACKENDS = sorted(ATTENTION)
RUN = {name: jax.jit(backend.run) for name, backend in ATTENTION.items()}
WRITE, CAUSAL = jax.jit(write_kv), jax.jit(causal_attention)
POISON = 3e4
LAYERS, LAYER = 3, 1
GROUPS, HEAD_DIM = 2, 8
EXACT = 2e-5


@dataclasses.dataclass
class Step:
    """A step of requests (keys before, new tokens), padded; `keys` and `values` are each request's own, whole."""

    queries: np.ndarray
    new_keys: np.ndarray
    new_values: np.ndarray
    pool: np.ndarray
    batch: PagedBatch
    first_page: int
    keys: list[np.ndarray]
    values: list[np.ndarray]
    owned: set[tuple[int, int]]  # (page of the pool, place) of every token of every request, new ones included
    num_tokens: int


def make_step(
    requests, *, page_size, seed=0, num_tokens=None, num_requests=None, width=None, heads=4, groups=GROUPS, decode=False
):
    """Random keys in random pages; every place that holds no key of a request holds 3e4, in all layers."""
    rng = np.random.default_rng(seed)
    lengths = [before + new for before, new in requests]
    total, rows = sum(new for _, new in requests), num_requests or len(requests)
    padded, width = num_tokens or total, width or max(-(-length // page_size) for length in lengths) + 1
    num_pages = 2 + sum(-(-length // page_size) for length in lengths)
    free = list(rng.permutation(np.arange(1, num_pages)))
    pool = np.full((LAYERS * num_pages, page_size, 2 * groups, HEAD_DIM), POISON, np.float32)
    table = np.zeros((rows, width), np.int32)
    positions, token_rows = np.zeros(padded, np.int32), np.zeros(padded, np.int32)
    new_keys, new_values = (rng.standard_normal((padded, groups, HEAD_DIM)).astype(np.float32) for _ in range(2))
    keys, values, owned, at = [], [], set(), 0
    for row, ((before, new), length) in enumerate(zip(requests, lengths, strict=True)):
        pages = [free.pop() for _ in range(-(-length // page_size))]
        table[row, : len(pages)] = pages
        own = [rng.standard_normal((length, groups, HEAD_DIM)).astype(np.float32) for _ in range(2)]
        own[0][before:], own[1][before:] = new_keys[at : at + new], new_values[at : at + new]
        for t in range(length):
            slot = LAYER * num_pages + pages[t // page_size], t % page_size
            owned.add(slot)
            if t < before:
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
    queries = rng.standard_normal((padded, heads, HEAD_DIM)).astype(np.float32)
    return Step(queries, new_keys, new_values, pool, batch, LAYER * num_pages, keys, values, owned, total)


def softmax_mix(query, keys, values):
    """One query head over its keys, float64."""
    scores = keys.astype(np.float64) @ query.astype(np.float64) / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ values.astype(np.float64)


def oracle(step):
    heads, groups = step.queries.shape[1], step.new_keys.shape[1]
    out = np.zeros(step.queries.shape)
    positions, rows = np.asarray(step.batch.positions), np.asarray(step.batch.token_rows)
    for n in range(step.num_tokens):
        num_visible = positions[n] + 1
        for head in range(heads):
            group = head // (heads // groups)
            out[n, head] = softmax_mix(
                step.queries[n, head],
                step.keys[rows[n]][:num_visible, group],
                step.values[rows[n]][:num_visible, group],
            )
    return out[: step.num_tokens]


def attend(name, step, *, dtype=jnp.float32):
    first = jnp.asarray(step.first_page, jnp.int32)
    pool = WRITE(
        jnp.asarray(step.pool, dtype), jnp.asarray(step.new_keys), jnp.asarray(step.new_values), first, step.batch
    )
    return np.asarray(RUN[name](jnp.asarray(step.queries, dtype), pool, first, step.batch), np.float64)[
        : step.num_tokens
    ]


RAGGED = {  # (keys before, new tokens) of each request
    "one token": [(0, 1)],
    "one prompt": [(0, 37)],
    "prefill and decode": [(0, 20), (45, 1), (9, 1), (0, 3)],
    "around the query tile": [(0, QUERY_TILE - 1), (0, QUERY_TILE), (5, QUERY_TILE + 1), (0, 1)],
    "around the key block": [(KEY_BLOCK - 2, 5), (0, 1), (KEY_BLOCK, 1), (KEY_BLOCK - 1, 1), (2 * KEY_BLOCK - 1, 2)],
    "a chunk far in": [(300, 40), (1, 1)],
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("requests", RAGGED.values(), ids=RAGGED)
def test_ragged_batch_equals_the_loop(name, requests):
    step = make_step(requests, page_size=16)
    np.testing.assert_allclose(attend(name, step), oracle(step), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("decode", [True, False])
def test_a_pool_wider_than_the_heads_gives_the_same_and_holds_zeros_beside_them(name, decode):
    step = make_step([(20, 1), (0, 1), (37, 1)], page_size=16, decode=decode)
    plain = attend(name, step)
    wide = dataclasses.replace(step, pool=np.pad(step.pool, ((0, 0), (0, 0), (0, 0), (0, 5)), constant_values=POISON))
    np.testing.assert_allclose(attend(name, wide), plain, atol=1e-6)
    first = jnp.asarray(step.first_page, jnp.int32)
    pool = np.asarray(
        WRITE(jnp.asarray(wide.pool), jnp.asarray(step.new_keys), jnp.asarray(step.new_values), first, step.batch)
    )
    page, offset = int(step.batch.page_table[2, 2]), 37 % 16
    assert not np.any(pool[step.first_page + page, offset, :, HEAD_DIM:])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 16, 48, 200])
def test_any_page_size_will_do(name, page_size):
    step = make_step([(140, 9), (0, 30), (201, 1)], page_size=page_size, seed=page_size, num_tokens=48, num_requests=4)
    np.testing.assert_allclose(attend(name, step), oracle(step), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("page_size", [16, 48])
def test_decode_batch_equals_the_loop_in_either_form(name, decode, page_size):
    befores = [0, 1, 15, 16, 63, 64, 65, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 2 * KEY_BLOCK]
    step = make_step(
        [(before, 1) for before in befores], page_size=page_size, num_tokens=12, num_requests=12, decode=decode
    )
    np.testing.assert_allclose(attend(name, step), oracle(step), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (8, 1), (6, 2)])
@pytest.mark.parametrize("decode", [True, False])
def test_heads_share_the_keys_of_their_group(name, heads, groups, decode):
    step = make_step([(6, 1), (17, 1), (2, 1)], page_size=16, heads=heads, groups=groups, decode=decode)
    np.testing.assert_allclose(attend(name, step), oracle(step), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("decode", [True, False])
def test_padding_tokens_and_rows_change_no_token(name, decode):
    requests = [(50, 1), (4, 1), (17, 1)]
    exact, padded = (
        make_step(requests, page_size=16, num_tokens=n, num_requests=n, width=5, decode=decode) for n in (3, 8)
    )
    step = dataclasses.replace(exact, queries=padded.queries, batch=padded.batch)
    step.new_keys, step.new_values = (
        np.concatenate([x, np.full((5, *x.shape[1:]), POISON, np.float32)]) for x in (exact.new_keys, exact.new_values)
    )
    np.testing.assert_allclose(attend(name, step), oracle(step), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_batch_of_padding_alone_is_finite(name):
    for decode in (True, False):
        step = make_step([(0, 1)], page_size=16, num_tokens=8, num_requests=8, decode=decode)
        zeros = {
            field: jnp.zeros_like(vars(step.batch)[field])
            for field in ("valid", "query_starts", "seq_lens", "page_table")
        }
        step.batch, step.num_tokens = dataclasses.replace(step.batch, **zeros), 8
        assert np.all(np.isfinite(attend(name, step)))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("decode", [True, False])
def test_what_a_request_does_not_own_changes_nothing_by_a_bit(name, decode):
    """Other requests' pages, freed pages, the padding page, places past a request's end and all other layers.

    NaN too: weights that were bad for one step must not live on in the pages that they wrote."""
    step = make_step([(130, 1), (14, 1), (31, 1)], page_size=16, decode=decode)
    clean = attend(name, step)
    mask = np.zeros(step.pool.shape[:2], bool)
    for slot in step.owned:
        mask[slot] = True
    for filler in (0.0, -POISON, np.nan, np.inf):
        step.pool = np.where(mask[..., None, None], step.pool, np.float32(filler))
        assert np.array_equal(attend(name, step), clean)


@pytest.mark.parametrize("name", BACKENDS)
def test_low_precision_is_computed_in_float32(name):
    step = make_step([(0, 20), (45, 1), (130, 3)], page_size=16)
    rounded = dataclasses.replace(step, queries=np.asarray(jnp.asarray(step.queries, jnp.bfloat16), np.float32))
    rounded.keys, rounded.values = (
        [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in xs] for xs in (step.keys, step.values)
    )
    np.testing.assert_allclose(
        attend(name, step, dtype=jnp.bfloat16), oracle(rounded), atol=0.02
    )  # the output is bfloat16 too


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_agree_with_the_loop_and_with_each_other(seed):
    rng = np.random.default_rng(100 + seed)
    requests, room = [], 40
    while room > 0 and len(requests) < 6:
        new = int(rng.integers(1, min(room, 25) + 1)) if rng.random() < 0.6 else 1
        requests.append((int(rng.choice([0, rng.integers(0, 250)])), new))
        room -= new
    step = make_step(requests, page_size=16, seed=seed, num_tokens=40, num_requests=6, width=18)
    expected = oracle(step)
    for name in BACKENDS:
        np.testing.assert_allclose(attend(name, step), expected, atol=EXACT)


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_write_kv_writes_the_slots_of_its_tokens_and_no_other(page_size):
    step = make_step([(0, 20), (45, 1), (9, 2)], page_size=page_size, num_tokens=32, num_requests=5)
    first = jnp.asarray(step.first_page, jnp.int32)
    written = np.asarray(
        WRITE(jnp.asarray(step.pool), jnp.asarray(step.new_keys), jnp.asarray(step.new_values), first, step.batch)
    )
    expected, table = step.pool.copy(), np.asarray(step.batch.page_table)
    for n in range(step.num_tokens):
        row, position = int(step.batch.token_rows[n]), int(step.batch.positions[n])
        slot = step.first_page + table[row, position // page_size], position % page_size
        expected[slot][0::2], expected[slot][1::2] = step.new_keys[n], step.new_values[n]
    differs = np.any(written != expected, axis=(1, 2, 3))
    assert not np.any(np.delete(differs, step.first_page)), "only the padding page of the layer may take padding"


def dense_oracle(queries, keys, values, segments):
    out = np.zeros(queries.shape)
    share = queries.shape[2] // keys.shape[2]
    for b, s, head in np.ndindex(queries.shape[:3]):
        visible = np.flatnonzero(segments[b, : s + 1] == segments[b, s])
        out[b, s, head] = softmax_mix(
            queries[b, s, head], keys[b, visible, head // share], values[b, visible, head // share]
        )
    return out


@pytest.mark.parametrize("packed", [True, False])
def test_causal_attention_equals_the_loop_within_segments(packed):
    rng = np.random.default_rng(5)
    queries = rng.standard_normal((2, 13, 4, 8)).astype(np.float32)
    keys, values = (rng.standard_normal((2, 13, 2, 8)).astype(np.float32) for _ in range(2))
    segments = (
        np.array([[0] * 5 + [1] * 8, [3] * 1 + [0] * 11 + [7]], np.int32) if packed else np.zeros((2, 13), np.int32)
    )
    out = CAUSAL(queries, keys, values, jnp.asarray(segments) if packed else None)
    np.testing.assert_allclose(out, dense_oracle(queries, keys, values, segments), atol=EXACT)


def test_paged_prefill_equals_causal_attention():
    step = make_step([(0, 70)], page_size=16)
    whole = CAUSAL(step.queries[None], step.new_keys[None], step.new_values[None], None)[0]
    for name in BACKENDS:
        np.testing.assert_allclose(attend(name, step), whole, atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("requests", [[(0, 40), (45, 1), (0, 20)], [(KEY_BLOCK - 2, 30), (0, 9)]])
def test_a_token_that_is_no_number_reaches_only_those_that_see_it(requests, bad, part, name):
    step = make_step(requests, page_size=16)
    expected, broken = oracle(step), 7  # of the first request
    getattr(step, f"new_{part}")[broken] = bad if part == "values" else np.nan
    out = attend(name, step)
    hit = np.zeros(len(out), bool)
    hit[broken : requests[0][1]] = True
    assert not np.isfinite(out[hit]).all(axis=(1, 2)).any()
    np.testing.assert_allclose(out[~hit], expected[~hit], atol=EXACT)


def test_a_token_that_is_no_number_stays_in_its_segment_and_behind_itself_in_whole_sequences():
    rng = np.random.default_rng(0)
    queries, keys, values = (jnp.asarray(rng.standard_normal((2, 12, heads, 4)), jnp.float32) for heads in (4, 2, 2))
    segments = jnp.asarray([[0] * 8 + [1] * 4] * 2)
    expected, out = (CAUSAL(queries, keys, used, segments) for used in (values, values.at[0, 5].set(jnp.nan)))
    hit = np.zeros((2, 12), bool)
    hit[0, 5:8] = True
    assert np.all(np.isnan(out[hit])) and np.array_equal(out[~hit], expected[~hit])
