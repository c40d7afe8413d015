"""Texts beside their routing: pieces of bytes, what may reach a terminal, and which token has which experts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records import build_text, random_record
from routed_experts.analysis import RoutedText, printable, token_texts
from routed_experts.core.errors import RoutingAlignmentError


@given(st.text(), st.randoms(use_true_random=False))
def test_pieces_join_to_the_text_however_its_bytes_are_cut(text, rng):
    encoded = text.encode()
    cuts = sorted(rng.randrange(len(encoded) + 1) for _ in range(5))
    tokens = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    pieces = token_texts(tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_a_character_belongs_to_the_token_that_completes_it():
    assert token_texts([b"a\xe2", b"\x82", b"\xacb"]) == ("a", "", "€b")
    assert token_texts([b"a", b"\xe2"]) == ("a", "\ufffd")
    assert token_texts([]) == ()


@given(st.text())
def test_nothing_that_steers_a_terminal_is_printed(text):
    printed = printable(text)
    assert len(printed) == len(text)
    assert all(character == "\n" or character.isprintable() for character in printed)


def test_controls_become_their_pictures():
    assert printable("a\x1b[2Jb\x7f\u202e\u00a0c\n") == "a␛[2Jb␡\ufffd c\n"


def test_experts_of_a_token_are_its_row_and_nothing_where_no_row_is_known():
    record = random_record(rows=4, start=2, valid=np.array([True, False, True, True]))
    text = RoutedText(title="t", pieces=tuple("abcdefg"), record=record)
    assert [text.experts(token, 1) for token in range(7)] == [
        (),
        (),
        tuple(record.ids[0, 1]),
        (),
        *map(tuple, record.ids[2:, 1]),
        (),
    ]


def test_a_piece_too_few_is_refused():
    with pytest.raises(RoutingAlignmentError, match=r"6 pieces.*7 tokens"):
        RoutedText(title="t", pieces=tuple("abcdef"), record=build_text("abcdefg").record)
