"""Parts of error messages. `short_repr` is tested with the values that sampling parameters refuse."""

import numpy as np
import pytest

from routed_experts.core.error_text import nearest_name, short_repr, suggestion

KNOWN = ("max_tokens", "stop", "seed", "n", "port")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_tokns", "max_tokens"),
        ("max_token", "max_tokens"),
        ("max_tokenss", "max_tokens"),
        ("stp", "stop"),
        ("prot", "port"),  # two neighbours swapped are one edit
        ("max_output", None),
        ("m", None),
        ("sxxd", None),
        ("x" * 10**6, None),
        (5, None),
    ],
)
def test_the_nearest_name_is_within_two_edits(name: object, nearest: str | None) -> None:
    assert nearest_name(name, KNOWN) == nearest


def test_arrays_without_a_length_are_rendered() -> None:
    assert short_repr(np.array(3)) == "a ndarray of one value"
    assert short_repr(np.zeros((3, 2))) == "a ndarray of 3"


def test_a_suggestion_names_the_nearest_or_lists_all() -> None:
    assert suggestion("stpo", KNOWN) == "did you mean stop?"
    assert suggestion("zzzz", KNOWN) == "known are max_tokens, stop, seed, n, port"
    assert suggestion("zzzz", KNOWN, otherwise="leave it out") == "leave it out"
