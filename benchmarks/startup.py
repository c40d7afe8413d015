"""Time until ready, cold and warm, and the time of each program: Qwen3-30B-A3B with random weights made on the device.

    python benchmarks/startup.py [--warm 1] [--programs] [--layers N] [--config CONFIG.json]

Each start is a process of its own, as a user has it, with a home folder of its own for the compilation cache: the first
is cold, the others warm. `s` of a process counts from its first line to ready, the import of JAX among it. --programs
then lowers and compiles the programs of one engine one by one, with no cache."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import print_table, write_result

CHILD = "--child"


def start(folder: str) -> None:
    """A start as a user has it; prints its phases as one JSON line."""
    began = time.perf_counter()
    from routed_experts.core.server_args import ServerArgs
    from routed_experts.engine.build.builder import PhaseClock, build_engine
    from routed_experts.execution.compilation_cache import enable_compilation_cache

    enable_compilation_cache()  # as Engine does
    phases: list[dict[str, object]] = []
    clock = PhaseClock(lambda phase: phases.append({"phase": phase.name, "s": phase.seconds, "detail": phase.detail}))
    build_engine(arguments(ServerArgs, folder), clock=clock, load_format="dummy")
    total = time.perf_counter() - began
    print(json.dumps({"phases": phases, "s": total}))


def arguments(kind: type, folder: str) -> object:
    """What is served: a batch of up to 256 with contexts of 2,048 tokens, capture on."""
    return kind(
        model_path=folder,
        context_length=2048,
        max_total_tokens=int(os.environ.get("STARTUP_TOKENS", "131072")),
        precompile_bs_paddings=(1, 8, 32, 64, 128, 256),
        mem_fraction_static=0.9,
        skip_tokenizer_init=True,
        enable_return_routed_experts=True,
    )


def programs(folder: str) -> list[dict[str, object]]:
    """Seconds of lowering and of compiling, program by program."""
    import jax

    from routed_experts.core.server_args import ServerArgs
    from routed_experts.engine.build.builder import build_engine
    from routed_experts.execution.aot_programs import lowerings

    runner = build_engine(arguments(ServerArgs, folder), load_format="dummy").core.runner
    jax.config.update("jax_enable_compilation_cache", False)
    jax.clear_caches()
    rows: list[dict[str, object]] = []
    for key, job in lowerings(runner.state, runner.spec, runner.config).items():
        began = time.perf_counter()
        lowered = job()
        middle = time.perf_counter()
        lowered.compile()
        rows.append(
            {"program": " ".join(map(_said, key)), "lower s": middle - began, "compile s": time.perf_counter() - middle}
        )
    return rows


def _said(part: object) -> str:
    names = ("num_tokens", "num_requests", "table_width")
    return (
        " ".join(f"{name}={getattr(part, name)}" for name in names)
        if hasattr(part, "num_tokens")
        else str(getattr(part, "value", part))
    )


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--name", default="startup_h200")
    parser.add_argument(CHILD, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return start(args.child)
    from step import QWEN3_30B_A3B

    config = dict(QWEN3_30B_A3B) if args.config is None else json.loads(args.config.read_text())
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for turn in range(1 + args.warm):
            environment = os.environ | {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"}
            command = [sys.executable, __file__, CHILD, folder]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            told, kind = json.loads(done.stdout.splitlines()[-1]), "cold" if turn == 0 else "warm"
            rows += [{"start": kind, **phase} for phase in told["phases"]]
            rows.append({"start": kind, "phase": "all", "s": told["s"], "detail": ""})
        print_table(rows)
        each = programs(folder) if args.programs else []
        if each:
            print_table(each)
    print(write_result(args.name, rows, programs=each))


if __name__ == "__main__":
    main()
