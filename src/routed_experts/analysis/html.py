"""One self-contained HTML page about routing: texts tinted by expert over the load of layers x experts.

The page makes no network request, and text of a model is text in it, never markup. Dims: M MoE layers, E experts, K
experts per token."""

import base64
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
from jaxtyping import Float64

from routed_experts.analysis.colormaps import CIVIDIS, colour_at, expert_palette, scale_top, text_color
from routed_experts.analysis.metrics import known_rows, utilization
from routed_experts.analysis.routed_text import RoutedText, printable

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_CELL, _LABELS, _STRIP = 14, 34, 8  # heights and widths in SVG units


def routing_page(texts: Sequence[RoutedText], *, title: str, column: int | None = None) -> str:
    """Render the page; `column` is the MoE layer shown at first, the middle one by default. All texts are of one
    model."""
    records = [text.record for text in texts]
    num_rows, first = len(known_rows(*records)), records[0]
    column = len(first.layer_ids) // 2 if column is None else column
    loads = {
        "prompt": utilization(*(record.prompt for record in records)),
        "generated": utilization(*(r.generated for r in records)),
    }
    counts = {
        "prompt": len(known_rows(*(r.prompt for r in records))),
        "generated": len(known_rows(*(r.generated for r in records))),
    }
    top = scale_top(*loads.values())
    values = {
        "title": html.escape(title),
        "shapes": f"{len(texts)} texts · {num_rows} rows · {len(first.layer_ids)} MoE layers of "
        f"{first.num_hidden_layers} · {first.num_experts} experts, top-{first.top_k}",
        "column": str(column),
        "last_column": str(len(first.layer_ids) - 1),
        "layer_name": f"layer {first.layer_ids[column]}",
        "texts": "\n".join(
            _section(text, index, column, expert_palette(first.num_experts)) for index, text in enumerate(texts)
        ),
        "maps": "".join(_map(name, load, counts[name], first.layer_ids, top) for name, load in loads.items()),
        "scale": _scale(top),
        "caption": "u = c·E / (T·K), where c counts the rows of a layer that went to an expert; 1 is uniform. "
        f"T = {counts['prompt']} rows of prompts and {counts['generated']} of generated tokens, K = {first.top_k}, E "
        f"= {first.num_experts}.",
        "routing": _script_json(texts),
    }
    template = files("routed_experts.analysis").joinpath("page.html").read_text(encoding="utf-8")
    # One pass: text that looks like a placeholder stays text.
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template)


def _section(text: RoutedText, index: int, column: int, palette: Sequence[str]) -> str:
    spans = "".join(_span(text, token, column, palette) for token in range(len(text.pieces)))
    label = f"text {index + 1}; arrow keys walk its tokens"
    return (
        f'<section><h2>{html.escape(printable(text.title))}</h2><p class="soft">'
        f"{text.record.num_prompt_tokens} tokens of prompt, {text.cached_tokens} of them from the prefix cache, "
        f"{text.record.num_tokens - text.record.num_prompt_tokens} generated</p>"
        f'<p class="text" tabindex="0" role="group" aria-label="{label}">{spans}</p></section>'
    )


def _span(text: RoutedText, token: int, column: int, palette: Sequence[str]) -> str:
    experts = text.experts(token, column)
    generated, cached = token >= text.record.num_prompt_tokens, token < text.cached_tokens
    classes = f"t{' g' if generated else ''}{' c' if cached else ''}{'' if experts else ' u'}"
    kind = ("generated" if generated else "prompt") + (", from the prefix cache" if cached else "")
    if not experts:
        kind += ", never fed: no row" if token == text.record.num_tokens - 1 else ", no row"
    colour = palette[experts[0]] if experts else ""
    style = f' style="background:{colour};color:{text_color(colour)}"' if experts else ""
    visible = printable(text.pieces[token]).replace("\n", "↵\n") or "·"
    return f'<span class="{classes}" data-kind="{kind}"{style}>{html.escape(visible)}</span>'


def _map(name: str, load: Float64[np.ndarray, "M E"], num_rows: int, layer_ids: Sequence[int], top: float) -> str:
    layers, experts = load.shape
    width, height = _LABELS + experts * _CELL, layers * _CELL
    parts = [
        f'<text x="{_LABELS - 6}" y="{(row + 0.75) * _CELL}" text-anchor="end" data-label="{row}">{layer}</text>'
        for row, layer in enumerate(layer_ids)
    ]
    for row, column in np.ndindex(layers, experts):
        u = float(load[row, column])
        fill = "var(--none)" if np.isnan(u) else colour_at(u / top, CIVIDIS)
        label = f"layer {layer_ids[row]}, expert {column}: " + ("no row" if np.isnan(u) else f"{u:.2f} × uniform")
        box = f'x="{_LABELS + column * _CELL}" y="{row * _CELL}" width="{_CELL - 1}" height="{_CELL - 1}"'
        parts.append(f'<rect class="cell" data-at="{row} {column}" {box} fill="{fill}"><title>{label}</title></rect>')
    for expert, colour in enumerate(expert_palette(experts)):
        box = f'x="{_LABELS + expert * _CELL}" y="{height + 4}" width="{_CELL - 1}" height="{_STRIP}"'
        parts.append(f'<rect {box} fill="{colour}"><title>expert {expert}</title></rect>')
    ticks = sorted({*range(0, experts, max(1, experts // 8)), experts - 1})
    parts += [
        f'<text x="{_LABELS + (tick + 0.5) * _CELL}" y="{height + 24}" text-anchor="middle" class="soft-ink">'
        f"{tick}</text>"
        for tick in ticks
        if tick == experts - 1 or experts - 1 - tick >= max(1, experts // 16)
    ]
    label = f"load of {experts} experts in {layers} layers, {name}"
    svg = f'<svg viewBox="0 0 {width} {height + 28}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    caption = f"{name}, T = {num_rows} rows; layers downward, experts across"
    return f'<div class="map"><p class="soft">{caption}</p>{svg}</div>'


def _scale(top: float) -> str:
    stops = "".join(
        f'<stop offset="{index / (len(CIVIDIS) - 1):.3f}" stop-color="#{colour}"/>'
        for index, colour in enumerate(CIVIDIS)
    )
    uniform = 10 + 280 / top
    return (
        '<svg class="scale" viewBox="0 0 300 34" role="img" '
        f'aria-label="colour scale, load 0 to {top:g}, uniform at 1">'
        f'<defs><linearGradient id="load">{stops}</linearGradient></defs>'
        '<rect x="10" y="2" width="280" height="10" fill="url(#load)"/>'
        f'<path d="M{uniform:.1f} 0V15" stroke="currentColor" stroke-width="2"/>'
        '<text x="10" y="26" text-anchor="middle">0</text>'
        f'<text x="{uniform:.1f}" y="26" text-anchor="middle">1 = uniform</text>'
        f'<text x="290" y="26" text-anchor="middle">{top:g}</text></svg>'
    )


def _script_json(texts: Sequence[RoutedText]) -> str:
    """Return the script's data: ids as base64 of little-endian bytes, colours, and which rows are known."""
    first = texts[0].record
    palette = expert_palette(first.num_experts)
    data = {
        "layers": first.layer_ids,
        "top_k": first.top_k,
        "palette": palette,
        "inks": [text_color(colour) for colour in palette],
        "texts": [
            {
                "start": text.record.start,
                "rows": text.record.num_rows,
                "id_bytes": text.record.ids.itemsize,
                "ids": base64.b64encode(
                    text.record.ids.astype(text.record.ids.dtype.newbyteorder("<")).tobytes()
                ).decode(),
                "known": None
                if text.record.valid is None
                else "".join("01"[bool(known)] for known in text.record.valid),
            }
            for text in texts
        ],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
