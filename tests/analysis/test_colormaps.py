"""Colours against matplotlib's tables and WCAG contrast."""

import itertools

import matplotlib
import numpy as np
import pytest

from routed_experts.analysis.colormaps import (
    CIVIDIS,
    VIRIDIS,
    colour_at,
    expert_palette,
    luminance,
    scale_top,
    text_color,
)


def channels(colour):
    return np.array([int(colour[offset : offset + 2], 16) for offset in (1, 3, 5)])


@pytest.mark.parametrize(("name", "anchors"), [("viridis", VIRIDIS), ("cividis", CIVIDIS)])
def test_every_shade_is_close_to_that_of_matplotlib(name, anchors):
    table = matplotlib.colormaps[name]
    for step in range(256):
        assert np.abs(channels(colour_at(step / 255, anchors)) - 255 * np.array(table(step)[:3])).max() <= 11, step


@pytest.mark.parametrize("anchors", [VIRIDIS, CIVIDIS])
def test_lightness_rises_all_the_way_so_that_grey_print_keeps_the_order(anchors):
    shades = [luminance(colour_at(step / 40, anchors)) for step in range(41)]
    assert all(a < b for a, b in itertools.pairwise(shades))


def test_shares_beyond_the_scale_take_its_ends():
    assert colour_at(-1.0) == f"#{VIRIDIS[0]}"
    assert colour_at(7.0) == f"#{VIRIDIS[-1]}"


@pytest.mark.parametrize("num_experts", [1, 2, 32, 128])
def test_each_expert_has_a_colour_of_its_own_on_which_ink_is_readable(num_experts):
    palette = expert_palette(num_experts)
    assert len(set(palette)) == num_experts
    for colour in palette:
        bright, dark = sorted((luminance(colour), luminance(text_color(colour))), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_the_shared_scale_holds_the_largest_load_and_never_ends_below_two():
    assert scale_top(np.array([[0.2, 1.8]])) == 2.0
    assert scale_top(np.array([[0.2, 1.8]]), np.array([[np.nan, 3.1]])) == 3.5
    assert scale_top(np.array([[np.nan]])) == 2.0
