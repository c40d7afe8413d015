"""Figures: every character of a text has a cell, strange text is drawn without a warning, and a missing matplotlib is
named."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records import build_text
from routed_experts.analysis import draw_routing, printable
from routed_experts.analysis.figures import place_tokens
from routed_experts.core.errors import ConfigError

SRC = Path(__file__).resolve().parents[2] / "src"


@given(st.lists(st.text(alphabet="ab \n漢\x1b", max_size=30), max_size=12))
def test_every_character_has_one_place_and_none_is_lost(pieces):
    parts = place_tokens(pieces, columns=10)
    cells = [(part.line, part.column + offset) for part in parts for offset in range(len(part.text))]
    assert len(set(cells)) == len(cells)
    assert cells == sorted(cells)
    assert all(column < 10 for _, column in cells)
    for token, piece in enumerate(pieces):
        drawn = "".join(part.text for part in parts if part.token == token)
        assert drawn == (printable(piece).replace("\n", "↵") or "·")


def test_lines_break_before_a_token_and_at_line_feeds_and_inside_tokens_that_fit_no_line():
    parts = place_tokens(["abcd", "efg", "h\n", "0123456789", "x"], columns=6)
    assert [(part.token, part.line, part.column, part.text) for part in parts] == [
        (0, 0, 0, "abcd"),
        (1, 1, 0, "efg"),
        (2, 1, 3, "h↵"),
        (3, 2, 0, "012345"),
        (3, 3, 0, "6789"),
        (4, 3, 4, "x"),
    ]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_written_whatever_the_text(tmp_path, ending):
    pieces = ["$x_1^2$", " \\frac", "漢字", "\x1b[0m", "😀", "\n", "", "<b>", " end"]
    texts = [build_text(pieces, cached_tokens=2, title="$t$ 漢"), build_text("abc", 1, valid=np.array([True, False]))]
    draw_routing(texts, tmp_path / f"routing.{ending}", title="$a$ title", dpi=40)
    written = (tmp_path / f"routing.{ending}").read_bytes()
    assert written.startswith({"png": b"\x89PNG", "svg": b"<?xml"}[ending])


def test_a_text_without_tokens_has_a_title_and_no_box(tmp_path):
    draw_routing([build_text("abc"), build_text("")], tmp_path / "some.svg", title="t", dpi=40)
    draw_routing([build_text("")], tmp_path / "none.svg", title="t", dpi=40)
    assert all((tmp_path / name).read_bytes().startswith(b"<?xml") for name in ("some.svg", "none.svg"))


def test_a_name_without_an_ending_gets_one(tmp_path):
    draw_routing([build_text("abcdef")], tmp_path / "fig", title="t", dpi=40)
    assert [file.name for file in tmp_path.iterdir()] == ["fig.png"] and (tmp_path / "fig.png").read_bytes().startswith(
        b"\x89PNG"
    )


def test_a_picture_is_the_same_each_time(tmp_path):
    for name in "ab":
        draw_routing([build_text("abcdef")], tmp_path / f"{name}.png", title="t", dpi=40)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_missing_matplotlib_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"matplotlib is not installed; run .*\[plot\]"):
        draw_routing([build_text("abcdef")], tmp_path / "a.png", title="t")


def test_analysis_is_imported_without_matplotlib_or_jax():
    code = "import sys, routed_experts.analysis\nassert not {'matplotlib', 'jax', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SRC)}, timeout=60)
