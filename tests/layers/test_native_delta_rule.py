"""The native gated delta rule: against the loop in float64 and against array code, with states in place; a sequence's
bits do not depend on its cuts nor on others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_delta_rule import SHAPE, loop, random_inputs
from layers.test_delta_rule import SHAPES as LOOP_SHAPES
from layers.test_native_batch_invariance import bits
from routed_experts.layers.delta_rule import DeltaInputs, DeltaShape, DeltaState, delta_ragged
from routed_experts.layers.native.ops import native_delta

pytestmark = pytest.mark.usefixtures("fast_compilation")

LAYER, SLOTS = 1, 7
RUN = jax.jit(native_delta)
SHAPES = {
    "odd": SHAPE,
    "whole vectors": DeltaShape(key_heads=1, value_heads=2, key_dim=32, value_dim=48, width=4),
    "wide": DeltaShape(key_heads=2, value_heads=4, key_dim=24, value_dim=144, width=3),
    "ragged": DeltaShape(key_heads=2, value_heads=2, key_dim=17, value_dim=37, width=2),
}
SHAPES |= {f"{name}, by channel": dataclasses.replace(shape, by_channel=True) for name, shape in SHAPES.items()}


def make_inputs(shape, num_tokens, *, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    return DeltaInputs(
        jnp.asarray(rng.standard_normal((num_tokens, shape.channels)), dtype),
        jnp.asarray(-rng.random((num_tokens, shape.num_decays)), jnp.float32),
        jnp.asarray(rng.random((num_tokens, shape.value_heads)), jnp.float32),
        jnp.asarray(rng.standard_normal((shape.channels, shape.width)), dtype),
        shape,
    )


def noise(shape, *, dtype="float32"):
    """States of other layers and slots, and of requests before: what must not be read nor changed."""
    rng = np.random.default_rng(9)
    conv = rng.standard_normal((2, SLOTS, shape.width - 1, shape.channels))
    recurrent = rng.standard_normal((2, SLOTS, shape.value_heads, shape.key_dim, shape.value_dim))
    return DeltaState(jnp.asarray(conv, dtype), jnp.asarray(recurrent, jnp.float32))


def feed(inputs, lengths, cuts, *, slots, padding=2):
    """Sequences in these cuts; what each reads, and the states."""
    shape, first = inputs.shape, np.cumsum((0, *lengths))
    states, done, reads = noise(shape, dtype=inputs.mixed.dtype), [0] * len(lengths), [[] for _ in lengths]
    for step in cuts:
        rows = [row for i, new in enumerate(step) for row in range(first[i] + done[i], first[i] + done[i] + new)]
        at = np.array(rows + [0] * padding)
        cut = DeltaInputs(inputs.mixed[at], inputs.decay[at], inputs.beta[at], inputs.kernel, shape)
        starts = jnp.asarray(np.cumsum((0, *step, 0)), jnp.int32)
        fresh = jnp.asarray([*(before == 0 for before in done), True])
        named = jnp.asarray([*slots, 0], jnp.int32)
        read, states = RUN(cut, states, jnp.int32(LAYER), named, fresh, starts)
        assert not np.any(read[len(rows) :]), "rows of no request"
        for i, new in enumerate(step):
            reads[i].append(np.asarray(read[starts[i] : starts[i] + new]))
            done[i] += new
    assert tuple(done) == lengths
    return [np.concatenate(parts) for parts in reads], states


CUTS = [
    ((9, 1, 14), ((4, 1, 0), (0, 0, 13), (1, 0, 1), (4, 0, 0))),
    ((190, 130, 3), ((1, 127, 1), (100, 1, 1), (0, 2, 1), (65, 0, 0), (24, 0, 0))),
    ((64, 65, 63), ((64, 65, 63),)),
]


@pytest.mark.parametrize("shape", LOOP_SHAPES.values(), ids=LOOP_SHAPES)
@pytest.mark.parametrize("forgets", [0.01, 1.0, 40.0])
@pytest.mark.parametrize(("lengths", "cuts"), CUTS)
def test_steps_of_any_cut_are_the_loop_and_other_states_are_untouched(lengths, cuts, forgets, shape):
    inputs = random_inputs(np.random.default_rng(0), sum(lengths), forgets=forgets, shape=shape)
    first = np.cumsum((0, *lengths))
    reads, states = feed(inputs, lengths, cuts, slots=(5, 2, 3))
    for i, read in enumerate(reads):
        np.testing.assert_allclose(read, loop(inputs, np.arange(first[i], first[i + 1])), atol=2e-5)
    for leaf, before in zip(jax.tree.leaves(states), jax.tree.leaves(noise(SHAPE)), strict=True):
        np.testing.assert_array_equal(leaf[0], before[0])
        np.testing.assert_array_equal(np.delete(leaf[1], (5, 2, 3), axis=0), np.delete(before[1], (5, 2, 3), axis=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_reads_and_states_are_those_of_array_code(name, dtype):
    shape, lengths = SHAPES[name], (70, 1, 20)
    inputs = make_inputs(shape, sum(lengths), dtype=dtype)
    reads, states = feed(inputs, lengths, (lengths,), slots=(5, 2, 3))
    plain, expected = jax.jit(delta_ragged)(
        inputs, shape.zeros(3, jnp.dtype(dtype)), jnp.asarray(np.cumsum((0, *lengths)), jnp.int32)
    )
    np.testing.assert_allclose(np.concatenate(reads), plain, atol=5e-5)
    np.testing.assert_allclose(states.recurrent[LAYER, jnp.array([5, 2, 3])], expected.recurrent, atol=5e-5)
    np.testing.assert_array_equal(states.conv[LAYER, jnp.array([5, 2, 3])], expected.conv)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_of_a_sequence_depend_neither_on_cuts_nor_on_others(name, dtype):
    inputs = make_inputs(SHAPES[name], 90, dtype=dtype)
    whole, states = feed(inputs, (50, 40), ((50, 40),), slots=(4, 1))
    for cuts in (
        ((1, 0),) * 50 + ((0, 40),),
        ((49, 1), (1, 39)),
        ((0, 38), (20, 1), (30, 1)),
        ((2, 3), (3, 2), (45, 35)),
    ):
        reads, cut_states = feed(inputs, (50, 40), cuts, slots=(2, 6))
        for read, expected in zip(reads, whole, strict=True):
            np.testing.assert_array_equal(bits(read), bits(expected))
        for leaf, expected in zip(jax.tree.leaves(cut_states), jax.tree.leaves(states), strict=True):
            np.testing.assert_array_equal(bits(leaf[1, (2, 6), ...]), bits(expected[1, (4, 1), ...]))


@pytest.mark.parametrize("shape", LOOP_SHAPES.values(), ids=LOOP_SHAPES)
@pytest.mark.parametrize("part", ["mixed", "decay", "beta"])
@pytest.mark.parametrize("at", [0, 40, 70, 99])
def test_a_token_that_is_no_number_spoils_those_after_it_in_its_sequence_alone(part, at, shape):
    cuts = ((80, 80), (20, 1), (0, 19))
    inputs = random_inputs(np.random.default_rng(2), 200, shape=shape)
    expected, whole = feed(inputs, (100, 100), cuts, slots=(0, 3))
    numbers = {name: getattr(inputs, name) for name in ("mixed", "decay", "beta")}
    numbers[part] = numbers[part].at[at].set(jnp.nan)
    reads, left = feed(DeltaInputs(**numbers, kernel=inputs.kernel, shape=shape), (100, 100), cuts, slots=(0, 3))
    np.testing.assert_array_equal(reads[0][:at], expected[0][:at])
    np.testing.assert_array_equal(reads[1], expected[1])
    assert np.all(np.isnan(reads[0][at:]))
    np.testing.assert_array_equal(left.recurrent[1, 3], whole.recurrent[1, 3])
    assert not np.any(np.isfinite(left.recurrent[1, 0]))


@pytest.mark.parametrize("at", [4, 11])
def test_a_decay_of_one_channel_that_is_no_number_spoils_its_head_alone(at):
    """At the last token, too: then the rows of other channels are spoiled by what the token adds."""
    inputs = make_inputs(SHAPES["odd, by channel"], 12)
    channel = inputs.shape.key_dim + 1  # of the second head
    spoiled = dataclasses.replace(inputs, decay=inputs.decay.at[at, channel].set(jnp.nan))
    ((expected,), whole), ((read,), left) = (feed(given, (12,), ((12,),), slots=(3,)) for given in (inputs, spoiled))
    np.testing.assert_array_equal(np.delete(read, 1, axis=1), np.delete(expected, 1, axis=1))
    np.testing.assert_array_equal(read[:at], expected[:at])
    assert np.all(np.isnan(read[at:, 1]))
    memory, clean = left.recurrent[LAYER, 3], whole.recurrent[LAYER, 3]
    np.testing.assert_array_equal(np.delete(memory, 1, axis=0), np.delete(clean, 1, axis=0))
    assert np.all(np.isnan(memory[1]))


def test_a_request_that_starts_anew_reads_nothing_of_the_one_before():
    inputs = make_inputs(SHAPE, 12)
    starts, slots = jnp.asarray([0, 12], jnp.int32), jnp.asarray([3], jnp.int32)
    outs = [
        RUN(inputs, states, jnp.int32(LAYER), slots, jnp.asarray([True]), starts)
        for states in (noise(SHAPE), jax.tree.map(lambda leaf: leaf * jnp.nan, noise(SHAPE)))
    ]
    np.testing.assert_array_equal(outs[0][0], outs[1][0])
    for leaf, other in zip(jax.tree.leaves(outs[0][1]), jax.tree.leaves(outs[1][1]), strict=True):
        np.testing.assert_array_equal(leaf[LAYER, 3], other[LAYER, 3])


def test_states_are_updated_in_place():
    shape = DeltaShape(key_heads=2, value_heads=4, key_dim=64, value_dim=64, width=4)
    states, inputs = noise(shape), make_inputs(shape, 3)
    args = (states, inputs, jnp.asarray([0, 1, 2, 3], jnp.int32), jnp.asarray([1, 5, 2], jnp.int32))

    def step(states, inputs, starts, slots):
        return native_delta(inputs, states, jnp.int32(LAYER), slots, jnp.zeros(3, bool), starts)

    memory = jax.jit(step, donate_argnums=0).lower(*args).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(states))
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size // 4


@pytest.mark.parametrize(
    ("slots", "starts", "layer", "message"),
    [
        ((1, 1), (0, 1, 3), 1, "each request has a state of its own"),
        ((1, 9), (0, 1, 3), 1, "each request has a state of its own"),
        ((1, 2), (0, 1, 9), 1, "query_starts are outside the step"),
        ((1, 2), (0, 1, 3), 2, "the layer is outside the states"),
    ],
)
def test_what_does_not_fit_is_an_error_and_not_a_crash(slots, starts, layer, message):
    run = functools.partial(RUN, make_inputs(SHAPE, 3), noise(SHAPE))
    where = (jnp.asarray(slots, jnp.int32), jnp.zeros(2, bool), jnp.asarray(starts, jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(run(jnp.int32(layer), *where))


def test_the_kernel_of_the_convolution_keeps_its_dtype_where_the_state_is_narrower():
    """States of bfloat16 beside a float32 kernel: as in array code, only inputs and states are rounded."""
    wide, lengths = make_inputs(SHAPE, 30, dtype="float32"), (30,)
    inputs = DeltaInputs(wide.mixed.astype(jnp.bfloat16), wide.decay, wide.beta, wide.kernel, SHAPE)
    (read,), _ = feed(inputs, lengths, ((30,),), slots=(4,))
    rounded = DeltaInputs(inputs.mixed.astype(jnp.float32), wide.decay, wide.beta, wide.kernel, SHAPE)
    np.testing.assert_allclose(read, loop(rounded, np.arange(30)), atol=2e-5)
