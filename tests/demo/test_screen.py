"""What reaches the terminal: bars in proportion, and no byte of a model's text that steers it."""

import io

import numpy as np
import pytest

from analysis.records import build_text, random_record
from routed_experts.demo.terminal import Screen, bars


def test_bars_grow_with_the_load_and_mark_the_dead():
    assert bars(np.array([0.0, 0.1, 1.0, 2.0, 4.0]), top=4.0) == "·▁▃▅█"


@pytest.mark.parametrize(("experts", "width"), [(1, 1), (64, 64), (65, 64), (300, 64)])
def test_bars_of_many_experts_fit_a_line(experts, width):
    assert len(bars(np.ones(experts), top=1.0)) == width


def test_text_of_a_model_cannot_steer_the_terminal_or_use_the_markup_of_rich():
    stream = io.StringIO()
    screen = Screen(stream)
    text = build_text(["[red]", "\x1b[2J", "\r", "\x07", ":smile:", "end"])
    screen.answer(text, 0)
    screen.experts(text, range(6))
    written = stream.getvalue()
    assert "[red]␛[2J" in written
    assert "␍␇:smile:end" in written
    assert not {"\x1b", "\r", "\x07"} & set(written)
    assert "no row" in written


def test_a_load_without_a_known_row_is_shown_as_such():
    stream = io.StringIO()
    Screen(stream).loads([random_record(rows=2, valid=np.zeros(2, bool))])
    assert "nan" in stream.getvalue()
