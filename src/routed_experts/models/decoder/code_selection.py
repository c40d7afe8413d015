"""Which matrices are codes in memory, and in which groups of inputs.

Of a quantised checkpoint a matrix stays as it is where the kernels take its format, all its tensors are scaled along
its inputs in groups that a kernel reads, and no device's part cuts a group below the smallest, nor, of codes of 4 bits,
a pair of runs. All others are dequantised when they are loaded. Outputs share scales where the tensors have them so,
the kernels read such spans, and neither a tensor nor a device's part ends inside of one. Scales of codes of 4 bits are
bfloat16 where the kernels take that, and all tensors of an array store it, or exponents. A block of layers whose stack
the kernels cannot read is cut into several. Plain matrices are quantised to e4m3, where that is asked for and the
checkpoint has no codes of another format. Both arrays of experts are codes, or neither."""

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from routed_experts.layers.quantized import BFLOAT16, BLOCK, CODE_VALUES, E4M3, FLOAT32, GROUPS, SPANS, packed_run
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.coded_arrays import CodedArray
from routed_experts.models.decoder.family_config import FamilyConfig, LayerBlock, LayerSpec, layer_sources
from routed_experts.models.decoder.layer_params import ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope
from routed_experts.models.loading.fused_experts import fuse_experts
from routed_experts.models.loading.virtual_tensors import CodedTensor

logger = logging.getLogger(__name__)
_AXES = {ParamKind.MATRIX: 2, ParamKind.EXPERTS: 3}  # of the matrices of a layer
_EXPERTS = frozenset({"gate_up", "down"})
ONE_DEVICE = ParallelConfig(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CodeSupport:
    """What an engine's kernels take (`Kernels.code_formats`, `outputs_first`, `code_runs`, `code_spans`,
    `takes_bf16_scales`, `code_stack_fits`), and how the model is sharded. `quantizes`: plain checkpoints, too."""

    formats: frozenset[str] = frozenset()
    quantizes: bool = False
    outputs_first: bool = False
    runs: tuple[int, ...] = (1,)
    spans: tuple[int, ...] = (1,)
    takes_bf16_scales: bool = False
    stack_fits: Callable[[int], bool] = lambda num_bytes: True
    parallel: ParallelConfig = ONE_DEVICE


NO_CODES = CodeSupport()


def select_codes(
    config: FamilyConfig, matrices: Mapping[str, CodedTensor], names: Iterable[str], support: CodeSupport
) -> FamilyConfig:
    """The config, whose layers say which of their arrays are codes. `matrices`: the quantised tensors, by plain names.
    `names`: of all tensors of the checkpoint."""
    if not support.formats or not (matrices or support.quantizes):
        return config
    shown = frozenset(names)
    layers = tuple(
        dataclasses.replace(layer, coded=_coded(config, index, layer, matrices, shown, support))
        for index, layer in enumerate(config.layers)
    )
    return fit_stacks(dataclasses.replace(config, layers=layers), support)


def fit_stacks(config: FamilyConfig, support: CodeSupport) -> FamilyConfig:
    """The config in blocks whose stacks of codes the kernels read on one device: with the largest limit of repeats, of
    all blocks alike, under which they do. Codes that are too large where a block is one repeat of its pattern are left
    out first; where no limit serves all blocks, so are those that are too large without one."""
    config = _without_large(dataclasses.replace(config, most_repeats=1), support, most_repeats=config.most_repeats)
    longest = max(run.repeats for run in config.blocks)
    for most in (config.most_repeats, *dict.fromkeys(math.ceil(longest / parts) for parts in range(2, longest + 1))):
        cut = dataclasses.replace(config, most_repeats=most)
        if any(_large_stacks(cut, run, layer, support) for run in cut.blocks for layer in run.pattern):
            continue
        if most != config.most_repeats:
            logger.info("blocks of layers are cut after %d repeats, so that kernels can read their codes", most)
        return cut
    return fit_stacks(_without_large(config, support, most_repeats=config.most_repeats), support)


def _without_large(config: FamilyConfig, support: CodeSupport, *, most_repeats: int | None) -> FamilyConfig:
    """The config with another limit, without the codes whose stacks are too large in its blocks as they are."""
    layers = list(config.layers)
    for run in config.blocks:
        for kind, layer in enumerate(run.pattern):
            stacks = _large_stacks(config, run, layer, support)
            if not stacks:
                continue
            large = stacks.keys() | (_EXPERTS if stacks.keys() & _EXPERTS else set())
            text = "%s of layers %d to %d are dequantised: the kernels do not read stacks of %d bytes of codes"
            last = run.first + run.num_layers - 1
            logger.warning(text, sorted(large), run.first, last, max(stacks.values()))
            retained = tuple(array for array in layer.coded if array.name not in large)
            for index in range(run.first + kind, last + 1, len(run.pattern)):
                layers[index] = dataclasses.replace(layer, coded=retained)
    return dataclasses.replace(config, layers=tuple(layers), most_repeats=most_repeats)


def _large_stacks(config: FamilyConfig, run: LayerBlock, layer: LayerSpec, support: CodeSupport) -> dict[str, int]:
    """The arrays of codes of a block's layers that the kernels cannot read, and their bytes on one device."""
    names = {array.name for array in layer.coded}
    specs = [spec for spec in layer.weights(config) if spec.name in names]
    sizes = {spec.name: _local_bytes(spec, run.repeats, support) for spec in specs}
    return {name: size for name, size in sizes.items() if not support.stack_fits(size)}


def _local_bytes(spec: ParamSpec, num_layers: int, support: CodeSupport) -> int:
    """The bytes of a block's array of codes on one device."""
    partition = spec.partition_in(num_layers, by_expert=support.parallel.expert_parallel)
    shape = spec.stacked(num_layers)
    if partition is not None:
        shape = partition.local_shape(shape, support.parallel.parts(partition))
    return math.prod(shape)


def _coded(
    config: FamilyConfig,
    index: int,
    layer: LayerSpec,
    matrices: Mapping[str, CodedTensor],
    names: frozenset[str],
    support: CodeSupport,
) -> tuple[CodedArray, ...]:
    """The arrays of one layer that stay codes."""
    quantizes = support.quantizes and (not matrices or any(tensor.code_format == E4M3 for tensor in matrices.values()))
    scope = CheckpointScope(target="", row=0, prefix=f"{config.stem}layers.{index}.")
    table = tuple(layer_sources(config, layer, scope))
    plain, stored = _by_array(table), _by_array(fuse_experts(table, names))
    selected: dict[str, CodedArray] = {}
    for spec in layer.weights(config):
        if len(spec.shape) != _AXES.get(spec.kind) or not stored[spec.name]:  # another one is a bias
            continue
        form = _shared_form(stored[spec.name], matrices)
        if form is None and quantizes and not any(source.name in matrices for source in stored[spec.name]):
            form = _Form(format=E4M3, group=BLOCK, span=BLOCK)
        if form is None or form.format not in support.formats:
            continue
        cuts = _input_cuts(spec, support.parallel)
        segments = max(_segments(plain[spec.name]), _segments(stored[spec.name]), key=len)
        group, is_packed = math.gcd(form.group, *cuts), form.format in CODE_VALUES
        run = packed_run(math.gcd(spec.shape[-2], *cuts), group, support.runs) if is_packed else 1
        if group >= GROUPS[-1] and run is not None:
            selected[spec.name] = CodedArray(
                name=spec.name,
                group=group,
                segments=segments,
                span=_span(form.span, (*segments, *_output_parts(spec, support.parallel)), support),
                format=form.format,
                outputs_first=support.outputs_first,
                run=run,
                scale_dtype=BFLOAT16 if is_packed and support.takes_bf16_scales and form.has_bf16_scales else FLOAT32,
            )
    if not selected.keys() >= _EXPERTS:
        return tuple(array for name, array in selected.items() if name not in _EXPERTS)
    return tuple(selected.values())


def without_codes(config: FamilyConfig) -> FamilyConfig:
    """The config with plain matrices, in the blocks of a model that never had codes."""
    layers = tuple(dataclasses.replace(layer, coded=()) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, most_repeats=None)


def can_retain(array: CodedArray, source: WeightSource, matrices: Mapping[str, CodedTensor]) -> bool:
    """Whether a tensor of the array has codes that stay as they are."""
    form = _shared_form((source,), matrices)
    if form is None or form.format != array.format:
        return False
    return form.group % array.group == 0 and form.span % array.span == 0


def _by_array(sources: Iterable[WeightSource]) -> dict[str, list[WeightSource]]:
    by_array: dict[str, list[WeightSource]] = defaultdict(list)
    for source in sources:
        by_array[source.target.removeprefix(".")].append(source)
    return by_array


def _segments(sources: Sequence[WeightSource]) -> tuple[int, ...]:
    """The outputs of the tensors that are side by side in one matrix of an array."""
    own = [source for source in sources if source.index == sources[0].index]
    ordered = sorted(own, key=lambda source: source.offset)
    return tuple(source.shape[-2 if source.transpose else -1] for source in ordered)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The format of the tensors of an array, the largest group of inputs and span of outputs that the scales of all
    allow, and whether bfloat16 holds all scales."""

    format: str
    group: int
    span: int
    has_bf16_scales: bool = False


def _shared_form(sources: Iterable[WeightSource], matrices: Mapping[str, CodedTensor]) -> _Form | None:
    """That of all tensors of an array; None where one is no code, or has another format."""
    shared: _Form | None = None
    for source in sources:
        matrix = matrices.get(source.name) if source.transpose else None
        if matrix is None or matrix.code_format is None or (shared and shared.format != matrix.code_format):
            return None
        shared = shared or _Form(format=matrix.code_format, group=GROUPS[0], span=SPANS[0], has_bf16_scales=True)
        shared = dataclasses.replace(
            shared,
            group=math.gcd(shared.group, matrix.group),
            span=math.gcd(shared.span, matrix.span),
            has_bf16_scales=shared.has_bf16_scales and matrix.has_bf16_scales,
        )
    return shared


def _span(largest: int, sizes: Sequence[int], support: CodeSupport) -> int:
    """The first span that the kernels read, of which `largest` and all sizes are multiples; 1 at least."""
    return next((span for span in support.spans if math.gcd(largest, *sizes) % span == 0), 1)


def _output_parts(spec: ParamSpec, parallel: ParallelConfig) -> tuple[int, ...]:
    """The outputs of the segments of an array's partition, of which a tensor may have several (q, k and v in one), and
    what a device holds of them."""
    served = spec.partition_in(1, by_expert=parallel.expert_parallel)
    partitions = ((spec.partition, 1), (served, 1 if served is None else parallel.parts(served)))
    pieces = (
        partition.pieces(0, count) for partition, count in partitions if partition is not None and partition.axis == -1
    )
    return tuple(end - first for piece in pieces for first, end in piece)


def _input_cuts(spec: ParamSpec, parallel: ParallelConfig) -> tuple[int, ...]:
    """The inputs of an array that each device holds, where devices share them."""
    partition = spec.partition_in(1, by_expert=parallel.expert_parallel)
    if partition is None or partition.axis != -2:
        return ()
    count = parallel.parts(partition)
    if count == 1:
        return ()
    return tuple(end - first for first, end in partition.pieces(0, count))
