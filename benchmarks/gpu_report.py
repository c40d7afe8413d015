"""What the GPU compiler makes of a decode step's layers, with capture off and on: launches, counted; no GPU is needed,
nothing is run.

    python benchmarks/gpu_report.py [--batches 1 16 64 256] [--layers 4]

Shapes of Qwen3-30B-A3B (benchmarks/step.py) with fewer layers, a loop whose body does not depend on their number, and a
small vocabulary. A launch is a fusion, a custom call or a copy of the optimised program: in the body of the loop over
layers (its condition is not counted: the number of turns is known), or outside of it, once a step. Sampling is another
program, the same with and without capture (tests/execution/test_capture_off_is_free.py). Needs Python 3.12 and `pip
install jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc nvidia-nvvm`. The card is
described below, as far as the compiler asks."""

import argparse
import collections
import os
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, write_result
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import RunnerConfig, lowerings
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec
from routed_experts.layers.routing import RouterSpec
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.families.qwen3_moe import Qwen3Moe, Qwen3MoeConfig

H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200 141GB HBM3e"
"""
PAGES, PAGE, TABLE = 512, 16, 256
_LAUNCH = re.compile(r"(?:ROOT )?%([A-Za-z_]+)\S* = .* (?:fusion|custom-call|copy)\(")


def config_of(layers: int) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B with so many layers."""
    return Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=2048,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        dense_width=6144,
        expert_width=768,
        router=RouterSpec(num_experts=128, top_k=8, renormalize=True),
        moe_layers=tuple(range(layers)),
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=False,
        context_length=PAGE * TABLE,
    )


def forward_text(device: jax.Device, config: Qwen3MoeConfig, batch: int, *, capture: bool) -> str:
    """The optimised program of a decode step's layers and its head."""
    pool = KVPoolSpec(
        num_layers=config.num_layers,
        num_pages=PAGES,
        page_size=PAGE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype("bfloat16"),
    )
    shape = BatchShape(mode=ForwardMode.DECODE, num_tokens=batch, num_requests=batch, table_width=TABLE)
    sizes = RunnerConfig(pool=pool, num_request_slots=batch + 1, shapes=(shape,), vocab_size=config.vocab_size)
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), config.needs, platform="gpu")
    module = nnx.eval_shape(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0), dtype=jnp.dtype("bfloat16")))
    graphdef, state = nnx.split(module)
    at = SingleDeviceSharding(device)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), state)
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec if capture else None,
        kernels=kernels,
        attention=attention,
        num_pages=PAGES,
        raw_logprobs=False,
    )
    with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("x",)).abstract_mesh):  # kernels ask which card it is
        return lowerings(state, spec, sizes)["forward", shape]().compile().as_text()


def launches(text: str) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """By name, the launches of the loop's body and those outside of it."""
    bodies = set(re.findall(r"body=(%[^\s,]+)", text))
    inside, outside = collections.Counter[str](), collections.Counter[str]()
    for computation in text.split("\n\n"):
        lines = computation.strip().splitlines()
        if lines and (lines[0].startswith("ENTRY") or lines[0].split(" ")[0] in bodies):
            names = [found[1] for line in lines[1:] if (found := _LAUNCH.match(line.strip()))]
            (outside if lines[0].startswith("ENTRY") else inside).update(names)
    return inside, outside


def main() -> None:
    """Compile, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # made without a card, a program cannot be read back
    device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200).devices[0]
    rows: list[dict[str, object]] = []
    for batch in args.batches:
        off, on = (
            launches(forward_text(device, config_of(args.layers), batch, capture=capture)) for capture in (False, True)
        )
        for name, made in (("off", off), ("on", on), ("added", tuple(a - b for a, b in zip(on, off, strict=True)))):
            counts = [made[0].total(), made[1].total()]
            told = "; ".join(" ".join(f"{count} {kernel}" for kernel, count in one.items()) for one in made)
            rows.append({"batch": batch, "capture": name, "a layer": counts[0], "a step": counts[1], "which": told})
    print_table(rows)
    print(write_result("gpu_report", rows, layers=args.layers))


if __name__ == "__main__":
    main()
