"""What the TPU and GPU compilers make of the engine's programs, with capture off and on. Needs no device; runs
nothing.

    python benchmarks/compiled.py tpu [--chips v5e v6e v5p] [--qwen3-30b]
    python benchmarks/compiled.py gpu [--batches 1 16 64 256]
    python benchmarks/compiled.py families [--batches 1 16 64 256] [--families GPT-OSS-20b ...]

tpu (needs the tpu-aot extra): operations of the optimised program, each counted once: outside of loops, in loop
bodies (a layer's), and those of a single number, which the scalar core does beside the others. Glue is the
compiler's estimate of a step in thousands of cycles, layers times their number, without Pallas kernels, gathers,
scatters and sorts, for which it has none; loops inside of a layer count once, so plain backends look cheaper than
they are. `pool` is what is aliased of the donated arrays. Backends: "tpu", the default of an engine on a TPU, and
"plain", array code. --qwen3-30b adds the forward pass of Qwen3-30B-A3B at full size on one v5p, with a pool of 12
GiB.

gpu (needs Python 3.12 and `pip install jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
nvidia-cuda-nvcc nvidia-nvvm`): launches of a decode step of Qwen3-30B-A3B's shapes on an H200, with fewer layers and
a small vocabulary. A launch is a fusion, a custom call or a copy of the optimised program; those of a loop count as
often as it runs. Launches of a layer are the difference of 8 and 16 layers. Sampling is another program, the same
with and without capture.

families (needs the same): launches of a decode step of each of family_configs.py, in bfloat16 with a small vocabulary,
capture on. Of Qwen3-Next a layer is the mean of three linear ones and one of attention. `temporary` is what the
compiler reserves beside weights, cache and results."""

import argparse
import collections
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, progress, read_config, write_result
from family_configs import PUBLISHED, layer_bytes, read_family
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding
from step import QWEN3_30B_A3B

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import RunnerConfig, lowerings
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
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
    read_config(QWEN3_30B_A3B | {"max_position_embeddings": 8192}),
    num_pages=2048,
    decode=64,
    extend=2048,
    num_request_slots=65,
)
FORWARD = ("forward decode", "forward extend")


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledProgram:
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
DEPTHS = 8, 16  # MoE layers; multiples of every pattern
_LAUNCH = re.compile(r"(?:ROOT )?%([A-Za-z_]+)\S* = .* (?:fusion|custom-call|copy)\(")


def qwen3_config(layers: int) -> FamilyConfig:
    """Qwen3-30B-A3B with so many layers and a small vocabulary."""
    changes = {"vocab_size": 8192, "num_hidden_layers": layers, "max_position_embeddings": PAGE * TABLE}
    return read_config(QWEN3_30B_A3B | changes)


def forward_program(device: jax.Device, config: FamilyConfig, batch: int, *, capture: bool) -> Any:
    """The compiled program of a decode step's layers and its head."""
    cache = config.cache
    pool = KVPoolSpec(
        num_layers=cache.num_layers,
        num_pages=PAGES,
        page_size=PAGE,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        dtype=jnp.dtype("bfloat16"),
        latent=cache.latent,
        num_recurrent=cache.num_recurrent,
        recurrent=cache.recurrent,
        num_requests=batch + 1,
    )
    shape = BatchShape(mode=ForwardMode.DECODE, num_tokens=batch, num_requests=batch, table_width=TABLE)
    sizes = RunnerConfig(pool=pool, num_request_slots=batch + 1, shapes=(shape,), vocab_size=config.vocab_size)
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), config.needs, platform="gpu")
    module = nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype("bfloat16")))
    graphdef, state = nnx.split(module)
    sharding = SingleDeviceSharding(device)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state)
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
        return lowerings(state, spec, sizes)["forward", shape]().compile()


def launches_a_step(text: str) -> collections.Counter[str]:
    """By name, the launches of a whole step: those of a loop's body as often as the loop runs. A loop whose count the
    compiler does not know is counted once, and its launches are called "unknown"."""
    computations = {}
    for computation in text.split("\n\n"):
        lines = computation.strip().splitlines()
        if lines:
            name = "ENTRY" if lines[0].startswith("ENTRY") else lines[0].split(" ")[0]
            computations[name] = [line.strip() for line in lines[1:]]

    def count(name: str, times: int, prefix: str) -> collections.Counter[str]:
        counted = collections.Counter[str]()
        for line in computations[name]:
            if match := _LAUNCH.match(line):
                counted[prefix + match[1]] += times
            elif match := re.search(r" while\(.*body=(%[^\s,]+)", line):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                counted += count(match[1], times * int(known[1]) if known else times, prefix if known else "unknown ")
        return counted

    return count("ENTRY", 1, "")


@dataclasses.dataclass(frozen=True, slots=True)
class StepLaunches:
    """Launches by name: of one layer, the difference of two depths over their layers, and of a step beside its
    layers."""

    layer: dict[str, float]
    once: dict[str, float]
    temporary: int  # bytes

    @property
    def totals(self) -> tuple[float, float]:
        """Launches of a layer, and those beside the layers."""
        return sum(self.layer.values()), sum(self.once.values())


def step_launches(
    device: jax.Device, config_of: Callable[[int], FamilyConfig], batch: int, *, capture: bool
) -> StepLaunches:
    """Compile a decode step at both depths and count."""
    programs = [forward_program(device, config_of(depth), batch, capture=capture) for depth in DEPTHS]
    shallow, deep = (launches_a_step(program.as_text()) for program in programs)
    names = sorted(deep | shallow, key=lambda name: -deep[name])
    layer = {name: (deep[name] - shallow[name]) / (DEPTHS[1] - DEPTHS[0]) for name in names}
    once = {name: shallow[name] - DEPTHS[0] * count for name, count in layer.items()}
    return StepLaunches(layer, once, programs[1].memory_analysis().temp_size_in_bytes)


def in_words(counts: dict[str, float]) -> str:
    """Launches by name in one line."""
    return " ".join(f"{count:.4g} {name}" for name, count in counts.items() if count)


def of_family(device: jax.Device, name: str, batch: int) -> dict[str, object]:
    """One row: a family at its published shapes, few layers, a small vocabulary, capture on."""
    model = PUBLISHED[name]

    def config_of(depth: int) -> FamilyConfig:
        changes = {"vocab_size": 8192, "max_position_embeddings": PAGE * TABLE}
        return read_family(model.cut(depth + model.dense_layers, **changes))

    counted = step_launches(device, config_of, batch, capture=True)
    config = config_of(DEPTHS[1])
    pattern = config.blocks[-1].pattern
    return {
        "family": name,
        "layers": DEFAULT_BACKENDS.layer_paths(config)["gpu"],
        "batch": batch,
        "a layer": counted.totals[0],
        "a step": counted.totals[1],
        "weights MiB a layer": sum(layer_bytes(layer, config) for layer in pattern) / len(pattern) / MIB,
        "temporary MiB": counted.temporary / MIB,
        "which": in_words(counted.layer),
    }


def names(chip: str, world: World) -> list[str]:
    """The programs of an engine, in order of its table."""
    return [program_name(key) for key in jobs(chip, capture=True, world=world)]


def report(model: str, world: World, chip: str, name: str) -> list[dict[str, object]]:
    """One row for a program that does not depend on capture; else, for each kind of backends, one with capture off, one
    with it on, and one of the difference."""
    if name not in FORWARD:
        return [table_row(model, chip, name, "any", "-", make(world, chip, name, capture=False, plain=False))]
    rows = []
    for plain in (False, True):
        backends = "plain" if plain else "tpu"
        off, on = (make(world, chip, name, capture=capture, plain=plain) for capture in (False, True))
        rows += [
            table_row(model, chip, name, backends, capture, program) for capture, program in (("off", off), ("on", on))
        ]
        rows.append(table_row(model, chip, name, backends, "added", difference(on, off)))
    return rows


def make(world: World, chip: str, name: str, *, capture: bool, plain: bool) -> CompiledProgram:
    """Compile and read."""
    start = time.perf_counter()
    program = compiled(chip, name, capture=capture, world=world, plain=plain)
    seconds, memory = time.perf_counter() - start, program.memory_analysis()
    pool = world.counts.prompt if name.startswith("count") else world.pool
    return CompiledProgram(
        operations=operations(program),
        kernels=kernels(program).total(),
        cycles=estimated_cycles(program, world) if name in FORWARD else 0,
        temporary=memory.temp_size_in_bytes,
        output=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        pool_copies=len(whole_pool_operations(program, pool)),
        seconds=seconds,
    )


def difference(on: CompiledProgram, off: CompiledProgram) -> CompiledProgram:
    """What capture adds."""
    return CompiledProgram(
        operations=on.operations - off.operations,
        kernels=on.kernels - off.kernels,
        cycles=on.cycles - off.cycles,
        temporary=on.temporary - off.temporary,
        output=on.output - off.output,
        aliased=on.aliased - off.aliased,
        pool_copies=on.pool_copies - off.pool_copies,
        seconds=0.0,
    )


def table_row(
    model: str, chip: str, name: str, backends: str, capture: str, program: CompiledProgram
) -> dict[str, object]:
    """A line of the table."""
    return {
        "model": model,
        "chip": chip,
        "program": name,
        "backends": backends,
        "capture": capture,
        "operations once": program.operations.once,
        "in loops": program.operations.in_loops,
        "scalar": program.operations.scalar,
        "kernels": program.kernels,
        "glue kcycles": program.cycles / 1e3,
        "temporary KiB": program.temporary / KIB,
        "output KiB": program.output / KIB,
        "pool MiB": program.aliased / MIB,
        "pool copies": program.pool_copies,
        "compile s": program.seconds,
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
        off, on = (step_launches(device, qwen3_config, batch, capture=capture) for capture in (False, True))
        for name, counted in (("off", off), ("on", on)):
            layer, once = counted.totals
            which = f"{in_words(counted.layer)}; {in_words(counted.once)}"
            rows.append({"batch": batch, "capture": name, "a layer": layer, "a step": once, "which": which})
        added = [of_on - of_off for of_on, of_off in zip(on.totals, off.totals, strict=True)]
        rows.append({"batch": batch, "capture": "added", "a layer": added[0], "a step": added[1], "which": ""})
    print_table(rows)
    print(write_result("compiled_gpu", rows))


def measure_families(args: argparse.Namespace) -> None:
    """Compile a decode step of each family for each batch, count launches, print, write."""
    jax.config.update("jax_enable_compilation_cache", False)  # made without a card, a program cannot be read back
    device = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200).devices[0]
    rows: list[dict[str, object]] = []
    for name in args.families:
        for batch in args.batches:
            progress(f"{name}, batch {batch}")
            rows.append(of_family(device, name, batch))
            print_table(rows[-1:])
    print_table(rows)
    print(write_result("compiled_families_gpu", rows))


def main() -> None:
    """Compile for one platform."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=["tpu", "gpu", "families"])
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "v5p"])
    parser.add_argument("--qwen3-30b", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--families", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    args = parser.parse_args()
    {"tpu": measure_tpu, "gpu": measure_gpu, "families": measure_families}[args.platform](args)


if __name__ == "__main__":
    main()
