"""Labels of weights and counts of updates: what is a label, and which weights fed which token."""

import itertools

import numpy as np
import pytest

from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.weight_version import (
    MAX_LABEL_CHARS,
    WeightVersion,
    cut_runs,
    labelled_spans,
    to_label,
    to_labels,
    to_spans,
    weight_runs,
)


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ("step-4", "step-4"),
        ("default", "default"),
        ("", ""),
        ("x" * 256, "x" * 256),
        ("größer 🦊\n", "größer 🦊\n"),
        (0, "0"),
        (-1, "-1"),
        (2**70, str(2**70)),
        (10**255, "1" + "0" * 255),
    ],
)
def test_any_text_and_any_integer_is_a_label(value, label):
    assert to_label(value, param="version") == label


WRONG = {
    "257 characters": (
        "x" * 257,
        r"weight_version='x{60}'\.\.\. \(257 characters\) has 257 characters, above 256; give a shorter label",
    ),
    "257 digits": (10**256, r"weight_version=an integer of 851 bits must be text of at most 256 characters"),
    "5001 digits": (-(10**5000), r"weight_version=an integer of 16610 bits must be text"),
    "a truth value": (True, r"weight_version=True must be text of at most 256 characters, or an integer"),
    "a fraction": (1.5, r"weight_version=1\.5 must be text"),
    "nothing": (None, r"weight_version=None must be text"),
    "a list": (["a"], r"weight_version=a list of 1 must be text"),
    "bytes": (b"a", r"weight_version=a bytes of 1 must be text"),
    "half a pair": ("a\ud800b", r"holds half of a surrogate pair, which is no text; give whole characters"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_label_is_refused_with_name_value_limit_and_fix(kind):
    value, told = WRONG[kind]
    with pytest.raises(InvalidRequestError, match=told) as caught:
        to_label(value, param="weight_version")
    assert caught.value.param == "weight_version" and len(str(caught.value)) < 300


def test_runs_are_those_of_a_count_token_by_token():
    """A sequence that is fed in pieces while updates come, some of which find nothing new fed."""
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(300):
        versions = [WeightVersion(label="ab"[rng.integers(2)], update_count=count) for count in range(6)]
        by_token, changes = [], []
        for old in versions[:-1]:
            by_token += [old] * int(rng.integers(0, 4))
            if len(by_token) > (changes[-1][0] if changes else 0):
                changes.append((len(by_token), old))
        by_token += [versions[-1]] * int(rng.integers(0, 4))
        runs = weight_runs(changes, versions[-1], len(by_token))
        assert [run.version for run in runs for _ in range(run.start, run.end)] == by_token
        assert all(a.end == b.start and a.version != b.version for a, b in itertools.pairwise(runs))
        assert [(low, high) for low, high, _ in to_spans(runs)] == [(run.start, run.end) for run in runs]
        start = int(rng.integers(0, len(by_token) + 1))
        cut = cut_runs(runs, start, len(by_token))
        assert [run.version for run in cut for _ in range(run.start, run.end)] == by_token[start:]
        spans = labelled_spans(runs)
        told = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        assert told == [version.label for version in by_token]
        assert all(a["version"] != b["version"] for a, b in itertools.pairwise(spans)), "as SGLang's neighbours"
        lengths.add((len(runs), len(spans)))
    assert any(many > few > 1 for many, few in lengths), "two updates under one label, beside others"


def test_a_label_belongs_to_its_count():
    versions = [WeightVersion(label="b", update_count=3), WeightVersion(), WeightVersion(label="b", update_count=2)]
    assert to_labels([*versions, *versions]) == ((0, "default"), (2, "b"), (3, "b"))


def test_the_limit_is_that_of_the_issue():
    assert MAX_LABEL_CHARS == 256
