"""What the TPU compiler makes of an engine's programs, with capture off and on; no TPU is needed, nothing is run.

    python benchmarks/tpu_report.py [--chips v5e v6e] [--qwen3-30b]

Operations are those of the optimised program, each counted once: outside of loops, in loop bodies (a layer's), and those of a
single number, which the scalar core does beside the others. `pool` is what is aliased of the donated arrays: the KV pool or the
counts of penalties. --qwen3-30b adds the forward pass of Qwen3-30B-A3B at full size on one v5p, with a pool of 12 GiB.
The programs and how they are counted: tests/tpu_programs.py. Needs the tpu-aot extra."""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from common import print_table, write_result

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.qwen3_moe import Qwen3MoeConfig
from tpu_programs import SMALL, Operations, World, compiled, jobs, name_of, operations, whole_pool_operations, world_of

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


def main() -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--qwen3-30b", action="store_true")
    args = parser.parse_args()
    rows = [row for chip in args.chips for name in names(chip, SMALL) for row in report("small", SMALL, chip, name)]
    if args.qwen3_30b:
        rows += [row for name in ("forward decode", "forward extend") for row in report("Qwen3-30B-A3B", QWEN3_30B, "v5p", name)]
    print_table(rows)
    print(write_result("tpu_report", rows))


def names(chip: str, world: World) -> list[str]:
    """The programs of an engine, in order of its table."""
    return [name_of(key) for key in jobs(chip, capture=True, world=world)]


def report(model: str, world: World, chip: str, name: str) -> list[dict[str, object]]:
    """One row for a program that knows no capture, else one without, one with it, and what is added."""
    captures = (False, True) if name.startswith("forward") else (False,)
    rows, counted, memories = [], [], []
    for capture in captures:
        start = time.perf_counter()
        program = compiled(chip, name, capture=capture, world=world)
        seconds, memory = time.perf_counter() - start, program.memory_analysis()
        counted.append(operations(program))
        memories.append((memory.temp_size_in_bytes, memory.output_size_in_bytes))
        pool = world.counts.prompt if "full" in name else world.pool
        copies = len(whole_pool_operations(program, pool))
        kind = {False: "off", True: "on"}[capture] if len(captures) > 1 else "-"
        rows.append(row_of(model, chip, name, kind, counted[-1], memories[-1], memory.alias_size_in_bytes, copies, seconds))
    if len(captures) > 1:
        added = tuple(on - off for off, on in zip(*memories, strict=True))
        rows.append(row_of(model, chip, name, "added", counted[1] - counted[0], added, 0, 0, 0.0))
    return rows


def row_of(
    model: str,
    chip: str,
    name: str,
    capture: str,
    counted: Operations,
    temp_and_output: tuple[int, ...],
    aliased: int,
    copies: int,
    seconds: float,
) -> dict[str, object]:
    """A line of the table."""
    temp, output = temp_and_output
    return {
        "model": model,
        "chip": chip,
        "program": name,
        "capture": capture,
        "operations once": counted.once,
        "in loops": counted.in_loops,
        "scalar": counted.scalar,
        "temporary KiB": temp / KIB,
        "output KiB": (output - aliased) / KIB,
        "pool MiB": aliased / MIB,
        "pool copies": copies,
        "compile s": seconds,
    }


if __name__ == "__main__":
    main()
