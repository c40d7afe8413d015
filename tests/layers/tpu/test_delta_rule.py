"""The gated delta rule on TPU, interpreted, against a NumPy loop over tokens; states of other layers and slots stay as
they were, NaN included. Nonfinite tokens spoil what follows them; repeated keys do not cancel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape, DeltaState
from routed_experts.layers.tpu.delta_rule import recur

pytestmark = pytest.mark.usefixtures("fast_compilation")

RUN = jax.jit(functools.partial(recur, interpret=True))
SHAPES = {
    "odd": DeltaShape(key_heads=1, value_heads=3, key_dim=5, value_dim=7, width=4),
    "two groups of heads": DeltaShape(key_heads=8, value_heads=16, key_dim=8, value_dim=8, width=3),
    "rows of lanes": DeltaShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128, width=4),
}
SHAPES |= {f"{name}, by channel": dataclasses.replace(shape, by_channel=True) for name, shape in SHAPES.items()}
SLOTS, LAYER = 6, 1


def loop(inputs, lengths, states):
    """Each token of each sequence in float64, from these states (conv, recurrent); what it reads, and the states."""
    shape, at, reads, ends = inputs.shape, 0, [], []
    mixed, decay, beta, kernel = (
        np.asarray(part, np.float64) for part in (inputs.mixed, inputs.decay, inputs.beta, inputs.kernel)
    )
    splits = np.cumsum([shape.key_heads * shape.key_dim] * 2)
    for length, (conv, memory) in zip(lengths, states, strict=True):
        for n in range(at, at + length):
            window = np.concatenate([conv, mixed[n : n + 1]])
            summed = np.sum(window * kernel.T, axis=0)
            queries, keys, values = np.split(summed / (1 + np.exp(-summed)), splits)
            queries, keys = (
                np.repeat(part.reshape(shape.key_heads, -1), shape.value_heads // shape.key_heads, axis=0)
                for part in (queries, keys)
            )
            queries, keys = (part / np.sqrt(np.sum(part**2, axis=1, keepdims=True) + 1e-6) for part in (queries, keys))
            memory = memory * np.exp(decay[n]).reshape(shape.value_heads, -1, 1)
            for head, value in enumerate(values.reshape(shape.value_heads, -1)):
                wrong = beta[n, head] * (value - memory[head].T @ keys[head])
                memory[head] += np.outer(keys[head], wrong)
            reads.append(np.stack([memory[h].T @ queries[h] for h in range(shape.value_heads)]) / shape.key_dim**0.5)
            conv = window[1:]
        ends.append((conv, memory))
        at += length
    return np.array(reads), ends


def random_inputs(rng, shape, num_tokens):
    return DeltaInputs(
        jnp.asarray(rng.standard_normal((num_tokens, shape.channels)), jnp.float32),
        jnp.asarray(-rng.random((num_tokens, shape.num_decays)), jnp.float32),
        jnp.asarray(rng.random((num_tokens, shape.value_heads)), jnp.float32),
        jnp.asarray(rng.standard_normal((shape.channels, shape.width)), jnp.float32),
        shape,
    )


CASES = {
    "decode, one starts anew": ((1, 1, 1), (False, True, False)),
    "chunks of two requests, one token, none": ((70, 1, 5, 0), (True, False, False, False)),
    "a whole chunk, then two tokens": ((64, 2), (False, False)),
}


@pytest.mark.parametrize(
    ("lengths", "fresh", "shape"),
    [
        pytest.param(
            *CASES[case],
            SHAPES[shape],
            id=f"{case}-{shape}",
            marks=[] if (row + column) % 3 == 0 else pytest.mark.thorough,  # each shape runs always, each case twice
        )
        for row, case in enumerate(CASES)
        for column, shape in enumerate(SHAPES)
    ],
)
def test_reads_and_states_are_those_of_the_loop_and_other_states_stay(shape, lengths, fresh):
    rng, total = np.random.default_rng(0), sum(lengths)
    inputs = random_inputs(rng, shape, total + 3)
    slots = np.array([3, 1, 5, 2][: len(lengths)])
    conv = np.full((2, SLOTS, shape.width - 1, shape.channels), np.nan, np.float32)
    recurrent = np.full((2, SLOTS, shape.value_heads, shape.key_dim, shape.value_dim), np.nan, np.float32)
    starts = []
    for slot, begins in zip(slots, fresh, strict=True):
        own = rng.standard_normal(conv.shape[2:]), rng.standard_normal(recurrent.shape[2:])
        if not begins:  # else what was there before is NaN
            conv[LAYER, slot], recurrent[LAYER, slot] = own
        starts.append((np.zeros_like(own[0]), np.zeros_like(own[1])) if begins else own)
    reads, ends = loop(inputs, lengths, starts)
    bounds = jnp.asarray(np.cumsum([0, *lengths, 0]), jnp.int32)  # the last row is padding, of slot 0
    dims = conv.shape[:2] + ((-1,) if lengths[0] == 70 else conv.shape[2:])  # once as numbers without dims
    states = DeltaState(jnp.asarray(conv).reshape(dims), jnp.asarray(recurrent))
    named, begins = jnp.asarray([*slots, 0], jnp.int32), jnp.asarray([*fresh, True])
    read, after = RUN(inputs, states, jnp.asarray(LAYER, jnp.int32), named, begins, bounds)
    np.testing.assert_allclose(read[:total], reads, atol=3e-5)
    assert not np.any(read[total:])
    for slot, (own_conv, own_memory) in zip(slots, ends, strict=True):
        conv[LAYER, slot], recurrent[LAYER, slot] = own_conv, own_memory
    np.testing.assert_allclose(after.conv.reshape(conv.shape), conv, atol=3e-5)
    np.testing.assert_allclose(after.recurrent, recurrent, atol=3e-5)


WHOLE = SHAPES["rows of lanes"]


def run_whole(inputs, lengths, states, *, fresh=False):
    """Requests in slots 0, 1, ... of the only layer."""
    count, bounds = len(lengths), jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    slots, layer = jnp.arange(count, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    return RUN(inputs, states, layer, slots, jnp.full(count, fresh), bounds)


def test_a_nonfinite_token_spoils_itself_and_later_tokens_of_its_request_alone():
    lengths, broken = (100, 1, 70, 66), 80  # in the second chunk of the first request
    rng, total = np.random.default_rng(1), sum(lengths)
    inputs = random_inputs(rng, WHOLE, total)
    zeros = WHOLE.zeros(len(lengths), jnp.float32)
    states = DeltaState(zeros.conv[None], jnp.asarray(rng.standard_normal((1, *zeros.recurrent.shape)), jnp.float32))
    read, after = run_whole(inputs, lengths, states)
    spoiled_inputs = dataclasses.replace(
        inputs,
        mixed=inputs.mixed.at[broken, 0].set(jnp.nan),  # one channel of one head
        decay=inputs.decay.at[101 + 3, 1].set(-jnp.inf),  # in the third request
    )
    conv = states.conv.at[0, 3, 1, 5].set(jnp.inf)  # the last request begins with it
    spoiled_read, spoiled_after = run_whole(spoiled_inputs, lengths, DeltaState(conv, states.recurrent))
    is_spoiled = np.zeros(total, bool)
    is_spoiled[broken:100] = is_spoiled[101 + 3 : 171] = is_spoiled[171:] = True
    assert np.all(np.isnan(np.asarray(spoiled_read)[is_spoiled]))
    assert np.array_equal(np.asarray(spoiled_read)[~is_spoiled], np.asarray(read)[~is_spoiled])
    assert np.all(np.isnan(np.asarray(spoiled_after.recurrent)[0, [0, 2, 3]]))
    assert np.array_equal(spoiled_after.recurrent[0, 1], after.recurrent[0, 1])


def test_chunks_of_one_repeated_key_equal_the_loop():
    """Powers of the triangular system grow to 1e17 here; its inverse does not."""
    num_tokens = 64
    inputs = random_inputs(np.random.default_rng(2), WHOLE, num_tokens)
    inputs = dataclasses.replace(
        inputs,
        mixed=jnp.broadcast_to(inputs.mixed[:1], inputs.mixed.shape),
        decay=jnp.zeros_like(inputs.decay),
        beta=jnp.ones_like(inputs.beta),
    )
    zeros = WHOLE.zeros(1, jnp.float32)
    reads, [(_, memory)] = loop(inputs, (num_tokens,), [(np.asarray(zeros.conv[0]), np.asarray(zeros.recurrent[0]))])
    read, after = run_whole(inputs, (num_tokens,), jax.tree.map(lambda leaf: leaf[None], zeros), fresh=True)
    np.testing.assert_allclose(read, reads, atol=3e-5)
    np.testing.assert_allclose(after.recurrent[0, 0], memory, atol=3e-5)
