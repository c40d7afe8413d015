"""Latent attention on TPU, interpreted, against a NumPy loop that expands each row into keys and values of all heads;
slots that hold no row of the step's requests are NaN, and stay as they were."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.attention import LatentQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import paged_variant, reference_variant, write_latent
from routed_experts.layers.tpu.latent_attention import TOKEN_TILE, attend_latent, write_rows

pytestmark = pytest.mark.usefixtures("fast_compilation")

LAYERS, LAYER, EPS = 2, 1, 1e-6
HEADS, RANK, ROTARY, KEY, VALUE = 3, 16, 4, 6, 5


def make_batch(requests, page_size, *, padded, decode=False):
    """Requests of (tokens before, new tokens) in random pages, the last row padding; and the number of pages."""
    rng, rows = np.random.default_rng(0), len(requests) + 1
    counts = [-(-(before + new) // page_size) for before, new in requests]
    table = np.zeros((rows, max(counts) + 1), np.int32)
    free = list(rng.permutation(np.arange(1, 1 + sum(counts))))
    positions, token_rows, starts = np.zeros(padded, np.int32), np.zeros(padded, np.int32), [0]
    for row, ((before, new), count) in enumerate(zip(requests, counts, strict=True)):
        table[row, :count] = [free.pop() for _ in range(count)]
        at = starts[-1]
        positions[at : at + new], token_rows[at : at + new] = np.arange(before, before + new), row
        starts.append(at + new)
    lengths = [before + new for before, new in requests]
    arrays = positions, token_rows, np.arange(padded) < starts[-1], np.array([*starts, starts[-1]], np.int32)
    batch = PagedBatch(
        *map(jnp.asarray, arrays), jnp.asarray([*lengths, 0], jnp.int32), jnp.asarray(table), decode=decode
    )
    return batch, 2 + sum(counts)


def slots_of(batch, row, count, num_pages, page_size):
    """Page and place of the first positions of a request."""
    positions = np.arange(count)
    pages = LAYER * num_pages + np.asarray(batch.page_table)[row, positions // page_size]
    return pages, positions % page_size


def make_step(requests, *, page_size=16, width=24, padded=None, interleaved=False, dtype=jnp.float32, decode=False):
    """What attend_latent takes, and the rows that each request had before."""
    total = sum(new for _, new in requests)
    padded = padded or total
    batch, num_pages = make_batch(requests, page_size, padded=padded, decode=decode)
    rng = np.random.default_rng(1)
    pool = np.full((LAYERS * num_pages, page_size, 1, width), np.nan, np.float32)
    before = [rng.standard_normal((count, RANK + ROTARY)).astype(np.float32) for count, _ in requests]
    for row, rows in enumerate(before):
        pages, places = slots_of(batch, row, len(rows), num_pages, page_size)
        pool[pages, places, 0] = np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
    inverse = jnp.asarray([1.0, 0.1])
    angles = batch.positions[:, None].astype(jnp.float32) * inverse
    compressed = rng.standard_normal((padded, RANK + ROTARY)).astype(np.float32)
    compressed[total:] = np.nan
    projected = LatentQKV(
        queries=jnp.asarray(rng.standard_normal((padded, HEADS, KEY + ROTARY)), dtype),
        compressed=jnp.asarray(compressed, dtype),
        norm=jnp.asarray(1 + 0.2 * rng.standard_normal(RANK), dtype),
        up=jnp.asarray(rng.standard_normal((RANK, HEADS * (KEY + VALUE))) / 4, dtype),
        angles=(jnp.cos(angles), jnp.sin(angles)),
        interleaved=interleaved,
        scale=0.3,
        eps=EPS,
    )
    return projected, jnp.asarray(pool, dtype), batch, num_pages, before


def run(projected, pool, batch, num_pages):
    arrays = (projected.queries, projected.compressed, projected.norm, projected.up, projected.angles)
    static = dict(interleaved=projected.interleaved, scale=projected.scale, eps=projected.eps)

    def program(arrays, pool, batch):
        names = ("queries", "compressed", "norm", "up", "angles")
        made = LatentQKV(**dict(zip(names, arrays, strict=True)), **static)
        return attend_latent(made, pool, jnp.asarray(LAYER, jnp.int32), batch, num_pages, interpret=True)

    return jax.jit(program)(arrays, pool, batch)


def turned(row, angle, *, interleaved):
    low, high = (row[0::2], row[1::2]) if interleaved else np.split(row, 2)
    pairs = (low + 1j * high) * np.exp(1j * angle)
    out = np.stack([pairs.real, pairs.imag], axis=-1 if interleaved else 0)
    return out.reshape(-1)


def loop(projected, batch, before, dtype):
    """Values of each token and head in float64, and the new rows."""

    def wide(x):
        return np.asarray(jnp.asarray(x, dtype), np.float64)

    queries, compressed, norm = (
        np.asarray(x, np.float64) for x in (projected.queries, projected.compressed, projected.norm)
    )
    up = np.asarray(projected.up, np.float64).reshape(RANK, HEADS, KEY + VALUE)
    total, rows = int(batch.query_starts[-1]), [list(wide(part)) for part in before]
    out, new = np.zeros((total, HEADS, VALUE)), np.zeros((total, RANK + ROTARY))
    for n in range(total):
        angle = int(batch.positions[n]) * np.array([1.0, 0.1])
        head = compressed[n, :RANK]
        head = head / np.sqrt(np.mean(head**2) + EPS) * norm
        new[n] = np.concatenate([head, turned(compressed[n, RANK:], angle, interleaved=projected.interleaved)])
        own = rows[int(batch.token_rows[n])]
        own.append(wide(new[n]))
        seen = np.stack(own)
        for index in range(HEADS):
            keys = np.concatenate([seen[:, :RANK] @ up[:, index, :KEY], seen[:, RANK:]], axis=1)
            position = turned(queries[n, index, KEY:], angle, interleaved=projected.interleaved)
            scores = keys @ np.concatenate([queries[n, index, :KEY], position]) * projected.scale
            weights = np.exp(scores - scores.max())
            out[n, index] = weights @ (seen[:, :RANK] @ up[:, index, KEY:]) / weights.sum()
    return out, new


RAGGED = [(0, 9), (20, 1), (7, 3), (45, 30), (16, 1), (0, 1)]
CASES = {
    "ragged, padded": (RAGGED, dict(padded=56)),
    "ragged, pairs, bfloat16": (RAGGED, dict(interleaved=True, dtype=jnp.bfloat16)),
    "two tiles of tokens, which part a tile of slots": ([(3, TOKEN_TILE - 1), (0, 20)], dict(padded=TOKEN_TILE + 30)),
    "decode": ([(length, 1) for length in (0, 15, 16, 40, 7)], dict(padded=8, decode=True)),
    "pages of 6 slots": (RAGGED, dict(page_size=6, dtype=jnp.bfloat16)),
}


@pytest.mark.parametrize(("requests", "fields"), CASES.values(), ids=CASES)
def test_values_and_rows_are_those_of_expanded_attention(requests, fields):
    projected, pool, batch, num_pages, before = make_step(requests, **fields)
    dtype = pool.dtype
    values, written = run(projected, pool, batch, num_pages)
    expected, new = loop(projected, batch, before, dtype)
    exact = 3e-5 if dtype == jnp.float32 else 0.06
    np.testing.assert_allclose(np.asarray(values, np.float64)[: len(expected)], expected, atol=exact)
    wanted, tokens = np.array(pool, np.float32), np.asarray(batch.token_rows)
    for n, row in enumerate(new):
        pages, places = slots_of(batch, tokens[n], int(batch.positions[n]) + 1, num_pages, pool.shape[1])
        wanted[pages[-1], places[-1], 0] = np.pad(row, (0, pool.shape[3] - len(row)))
    np.testing.assert_allclose(np.asarray(written, np.float32), wanted, atol=exact)
    untouched = np.array_equal(np.asarray(pool, np.float32), wanted, equal_nan=True)
    assert not untouched and np.isnan(np.asarray(written, np.float32)).any()


def test_a_step_of_padding_alone_writes_nothing():
    projected, pool, batch, num_pages, _ = make_step([(3, 2)], padded=8)
    none = {"query_starts": jnp.zeros_like(batch.query_starts), "seq_lens": jnp.zeros_like(batch.seq_lens)}
    empty = dataclasses.replace(batch, **none)
    written = jax.jit(functools.partial(write_rows, interpret=True))(
        pool, projected.compressed[:, None], jnp.asarray(num_pages, jnp.int32), empty
    )
    np.testing.assert_array_equal(written, pool)


@pytest.mark.parametrize("variant", [paged_variant, reference_variant])
def test_array_code_reads_and_writes_a_latent_pool_that_is_wider_than_its_rows(variant):
    """As an engine on a TPU pads it, should the plain backend be asked for."""
    projected, pool, batch, num_pages, _ = make_step(RAGGED, padded=48)
    rows, first = jnp.where(batch.valid[:, None, None], projected.compressed[:, None], 0), jnp.asarray(num_pages)
    features = AttentionFeatures(latent=RANK, scale=0.3)
    queries = jnp.concatenate([projected.queries, projected.queries], axis=-1)[..., : RANK + ROTARY]
    outs = []
    for width in (RANK + ROTARY, pool.shape[3]):
        own = jnp.nan_to_num(pool[..., :width])
        outs.append(variant(queries, write_latent(own, rows, first, batch), first, batch, features))
    np.testing.assert_array_equal(*outs)
