"""A step's metadata crosses to the device as one int32 array and comes out bit for bit."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from routed_experts.core.model_worker_batch import (
    FROM_DEVICE,
    ForwardMode,
    ModelWorkerBatch,
    SamplingArrays,
    SamplingMode,
)
from routed_experts.execution.forward_batch import (
    BatchShape,
    num_sampler_words,
    pack,
    to_batch_shape,
    unpack,
    unpack_sampler,
)

SHAPES = [
    BatchShape(mode=ForwardMode.DECODE, num_tokens=1, num_requests=1, table_width=1),
    BatchShape(mode=ForwardMode.DECODE, num_tokens=8, num_requests=8, table_width=5),
    BatchShape(mode=ForwardMode.EXTEND, num_tokens=64, num_requests=3, table_width=16),
    BatchShape(mode=ForwardMode.EXTEND, num_tokens=7, num_requests=8, table_width=2),
]
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
# Bits that arithmetic would change: signed zeros, the smallest and largest floats, infinities, quiet and signalling
# NaN.
AWKWARD = np.array([0, 1 << 31, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001], np.uint32)


def random_batch(shape, seed):
    """Arrays of random bits, so that no two words agree by chance."""
    rng = np.random.default_rng(seed)
    tokens, rows = shape.num_tokens, shape.num_requests

    def words(*dims):
        return rng.integers(-(1 << 31), 1 << 31, dims).astype(np.int32)

    floats = {
        name: np.where(rng.random(rows) < 0.5, words(rows).view(np.uint32), rng.choice(AWKWARD, rows))
        for name in FLOATS
    }
    columns = SamplingArrays(
        **{name: bits.astype(np.uint32).view(np.float32) for name, bits in floats.items()},
        top_k=words(rows),
        choice=words(rows),
        position=words(rows),
        prompt_len=words(rows),
        seed=words(rows, 2).view(np.uint32),
        bias_ids=None,
        bias_values=None,
    )
    return ModelWorkerBatch(
        step=0,
        mode=shape.mode,
        sampling_mode=SamplingMode.FILTERED,
        num_tokens=int(rng.integers(0, tokens + 1)),
        num_requests=rows,
        token_ids=words(tokens),
        positions=words(tokens),
        token_rows=words(tokens),
        kv_slots=words(tokens),
        query_starts=words(rows + 1),
        seq_lens=words(rows),
        request_slots=words(rows),
        page_table=words(rows, shape.table_width),
        sampling=columns,
        samples=(True,) * rows,
        prompt_targets=None,
        return_routed_experts=(True,) * rows,
    )


def bits(array):
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.mode.value}-{shape.num_tokens}x{shape.num_requests}"
)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_packed_is_unpacked_bit_for_bit(shape, seed):
    batch = random_batch(shape, seed)
    assert to_batch_shape(batch) == shape
    packed = pack(batch)
    assert (packed.shape, packed.dtype) == (shape.packed.shape, shape.packed.dtype)
    out = jax.jit(unpack, static_argnums=1)(packed, shape)
    sampler = jax.jit(unpack_sampler, static_argnums=1)(
        packed[: num_sampler_words(shape.num_requests)], shape.num_requests
    )
    sampling = batch.sampling
    pairs = {
        name: (getattr(sampler.sampling, name), getattr(sampling, name))
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "choice", "position")
    }
    pairs |= {
        name: (getattr(sampler, name), getattr(sampling, name)) for name in ("presence", "frequency", "repetition")
    }
    pairs |= {"prompt_len": (out.prompt_len, sampling.prompt_len), "token_ids": (out.token_ids, batch.token_ids)}
    pairs |= {"request_slots": (out.request_slots, batch.request_slots)}
    assert bits(sampler.request_slots) == bits(batch.request_slots), "both look at it"
    paged = ("positions", "token_rows", "query_starts", "seq_lens", "page_table")
    pairs |= {name: (getattr(out.paged, name), getattr(batch, name)) for name in paged}
    assert {name for name, (unpacked, packed_array) in pairs.items() if bits(unpacked) != bits(packed_array)} == set()
    assert np.array_equal(out.paged.valid, np.arange(shape.num_tokens) < batch.num_tokens)
    assert out.paged.decode is (shape.mode is ForwardMode.DECODE)
    others = {"num_tokens", "padding"}  # the first is seen in `valid`
    assert len(pairs) + len(others) == len(shape.segments()), "a segment that nobody looks at"


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 16, 64, 96])
@pytest.mark.parametrize("tokens", [1, 16, 100, 512, 4096])
def test_the_page_table_begins_at_a_multiple_of_256_bytes(tokens, requests):
    shape = BatchShape(mode=ForwardMode.EXTEND, num_tokens=tokens, num_requests=requests, table_width=3)
    segments = shape.segments()
    names = list(segments)
    before = sum(math.prod(segments[name]) for name in names[: names.index("page_table")])
    assert 4 * before % 256 == 0
    assert segments["padding"][0] < 64


def test_columns_that_are_views_are_packed_as_what_they_show():
    shape = SHAPES[1]
    batch = random_batch(shape, 0)
    strided = dataclasses.replace(
        batch, token_ids=np.repeat(batch.token_ids, 2)[::2], page_table=np.asfortranarray(batch.page_table)
    )
    assert np.array_equal(pack(strided), pack(batch))


def test_an_array_of_another_width_is_refused():
    batch = random_batch(SHAPES[1], 0)
    with pytest.raises(AssertionError, match="positions"):
        pack(dataclasses.replace(batch, positions=batch.positions.astype(np.int64)))


def test_unknown_tokens_are_the_last_ones_of_their_slots():
    batch = random_batch(SHAPES[2], 1)
    rng = np.random.default_rng(2)
    token_rows, slots = rng.integers(0, 3, 64).astype(np.int32), np.array([4, 0, 2], np.int32)
    ids = np.where(rng.random(64) < 0.5, FROM_DEVICE, rng.integers(0, 100, 64)).astype(np.int32)
    last = np.arange(5, dtype=np.int32) + 1000
    out = unpack(pack(dataclasses.replace(batch, token_ids=ids, token_rows=token_rows, request_slots=slots)), SHAPES[2])
    expected = [last[slots[row]] if token == FROM_DEVICE else token for token, row in zip(ids, token_rows, strict=True)]
    assert np.array_equal(out.resolve_tokens(last), expected)


def test_the_last_token_of_a_row_is_the_one_before_the_next_row():
    batch = dataclasses.replace(random_batch(SHAPES[2], 3), query_starts=np.array([0, 5, 6, 6], np.int32))
    positions = np.arange(64)[:, None]
    assert np.asarray(unpack(pack(batch), SHAPES[2]).of_last_tokens(positions)).tolist() == [[4], [5], [5]]
    empty = dataclasses.replace(batch, query_starts=np.zeros(4, np.int32))
    assert np.asarray(unpack(pack(empty), SHAPES[2]).of_last_tokens(positions)).tolist() == [[0], [0], [0]]
