"""Policies of resident experts: first N, by frequency, adaptive, at several numbers of residents, on prompts whose
domain changes half way.

    python benchmarks/residency.py [--layers 4] [--batches 64] [--fractions 0.1 0.3 0.5 0.7 0.9]
    python benchmarks/residency.py --small      # CPU, a small model in float32

Model, domains and skew are those of domains.py; tokens are drawn at temperature 1, a domain's routers prefer experts of
their own. Each policy sees --runs batches of one domain, then as many of the other. `first`: experts 0 to N-1.
`static`: the most used of a run of the first domain with other prompts. `adaptive`: begins as these, and follows the
load from the first step on (engine/control/resident_expert_updater.py). tok/s are decode tokens of a median step, of
each half and (of a mean step) over both; hits are shares of slots that residents ran, of each half and of the last run;
`copied`: experts copied to the accelerator. `gain` is tok/s over both halves against `first` at that number."""

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import print_table, write_result
from domains import build_domains, skewed_checkpoint
from expert_offload import Bench, by_frequency, server_args

from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.engine.build.builder import build_engine
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.models.decoder.decoder import FamilyDecoder


def halves(bench: Bench, batch: int, runs: int) -> dict[str, float]:
    """Runs of one domain, then of the other."""
    runner, figures = bench.core.runner, dict[str, float]()
    everything = list[float]()
    for number, half in enumerate(("before", "after")):
        steps, start = list[float](), runner.slot_counts()
        for _ in range(runs):
            last = runner.slot_counts()
            steps += bench.run(batch, domain=number).steps
        counts = runner.slot_counts()
        figures[f"tok/s {half}"], figures[f"hits {half}"] = batch / statistics.median(steps), hits(counts - start)
        everything += steps
    figures["hits last"], figures["tok/s"] = hits(counts - last), batch / statistics.mean(everything)
    return figures


def hits(counts: np.ndarray) -> float:
    """Share of slots that residents ran."""
    misses, slots = counts.sum(axis=0)
    return float(1.0 - misses / slots)


def of_fraction(
    model: FamilyDecoder, args: argparse.Namespace, folder: Path, fraction: float
) -> Iterator[dict[str, object]]:
    """All policies at one number of residents."""
    gc.collect()  # the tables of the last engine
    config = json.loads((folder / "config.json").read_text())
    shared = ExpertOffloadConfig(kt_num_gpu_experts=round(fraction * int(config["num_experts"])))
    core = build_engine(server_args(args, folder), model=model, experts=shared).core
    runner, first = core.runner, core.runner.residency
    assert isinstance(runner, OffloadRunner)
    for batch in args.batches:
        plain = float("nan")
        for policy in ("first", "static", "adaptive"):
            bench = Bench(core=core, args=args, domains=build_domains(config))  # the same prompts for all
            learned = by_frequency(bench.run(batch, ask=True), first)
            residents = first if policy == "first" else learned
            runner.apply_residency(dataclasses.replace(residents, slot_of=residents.slot_of.copy()))
            bench.run(batch, new=4)
            copied = runner.num_swapped
            if policy == "adaptive":
                with bench.following():
                    figures = halves(bench, batch, args.runs)
            else:
                figures = halves(bench, batch, args.runs)
            plain = figures["tok/s"] if policy == "first" else plain
            row = {"resident": fraction, "batch": batch, "policy": policy, **figures, "gain": figures["tok/s"] / plain}
            yield row | {"copied": runner.num_swapped - copied}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[64])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--runs", type=int, default=6, help="batches of each domain")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--skew", type=float, default=0.4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a small model in float32, short runs")
    parser.add_argument("--name", default="residency")
    args = parser.parse_args()
    if args.small:
        vars(args).update(dtype="float32", layers=2, batches=[4], fractions=[0.25, 0.5], runs=2, new=24)
    return args


def main() -> None:
    """Run, print, write after every number of residents."""
    args, rows = parsed(), list[dict[str, object]]()
    figures = {
        "layers": args.layers,
        "skew": args.skew,
        "prompt": args.prompt,
        "new": args.new,
        "runs": args.runs,
    }
    with skewed_checkpoint(args) as (_, folder, model):
        for fraction in args.fractions:
            begin = time.perf_counter()
            rows += of_fraction(model, args, folder, fraction)
            print(
                f"{fraction}: {time.perf_counter() - begin:.0f} s; {write_result(args.name, rows, **figures)}",
                flush=True,
            )
    print_table(rows)


if __name__ == "__main__":
    main()
