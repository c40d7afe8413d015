"""One row of a model's table of names: a tensor of a checkpoint and where it belongs in the model's stacked arrays."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Shaped

_Side = TypeVar("_Side", int, slice)  # of a shape, or of a box


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntries:
    """The entries of a file's tensor `name` that make a tensor of the table: start, start + step, ... of its last axis;
    with `swapped`, the last two axes are swapped then. Loading reads `view`, and an export writes to it."""

    name: str
    start: int = 0
    step: int = 1
    swapped: bool = False

    def view(self, stored: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The entries, as a view of the file's tensor or of a box that `stored_box` gives."""
        entries = stored[..., self.start :: self.step]
        return np.swapaxes(entries, -1, -2) if self.swapped else entries

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the entries of a file's tensor."""
        return self._order((*stored[:-1], stored[-1] // self.step))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the file's tensor that has these entries."""
        *lead, last = self._order(shape)
        return (*lead, last * self.step)

    def stored_box(self, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """The box of the file's tensor that holds a box of the entries."""
        *lead, last = self._order(box)
        return (*lead, slice(self.step * last.start, self.step * last.stop))

    def _order(self, sides: tuple[_Side, ...]) -> tuple[_Side, ...]:
        return (*sides[:-2], sides[-1], sides[-2]) if self.swapped else sides


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where one tensor of a checkpoint belongs: target[*index, ..., offset : offset + its size], and with `first`, a
    tensor of several stacked ones, target[first : first + its first axis, ...]."""

    name: str
    shape: tuple[int, ...]  # as in the checkpoint
    target: str  # dotted path of our array
    index: tuple[int, ...] = ()  # leading indices into the target, such as (layer,)
    transpose: bool = False  # swap the last two axes: a checkpoint holds [out, in], we hold [in, out]
    offset: int = 0  # along an axis of the target, for gate|up and q|k|v
    offset_axis: int = -1  # that axis, counted from the last one
    optional: bool = False
    first: int = 0  # along the first axis of the target, for stacked experts; `index` is empty then
    stored: StoredEntries | None = None  # of the file's tensor, where the tensor is part of one; None: it is one itself

    @property
    def start(self) -> list[int]:
        """Where the tensor begins in the target, by axis."""
        start = [*self.index, *[0] * len(self.shape)]
        if self.offset:
            start[self.offset_axis] += self.offset
        if self.first:
            assert not self.index, self
            start[0] += self.first
        return start

    @property
    def placed_shape(self) -> tuple[int, ...]:
        """The tensor's shape in the target."""
        tail = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transpose else self.shape
        return (1,) * len(self.index) + tail
