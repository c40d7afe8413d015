"""Draw docs/performance.png from results/step_h200.json: a decode step against batch, with the floor.

python benchmarks/plots.py"""

import json
from pathlib import Path

from common import RESULTS
from matplotlib.figure import Figure

PAGE = Path(__file__).parent.parent / "docs" / "performance.png"


def main() -> None:
    """Read, draw, write."""
    rows = json.loads((RESULTS / "step_h200.json").read_text())["rows"]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, style in (("on, asked", "o-"), ("off", "s--")):
        own = sorted((row["batch"], row["step ms"]) for row in rows if row["capture"] == name)
        axes.plot(*zip(*own, strict=True), style, label=f"step, capture {name}")
    floor = sorted({(row["batch"], row["floor ms"]) for row in rows if row["capture"] == "off"})
    axes.plot(*zip(*floor, strict=True), "k:", label="floor: bytes that must be read / 4.3 TB/s")
    axes.set(xscale="log", xlabel="batch", ylabel="ms", title="Decode step, Qwen3-30B-A3B shapes, one H200", ylim=(0, None))
    axes.set_xticks([1, 16, 64, 256], ["1", "16", "64", "256"])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(PAGE, dpi=110)
    print(PAGE)


if __name__ == "__main__":
    main()
