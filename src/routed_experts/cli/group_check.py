"""`routed-experts doctor --nnodes N`: starts a process group without a model, and times its rendezvous, its channel and
a sum over all devices."""

import statistics
import time

from routed_experts.cli.bootstrap import start_jax
from routed_experts.core.dist_config import DistConfig

_ROUNDS = 20
_SUM_BYTES = 1 << 20  # of float32, on each device


def check_group(dist: DistConfig) -> int:
    """Meet the other processes, measure, and end with them; returns 0. Raises ConfigError, MachineError or
    PeerLostError."""
    start_jax(default_platform=None, find_devices=False)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from routed_experts.engine.build.group_start import group_fields
    from routed_experts.engine.group.process_group import FollowingGroup, start_group
    from routed_experts.models.base.sharding import put_global

    since = time.perf_counter()
    fields = group_fields(None, dist, None, None, "none")
    group = start_group(dist, fields, num_devices=None)
    print(f"rendezvous and JAX: {time.perf_counter() - since:.2f} s, process {group.rank} of {dist.nnodes}")
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("all",))
    print(f"devices: {len(devices)} of all processes, {len(jax.local_devices())} here, {devices[0].device_kind}")
    trips = [_seconds(lambda index=index: group.exchange(f"trip {index}", index)) for index in range(_ROUNDS)]
    print(f"a value of every process to all, over the group's channel: {statistics.median(trips) * 1e3:.3f} ms")

    def add(part: jax.Array) -> jax.Array:
        return jax.lax.psum(part, "all")

    same = PartitionSpec()
    summed = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=same, out_specs=same, check_vma=False))
    ones = put_global(np.ones(_SUM_BYTES // 4, np.float32), jax.sharding.NamedSharding(mesh, same))
    total = float(jnp.max(jax.block_until_ready(summed(ones)).addressable_data(0)))
    times = [_seconds(lambda: jax.block_until_ready(summed(ones))) for _ in range(_ROUNDS)]
    print(f"a sum of {_SUM_BYTES >> 20} MiB over all devices: {statistics.median(times) * 1e3:.3f} ms")
    if isinstance(group, FollowingGroup):
        group.stopped(group.receive().seq)
    else:
        group.close()
    passed = total == len(devices)
    print("all checks passed" if passed else f"FAILED: the sum of {len(devices)} ones is {total}")
    return 0 if passed else 1


def _seconds(call: object) -> float:
    assert callable(call)
    since = time.perf_counter()
    call()
    return time.perf_counter() - since
