"""Ordered sums add what devices hold in the order of the devices, by the bit; other sums stay XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.layers.parallel import AxisGroup

pytestmark = pytest.mark.devices(4)


def run(group, method, parts):
    mesh = Mesh(np.array(jax.devices()[: group.count]), ("tensor",))

    def program(part):
        return getattr(group, method)(part[0])

    sharded = jax.shard_map(
        program, mesh=mesh, in_specs=PartitionSpec("tensor"), out_specs=PartitionSpec(), check_vma=False
    )
    return np.asarray(jax.jit(sharded)(parts)), jax.jit(sharded).lower(parts).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [2, 4])
def test_an_ordered_sum_is_the_fold_in_the_order_of_the_devices(count, dtype):
    noise = np.random.default_rng(0).normal(size=(count, 33, 7)) * np.logspace(-3, 3, count)[:, None, None]
    parts = jnp.asarray(noise, dtype)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    group = AxisGroup(axis="tensor", count=count, ordered=True)
    actual, text = run(group, "all_reduce", parts)
    np.testing.assert_array_equal(actual, np.asarray(expected))
    assert "all_gather" in text and "all_reduce" not in text
    mean, _ = run(group, "all_mean", parts)
    np.testing.assert_array_equal(mean, np.asarray(expected / count))


def test_sums_are_ordered_in_deterministic_mode_alone():
    for deterministic in (False, True):
        kernels, _ = DEFAULT_BACKENDS.choose(ServerArgs(tp_size=4, deterministic=deterministic))
        assert kernels.group.ordered == deterministic
    _, text = run(AxisGroup(axis="tensor", count=4), "all_reduce", jnp.ones((4, 8)))
    assert "all_reduce" in text and "all_gather" not in text
