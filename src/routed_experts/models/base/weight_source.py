"""One row of a model's table of names: a tensor of a checkpoint and where it belongs in the model's stacked arrays."""

from dataclasses import dataclass


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
