"""Figures of plans, drawn by matplotlib: the load of each device before and after, and the hits of residents.

matplotlib (routed-experts[plot]) is imported when a figure is drawn, without pyplot and its global state. Dims: M MoE
layers, E experts, V devices."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float64

from routed_experts.analysis import known_rows
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.installation import import_optional
from routed_experts.core.load_metrics import count_experts
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.placement.residency import lru_coverage, static_coverage

_WIDTH, _PANEL, _DPI = 10.0, 3.4, 160
_LINES = {
    "first": ("#8a8a8a", "--"),
    "static": ("#00204d", "-"),
    "static, of its own load": ("#00204d", ":"),
    "LRU": ("#c2a300", "-"),
}


def draw_plans(
    path: str | os.PathLike[str],
    records: Sequence[RoutedExperts],
    learned: Float[np.ndarray, "M E"],
    *,
    devices: Mapping[str, Float64[np.ndarray, "M V"]],
    residents: int | None,
    title: str = "Where experts would live",
) -> None:
    """Write a PNG, SVG or PDF, as `path` ends, else `path`.png. `learned` is the load that plans were made from,
    `devices` the simulated loads, by name; `residents` marks a number of them, None leaves residency out.
    Raises ConfigError where matplotlib is missing."""
    panels = len(devices) + (residents is not None)
    library = import_optional("matplotlib.figure", purpose="pictures", extra="plot")
    figure = library.Figure(figsize=(_WIDTH, _PANEL + 0.9), facecolor="white", layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    layer_ids = records[0].layer_ids
    top = max((float((load / load.mean(axis=1, keepdims=True)).max()) for load in devices.values()), default=1.0)
    for panel, (name, load) in enumerate(devices.items()):
        shade = _draw_devices(axes[panel], name, load, layer_ids, top)
        if panel == len(devices) - 1:
            figure.colorbar(shade, ax=list(axes[: panel + 1]), label="device load / mean", shrink=0.9)
    if residents is not None:
        _draw_residency(axes[-1], records, learned, residents)
    figure.suptitle(title, fontsize=12, weight="bold", x=0.01, ha="left")
    file = Path(path if Path(path).suffix else f"{os.fspath(path)}.png")
    form = file.suffix.removeprefix(".")
    with atomic_write(file) as part:
        figure.savefig(part, format=form, dpi=_DPI, metadata={"Software": None} if form == "png" else None)


def _draw_devices(
    axes: Any, name: str, load: Float64[np.ndarray, "M V"], layer_ids: tuple[int, ...], top: float
) -> Any:
    """Layer x device, relative to the layer's mean; the balance of each layer on the right."""
    shade = axes.imshow(
        load / load.mean(axis=1, keepdims=True),
        cmap="cividis",
        vmin=0,
        vmax=top,
        aspect="auto",
        interpolation="nearest",
    )
    balance = load.mean(axis=1) / load.max(axis=1)
    axes.set_title(f"{name}: mean / max {balance.mean():.2f}", fontsize=10)
    axes.set_xlabel("device", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    rows = range(0, len(layer_ids), max(1, len(layer_ids) // 12))
    axes.set_yticks(list(rows), [str(layer_ids[row]) for row in rows], fontsize=8)
    axes.tick_params(labelsize=8)
    return shade


def _draw_residency(
    axes: Any, records: Sequence[RoutedExperts], learned: Float[np.ndarray, "M E"], residents: int
) -> None:
    """Share of slots on the accelerator against the number of residents, mean of the layers."""
    counts = count_experts(known_rows(*records), records[0].num_experts)
    order = np.argsort(-np.asarray(learned), axis=1, kind="stable")
    curves = {
        "first": _hit_curve(counts),
        "static": _hit_curve(np.take_along_axis(counts, order, axis=1)),
        "static, of its own load": static_coverage(counts).mean(axis=0),
        "LRU": lru_coverage(*records).hits.mean(axis=0),
    }
    for name, curve in curves.items():
        colour, style = _LINES[name]
        axes.plot(np.arange(curve.size), curve, color=colour, linestyle=style, linewidth=1.4, label=name)
    axes.axvline(residents, color="#b0b0b0", linewidth=0.8)
    axes.set(xlim=(0, counts.shape[1]), ylim=(0, 1))
    axes.set_title("slots that find their expert resident", fontsize=10)
    axes.set_xlabel(f"resident experts of {counts.shape[1]}", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _hit_curve(counts: Float[np.ndarray, "M E"]) -> Float64[np.ndarray, " E1"]:
    """Mean share of the slots of the first n columns, for n of 0 to E."""
    share = np.cumsum(counts, axis=1) / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return np.concatenate([[0.0], share.mean(axis=0)])
