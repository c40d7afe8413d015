"""Verify steps of a recurrent layer: drafts that are rejected leave no trace. Sequences are cut at random into such
steps, some with wrong drafts behind the right ones. Each right token reads what a loop over its sequence gives."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_delta_rule import SHAPES, loop, random_inputs
from layers.test_short_conv import by_hand
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape, unpack
from routed_experts.execution.recurrent_ops import commit_states, hybrid_ops, with_inputs
from routed_experts.layers.gpu.delta_rule import gpu_delta
from routed_experts.layers.native.ops import native_delta
from routed_experts.layers.short_conv import ConvInputs, ConvShape
from routed_experts.layers.tpu.delta_rule import recur as tpu_recur
from routed_experts.memory.kv_pool import HybridPool
from support.model_steps import packed

pytestmark = pytest.mark.usefixtures("fast_compilation")

DRAFTS, LENGTHS, SLOTS, OTHERS, LAYERS, LAYER = 3, (23, 9, 14), (4, 1, 2), (3, 5), 2, 1
STEP = BatchShape(mode=ForwardMode.TARGET_VERIFY, num_tokens=20, num_requests=4, table_width=1)
STORED = 16  # tokens of a verify step at most
CONV = ConvShape(channels=5, width=3)
KERNELS = {
    "array code": None,
    "native": native_delta,
    "GPU, interpreted": functools.partial(gpu_delta, interpret=True),
    "TPU, interpreted": functools.partial(tpu_recur, interpret=True),
}
CASES = {f"{name}, {kernel}": (shape, recur) for name, shape in SHAPES.items() for kernel, recur in KERNELS.items()}
CASES |= {"convolution": (CONV, None)}


def sequences(shape, rng):
    """The inputs of all sequences, one behind the other."""
    if shape is not CONV:
        return random_inputs(rng, sum(LENGTHS), shape=shape)
    sizes = (sum(LENGTHS), shape.channels), (shape.channels, shape.width), (shape.channels,)
    return ConvInputs(*(jnp.asarray(rng.standard_normal(size), jnp.float32) for size in sizes), shape)


def read_by_loop(inputs, rows):
    """What the tokens of one sequence read."""
    if isinstance(inputs, ConvInputs):
        return by_hand(np.asarray(inputs.mixed)[rows], np.asarray(inputs.kernel), np.asarray(inputs.bias))
    return loop(inputs, rows)


def take_rows(inputs, rows, rng):
    """The inputs of a step: these rows of all sequences, and noise where the row is -1."""

    def take(part):
        values = np.asarray(part)[np.maximum(rows, 0)]
        return jnp.asarray(np.where((rows < 0)[:, None], -rng.random(values.shape), values), jnp.float32)

    names = [name for name in ("mixed", "decay", "beta") if hasattr(inputs, name)]
    return dataclasses.replace(inputs, **{name: take(getattr(inputs, name)) for name in names})


def noisy_pool(shape, rng):
    """States of other layers and slots are noise; those of the sequences are initial ones."""
    one = jax.eval_shape(lambda: shape.zeros(1, jnp.dtype(jnp.float32)))
    noise = jax.tree.map(lambda leaf: rng.standard_normal((LAYERS, 6, *leaf.shape[1:])).astype(np.float32), one)
    for leaf in jax.tree.leaves(noise):
        leaf[LAYER, list(SLOTS)] = 0
    return HybridPool(jnp.zeros((1, 8, 2, 4), jnp.float32), jax.tree.map(jnp.asarray, noise))


def verify(pool, inputs, words, accepted, *, backend):
    """What a verify step reads in one layer, the pool after it, and the pool after the program that follows."""
    ops = hybrid_ops(types.SimpleNamespace(backend=backend), unpack(words, STEP))
    read, stored = ops.recur(inputs, with_inputs(pool, inputs.shape, STORED), jnp.int32(LAYER))
    left = dataclasses.replace(stored, inputs=None)
    return read, left, commit_states(left, stored.inputs, words, accepted, backend=backend, shape=STEP)


@dataclasses.dataclass
class Part:
    """A sequence's part of a step: its rows, -1 for wrong drafts, and how many drafts are right."""

    sequence: int
    rows: list
    accepted: int


def draw_step(rng, done):
    """The parts of a step, in any order. Some sequences sit out."""
    first, parts = np.cumsum((0, *LENGTHS)), []
    for index in rng.permutation(len(LENGTHS)).tolist():
        left = LENGTHS[index] - done[index]
        if left == 0 or rng.random() < 0.15:
            continue
        right = int(rng.integers(0, min(DRAFTS, left - 1) + 1))
        wrong, start = int(rng.integers(0, DRAFTS - right + 1)), int(first[index]) + done[index]
        parts.append(Part(index, [*range(start, start + right + 1), *[-1] * wrong], right))
    return parts


@pytest.mark.parametrize("case", CASES)
def test_sequences_in_verify_steps_with_wrong_drafts_are_those_of_a_loop(case):
    shape, recur = CASES[case]
    run = jax.jit(functools.partial(verify, backend=types.SimpleNamespace(recur=recur)))
    for seed in range(2):  # one program
        assert_verified(run, shape, np.random.default_rng(seed))


def assert_verified(run, shape, rng):
    """Random sequences in random steps read what a loop over each reads, and leave its states."""
    inputs, pool = sequences(shape, rng), noisy_pool(shape, rng)
    before, done, reads = jax.tree.map(np.asarray, pool), [0] * len(LENGTHS), [[] for _ in LENGTHS]
    while done != list(LENGTHS):
        parts = draw_step(rng, done)
        ends = np.cumsum([0, *(len(part.rows) for part in parts)])
        starts = np.pad(ends, (0, STEP.num_requests + 1 - ends.size), mode="edge")
        rows = np.full(STEP.num_tokens, -1)
        rows[: ends[-1]] = [row for part in parts for row in part.rows]
        positions = [1 + done[part.sequence] + place for part in parts for place in range(len(part.rows))]
        slots = [SLOTS[part.sequence] for part in parts]
        words = packed(STEP, positions=positions, query_starts=starts, request_slots=slots)
        accepted = np.zeros(STEP.num_requests, np.int32)
        accepted[: len(parts)] = [part.accepted for part in parts]
        old = jax.tree.map(np.asarray, pool.states)
        read, left, pool = run(pool, take_rows(inputs, rows, rng), words, jnp.asarray(accepted))
        jax.tree.map(np.testing.assert_array_equal, left.states, old)
        for part, start in zip(parts, ends, strict=False):
            reads[part.sequence].append(np.asarray(read)[start : start + 1 + part.accepted])
            done[part.sequence] += 1 + part.accepted
        conv = np.asarray(jax.tree.leaves(pool.states)[0])[LAYER]
        for slot, count, start in zip(SLOTS, done, np.cumsum((0, *LENGTHS)), strict=False):
            past = np.pad(np.asarray(inputs.mixed)[start : start + count], ((shape.width - 1, 0), (0, 0)))
            np.testing.assert_array_equal(conv[slot], past[count:], "the last inputs of the convolution")
    for index, start in enumerate(np.cumsum((0, *LENGTHS))[:-1]):
        expected = read_by_loop(inputs, np.arange(start, start + LENGTHS[index]))
        np.testing.assert_allclose(np.concatenate(reads[index]), expected, atol=3e-5)
    for leaf, noise in zip(jax.tree.leaves(pool.states), jax.tree.leaves(before.states), strict=True):
        np.testing.assert_array_equal(leaf[LAYER, OTHERS], noise[LAYER, OTHERS])
