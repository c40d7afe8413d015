"""Why experts= is refused on a TPU, by the real compiler: a host computation inside a program compiles, with its
weights in host memory, but the device waits for it at once. Proves no value and no time."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import compute_on
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from support.tpu_aot import tpu_mesh, without_compilation_cache

pytestmark = pytest.mark.tpu_aot

LAYERS, EXPERTS, TOKENS, TOP_K, HIDDEN, WIDTH = 4, 16, 16, 4, 256, 512


# JAX 0.10 calls the form with keywords compute_on2.
on_host = functools.partial(
    getattr(compute_on, "compute_on2", compute_on.compute_on),
    compute_type="device_host",
    out_memory_spaces=jax.memory.Space.Host,
)


@on_host
@jax.jit
def host_experts(x, ids, weights, layer, gate_up, down):
    """Every expert of a layer over all tokens, in a loop; weights of slots that are not its own count 0."""

    def add(expert, total):
        gate_up_of, down_of = (
            lax.dynamic_index_in_dim(a, layer * EXPERTS + expert, keepdims=False) for a in (gate_up, down)
        )
        gate, up = jnp.split(jnp.dot(x, gate_up_of, preferred_element_type=jnp.float32), 2, axis=-1)
        y = jnp.dot((jax.nn.silu(gate) * up).astype(x.dtype), down_of, preferred_element_type=jnp.float32)
        return total + y * jnp.sum(weights * (ids == expert).astype(weights.dtype), axis=1)[:, None]

    return lax.fori_loop(0, EXPERTS, add, (x * 0).astype(jnp.float32))


def step(x, ids, weights, matrix, gate_up, down):
    """A scan of layers; the host's experts and a product on the device need nothing of each other."""

    def body(x, layer):
        moved = jax.device_put((x, ids, weights, layer), jax.memory.Space.Host)
        from_host = jax.device_put(host_experts(*moved, gate_up, down), jax.memory.Space.Device)
        on_device = jnp.tanh(x @ matrix)
        return x + on_device + from_host.astype(x.dtype), None

    return lax.scan(body, x, jnp.arange(LAYERS, dtype=jnp.int32))[0]


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_host_experts_compile_but_nothing_runs_beside_them(chip):
    mesh = tpu_mesh(chip)
    device, host = (NamedSharding(mesh, P(), memory_kind=kind) for kind in ("device", "pinned_host"))

    def shape(*dims, dtype=jnp.bfloat16, at=device):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=at)

    args = (
        shape(TOKENS, HIDDEN),
        shape(TOKENS, TOP_K, dtype=jnp.int32),
        shape(TOKENS, TOP_K, dtype=jnp.float32),
        shape(HIDDEN, HIDDEN),
        shape(LAYERS * EXPERTS, HIDDEN, 2 * WIDTH, at=host),
        shape(LAYERS * EXPERTS, WIDTH, HIDDEN, at=host),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), without_compilation_cache():
        compiled = jax.jit(step, in_shardings=tuple(arg.sharding for arg in args)).lower(*args).compile()
    memory, store = compiled.memory_analysis(), 3 * LAYERS * EXPERTS * HIDDEN * WIDTH * 2
    assert memory.host_argument_size_in_bytes == store  # the weights stay in host memory
    assert memory.temp_size_in_bytes < store // LAYERS
    (body,) = [part for part in compiled.as_text().split("\n\n") if "host-call" in part and "call-start" in part]
    calls = [
        line
        for line in body.splitlines()
        if re.search(r"call-start\(|call-done\(|tanh|convolution\(|dot\(|fusion\(", line)
    ]
    (start,) = [number for number, line in enumerate(calls) if "call-start(" in line]
    assert "call-done(" in calls[start + 1], calls[start : start + 3]
