"""What capture costs: throughput with capture off (twice), on without rows, on with rows, step by step in one
process.

    python benchmarks/capture.py [--rounds 8] [--batches 8 32] [--new 128] [--block 16]
    python benchmarks/capture.py --weights ...             # what combine weights cost over ids alone
    python benchmarks/capture.py --dummy --batches 1 16 --block 16 --new 384 --rounds 3 --name capture_h200      # a GPU
    python benchmarks/capture.py --pool FILE.json ...      # joins runs: writes `pooled` from the `runs` of each file
    python benchmarks/capture.py --small                   # does it run

With --weights the base is an engine that records ids and is asked for them by all requests; the others record combine
weights, too. The benchmark model in float32; with --dummy Qwen3-30B-A3B in bfloat16 with random weights. Engine cores
over the same weights take steps in turn, in an order that is drawn for every step, so drift of the machine falls on
all alike. A step counts from its dispatch to its tokens on the host. The address of a pool moves a step by a percent
or two, so the pools change places with every round; a second engine like the first shows the remaining noise. For
prefill alone: --new 8.

`ratio`: throughput over the first engine, the median over groups of neighbouring steps; `+-`: the standard error of
that median (1.25 sigma / sqrt(n), sigma from the quartiles). A median does not see what few steps do, so that is timed
by itself: `rare us` is the time a step, over all threads, in which rows are filed and experts counted. `with it` is the
ratio with that added to every step; where steps overlap it is a bound. `both` are the last two engines over the first
two. `whole` is the ratio of all steps together. With --pool, ratios are weighted by 1 / (+-)^2 and the rest is a mean
of runs."""

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
from common import Prompts, benchmark_model, build, print_table, progress, write_result
from step import QWEN3_30B_A3B

from routed_experts.core.io_struct import RoutingOptions
from routed_experts.engine.loop.core import EngineCore
from routed_experts.models.model_folder import ModelFolder

VARIANTS = ("off", "off again", "on, unasked", "on, asked")
WITH_WEIGHTS = ("ids, asked", "ids, asked again", "weights, unasked", "weights, asked")


def time_steps(core: EngineCore, count: int) -> float:
    """Seconds a step. One step counts from its dispatch to the last outputs on the host. Of several, each is dispatched
    before the previous one is read, as the engine does; the first two are left out."""
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
    elapsed = time.perf_counter() - start
    core.drain()
    return elapsed / (count - 2)


class RareWork:
    """Times the work of a core that few steps do: filing rows, counting experts."""

    def __init__(self, core: EngineCore) -> None:
        self._seconds: dict[str, float] = {"flush": 0.0, "add": 0.0}  # each written by one thread
        self._counts: Any = None
        if core.capturers[0].enabled:
            cache: Any = core.capturers[0].host_cache
            self._counts = cache._counts
            cache.flush = self._timed("flush", cache.flush, time.perf_counter)
            self._counts.add = self._timed("add", self._counts.add, time.thread_time)

    @property
    def seconds(self) -> float:
        """Counts until now; waits for the worker."""
        if self._counts is not None:
            self._counts._worker.submit(lambda: None).result()
        return sum(self._seconds.values())

    def _timed(self, name: str, call: Callable[..., None], clock: Callable[[], float]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = clock()
            call(*args)
            self._seconds[name] += clock() - start

        return timed


def rotate_pools(cores: list[EngineCore]) -> None:
    """Give each idle core the KV pool of the next."""
    pools = [core.runner._pool for core in cores]
    for core, pool in zip(cores, [*pools[1:], pools[0]], strict=True):
        core.flush_cache()
        core.runner._pool = pool


def dummy_model() -> Any:
    """Qwen3-30B-A3B, weights made on the device."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
        return ModelFolder.open(Path(folder), load_format="dummy").load(jnp.dtype("bfloat16"))


def num_runs(args: argparse.Namespace, phase: str) -> int:
    """Steps that are timed together."""
    return args.block if phase == "decode" else 1


def is_decoding(core: EngineCore) -> bool:
    """Whether no prompt waits or is being read."""
    return all(req.is_prefilled for req in core.ranks[0].running) and not core.ranks[0].waiting


def means(pair: tuple[list[float], list[float]]) -> list[float]:
    """Means of neighbouring steps of two engines."""
    return [sum(times) / 2 for times in zip(*pair, strict=True)]


def routing_options(name: str) -> RoutingOptions:
    """What the requests of an engine ask for."""
    is_asked = "asked" in name and "unasked" not in name
    return RoutingOptions(enabled=is_asked, weights=is_asked and name.startswith("weights"))


def compare_steps(base: list[float], measured: list[float], rare: float) -> dict[str, object]:
    """Compare neighbouring steps of two engines; `rare`: seconds a step that a median does not see."""
    ratios = sorted(a / b for a, b in zip(base, measured, strict=True))
    quarter, ratio = len(ratios) // 4, statistics.median(ratios)
    return {
        "steps": len(measured),
        "median ms": statistics.median(measured) * 1e3,
        "ratio": ratio,
        "+-": 1.25 * (ratios[-1 - quarter] - ratios[quarter]) / 1.35 / len(ratios) ** 0.5,
        "rare us": rare * 1e6,
        "with it": 1 / (1 / ratio + rare / statistics.median(base)),
        "quartiles": f"{ratios[quarter]:.3f}..{ratios[-1 - quarter]:.3f}",
        "whole": sum(base) / sum(measured),
    }


def pool(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each batch, phase and engine of these runs."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in (row for rows in runs for row in rows):
        groups.setdefault((row["batch"], row["phase"], row["capture"]), []).append(row)
    return [join_rows(rows) for rows in groups.values() if all(row["+-"] for row in rows)]


def join_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    weights = [row["+-"] ** -2 for row in rows]

    def weighted(name: str) -> float:
        return sum(weight * row[name] for weight, row in zip(weights, rows, strict=True)) / sum(weights)

    return {
        **{name: rows[0][name] for name in ("batch", "phase", "capture")},
        "runs": len(rows),
        "steps": sum(row["steps"] for row in rows),
        "ratio": weighted("ratio"),
        "+-": sum(weights) ** -0.5,
        "rare us": statistics.mean(row["rare us"] for row in rows),
        "with it": weighted("with it"),
        "whole": statistics.mean(row["whole"] for row in rows),
    }


def measure(
    cores: dict[str, EngineCore], rare_work: dict[str, RareWork], batch: int, args: argparse.Namespace
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Seconds of steps, and of rare work, by engine and phase."""
    order = random.Random(batch)
    steps: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in cores}
    extra = {name: {"prefill": 0.0, "decode": 0.0} for name in cores}
    for turn in range(-1, args.rounds):  # the first round warms up
        progress(f"batch {batch}, round {turn + 1} of {args.rounds}")
        rotate_pools(list(cores.values()))
        for name, core in cores.items():
            core.flush_cache()
            prompts = Prompts(turn + 1)  # the same for all
            core.add(prompts.requests(batch, prompt=args.prompt, new=args.new, ask=routing_options(name)))
        while not all(core.is_idle for core in cores.values()):
            phase = (
                "decode" if all([is_decoding(core) for core in cores.values()]) else "prefill"
            )  # reads all cores: that puts them in the CPU's cache
            count = num_runs(args, phase)
            for name in order.sample(list(cores), len(cores)):
                before = rare_work[name].seconds
                seconds = time_steps(cores[name], count)
                if turn >= 0:
                    steps[name][phase].append(seconds)
                    extra[name][phase] += rare_work[name].seconds - before
    return steps, extra


def pool_files(paths: list[Path]) -> None:
    """Write `pooled` of each result from its `runs`."""
    for path in paths:
        result = json.loads(path.read_text())
        result["pooled"] = {name: pool(runs) for name, runs in result["runs"].items()}
        path.write_text(json.dumps(result, indent=1) + "\n")
        for name, rows in result["pooled"].items():
            print(name)
            print_table(rows)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--block", type=int, default=1, help="decode steps that overlap; 1: none")
    parser.add_argument("--name", help="of the result; capture_cpu, or with --weights combine_weights_cpu")
    parser.add_argument("--weights", action="store_true", help="combine weights beside ids, over ids alone")
    parser.add_argument("--dummy", action="store_true", help="Qwen3-30B-A3B with random weights, for a GPU")
    parser.add_argument("--small", action="store_true", help="one short round")
    parser.add_argument("--pool", type=Path, nargs="+", metavar="FILE", help="join the runs of these results")
    args = parser.parse_args()
    if args.pool:
        return pool_files(args.pool)
    if args.small:
        vars(args).update(rounds=2, batches=[2], prompt=8, new=12)
    variants = WITH_WEIGHTS if args.weights else VARIANTS
    name_of_result = args.name or ("combine_weights_cpu" if args.weights else "capture_cpu")
    model = dummy_model() if args.dummy else benchmark_model(jnp.dtype("float32"))
    sizes = {"precompile_bs_paddings": tuple(sorted(args.batches))} if args.dummy else {}
    cores = {
        name: build(
            model,
            capture=not name.startswith("off"),
            enable_return_routed_experts_weights=name.startswith("weights"),
            **sizes,
        ).core
        for name in variants
    }
    rare_work = {name: RareWork(core) for name, core in cores.items()}
    rows: list[dict[str, object]] = []
    for batch in args.batches:
        steps, extra = measure(cores, rare_work, batch, args)
        for phase in ("prefill", "decode"):
            step_times = {name: of_phase[phase] for name, of_phase in steps.items()}
            rare = {
                name: of_phase[phase] / len(step_times[name]) / num_runs(args, phase)
                for name, of_phase in extra.items()
            }
            base, again, third, fourth = variants
            bases = means((step_times[base], step_times[again]))
            step_times["both"] = means((step_times[third], step_times[fourth]))
            rare["both"] = statistics.mean((rare[third], rare[fourth]))
            for name in (*variants, "both"):
                rows.append(
                    {
                        "batch": batch,
                        "phase": phase,
                        "capture": name,
                        **compare_steps(bases if name == "both" else step_times[base], step_times[name], rare[name]),
                    }
                )
        print_table(rows[-2 * (len(variants) + 1) :])
        write_result(name_of_result, rows, rounds=args.rounds, prompt=args.prompt, new=args.new)
    print(write_result(name_of_result, rows, rounds=args.rounds, prompt=args.prompt, new=args.new))


if __name__ == "__main__":
    main()
