"""WeightVersion: which weights are served: the label that their owner gave them, and the engine's count of updates.

A label is any text of at most MAX_LABEL_CHARS characters. It may repeat, and an older one may come back. The count
rises by one with every update of the weights or of the label, so no two updates are one. Rows, pages and programs know
weights by this count alone; labels are told beside it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.integers import is_integer
from routed_experts.core.record_validation import VersionSpans

MAX_LABEL_CHARS = 256
INITIAL_LABEL = "default"  # of the weights that an engine starts with, as in SGLang
_TOO_LARGE = 10**MAX_LABEL_CHARS  # Python does not write an integer of 4,300 digits as text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """The weights of one update. `update_count` is 0 for those that an engine starts with."""

    label: str = INITIAL_LABEL
    update_count: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the fields by which routes tell it."""
        return {"weight_version": self.label, "update_count": self.update_count}


@dataclasses.dataclass(frozen=True, slots=True)
class WeightRun:
    """Tokens [start, end) and the weights that fed, or sampled, them."""

    start: int
    end: int
    version: WeightVersion


def to_label(value: object, *, param: str) -> str:
    """Return a label that a caller gave: text, or an integer as its text. Raises InvalidRequestError naming `param`."""
    value = int_as_text(value)
    if not isinstance(value, str):
        expected = f"text of at most {MAX_LABEL_CHARS} characters, or an integer of as many"
        raise InvalidRequestError(f"{param}={short_repr(value)} must be {expected}", param=param)
    if len(value) > MAX_LABEL_CHARS:
        text = f"{param}={short_repr(value)} has {len(value)} characters, above {MAX_LABEL_CHARS}; give a shorter label"
        raise InvalidRequestError(text, param=param)
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        text = f"{param}={short_repr(value)} holds half of a surrogate pair, which is no text; give whole characters"
        raise InvalidRequestError(text, param=param)
    return value


def int_as_text(value: Any) -> Any:
    """Return an integer as its text, and anything else, an integer that is too long too, as it is."""
    return str(int(value)) if is_integer(value) and abs(value) < _TOO_LARGE else value


def weight_runs(
    changes: Sequence[tuple[int, WeightVersion]], current: WeightVersion, num_fed: int
) -> tuple[WeightRun, ...]:
    """Return which weights fed tokens [0, num_fed) of a sequence. `changes`: (number of tokens fed, weights before the
    update), an update a pair, in order; tokens after the last one were fed by `current`."""
    runs, covered = list[WeightRun](), 0
    for end, version in (*changes, (num_fed, current)):
        end = min(end, num_fed)
        if end > covered:
            runs.append(WeightRun(covered, end, version))
            covered = end
    return tuple(runs)


def to_spans(runs: Iterable[WeightRun]) -> VersionSpans:
    """Return runs as a record has them: by count."""
    return tuple((run.start, run.end, run.version.update_count) for run in runs)


def to_labels(versions: Iterable[WeightVersion]) -> tuple[tuple[int, str], ...]:
    """Return (count, label) of each, ascending."""
    return tuple(sorted({version.update_count: version.label for version in versions}.items()))


def cut_runs(runs: Iterable[WeightRun], start: int, end: int) -> tuple[WeightRun, ...]:
    """Return the runs of tokens [start, end), counted from `start`."""
    parts = ((max(run.start, start) - start, min(run.end, end) - start, run.version) for run in runs)
    return tuple(WeightRun(low, high, version) for low, high, version in parts if low < high)


def labelled_spans(runs: Iterable[WeightRun]) -> list[dict[str, object]]:
    """Return runs in SGLang's form, `{version, start, end}`. Neighbours of one label are one span, as there: their
    counts are told in `version_spans`."""
    spans: list[dict[str, object]] = []
    for run in runs:
        if spans and spans[-1]["version"] == run.version.label:
            spans[-1]["end"] = run.end
        else:
            spans.append({"version": run.version.label, "start": run.start, "end": run.end})
    return spans
