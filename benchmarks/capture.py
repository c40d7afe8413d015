"""What capture costs: off, on and asked by none, on and asked by all; interleaved step by step in one process.

    python benchmarks/capture.py [--rounds 8] [--batches 8 32] [--new 128] [--block 16]
    python benchmarks/capture.py --dummy --batches 1 16 --block 16 --new 384 --rounds 3 --name capture_h200

The benchmark model in float32; with --dummy Qwen3-30B-A3B in bfloat16 with random weights (benchmarks/step.py), for a
GPU. Engine cores over the same weights take steps in turn, in an order that is drawn anew for every step, each step
from its dispatch to its tokens on the host, so that neighbours in time are compared and drift of the machine falls on
all alike. Where in memory a pool happens to lie moves a step by a percent or two, so the pools change hands with every
round, and a second engine without capture shows what is left of such luck. `ratio` is throughput relative to off: the
median over groups of neighbouring steps, `+-` the standard error of that median (1.25 sigma / sqrt(n), sigma from the
quartiles). A median does not see what few steps do, so that is timed by itself: `seldom us` is the time by the step in
which rows were filed and experts counted (the engine's thread, and what the worker's had of a core, as if nothing else
had wanted it), and `with it` the ratio with that added to every step; where steps overlap that is a bound, for filing
overlaps too. For prefill alone: --new 8, so that no request ends while another one's prompt is read. `on, both` are the
two engines with capture beside the two without, group by group: the programs are the same whether rows are asked for or
not. `whole` is that of all steps together, the last one of a request, which gathers its rows, among them."""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from common import Prompts, benchmark_model, build, print_table, write_result
from step import QWEN3_30B_A3B

from routed_experts.engine.loop.core import EngineCore
from routed_experts.models.model_folder import ModelFolder

VARIANTS = ("off", "off again", "on, unasked", "on, asked")


def some_steps(core: EngineCore, count: int) -> float:
    """Seconds a step. A single step counts from its dispatch to the last outputs on the host, news of ended requests
    included. Of more, each is dispatched before the one before it is read, as the engine does: from one return to the
    next, the first two steps left out."""
    if count == 1:
        start = time.perf_counter()
        core.step()
        core.drain()
        return time.perf_counter() - start
    core.step()
    core.step()
    start = time.perf_counter()
    for _ in range(count - 2):
        core.step()
    taken = time.perf_counter() - start
    core.drain()
    return taken / (count - 2)


class Seldom:
    """Seconds of a core in which rows are filed and experts counted."""

    def __init__(self, core: EngineCore) -> None:
        self._taken: dict[str, float] = {"file": 0.0, "add": 0.0}  # each is one thread's
        self._counts: Any = None
        if core.capturer.enabled:
            cache: Any = core.capturer.host_cache
            self._counts = cache._counts
            cache.file = self._timed("file", cache.file, time.perf_counter)
            self._counts.add = self._timed("add", self._counts.add, time.thread_time)

    @property
    def seconds(self) -> float:
        """Until now; waits for the worker."""
        if self._counts is not None:
            self._counts._worker.submit(lambda: None).result()
        return sum(self._taken.values())

    def _timed(self, name: str, call: Callable[..., None], clock: Callable[[], float]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = clock()
            call(*args)
            self._taken[name] += clock() - start

        return timed


def pools_change_hands(cores: list[EngineCore]) -> None:
    """Each idle core gets the KV pool of the next; what lies in it belongs to no request."""
    pools = [core.runner._pool for core in cores]
    for core, pool in zip(cores, [*pools[1:], pools[0]], strict=True):
        core.flush_cache()
        core.runner._pool = pool


def dummy_model() -> Any:
    """Qwen3-30B-A3B, weights made on the device."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
        return ModelFolder.open(Path(folder), load_format="dummy").load(jnp.dtype("bfloat16"))


def count_of(args: argparse.Namespace, phase: str) -> int:
    """Steps that are timed together."""
    return args.block if phase == "decode" else 1


def decodes(core: EngineCore) -> bool:
    """Whether no prompt waits or is being read."""
    return all(req.is_prefilled for req in core.scheduler.running) and not core.scheduler.waiting


def halves(taken: dict[str, list[float]]) -> tuple[tuple[list[float], list[float]], tuple[list[float], list[float]]]:
    """Steps of the two engines without capture, and of the two with it."""
    return (taken["off"], taken["off again"]), (taken["on, unasked"], taken["on, asked"])


def compared(base: list[float], mine: list[float], rare: float) -> dict[str, object]:
    """Steps of one engine beside those of another that were taken next to them; `rare`: seconds by the step that a
    median does not see."""
    ratios = sorted(a / b for a, b in zip(base, mine, strict=True))
    quarter, ratio = len(ratios) // 4, statistics.median(ratios)
    return {
        "steps": len(mine),
        "median ms": statistics.median(mine) * 1e3,
        "ratio": ratio,
        "+-": 1.25 * (ratios[-1 - quarter] - ratios[quarter]) / 1.35 / len(ratios) ** 0.5,
        "seldom us": rare * 1e6,
        "with it": 1 / (1 / ratio + rare / statistics.median(base)),
        "quartiles": f"{ratios[quarter]:.3f}..{ratios[-1 - quarter]:.3f}",
        "whole": sum(base) / sum(mine),
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--block", type=int, default=1, help="decode steps that overlap; 1: none")
    parser.add_argument("--name", default="capture_cpu")
    parser.add_argument("--dummy", action="store_true")
    args = parser.parse_args()
    model = dummy_model() if args.dummy else benchmark_model(jnp.dtype("float32"))
    sizes = {"precompile_bs_paddings": tuple(sorted(args.batches))} if args.dummy else {}
    cores = {name: build(model, capture=name.startswith("on"), **sizes).core for name in VARIANTS}
    seldom = {name: Seldom(core) for name, core in cores.items()}
    rows: list[dict[str, object]] = []
    order = random.Random(0)
    for batch in args.batches:
        steps: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in VARIANTS}
        extra = {name: {"prefill": 0.0, "decode": 0.0} for name in VARIANTS}
        for turn in range(-1, args.rounds):  # the first round warms up
            pools_change_hands(list(cores.values()))
            for name, core in cores.items():
                core.flush_cache()
                ask = name == "on, asked"
                core.add(
                    Prompts(turn + 1).requests(batch, prompt=args.prompt, new=args.new, ask=ask)
                )  # the same for all
            while not all(core.is_idle for core in cores.values()):
                phase = (
                    "decode" if all([decodes(core) for core in cores.values()]) else "prefill"
                )  # looks at all: who is seen is in cache
                count = count_of(args, phase)
                for name in order.sample(VARIANTS, len(VARIANTS)):
                    before = seldom[name].seconds
                    seconds = some_steps(cores[name], count)
                    if turn >= 0:
                        steps[name][phase].append(seconds)
                        extra[name][phase] += seldom[name].seconds - before
        for phase in ("prefill", "decode"):
            taken = {name: of_phase[phase] for name, of_phase in steps.items()}
            rare = {
                name: of_phase[phase] / len(taken[name]) / count_of(args, phase) for name, of_phase in extra.items()
            }
            taken["off, both"], taken["on, both"] = (
                [sum(pair) / 2 for pair in zip(*pairs, strict=True)] for pairs in halves(taken)
            )
            rare["off, both"], rare["on, both"] = 0.0, statistics.mean((rare["on, unasked"], rare["on, asked"]))
            for name in (*VARIANTS, "on, both"):
                base = taken["off, both" if name == "on, both" else "off"]
                rows.append(
                    {"batch": batch, "phase": phase, "capture": name, **compared(base, taken[name], rare[name])}
                )
        print_table(rows[-2 * (len(VARIANTS) + 1) :])
        write_result(args.name, rows, rounds=args.rounds, prompt=args.prompt, new=args.new)
    print(write_result(args.name, rows, rounds=args.rounds, prompt=args.prompt, new=args.new))


if __name__ == "__main__":
    main()
