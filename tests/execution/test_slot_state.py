"""SlotState against loops over requests and tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.core.model_worker_batch import FROM_DEVICE, ForwardMode
from routed_experts.execution.forward_batch import BatchShape, pack_words, unpack, unpack_sampler, unpack_words
from routed_experts.execution.slot_state import SlotState, advance, advance_positions, locate, locate_text

NUM_SLOTS, NUM_DRAFTS = 6, 3
SHAPE = BatchShape(mode=ForwardMode.TARGET_VERIFY, num_tokens=12, num_requests=4, table_width=5)


def random_step(rng, counts):
    """A packed batch that is ahead: requests that feed so many tokens, in slots of their own."""
    total, rows = sum(counts), len(counts)
    parts = {name: rng.integers(1, 1000, dims).astype(np.int32) for name, dims in SHAPE.segments().items()}
    for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition"):
        parts[name] = rng.normal(size=parts[name].shape).astype(np.float32)
    starts = np.full(SHAPE.num_requests + 1, total)
    starts[: rows + 1] = np.cumsum([0, *counts])
    for name in ("token_ids", "positions", "token_rows", "seq_lens", "position", "request_slots"):
        parts[name][:] = 0
    parts["num_tokens"], parts["query_starts"] = np.array(total, np.int32), starts.astype(np.int32)
    parts["token_ids"][:total] = FROM_DEVICE
    parts["token_rows"][:total] = np.repeat(np.arange(rows), counts)
    parts["positions"][:total] = np.concatenate([np.arange(count) for count in counts])
    parts["seq_lens"][:rows] = parts["position"][:rows] = counts
    parts["request_slots"][:rows] = 1 + rng.permutation(NUM_SLOTS - 1)[:rows]
    return parts


def random_state(rng):
    drafts = rng.integers(-1, 50, (NUM_SLOTS, NUM_DRAFTS))
    return SlotState(
        positions=jnp.asarray(rng.integers(1, 40, NUM_SLOTS), jnp.int32), drafts=jnp.asarray(drafts, jnp.int32)
    )


def packed(parts):
    return pack_words({name: jnp.asarray(part) for name, part in parts.items()})


def test_words_are_packed_as_they_were_unpacked():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, SHAPE.packed.shape, dtype=np.int64).astype(np.int32)
    np.testing.assert_array_equal(pack_words(unpack_words(jnp.asarray(words), SHAPE)), words)


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 1, 1, 1), (4, 1, 3), (2, 4, 4, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_that_is_ahead_is_located_token_by_token(counts, seed):
    rng = np.random.default_rng(seed)
    parts, state = random_step(rng, counts), random_state(rng)
    located = jax.jit(lambda words, state: locate(words, state, shape=SHAPE))(packed(parts), state)
    actual, expected = unpack_words(located, SHAPE), {name: part.copy() for name, part in parts.items()}
    for at in range(sum(counts)):
        row, place = int(parts["token_rows"][at]), int(parts["positions"][at])
        slot = int(parts["request_slots"][row])
        expected["positions"][at] = int(state.positions[slot]) + place
        if place > 0:
            expected["token_ids"][at] = max(int(state.drafts[slot, place - 1]), 0)
    for row, count in enumerate(counts):
        end = int(state.positions[parts["request_slots"][row]]) + count
        expected["seq_lens"][row] = expected["position"][row] = end
    for name, part in expected.items():
        np.testing.assert_array_equal(actual[name], part, err_msg=name)
    paged = unpack(located, SHAPE).paged
    assert int(paged.valid.sum()) == sum(counts)
    np.testing.assert_array_equal(unpack_sampler(located, SHAPE.num_requests).sampling.position, expected["position"])


@pytest.mark.parametrize("counts", [(1,), (4, 1, 3), (2, 4, 4, 2)])
def test_slots_move_behind_their_accepted_drafts_and_no_other_slot_changes(counts):
    rng = np.random.default_rng(3)
    parts, state = random_step(rng, counts), random_state(rng)
    start = rng.integers(1, 30, len(counts))
    parts["positions"][: sum(counts)] += np.repeat(start, counts).astype(np.int32)
    accepted = np.array([rng.integers(0, count) for count in counts] + [0] * (4 - len(counts)), np.int32)
    proposed = rng.integers(-1, 50, (SHAPE.num_requests, 2 * NUM_DRAFTS)).astype(np.int32)
    actual = jax.jit(lambda *inputs: advance(*inputs, shape=SHAPE))(
        state, packed(parts), jnp.asarray(accepted), jnp.asarray(proposed)
    )
    positions, drafts = np.array(state.positions), np.array(state.drafts)
    for row, slot in enumerate(parts["request_slots"][: len(counts)]):
        positions[slot] = start[row] + 1 + accepted[row]
        drafts[slot] = proposed[row, :NUM_DRAFTS]
    np.testing.assert_array_equal(actual.positions[1:], positions[1:])  # slot 0 is that of padding
    np.testing.assert_array_equal(actual.drafts[1:], drafts[1:])


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 1, 1, 1), (4, 1, 3), (2, 4, 4, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_that_is_ahead_takes_its_drafts_from_the_text_at_their_positions(counts, seed):
    rng = np.random.default_rng(seed)
    parts, positions = random_step(rng, counts), rng.integers(1, 40, NUM_SLOTS).astype(np.int32)
    texts, size = np.zeros((SHAPE.num_requests, 8), np.int32), 7
    texts[:, 1:] = rng.integers(-1, 50, (SHAPE.num_requests, size))
    for row, slot in enumerate(parts["request_slots"]):  # the text begins before the request stands, or far from it
        texts[row, 0] = positions[slot] + rng.integers(-9, 4)
    located = jax.jit(lambda *inputs: locate_text(*inputs, shape=SHAPE))(packed(parts), positions, texts)
    actual, expected = unpack_words(located, SHAPE), {name: part.copy() for name, part in parts.items()}
    for at in range(sum(counts)):
        row, place = int(parts["token_rows"][at]), int(parts["positions"][at])
        position = int(positions[parts["request_slots"][row]]) + place
        expected["positions"][at] = position
        index = position - int(texts[row, 0])
        if place > 0:
            expected["token_ids"][at] = max(int(texts[row, 1 + index]), 0) if 0 <= index < size else 0
    for row, count in enumerate(counts):
        end = int(positions[parts["request_slots"][row]]) + count
        expected["seq_lens"][row] = expected["position"][row] = end
    for name, part in expected.items():
        np.testing.assert_array_equal(actual[name], part, err_msg=name)


def test_positions_advance_as_the_state_does_whatever_follows_the_packed_form():
    rng = np.random.default_rng(3)
    parts, state = random_step(rng, (4, 1, 3)), random_state(rng)
    accepted = jnp.asarray([2, 0, 1, 0], jnp.int32)
    proposed = jnp.zeros((SHAPE.num_requests, 2 * NUM_DRAFTS), jnp.int32)
    expected = advance(state, packed(parts), accepted, proposed, shape=SHAPE).positions
    words = jnp.concatenate([packed(parts), jnp.full(5, 77, jnp.int32)])
    np.testing.assert_array_equal(advance_positions(state.positions, words, accepted, shape=SHAPE), expected)


def test_what_is_located_next_continues_what_has_been_accepted():
    """Two steps in a row: the second begins behind the first one's accepted drafts, with the drafts proposed then."""
    rng = np.random.default_rng(5)
    parts, state = random_step(rng, (4, 3)), random_state(rng)
    first = locate(packed(parts), state, shape=SHAPE)
    proposed = jnp.asarray(rng.integers(0, 50, (SHAPE.num_requests, 2 * NUM_DRAFTS)), jnp.int32)
    state = advance(state, first, jnp.asarray([2, 0, 0, 0], jnp.int32), proposed, shape=SHAPE)
    second, first = (unpack_words(words, SHAPE) for words in (locate(packed(parts), state, shape=SHAPE), first))
    assert int(second["positions"][0]) == int(first["positions"][0]) + 3
    assert int(second["positions"][4]) == int(first["positions"][4]) + 1
    np.testing.assert_array_equal(second["token_ids"][1:4], proposed[0, :3])
    np.testing.assert_array_equal(second["token_ids"][5:7], proposed[1, :2])
