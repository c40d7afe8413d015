"""Figures of routing, drawn by matplotlib: texts tinted by expert over the load of layers x experts.

matplotlib (routed-experts[plot]) is imported when a figure is drawn, without pyplot and its global state. Dims: M MoE
layers, E experts."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from routed_experts.analysis.colormaps import CIVIDIS, expert_palette, scale_top, text_color
from routed_experts.analysis.metrics import known_rows, utilization
from routed_experts.analysis.routed_text import RoutedText, printable
from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import ConfigError
from routed_experts.core.installation import import_optional

_WIDTH, _MARGIN = 10.0, 0.45  # inches
_CHAR_PT, _LINE_PT, _FONT_PT = 5.72, 21.0, 9.5  # DejaVu Sans Mono is 0.602 em wide
_COLUMNS = int((_WIDTH - 2 * _MARGIN) * 72 / _CHAR_PT)
_BETWEEN_LINES = 2.5  # from the last line of a text to the last but one before the first of the next
_SOFT, _NONE = "#5c5c5c", "#e6e6e6"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedToken:
    """A run of characters of one token on one line of a text."""

    token: int
    line: int
    column: int
    text: str


def draw_routing(
    texts: Sequence[RoutedText], path: str | os.PathLike[str], *, title: str, column: int | None = None, dpi: int = 160
) -> None:
    """Write a PNG, SVG or PDF, as `path` ends, else `path`.png; `column` is the MoE layer that tints the texts, the
    middle one by default.

    Raises ConfigError without a text, for another column, and where matplotlib is missing."""
    if not texts:
        raise ConfigError("texts is empty; give at least one RoutedText")
    first = texts[0].record
    column = len(first.layer_ids) // 2 if column is None else column
    if not 0 <= column < len(first.layer_ids):
        raise ConfigError(f"column={column}; expected 0 to {len(first.layer_ids) - 1}: one of the MoE layers")
    positioned = [place_tokens(text.pieces, columns=_COLUMNS) for text in texts]
    lines = sum((tokens[-1].line if tokens else 0) + _BETWEEN_LINES for tokens in positioned)
    text_height, map_height = lines * _LINE_PT / 72, min(max(len(first.layer_ids) * 0.24, 1.3), 8.0)
    height = 0.7 + text_height + 0.35 + map_height + 0.95
    figure = _library("matplotlib.figure").Figure(figsize=(_WIDTH, height), facecolor="white")
    figure.text(_MARGIN / _WIDTH, 1 - 0.32 / height, title, fontsize=13, weight="bold", va="center", parse_math=False)
    subtitle = f"colour and number: the first of {first.top_k} experts, layer {first.layer_ids[column]}   ·   "
    subtitle += "bold: generated   ·   line above: prefix cache   ·   outlined: never fed, no row"
    figure.text(_MARGIN / _WIDTH, 1 - 0.58 / height, subtitle, fontsize=8, color=_SOFT, va="center")
    box = (_MARGIN / _WIDTH, 1 - (0.7 + text_height) / height, 1 - 2 * _MARGIN / _WIDTH, text_height / height)
    axes = figure.add_axes(box)
    axes.set(xlim=(0, _COLUMNS * _CHAR_PT), ylim=(text_height * 72, 0))
    axes.axis("off")
    top = 0.0
    for text, tokens in zip(texts, positioned, strict=True):
        top = _draw_text(axes, text, tokens, column, top)
    _draw_loads(figure, texts, column, bottom=0.85 / height, height=map_height / height)
    caption = (
        f"u = c·E / (T·K): rows of a layer that went to an expert, relative to uniform; T rows, K = {first.top_k}, "
    )
    caption += f"E = {first.num_experts}. The strip gives each expert's colour above."
    figure.text(_MARGIN / _WIDTH, 0.16 / height, caption, fontsize=8, color=_SOFT, va="center")
    file = Path(path if Path(path).suffix else f"{os.fspath(path)}.png")
    form = file.suffix.removeprefix(".")
    with atomic_write(file) as part:
        figure.savefig(part, format=form, dpi=dpi, metadata={"Software": None} if form == "png" else None)


def place_tokens(pieces: Sequence[str], *, columns: int) -> list[PlacedToken]:
    """Break tokens into lines of `columns` characters, one cell a character; a line feed shows as ↵ and ends its
    line."""
    positioned: list[PlacedToken] = []
    line = column = 0
    for token, piece in enumerate(pieces):
        visible = printable(piece).replace("\n", "↵\n") or "·"
        for part in visible.splitlines(keepends=True):
            rest = part.removesuffix("\n")
            if column and column + len(rest) > columns:
                line, column = line + 1, 0
            while rest:
                cut = rest[: columns - column]
                positioned.append(PlacedToken(token=token, line=line, column=column, text=cut))
                rest, column = rest[len(cut) :], column + len(cut)
                if rest:
                    line, column = line + 1, 0
            if part.endswith("\n"):
                line, column = line + 1, 0
    return positioned


def _draw_text(axes: Any, text: RoutedText, positioned: Sequence[PlacedToken], column: int, top: float) -> float:
    """Draw one text below `top` (points), tinted by MoE layer `column`, and return where it ends."""
    box, palette = _library("matplotlib.patches").FancyBboxPatch, expert_palette(text.record.num_experts)
    drawable, prompt = _drawable(), text.record.num_prompt_tokens
    cached = f" ({text.cached_tokens} from the prefix cache)" if text.cached_tokens else ""
    subtitle = f"{prompt} tokens of prompt{cached}, {text.record.num_tokens - prompt} generated"
    title, small = (
        {"fontsize": 9.5, "weight": "bold", "va": "center", "parse_math": False},
        {"fontsize": 8, "color": _SOFT, "va": "center"},
    )
    title_text = axes.annotate(drawable(printable(text.title)), (0, top + 0.75 * _LINE_PT), **title)
    axes.annotate(subtitle, (1, 0.5), xycoords=title_text, xytext=(8, 0), textcoords="offset points", **small)
    start = top + 1.65 * _LINE_PT
    for part in positioned:
        x, y, width = part.column * _CHAR_PT, start + part.line * _LINE_PT, len(part.text) * _CHAR_PT
        experts = text.experts(part.token, column)
        fill = palette[experts[0]] if experts else "#ffffff"
        edge = {"linewidth": 0} if experts else {"linewidth": 0.6, "edgecolor": _SOFT}
        axes.add_patch(
            box((x + 0.5, y - 6.5), width - 1, 13, boxstyle="round,pad=0,rounding_size=2", facecolor=fill, **edge)
        )
        weight = "bold" if part.token >= prompt else "normal"
        font = {"family": "DejaVu Sans Mono", "fontsize": _FONT_PT, "weight": weight, "color": text_color(fill)}
        axes.text(x, y, drawable(part.text), va="center_baseline", ha="left", parse_math=False, **font)
        if experts:
            axes.text(x + width / 2, y + 10, str(experts[0]), fontsize=4.8, color=_SOFT, ha="center", va="center")
        if part.token < text.cached_tokens:
            axes.plot([x, x + width], [y - 8.2, y - 8.2], color="black", linewidth=0.7, solid_capstyle="butt")
    last_line = positioned[-1].line if positioned else 0
    return start + (last_line + _BETWEEN_LINES - 1.65) * _LINE_PT


def _draw_loads(figure: Any, texts: Sequence[RoutedText], column: int, *, bottom: float, height: float) -> None:
    """Draw the heat maps of prompt and generated rows side by side, with one scale."""
    colormap = _library("matplotlib.colors").LinearSegmentedColormap.from_list(
        "load", [f"#{colour}" for colour in CIVIDIS]
    )
    colormap = colormap.with_extremes(bad=_NONE)
    spans = {"prompt": [text.record.prompt for text in texts], "generated": [text.record.generated for text in texts]}
    loads = {name: utilization(*records) for name, records in spans.items()}
    top, first = scale_top(*loads.values()), texts[0].record
    left, gap, bar = (_MARGIN + 0.3) / _WIDTH, 0.45 / _WIDTH, 0.7 / _WIDTH
    width = (1 - left - _MARGIN / _WIDTH - gap - bar) / 2
    drawn: Any = None
    inch = 1 / figure.get_figheight()
    for panel, (name, load) in enumerate(loads.items()):
        axes = figure.add_axes((left + panel * (width + gap), bottom, width, height))
        drawn = axes.imshow(
            np.ma.masked_invalid(load), cmap=colormap, vmin=0, vmax=top, aspect="auto", interpolation="nearest"
        )
        axes.set_title(f"{name}, T = {len(known_rows(*spans[name])):,} rows", fontsize=9, loc="left")
        _label_axes(axes, load, first.layer_ids, column, with_layers=panel == 0)
        strip = figure.add_axes((left + panel * (width + gap), bottom - 0.11 * inch, width, 0.07 * inch))
        strip.imshow([np.arange(load.shape[1])], cmap="viridis", aspect="auto", interpolation="nearest")
        strip.set(yticks=[], xticks=_ticks(load.shape[1]))
        strip.tick_params(labelsize=7, length=2)
        strip.spines[:].set_visible(False)
        strip.set_xlabel("expert", fontsize=8)
    scale = figure.add_axes((1 - _MARGIN / _WIDTH - 0.42 / _WIDTH, bottom, 0.11 / _WIDTH, height))
    colourbar = figure.colorbar(drawn, cax=scale, ticks=sorted({0.0, 1.0, top}))
    colourbar.ax.axhline(1, color="white", linewidth=1.5)
    colourbar.ax.set_yticklabels(
        ["uniform" if tick == 1 else f"{tick:g}" for tick in sorted({0.0, 1.0, top})], fontsize=7
    )
    colourbar.ax.set_title("u", fontsize=8)
    colourbar.outline.set_visible(False)


def _label_axes(
    axes: Any, load: Float64[np.ndarray, "M E"], layer_ids: Sequence[int], column: int, *, with_layers: bool
) -> None:
    layers, experts = load.shape
    step = math.ceil(layers / 24)
    rows = [row for row in range(layers) if row % step == 0 or row == column]
    axes.set(xticks=[], yticks=rows if with_layers else [])
    if with_layers:
        axes.set_yticklabels(
            [f"▸ {layer_ids[row]}" if row == column else str(layer_ids[row]) for row in rows], fontsize=7.5
        )
        axes.set_ylabel("layer", fontsize=8)
    axes.set_xticks(np.arange(experts + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(layers + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def _ticks(num_experts: int) -> list[int]:
    step = max(1, num_experts // 8)
    return [*range(0, num_experts - step // 2 - 1, step), num_experts - 1]


def _drawable() -> Callable[[str], str]:
    """Return a function that replaces characters without a glyph in the font, of which matplotlib would warn, by ▯."""
    manager = _library("matplotlib.font_manager")
    faces = [manager.get_font(manager.findfont(f"DejaVu Sans Mono:{weight}")) for weight in ("normal", "bold")]
    return lambda text: "".join(
        character if all(face.get_char_index(ord(character)) for face in faces) else "▯" for character in text
    )


def _library(name: str) -> Any:
    return import_optional(name, purpose="pictures", extra="plot")
