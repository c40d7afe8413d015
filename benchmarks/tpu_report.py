"""What the TPU compiler makes of an engine's programs, with capture off and on; no TPU is needed, nothing is run.

    python benchmarks/tpu_report.py [--chips v5e v6e v5p] [--qwen3-30b]

Operations are those of the optimised program, each counted once: outside of loops, in loop bodies (a layer's), and
those of a single number, which the scalar core does beside the others. Glue is the compiler's estimate of a step in
thousands of cycles, layers times their number, without Pallas kernels, gathers, scatters and sorts, for which it has
none, and with loops inside of a layer counted once, so that plain backends look cheaper than they are. `pool` is what
is aliased of the donated arrays: the KV pool or the counts of penalties. Backends: "tpu", which an engine picks on a
TPU, and "plain", array code alone; programs after the forward pass are the same. --qwen3-30b adds the forward pass of
Qwen3-30B-A3B at full size on one v5p, with a pool of 12 GiB. The programs and how they are counted:
tests/support/tpu_programs.py. Needs the tpu-aot extra."""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from common import print_table, write_result

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.families.qwen3_moe import Qwen3MoeConfig
from support.tpu_programs import (
    SMALL,
    Operations,
    World,
    compiled,
    estimated_cycles,
    jobs,
    kernels,
    name_of,
    operations,
    whole_pool_operations,
    world_of,
)

KIB, MIB = 1 << 10, 1 << 20
QWEN3_30B = world_of(
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


def main() -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "v5p"])
    parser.add_argument("--qwen3-30b", action="store_true")
    args = parser.parse_args()
    rows = []
    for chip in args.chips:
        for name in names(chip, SMALL):
            rows += report("small", SMALL, chip, name)
    if args.qwen3_30b:
        for name in FORWARD:
            rows += report("Qwen3-30B-A3B", QWEN3_30B, "v5p", name)
    print_table(rows)
    print(write_result("tpu_report", rows))


def names(chip: str, world: World) -> list[str]:
    """The programs of an engine, in order of its table."""
    return [name_of(key) for key in jobs(chip, capture=True, world=world)]


def report(model: str, world: World, chip: str, name: str) -> list[dict[str, object]]:
    """One row for a program that knows no capture; else for each kind of backends one without, one with it, and what is
    added."""
    if name not in FORWARD:
        return [row_of(model, chip, name, "any", "-", make(world, chip, name, capture=False, plain=False))]
    rows = []
    for plain in (False, True):
        backends = "plain" if plain else "tpu"
        off, on = (make(world, chip, name, capture=capture, plain=plain) for capture in (False, True))
        rows += [row_of(model, chip, name, backends, capture, made) for capture, made in (("off", off), ("on", on))]
        rows.append(row_of(model, chip, name, backends, "added", difference(on, off)))
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


def row_of(model: str, chip: str, name: str, backends: str, capture: str, made: Made) -> dict[str, object]:
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


if __name__ == "__main__":
    main()
