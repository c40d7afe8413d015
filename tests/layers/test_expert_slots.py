"""Slots of one table: equal to a loop over tokens in NumPy; an unassigned slot gives 0 whatever the weights hold, and
two tables add up to the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.engine.build.backends import KERNELS
from routed_experts.layers.expert_slots import ExpertTable, run_slots
from routed_experts.layers.moe import ExpertCall, reference_experts

pytestmark = pytest.mark.usefixtures("fast_compilation")

N, K, D, F, E, R = 7, 3, 16, 8, 6, 2
BACKENDS = [name for name in ("reference", "tiled", "grouped", "native") if KERNELS[name].refusal("cpu") is None]


@pytest.fixture(scope="module")
def layer():
    noise = np.random.default_rng(3)
    table = ExpertTable(
        *(jnp.asarray(noise.standard_normal(s), jnp.float32) for s in ((R * E, D, 2 * F), (R * E, F, D)))
    )
    ids = np.stack([noise.permutation(E)[:K] for _ in range(N)]).astype(np.int32)
    return (
        jnp.asarray(noise.standard_normal((N, D)), jnp.float32),
        ids,
        jnp.asarray(noise.random((N, K)), jnp.float32),
        table,
    )


def by_loop(x, slots, weights, table, layer):
    """The sum, token by token and slot by slot, in float64."""
    wide = [np.asarray(array, np.float64) for array in (x, weights, table.gate_up, table.down)]
    x, weights, gate_up, down = wide
    y = np.zeros_like(x)
    for n, row in enumerate(np.asarray(slots)):
        for k, slot in enumerate(row):
            if slot >= 0:
                gate, up = np.split(x[n] @ gate_up[layer * E + slot], 2)
                y[n] += weights[n, k] * ((gate / (1 + np.exp(-gate)) * up) @ down[layer * E + slot])
    return y


def run(x, slots, weights, table, layer, backend, size=E):
    how = {"size": size, "backend": KERNELS[backend].load().moe}
    return np.asarray(jax.jit(lambda *arrays: run_slots(*arrays, **how))(x, slots, weights, table, np.int32(layer)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_of_a_table_equal_a_loop(layer, backend):
    x, ids, weights, table = layer
    slots = np.where(np.random.default_rng(1).random(ids.shape) < 0.5, ids, -1)
    slots[2] = -1
    np.testing.assert_allclose(
        run(x, slots, weights, table, 1, backend), by_loop(x, slots, weights, table, 1), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("tiled", "native")])
def test_a_table_of_another_format_is_computed_in_its_own(layer, backend):
    x, ids, weights, table = layer
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), table)
    actual, expected = run(x, ids, weights, half, 0, backend), by_loop(x.astype(jnp.bfloat16), ids, weights, half, 0)
    np.testing.assert_allclose(actual, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unassigned_slot_adds_nothing_even_to_a_row_of_nan(layer, backend):
    x, ids, weights, table = layer
    slots = ids.copy()
    slots[4] = -1
    actual = run(x.at[4].set(jnp.nan), slots, weights, table, 0, backend)
    assert (actual[4] == 0).all()
    others = np.arange(N) != 4
    np.testing.assert_array_equal(actual[others], run(x, slots, weights, table, 0, backend)[others])


def test_two_tables_add_up_to_the_layer(layer):
    x, ids, weights, table = layer
    call = ExpertCall(x, jnp.asarray(ids), weights, jnp.ones(N, bool), table.gate_up, table.down, jnp.int32(E), E)
    device_ids, host_ids = np.where(ids < 2, ids, -1), np.where(ids < 2, -1, ids)
    both = [run(x, slots, weights, table, 1, "tiled") for slots in (device_ids, host_ids)]
    np.testing.assert_allclose(sum(both), reference_experts(call), atol=2e-4, rtol=1e-4)


def test_a_table_of_none_gives_zeros(layer):
    x, ids, weights, _ = layer
    empty = ExpertTable(jnp.zeros((0, D, 2 * F)), jnp.zeros((0, F, D)))
    assert (run(x, np.full_like(ids, -1), weights, empty, 0, "tiled", size=0) == 0).all()
