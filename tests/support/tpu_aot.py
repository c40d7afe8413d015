"""Compile with the real TPU compiler on a machine that has no TPU.

Proves that a program lowers, that it fits in VMEM and HBM and that pools are updated in place; proves no values and no
times, as the executable cannot run. Arguments are `jax.ShapeDtypeStruct`: nothing is allocated. Run under
JAX_PLATFORMS=cpu."""

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

REPLICATED = P()
TOPOLOGY = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}

# Read when libtpu loads: no metadata server, no log folder, and a second test run beside this one is no error.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@functools.cache
def tpu_devices(chip: str) -> Sequence[Any]:
    """Describe the devices of one host of `chip`; they can be compiled for, never run on."""
    for name, value in LIBTPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY[chip]).devices


def tpu_mesh(chip: str, shape: tuple[int, ...] = (1,), axes: tuple[str, ...] = ("tensor",)) -> Mesh:
    devices = tpu_devices(chip)
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), axes)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Keep programs out of the persistent cache: a compiler without a chip can write an entry there, but not load it
    again."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX looks at the switch once, then remembers
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def compile_tpu(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    in_specs: Any = REPLICATED,
    out_specs: Any = REPLICATED,
    donate_argnums: int | Sequence[int] = (),
) -> jax.stages.Compiled:
    """Lower and compile `fn` for the chip of `mesh`; args are trees of `jax.ShapeDtypeStruct` of global shape."""

    def to_shardings(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))

    jitted = jax.jit(
        fn, in_shardings=to_shardings(in_specs), out_shardings=to_shardings(out_specs), donate_argnums=donate_argnums
    )
    # Without the abstract mesh pltpu.get_tpu_info() fails on a CPU host.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), without_compilation_cache():
        return jitted.lower(*args).compile()


def pool_copies(compiled: jax.stages.Compiled, pool: jax.ShapeDtypeStruct) -> list[str]:
    """Find the instructions that copy an array of the pool's shape."""
    dims = ",".join(map(str, pool.shape))
    return re.findall(rf"= .*\[{dims}\].* copy(?:-start)?\(", compiled.as_text() or "")


def assert_in_place(compiled: jax.stages.Compiled, pool: jax.ShapeDtypeStruct, max_temp_bytes: int) -> None:
    """Check that a donated pool (its per-device shape) is aliased, never copied, and that temporaries are bounded.

    Aliasing alone proves nothing: a pool copied whole, twice, aliases as well. Use a pool larger than VMEM (128
    MiB)."""
    memory, copies = compiled.memory_analysis(), pool_copies(compiled, pool)
    aliased, expected = memory.alias_size_in_bytes, pool.size * pool.dtype.itemsize
    assert aliased >= expected, f"the pool is not updated in place: {aliased} of {expected} bytes aliased; donate it"
    assert not copies, f"the pool is copied whole {len(copies)} times: {copies}"
    assert memory.temp_size_in_bytes <= max_temp_bytes, (
        f"temporaries: {memory.temp_size_in_bytes} bytes, expected at most {max_temp_bytes}"
    )
