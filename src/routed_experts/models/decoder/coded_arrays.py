"""Matrices of a layer that stay codes and scales in memory (layers/quantized.py): their arrays, and the tensors that
fill them.

An array `name` [..., I, O] of numbers becomes the codes `name`, of the same shape or with its last two axes swapped,
and `name_scale` [..., J, P], float32 or, as `select_codes` chooses for codes of 4 bits, bfloat16. Codes of 4 bits are
two a byte, along the inputs. Both are sharded as the numbers were: outputs in whole spans, inputs in whole groups, and
with codes of 4 bits in whole pairs of runs. Dims: I inputs, O outputs, J groups of inputs, P spans of outputs."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import jax.numpy as jnp
from jaxtyping import Array

from routed_experts.layers.quantized import CODE_DTYPES, E4M3, FLOAT32, SCALE, inputs_of_byte, quantize_blocks
from routed_experts.models.base.partitioning import AxisPartition, Segment
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import ParamSpec
from routed_experts.models.loading.quantized_checkpoint import GROUP_SCALES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodedArray:
    """An array that is kept as codes: its name in the layer, the inputs and the outputs that share a scale, the order
    of the codes, the run in which those of 4 bits are packed, and the dtype of the scales. `segments`: the outputs of
    each of its tensors, which are side by side; multiples of the span."""

    name: str
    group: int
    segments: tuple[int, ...]
    span: int = 1
    format: str = E4M3
    outputs_first: bool = False
    run: int = 1
    scale_dtype: jnp.dtype = FLOAT32

    def num_groups(self, inputs: int) -> int:
        """J."""
        return math.ceil(inputs / self.group)

    def num_bytes(self, inputs: int) -> int:
        """Bytes of the codes of an output."""
        return inputs // inputs_of_byte(self.format)

    def segments_of(self, source: WeightSource) -> tuple[int, ...]:
        """The segments of one tensor: of experts that are stacked in one, several."""
        ends = list(itertools.accumulate(self.segments))
        first, last = source.offset, source.offset + source.shape[-2]
        inside = (size for end, size in zip(ends, self.segments, strict=True) if first < end <= last)
        return tuple(inside)


def coded_specs(specs: Iterable[ParamSpec], coded: Iterable[CodedArray]) -> Iterator[ParamSpec]:
    """The arrays of a layer, with codes and scales in place of those that are coded."""
    by_name = {array.name: array for array in coded}
    for spec in specs:
        array = by_name.get(spec.name)
        if array is None:
            yield spec
            continue
        *lead, inputs, outputs = spec.shape
        rows, partition = array.num_bytes(inputs), _by_group(spec.partition, inputs_of_byte(array.format))
        codes = (*lead, outputs, rows) if array.outputs_first else (*lead, rows, outputs)
        partition = _swapped(partition) if array.outputs_first else partition
        dtype = CODE_DTYPES[array.format]
        yield dataclasses.replace(spec, shape=codes, dtype=dtype, partition=partition)
        yield dataclasses.replace(
            spec,
            name=f"{spec.name}{SCALE}",
            shape=(*lead, array.num_groups(inputs), outputs // array.span),
            dtype=array.scale_dtype,
            fill=1.0,
            partition=_by_span(_by_group(spec.partition, array.group), array.span),
        )


def coded_sources(sources: Iterable[WeightSource], coded: Mapping[str, CodedArray]) -> Iterator[WeightSource]:
    """The table of names with codes and scales for the targets that are coded, which are given by dotted path."""
    for source in sources:
        array = coded.get(source.target)
        if array is None:
            yield source
            continue
        assert source.transpose, source
        codes = dataclasses.replace(source, shape=(*source.shape[:-1], array.num_bytes(source.shape[-1])))
        yield dataclasses.replace(codes, transpose=False, offset_axis=-2) if array.outputs_first else codes
        *lead, outputs, inputs = source.shape
        yield dataclasses.replace(
            source,
            name=f"{source.name}{GROUP_SCALES}",
            shape=(*lead, outputs // array.span, array.num_groups(inputs)),
            target=f"{source.target}{SCALE}",
            offset=source.offset // array.span,
        )


def quantized_arrays(arrays: Mapping[str, Array], coded: Mapping[str, CodedArray]) -> dict[str, Array]:
    """Codes and scales of plain arrays [..., I, O], all by dotted path. Arrays that are not coded stay as they are."""
    quantized = dict(arrays)
    for name in arrays.keys() & coded.keys():
        array = coded[name]
        quantized[name], quantized[f"{name}{SCALE}"] = quantize_blocks(
            arrays[name],
            segments=array.segments,
            group=array.group,
            span=array.span,
            outputs_first=array.outputs_first,
        )
    return quantized


def _swapped(partition: AxisPartition | None) -> AxisPartition | None:
    """The partition of a matrix whose last two axes are swapped."""
    if partition is None or partition.axis not in (-1, -2):
        return partition
    return dataclasses.replace(partition, axis=-3 - partition.axis)


def _by_group(partition: AxisPartition | None, group: int) -> AxisPartition | None:
    """The partition of the scales: inputs are cut between groups."""
    return _coarser(partition, -2, group)


def _by_span(partition: AxisPartition | None, span: int) -> AxisPartition | None:
    """The same for outputs, which are cut between spans; `select_codes` chooses one that divides the segments."""
    if partition is not None and partition.axis == -1:
        assert all(segment.size % span == 0 for segment in partition.segments), (partition, span)
    return _coarser(partition, -1, span)


def _coarser(partition: AxisPartition | None, axis: int, size: int) -> AxisPartition | None:
    """The partition of an array that has an index for `size` of the axis."""
    if partition is None or partition.axis != axis:
        return partition
    segments = tuple(_units(segment, size) for segment in partition.segments)
    return dataclasses.replace(partition, segments=segments)


def _units(segment: Segment, size: int) -> Segment:
    return dataclasses.replace(segment, size=math.ceil(segment.size / size))
