"""Draws the pictures of docs/performance.md and docs/speculative.md from results/: a decode step against batch, layers
and context, a CPU beside other engines, and what drafts cost and gain.

    python benchmarks/plots.py"""

import argparse
import json
from pathlib import Path

from common import RESULTS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

IMAGES = Path(__file__).parent.parent / "docs" / "images"
LOADS = ("random", "copy and edit", "oracle", "rollouts", "old rollouts")  # of speculative.py
FLOOR = "floor: bytes that must be read / 4.3 TB/s"


def draw_curve(axes: Axes, rows: list[dict], along: str, title: str) -> None:
    """Step and floor of the rows, against one of their columns."""
    points = sorted({(row[along], row["step ms"], row["floor ms"]) for row in rows})
    values, steps, floors = zip(*points, strict=True)
    axes.plot(values, steps, "o-", label="step, capture on, asked")
    axes.plot(values, floors, "k:", label=FLOOR)
    axes.set(xlabel=along, ylabel="ms", title=title, ylim=(0, None))
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.tick_params(axis="x", rotation=30 if max(values) > 1000 else 0)
    axes.grid(alpha=0.3)


def draw_engines() -> Figure:
    """Our throughput over that of each other engine, by phase and batch."""
    figure = Figure(figsize=(11.5, 3.4), layout="constrained")
    for axes, (dtype, name) in zip(
        figure.subplots(1, 2, sharey=True),
        {"float32": "peers_float32_cpu", "bfloat16": "peers_bfloat16_cpu"}.items(),
        strict=True,
    ):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        ratios = {(row["peer"], row["phase"], row["batch"]): row["ratio"] for row in rows}
        engines = sorted({engine for engine, _, _ in ratios}, reverse=True)
        groups = sorted({(phase, batch) for _, phase, batch in ratios})
        width = 0.8 / len(engines)
        for offset, engine in enumerate(engines):
            positions = [index + (offset - (len(engines) - 1) / 2) * width for index in range(len(groups))]
            colour = {"vllm": "C0", "llama_cpp": "C1", "transformers": "C2"}[engine]
            bars = axes.bar(
                positions,
                [ratios[engine, *group] for group in groups],
                width,
                label=engine.replace("_", "."),
                color=colour,
            )
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
        axes.axhline(1, color="k", linewidth=0.8)
        axes.set_xticks(range(len(groups)), [f"{phase}\nbatch {batch}" for phase, batch in groups])
        axes.set(title=dtype, ylabel="our tokens/s over theirs", ylim=(0, 4.8))
        axes.legend(fontsize="small")
    figure.suptitle("Two CPU cores, capture on and asked by all")
    return figure


def draw_speculation() -> Figure:
    """The cost of a step by tokens of a request, and throughput with drafts over that without, by load and batch."""
    figure = Figure(figsize=(11.5, 6.4), layout="constrained")
    machines = {
        "two CPU cores, benchmark model": ["speculative_cpu"],
        "H200, Qwen3-30B-A3B": ["speculative_h200", "speculative_oracle_h200"],
    }
    for (costs, gains), (machine, names) in zip(figure.subplots(2, 2), machines.items(), strict=True):
        results = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names]
        result = results[0]
        for batch, by_tokens in result["costs_ms"].items():
            points = [(int(tokens) / int(batch), ms) for tokens, ms in by_tokens.items()]
            costs.plot(*zip(*points, strict=True), "o-", label=f"batch {batch}")
        costs.set(xlabel="tokens a request", ylabel="ms a step", title=machine, ylim=(0, None))
        costs.grid(alpha=0.3)
        costs.legend(fontsize="small")
        rows = [row for result in results for row in result["rows"] if "," not in row["engine"]]
        loads = [load for load in LOADS if load in {row["text"] for row in rows}]
        batches = sorted({row["batch"] for row in rows})
        for index, batch in enumerate(batches):
            found = {row["text"]: row["on / off"] for row in rows if row["batch"] == batch}
            places = [at + (index - (len(batches) - 1) / 2) * 0.8 / len(batches) for at in range(len(loads))]
            heights = [found.get(load, 0.0) for load in loads]
            bars = gains.bar(places, heights, 0.8 / len(batches), label=f"batch {batch}")
            gains.bar_label(bars, [f"{height:.2f}" if height else "" for height in heights], fontsize=7, padding=1)
        gains.axhline(1, color="k", linewidth=0.8)
        gains.set_xticks(range(len(loads)), loads)
        gains.set(ylabel="tokens/s, drafts over none", title=machine)
        gains.legend(fontsize="small")
    return figure


def main() -> None:
    """Read, draw, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    by_batch = [
        row for row in json.loads((RESULTS / "step_h200.json").read_text())["rows"] if row["capture"] == "on, asked"
    ]
    measured = json.loads((RESULTS / "step_curves_h200.json").read_text())["rows"]
    points = {(row["layers"], row["context"]): row for row in measured}  # of a point measured twice, the last
    deep, short = max(layers for layers, _ in points), min(context for _, context in points)
    figure = Figure(figsize=(11.5, 3.4), layout="constrained")
    batch, layers, context = figure.subplots(1, 3)
    draw_curve(batch, by_batch, "batch", "1,024 tokens in (batch 1: 128)")
    batch.set_xscale("log")
    batch.set_xticks([1, 16, 64, 256], ["1", "16", "64", "256"])
    batch.minorticks_off()
    draw_curve(layers, [row for row in points.values() if row["context"] == short], "layers", "batch 16")
    draw_curve(context, [row for row in points.values() if row["layers"] == deep], "context", "batch 16, 48 layers")
    layers.legend(fontsize="small", loc="lower right")
    figure.suptitle("Decode step, Qwen3-30B-A3B shapes, one H200")
    pictures = {"performance": figure, "cpu_engines": draw_engines(), "speculative": draw_speculation()}
    for name, picture in pictures.items():
        picture.savefig(IMAGES / f"{name}.png", dpi=100)
        print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
