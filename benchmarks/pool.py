"""Joins runs of capture.py: writes `pooled` anew from `runs`, in the files that are named.

    python benchmarks/pool.py benchmarks/results/capture_pooled_cpu.json

Ratios are weighted by 1 / (+-)^2, the rest is a mean of runs. A run of so few steps that it has no standard error
leaves its batch and phase out."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def pool(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each batch, phase and engine of these runs."""
    found: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for row in (row for rows in runs for row in rows):
        found.setdefault((row["batch"], row["phase"], row["capture"]), []).append(row)
    return [_joined(rows) for rows in found.values() if all(row["+-"] for row in rows)]


def _joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    weights = [row["+-"] ** -2 for row in rows]

    def weighted(name: str) -> float:
        return sum(weight * row[name] for weight, row in zip(weights, rows, strict=True)) / sum(weights)

    return {
        **{name: rows[0][name] for name in ("batch", "phase", "capture")},
        "runs": len(rows),
        "steps": sum(row["steps"] for row in rows),
        "ratio": weighted("ratio"),
        "+-": sum(weights) ** -0.5,
        "seldom us": statistics.mean(row["seldom us"] for row in rows),
        "with it": weighted("with it"),
        "whole": statistics.mean(row["whole"] for row in rows),
    }


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        result = json.loads(path.read_text())
        result["pooled"] = {name: pool(runs) for name, runs in result["runs"].items()}
        path.write_text(json.dumps(result, indent=1))
