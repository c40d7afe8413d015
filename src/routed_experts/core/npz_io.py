"""Write arrays to an .npz file atomically, and read them with dtypes and dims checked. Loading never runs code."""

import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import RoutingFormatError

# What NumPy and zipfile raise for damaged archives: of other methods, with wrong places, or sizes beyond all memory.
_DAMAGED = (
    *(ValueError, KeyError, EOFError, AttributeError, TypeError, OSError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)
ArraySpecs = Mapping[str, tuple[type[Any], int]]  # by name: dtype and number of dims


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz; the suffix is added if `path` has another, as NumPy does. Raises WriteError and leaves no file."""
    name = os.fspath(path)
    with atomic_write(name if name.endswith(".npz") else f"{name}.npz") as part, part.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read_arrays(path: str | os.PathLike[str], specs: ArraySpecs, *, what: str) -> dict[str, np.ndarray]:
    """Read the arrays of `specs`; `what` names them in errors. Raises RoutingFormatError for another file or other
    arrays."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays: dict[str, np.ndarray] = {name: file[name] for name in specs}
    except _DAMAGED as error:
        # NumPy takes what is no archive for a pickle, and advises to load it all the same.
        is_advice = isinstance(error, ValueError) and ("allow_pickle" in str(error) or "pickled data" in str(error))
        reason = "no .npz of plain arrays" if is_advice else error
        raise RoutingFormatError(f"{path} holds no {what} ({reason}); give what its save() wrote") from error
    for name, (dtype, ndim) in specs.items():
        if arrays[name].dtype != dtype or arrays[name].ndim != ndim:
            received = f"{arrays[name].dtype} of {arrays[name].ndim} dims"
            raise RoutingFormatError(
                f"{path}: {name} is {received}; expected {np.dtype(dtype)} of {ndim}, as save() writes it"
            )
    return arrays
