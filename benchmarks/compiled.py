"""What the TPU and GPU compilers make of the engine's programs, with capture off and on. Needs no device; runs
nothing.

    python benchmarks/compiled.py tpu [--chips v5e v6e v5p] [--qwen3-30b]
    python benchmarks/compiled.py gpu [--batches 1 16 64 256] [--layers 4]

tpu (needs the tpu-aot extra): operations of the optimised program, each counted once: outside of loops, in loop
bodies (a layer's), and those of a single number, which the scalar core does beside the others. Glue is the
compiler's estimate of a step in thousands of cycles, layers times their number, without Pallas kernels, gathers,
scatters and sorts, for which it has none; loops inside of a layer count once, so plain backends look cheaper than
they are. `pool` is what is aliased of the donated arrays. Backends: "tpu", the default of an engine on a TPU, and
"plain", array code. --qwen3-30b adds the forward pass of Qwen3-30B-A3B at full size on one v5p, with a pool of 12
GiB.

gpu (needs Python 3.12 and `pip install jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
nvidia-cuda-nvcc nvidia-nvvm`): launches of a decode step of Qwen3-30B-A3B's shapes on an H200, with fewer layers and
a small vocabulary. A launch is a fusion, a custom call or a copy of the optimised program, in the body of the loop
over layers or outside of it, once a step. Sampling is another program, the same with and without capture."""

import argparse
import collections
import dataclasses
import os
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, progress, write_result
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
from support.tpu_programs import (
    SMALL,
    Operations,
    World,
    build_world,
    compiled,
    estimated_cycles,
    jobs,
    kernels,
    operations,
    program_name,
    whole_pool_operations,
)

KIB, MIB = 1 << 10, 1 << 20
QWEN3_30B = build_world(
    Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        dense_width=6144,
        expert_width=768,
        router=RouterSpec(num_experts=128, top_k=8, renormalize=True),
        moe_layers=tuple(range(48)),
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=False,
        context_length=8192,
    ),
    num_pages=2048,
    decode=64,
    extend=2048,
    num_request_slots=65,
)


FORWARD = ("forward decode", "forward extend")


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """What is read off one program."""

    operations: Operations
    kernels: int
    cycles: int
    temporary: int
    output: int
    aliased: int
    pool_copies: int
    seconds: float


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


def qwen3_config(layers: int) -> Qwen3MoeConfig:
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
    with jax.sharding.use_abstract_mesh(
        Mesh(np.array([device]), ("x",)).abstract_mesh
    ):  # kernels query the compute capability
        return lowerings(state, spec, sizes)["forward", shape]().compile().as_text()


def launches(text: str) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """By name, the launches of the loop's body and those outside of it."""
    bodies = set(re.findall(r"body=(%[^\s,]+)", text))
    inside, outside = collections.Counter[str](), collections.Counter[str]()
    for computation in text.split("\n\n"):
        lines = computation.strip().splitlines()
        if lines and (lines[0].startswith("ENTRY") or lines[0].split(" ")[0] in bodies):
            names = [match[1] for line in lines[1:] if (match := _LAUNCH.match(line.strip()))]
            (outside if lines[0].startswith("ENTRY") else inside).update(names)
    return inside, outside


def names(chip: str, world: World) -> list[str]:
    """The programs of an engine, in order of its table."""
    return [program_name(key) for key in jobs(chip, capture=True, world=world)]


def report(model: str, world: World, chip: str, name: str) -> list[dict[str, object]]:
    """One row for a program that knows no capture; else for each kind of backends one without, one with it, and what is
    added."""
    if name not in FORWARD:
        return [table_row(model, chip, name, "any", "-", make(world, chip, name, capture=False, plain=False))]
    rows = []
    for plain in (False, True):
        backends = "plain" if plain else "tpu"
        off, on = (make(world, chip, name, capture=capture, plain=plain) for capture in (False, True))
        rows += [table_row(model, chip, name, backends, capture, made) for capture, made in (("off", off), ("on", on))]
        rows.append(table_row(model, chip, name, backends, "added", difference(on, off)))
    return rows


def make(world: World, chip: str, name: str, *, capture: bool, plain: bool) -> Made:
    """Compile and read."""
    start = time.perf_counter()
    program = compiled(chip, name, capture=capture, world=world, plain=plain)
    seconds, memory = time.perf_counter() - start, program.memory_analysis()
    pool = world.counts.prompt if name.startswith("count") else world.pool
    return Made(
        operations=operations(program),
        kernels=kernels(program),
        cycles=estimated_cycles(program, world) if name in FORWARD else 0,
        temporary=memory.temp_size_in_bytes,
        output=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        pool_copies=len(whole_pool_operations(program, pool)),
        seconds=seconds,
    )


def difference(on: Made, off: Made) -> Made:
    """What capture adds."""
    return Made(
        operations=on.operations - off.operations,
        kernels=on.kernels - off.kernels,
        cycles=on.cycles - off.cycles,
        temporary=on.temporary - off.temporary,
        output=on.output - off.output,
        aliased=on.aliased - off.aliased,
        pool_copies=on.pool_copies - off.pool_copies,
        seconds=0.0,
    )


def table_row(model: str, chip: str, name: str, backends: str, capture: str, made: Made) -> dict[str, object]:
    """A line of the table."""
    return {
        "model": model,
        "chip": chip,
        "program": name,
        "backends": backends,
        "capture": capture,
        "operations once": made.operations.once,
        "in loops": made.operations.in_loops,
        "scalar": made.operations.scalar,
        "kernels": made.kernels,
        "glue kcycles": made.cycles / 1e3,
        "temporary KiB": made.temporary / KIB,
        "output KiB": made.output / KIB,
        "pool MiB": made.aliased / MIB,
        "pool copies": made.pool_copies,
        "compile s": made.seconds,
    }


def measure_tpu(args: argparse.Namespace) -> None:
    """Compile every program for each chip, print, write."""
    rows = []
    for chip in args.chips:
        for name in names(chip, SMALL):
            progress(f"{chip}, {name}")
            rows += report("small", SMALL, chip, name)
    for name in FORWARD if args.qwen3_30b else ():
        progress(f"v5p, Qwen3-30B-A3B, {name}")
        rows += report("Qwen3-30B-A3B", QWEN3_30B, "v5p", name)
    print_table(rows)
    print(write_result("compiled_tpu", rows))


def measure_gpu(args: argparse.Namespace) -> None:
    """Compile a decode step for each batch, count launches, print, write."""
    jax.config.update("jax_enable_compilation_cache", False)  # made without a card, a program cannot be read back
    device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200).devices[0]
    rows: list[dict[str, object]] = []
    for batch in args.batches:
        progress(f"batch {batch}")
        off, on = (
            launches(forward_text(device, qwen3_config(args.layers), batch, capture=capture))
            for capture in (False, True)
        )
        for name, made in (("off", off), ("on", on), ("added", tuple(a - b for a, b in zip(on, off, strict=True)))):
            counts = [made[0].total(), made[1].total()]
            kernels_of = "; ".join(" ".join(f"{count} {kernel}" for kernel, count in part.items()) for part in made)
            rows.append(
                {"batch": batch, "capture": name, "a layer": counts[0], "a step": counts[1], "which": kernels_of}
            )
    print_table(rows)
    print(write_result("compiled_gpu", rows, layers=args.layers))


def main() -> None:
    """Compile for one platform."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=["tpu", "gpu"])
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "v5p"])
    parser.add_argument("--qwen3-30b", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    {"tpu": measure_tpu, "gpu": measure_gpu}[args.platform](args)


if __name__ == "__main__":
    main()
