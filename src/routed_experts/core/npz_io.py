"""Arrays in an .npz file, written whole and read with their dtypes and dims checked; nothing in the file runs code.
Knows not what they mean."""

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import RoutingFormatError

ArraySpecs = Mapping[str, tuple[type[Any], int]]  # by name: dtype and number of dims


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz, with that suffix if `path` has another, as NumPy does. Raises WriteError; then nothing is left of
    it."""
    said = os.fspath(path)
    with atomic_write(said if said.endswith(".npz") else f"{said}.npz") as part, part.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read_arrays(path: str | os.PathLike[str], forms: ArraySpecs, *, what: str) -> dict[str, np.ndarray]:
    """Read the arrays of these forms; `what` names them in errors. Raises RoutingFormatError for another file or other
    arrays."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays: dict[str, np.ndarray] = {name: file[name] for name in forms}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise RoutingFormatError(f"{path} holds no {what} ({error}); give what its save() wrote") from error
    for name, (dtype, ndim) in forms.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != ndim:
            came = f"{arrays[name].dtype} of {arrays[name].ndim} dims"
            raise RoutingFormatError(
                f"{path}: {name} is {came}; expected {np.dtype(dtype)} of {ndim}, as save() writes it"
            )
    return arrays
