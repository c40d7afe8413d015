"""Attention by features: paged, reference and whole-sequence forms against a loop over tokens, heads and keys in
float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS, causal_variant, write_latent
from routed_experts.layers.native.ops import NATIVE_ATTENTION

pytestmark = pytest.mark.usefixtures("fast_compilation")

PAGE, WIDTH, PAGES, HEADS, GROUPS, DIM, LATENT = 4, 40, 130, 4, 2, 6, 5
SINKS = jnp.asarray([0.5, -1.0, 3.0, 0.0], jnp.float32)
TRAITS = {
    "scale": AttentionFeatures(scale=0.7),
    "window": AttentionFeatures(window=5),
    "window of one": AttentionFeatures(window=1),
    "chunk": AttentionFeatures(chunk=6),
    "sinks": AttentionFeatures(sinks=SINKS),
    "window and sinks": AttentionFeatures(sinks=SINKS, window=9, scale=0.3),
    "latent": AttentionFeatures(latent=LATENT, scale=0.4),
}
STEPS = {  # (tokens in the pool after the step, tokens of the step) of each request
    "prefill": [(7, 7), (23, 23)],
    "chunks and decode": [(150, 1), (40, 17), (9, 2)],
    "decode": [(1, 1), (150, 1), (33, 1)],
}
RUN = {
    name: jax.jit(backend.run_with_features)
    for name, backend in {**ATTENTION_BACKENDS, "native": NATIVE_ATTENTION}.items()
    if backend.run_with_features is not None
}


def build_step(name, *, latent, seed=0):
    """Queries, pool (what no request owns is NaN), batch, and the keys and values by request."""
    rng, requests = np.random.default_rng(seed), STEPS[name]
    decode, padded = name == "decode", len(STEPS[name]) + 1
    num_tokens = sum(new for _, new in requests)
    total = padded if decode else num_tokens + 3
    rows = 1 if latent else 2 * GROUPS
    pool = np.full((2 * PAGES, PAGE, rows, DIM), np.nan, np.float32)
    table, order = np.zeros((padded, WIDTH), np.int32), rng.permutation(np.arange(1, PAGES))
    histories, per_token = [], {key: np.zeros(total, np.int32) for key in ("positions", "token_rows")}
    starts, lens, at = np.zeros(padded + 1, np.int32), np.zeros(padded, np.int32), 0
    for row, (length, new) in enumerate(requests):
        used = -(-length // PAGE)
        table[row, :used], order = order[:used], order[used:]
        stored = rng.standard_normal((length, rows, DIM)).astype(np.float32)
        for position in range(length):
            pool[PAGES + table[row, position // PAGE], position % PAGE] = stored[position]
        histories.append(stored)
        per_token["positions"][at : at + new] = np.arange(length - new, length)
        per_token["token_rows"][at : at + new] = row
        at += new
        starts[row + 1 :], lens[row] = at, length
    batch = PagedBatch(
        **{key: jnp.asarray(value) for key, value in per_token.items()},
        valid=jnp.arange(total) < num_tokens,
        query_starts=jnp.asarray(starts),
        seq_lens=jnp.asarray(lens),
        page_table=jnp.asarray(table),
        decode=decode,
    )
    queries = rng.standard_normal((total, HEADS, DIM)).astype(np.float32)
    return queries, pool, batch, histories, num_tokens


def attend(query, stored, at, head, features):
    """One head of one token over what it sees."""
    visible = [t for t in range(at + 1) if (not features.window or t > at - features.window)]
    visible = [t for t in visible if not features.chunk or t // features.chunk == at // features.chunk]
    group = 0 if features.latent else head // (HEADS // GROUPS)
    scale = features.scale or DIM**-0.5
    scores = [scale * float(query @ stored[t, 2 * group]) for t in visible]
    sink = [] if features.sinks is None else [float(features.sinks[head])]
    weights = np.exp(np.array(scores + sink) - max(scores + sink))
    weights /= weights.sum()
    values = [stored[t, 0, : features.latent] if features.latent else stored[t, 2 * group + 1] for t in visible]
    return sum(w * v for w, v in zip(weights, values, strict=False))


@pytest.mark.parametrize("backend", sorted(RUN))
@pytest.mark.parametrize("name", TRAITS)
@pytest.mark.parametrize("step", STEPS)
def test_each_backend_is_the_loop_and_reads_nothing_that_is_not_seen(step, name, backend):
    features = TRAITS[name]
    queries, pool, batch, histories, num_tokens = build_step(step, latent=bool(features.latent))
    out = np.asarray(
        RUN[backend](jnp.asarray(queries), jnp.asarray(pool), jnp.asarray(PAGES, jnp.int32), batch, features)
    )
    for token in range(num_tokens):
        at, row = int(batch.positions[token]), int(batch.token_rows[token])
        for head in range(HEADS):
            expected = attend(
                queries[token, head].astype(np.float64), histories[row].astype(np.float64), at, head, features
            )
            np.testing.assert_allclose(out[token, head], expected, atol=2e-5)


@pytest.mark.parametrize("name", TRAITS)
def test_whole_sequences_are_the_loop_segment_by_segment_and_differentiable(name):
    features, rng = TRAITS[name], np.random.default_rng(1)
    length, rows = 13, 1 if TRAITS[name].latent else 2 * GROUPS
    stored = rng.standard_normal((2, length, rows, DIM)).astype(np.float32)
    queries = rng.standard_normal((2, length, HEADS, DIM)).astype(np.float32)
    segments = None if features.chunk or features.window else np.repeat([[0] * 6 + [1] * 7], 2, axis=0)
    keys = jnp.asarray(stored[:, :, 0::2] if rows > 1 else stored)
    values = jnp.asarray(stored[:, :, 1::2]) if rows > 1 else None

    def run(q):
        return causal_variant(q, keys, values, None if segments is None else jnp.asarray(segments), features)

    out = np.asarray(jax.jit(run)(jnp.asarray(queries)))
    for row in range(2):
        for at in range(length):
            first = 0 if segments is None or at < 6 else 6
            for head in range(HEADS):
                expected = attend(
                    queries[row, at, head].astype(np.float64),
                    stored[row, first:].astype(np.float64),
                    at - first,
                    head,
                    features,
                )
                np.testing.assert_allclose(out[row, at, head], expected, atol=2e-5)
    assert np.all(np.isfinite(jax.grad(lambda q: jnp.sum(run(q) ** 2))(jnp.asarray(queries))))


@pytest.mark.parametrize("backend", sorted(RUN))
@pytest.mark.parametrize("name", TRAITS)
@pytest.mark.parametrize("step", STEPS)
def test_a_token_that_is_no_number_reaches_only_those_that_see_it(step, name, backend):
    features = TRAITS[name]
    queries, pool, batch, _, num_tokens = build_step(step, latent=bool(features.latent))
    run, first = RUN[backend], jnp.asarray(PAGES, jnp.int32)
    expected = np.asarray(run(jnp.asarray(queries), jnp.asarray(pool), first, batch, features))
    row, position = 1, STEPS[step][1][0] - STEPS[step][1][1] // 2 - 1  # a token of the second request
    pool[PAGES + int(batch.page_table[row, position // PAGE]), position % PAGE, -1] = np.nan
    out = np.asarray(run(jnp.asarray(queries), jnp.asarray(pool), first, batch, features))
    at, same_request = np.asarray(batch.positions), np.asarray(batch.token_rows) == row
    sees = (
        (at >= position)
        & (not features.window or at - features.window < position)
        & (not features.chunk or at // features.chunk == position // features.chunk)
    )
    hit = (same_request & sees)[:num_tokens]
    assert not np.isfinite(out[:num_tokens][hit]).all(axis=(1, 2)).any()
    assert np.array_equal(out[:num_tokens][~hit], expected[:num_tokens][~hit])


@pytest.mark.parametrize("backend", sorted(RUN))
@pytest.mark.parametrize("name", ["window", "window of one", "chunk", "window and sinks"])
@pytest.mark.parametrize("step", STEPS)
def test_what_no_token_of_the_step_sees_changes_nothing_by_a_bit(step, name, backend):
    """Slots of a request before its window may be freed and hold another one's keys, or what is no number."""
    features = TRAITS[name]
    queries, pool, batch, _, num_tokens = build_step(step, latent=False)
    run, first = RUN[backend], jnp.asarray(PAGES, jnp.int32)
    expected = np.asarray(run(jnp.asarray(queries), jnp.asarray(pool), first, batch, features))[:num_tokens]
    freed = 0
    for row, (length, new) in enumerate(STEPS[step]):
        at = length - new  # of the first token
        low = max(0, at - features.window + 1) if features.window else at // features.chunk * features.chunk
        for position in range(low):
            pool[PAGES + int(batch.page_table[row, position // PAGE]), position % PAGE] = np.nan
        freed += low
    assert freed > 0 or step == "prefill"
    out = np.asarray(run(jnp.asarray(queries), jnp.asarray(pool), first, batch, features))[:num_tokens]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", TRAITS)
def test_a_token_that_is_no_number_stays_in_its_segment_and_behind_itself_in_whole_sequences(name):
    features, rng = TRAITS[name], np.random.default_rng(3)
    queries, keys = (
        jnp.asarray(rng.standard_normal((2, 13, heads, DIM)), jnp.float32)
        for heads in (HEADS, 1 if features.latent else GROUPS)
    )
    segments = jnp.asarray([[0] * 8 + [1] * 5] * 2)
    broken = keys.at[0, 5].set(jnp.nan)
    pairs = ((keys, keys), (broken, broken)) if not features.latent else ((keys, None), (broken, None))
    expected, out = (np.asarray(causal_variant(queries, *pair, segments, features)) for pair in pairs)
    at = np.arange(13)
    sees = (
        (at >= 5)
        & (at < 8)
        & (not features.window or at - features.window < 5)
        & (not features.chunk or at // features.chunk == 5 // features.chunk)
    )
    hit = np.stack([sees, np.zeros(13, bool)])
    assert np.all(np.isnan(out[hit])) and np.array_equal(out[~hit], expected[~hit])


def test_latent_rows_are_written_where_the_table_says_and_padding_to_page_0():
    queries, pool, batch, _, num_tokens = build_step("chunks and decode", latent=True)
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((queries.shape[0], 1, DIM)), jnp.float32)
    written = np.asarray(jax.jit(write_latent)(jnp.asarray(pool), rows, jnp.asarray(PAGES, jnp.int32), batch))
    same = np.isnan(pool) & np.isnan(written) | (pool == written)
    for token in range(num_tokens):
        row, at = int(batch.token_rows[token]), int(batch.positions[token])
        page = PAGES + int(batch.page_table[row, at // PAGE])
        assert np.array_equal(written[page, at % PAGE], rows[token])
        same[page, at % PAGE] = True
    same[PAGES] = True  # page 0 of the layer
    assert np.all(same)


def test_a_backend_keeps_a_way_of_its_own():
    own = dataclasses.replace(ATTENTION_BACKENDS["paged"], run_with_features=None).with_features_run(max)
    assert own.run_with_features is max and own.with_features_run(min).run_with_features is max
