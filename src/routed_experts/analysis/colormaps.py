"""Colour maps that are readable with any colour vision and in grey: viridis and cividis.

Sixteen anchors each, linear in between: within 11/255 of the original tables."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

# Anchors of matplotlib's viridis (van der Walt, Smith 2015) and cividis (Nunez, Anderton, Renslow 2018), both CC0.
VIRIDIS = tuple(
    "440154 481a6c 472f7d 414487 39568c 31688e 2a788e 23888e "
    "1f988b 22a884 35b779 54c568 7ad151 a5db36 d2e21b fde725".split()
)
CIVIDIS = tuple(
    "00224e 002e6c 1e3a6f 35456c 47516c 575d6d 666970 757575 "
    "848279 948e77 a59c74 b7a96e c8b866 dbc75a eed649 fee838".split()
)


def colour_at(share: float, anchors: Sequence[str] = VIRIDIS) -> str:
    """Return the colour at `share` of the map, clipped to 0..1, as "#rrggbb"."""
    position = min(max(share, 0.0), 1.0) * (len(anchors) - 1)
    low = min(int(position), len(anchors) - 2)
    mixed = zip(_channels(anchors[low]), _channels(anchors[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (position - low)):02x}" for a, b in mixed)


def expert_palette(num_experts: int) -> tuple[str, ...]:
    """Return one viridis colour for each expert, in order of ids."""
    return tuple(colour_at(expert / max(num_experts - 1, 1)) for expert in range(num_experts))


def text_color(background: str) -> str:
    """Return black or white for text on `background`, with a contrast of 4.5 or more (WCAG 2.2, 1.4.3)."""
    return "#000000" if luminance(background) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb" (WCAG 2.2), 0 to 1."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (v / 255 for v in _channels(colour.removeprefix("#")))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def scale_top(*loads: Float64[np.ndarray, "M E"]) -> float:
    """Return the upper end of a shared load scale: the largest load, rounded up to a half, at least 2."""
    known = np.concatenate([load[~np.isnan(load)] for load in loads])
    return max(2.0, float(np.ceil(known.max() * 2) / 2)) if known.size else 2.0


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour))
