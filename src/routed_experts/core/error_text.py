"""Parts of error messages: a short rendering of a user's value, and the known name nearest to an unknown one."""

import numbers
from collections.abc import Collection

_MAX_CHARS = 60
_MAX_NAME_CHARS = 64  # bounds the edit distance, which is quadratic


def short_repr(value: object, *, max_chars: int = _MAX_CHARS) -> str:
    """Render any user's value in one short line, so that an error never echoes a large input. `max_chars`: of a text
    that are shown."""
    if isinstance(value, str):
        return repr(value[:max_chars]) + (f"... ({len(value)} characters)" if len(value) > max_chars else "")
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | numbers.Number):
        return repr(value)[:_MAX_CHARS]
    if isinstance(value, Collection):
        try:
            return f"a {type(value).__name__} of {len(value)}"
        except TypeError:  # an array of no dims
            return f"a {type(value).__name__} of one value"
    return f"a {type(value).__name__}"


def short_text(text: str) -> str:
    """Text for an error without quotes: its first characters, and their number, where it is long."""
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}... ({len(text)} characters)"


def nearest_name(name: object, known: Collection[str]) -> str | None:
    """Return the known name within two edits of `name` (one, for names of up to 5 letters), or None.

    An edit inserts, deletes or replaces a character, or swaps two neighbours."""
    if not isinstance(name, str) or not 3 <= len(name) <= _MAX_NAME_CHARS:
        return None
    limit = 1 if len(name) <= 5 else 2
    candidates = [other for other in sorted(known) if len(other) > 2 and abs(len(other) - len(name)) <= limit]
    distance, nearest = min(((_edit_distance(name, other), other) for other in candidates), default=(limit + 1, ""))
    return nearest if distance <= limit else None


def suggestion(name: object, known: Collection[str], *, otherwise: str | None = None) -> str:
    """Return "did you mean X?" for the nearest known name; without one `otherwise`, by default all known names."""
    nearest = nearest_name(name, known)
    if nearest is not None:
        return f"did you mean {nearest}?"
    return f"known are {', '.join(known)}" if otherwise is None else otherwise


def _edit_distance(a: str, b: str) -> int:
    """Optimal string alignment distance."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, char in enumerate(a, start=1):
        above = row
        row = [i]
        for j, other in enumerate(b, start=1):
            edits = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (char != other))
            if i > 1 and j > 1 and char == b[j - 2] and a[i - 2] == other:
                edits = min(edits, before[j - 2] + 1)
            row.append(edits)
        before = above
    return row[-1]
