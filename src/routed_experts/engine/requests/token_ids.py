"""Token ids that a caller gives, as integers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.integers import is_integer


def is_nested(input_ids: object) -> bool:
    """Whether these token ids are several rows, one a prompt."""
    if isinstance(input_ids, np.ndarray):
        return input_ids.ndim > 1
    rows: Sequence[object] = input_ids if isinstance(input_ids, list | tuple) else ()
    return len(rows) > 0 and all(isinstance(row, list | tuple | range | np.ndarray) for row in rows)


def as_integers(ids: object, param: str = "input_ids") -> np.ndarray:
    """Token ids as integers; refuses what only looks like an integer. Those that int64 does not hold are out of any
    vocabulary, and stay as they are for its message."""
    if isinstance(ids, np.ndarray):
        array = ids
    else:
        parts: list[Any] | None = list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str | bytes) else None
        if parts is None or not all(is_integer(part) for part in parts):
            several = ", or a list of such lists" if param == "input_ids" else ""
            text = f"{PARAM}={short_repr(ids)} must be a list of token ids{several}"
            wrong = next((item for item in enumerate(parts or ()) if not is_integer(item[1])), None)
            if wrong is not None:
                text = f"{text}; item {wrong[0]} is {short_repr(wrong[1])}: give an integer"
            raise InvalidRequestError(text, param=param)
        try:
            array = np.asarray(parts, np.int64)
        except OverflowError:
            return np.asarray(parts, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        text = f"{PARAM} of shape {array.shape} and type {array.dtype} must be a row of integers"
        raise InvalidRequestError(text, param=param)
    return array if array.dtype == np.uint64 else array.astype(np.int64)
