"""The served model: as its folder describes it, and as it is on one device or sharded over several."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int32

from routed_experts.core.errors import CaptureUnsupportedError, ConfigError, PlacementError
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.placement_config import PlacementConfig, parse_fraction
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.group.process_group import AnyGroup
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.quantized import E4M3
from routed_experts.models.base.interface import Decoder, DecoderConfig
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.base.weight_format import placed
from routed_experts.models.decoder.code_selection import NO_CODES, CodeSupport, select_codes
from routed_experts.models.decoder.coded_arrays import quantized_arrays
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.decoder.layer_regrouping import regroup
from routed_experts.models.decoder.replica_maps import capacity_maps, placed_partitions, replica_maps, with_replica_maps
from routed_experts.models.model_folder import ModelFolder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """`config` and `arrays` (names, shapes and dtypes) are of the whole model; `graphdef` and `part` are of one device.
    On one device (`shards` None) both are the same."""

    config: DecoderConfig
    arrays: nnx.State[Any, Any]  # leaves: ShapeDtypeStruct
    graphdef: nnx.GraphDef[Any]
    part: DecoderConfig
    shards: ModelSharding | None

    @staticmethod
    def create(
        config: DecoderConfig, graphdef: nnx.GraphDef[Any], arrays: nnx.State[Any, Any], shards: ModelSharding | None
    ) -> "ServedModel":
        """Create the served form of a model, sharded where `shards` is set."""
        if shards is None:
            return ServedModel(config=config, arrays=arrays, graphdef=graphdef, part=config, shards=None)
        module: Any = nnx.merge(graphdef, arrays)
        module.config = config.shard(shards.parallel)
        for name, table in shards.maps.items():
            _, run, kind, last = name.split(".")
            module.blocks[int(run)][int(kind)][last] = nnx.Variable(jax.ShapeDtypeStruct(table.shape, table.dtype))
        graphdef = nnx.split(module)[0]
        return ServedModel(config=config, arrays=arrays, graphdef=graphdef, part=module.config, shards=shards)

    @property
    def coded_config(self) -> FamilyConfig | None:
        """The config, where some arrays are served as codes and scales."""
        return self.config if isinstance(self.config, FamilyConfig) and self.config.coded_arrays else None

    def device_put(self, state: nnx.State[Any, Any], *, donate: bool = False) -> nnx.State[Any, Any]:
        """Put the arrays of this model on its devices, a part on each; with one device they are unchanged.
        `donate`: copied arrays are deleted."""
        return (
            state
            if self.shards is None
            else with_replica_maps(self.shards.device_put(state, donate=donate), self.shards.put_maps())
        )

    def with_placement(self, placement: ExpertPlacement | None, factor: tuple[int, int] | None = None) -> "ServedModel":
        """The same model with another placement of its experts and this capacity factor; None: unchanged."""
        if placement is None or self.shards is None:
            return self
        partitions, config = (
            _placed_partitions(self.config, self.config.partitions(by_expert=True), placement),
            _family(self.config),
        )
        return dataclasses.replace(
            self, shards=dataclasses.replace(self.shards, partitions=partitions, maps=_maps(config, placement, factor))
        )


def create_sharding(
    args: ServerArgs, config: DecoderConfig, placement_config: PlacementConfig | None = None
) -> ModelSharding | None:
    """Create the sharding of a model; None on one device. Raises ConfigError for an unsupported sharding, and
    PlacementError for a placement of another model or number of devices."""
    parallel, partitions = (
        ParallelConfig(args.tp_size, expert_parallel=args.ep_size > 1, data=args.dp_size),
        config.partitions(by_expert=args.ep_size > 1),
    )
    if placement_config is None:
        return ModelSharding.create(partitions, parallel)
    placement = placement_config.initial
    if args.ep_size != placement.num_devices or args.ep_size == 1:
        text = (
            f"placement has num_devices={placement.num_devices}, but tp_size={args.tp_size} and ep_size={args.ep_size}"
        )
        raise PlacementError(f"{text}; build the engine with both equal to num_devices, at least 2")
    if args.deterministic:
        text = "deterministic=True with placement=: which instance runs depends on the batch"
        raise ConfigError(f"{text}, and so does the order of sums")
    spec = config.capture_spec
    placement.check_model(*((0, 0) if spec is None else (spec.num_moe_layers, spec.num_experts)))
    if placement_config.on_exhausted == "drop" and args.enable_return_routed_experts:
        text = "on_exhausted='drop' leaves slots empty, and a record has an expert in every slot"
        raise CaptureUnsupportedError(f"{text}; choose 'overflow', or enable_return_routed_experts=False")
    factor = parse_fraction(placement_config.capacity_factor) if placement_config.capacity_limited else None
    parallel = dataclasses.replace(
        parallel,
        instances=placement.num_instances,
        replicas=placement.logical_to_physical_map.shape[2],
        bounded=placement_config.capacity_limited,
    )
    return ModelSharding.create(
        _placed_partitions(config, partitions, placement), parallel, maps=_maps(_family(config), placement, factor)
    )


def code_support(args: ServerArgs, kernels: Kernels, *, offloads_experts: bool = False) -> CodeSupport:
    """Which codes the engine keeps. Raises ConfigError for a quantization that the kernels do not take."""
    if args.quantization == "fp8_block" and offloads_experts:
        text = "quantization='fp8_block' with experts on the host, whose kernels take no codes"
        raise ConfigError(f"{text}; leave quantization out, or kt_num_gpu_experts")
    if args.quantization == "none" or offloads_experts:
        return NO_CODES
    if args.quantization == "fp8_block" and E4M3 not in kernels.code_formats:
        text = f"quantization='fp8_block', but moe_backend={kernels.moe.name!r} takes no codes of 8 bits"
        raise ConfigError(f"{text}; choose moe_backend='auto', or quantization='none'")
    parallel = ParallelConfig(args.tp_size, expert_parallel=args.ep_size > 1, data=args.dp_size)
    quantizes = args.quantization == "fp8_block"
    return CodeSupport(
        formats=kernels.code_formats & {E4M3} if quantizes else kernels.code_formats,
        quantizes=quantizes,
        outputs_first=kernels.outputs_first,
        runs=kernels.code_runs,
        spans=kernels.code_spans,
        takes_bf16_scales=kernels.takes_bf16_scales,
        stack_fits=kernels.code_stack_fits,
        parallel=parallel,
    )


def serve_codes(
    args: ServerArgs,
    source: ModelFolder | Decoder,
    config: DecoderConfig,
    shards: ModelSharding | None,
    codes: CodeSupport,
    placement: PlacementConfig | None,
) -> tuple[ModelFolder | Decoder, DecoderConfig, ModelSharding | None]:
    """A model, its config and sharding, with the matrices that are codes; a decoder as it is, with the config that it
    is to be served with. Raises ConfigError where codes are asked for and none can be had."""
    coded = config
    if isinstance(source, ModelFolder):
        source = source.with_codes(codes)
        coded = source.config
    elif isinstance(config, FamilyConfig):
        coded = select_codes(config, {}, (), codes)
    if coded != config:
        return source, coded, create_sharding(args, coded, placement)
    if args.quantization == "fp8_block":
        stored = f" ({source.quantized_form})" if isinstance(source, ModelFolder) and source.quantized_form else ""
        text = f"quantization='fp8_block', but no matrix of this model{stored} can be codes of 8 bits on this machine"
        raise ConfigError(f"{text}; leave quantization out")
    return source, config, shards


def check_processes(group: AnyGroup | None) -> None:
    """Raise ConfigError where this process is one of several of which the engine was not told: each would record only
    a part of the rows."""
    if group is None and jax.process_count() > 1:
        process = f"this is process {jax.process_index()} of {jax.process_count()} (jax.distributed)"
        text = f"{process}, and this engine is built without dist=: it would record its own devices' part only"
        raise ConfigError(f"{text}; give dist=DistConfig(...), or run an engine in each by itself")


def load_model(
    source: ModelFolder | Decoder,
    config: DecoderConfig,
    shards: ModelSharding | None,
    *,
    dtype: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[ServedModel, nnx.State[Any, Any]]:
    """The model and its arrays on their devices; a folder's tensors are loaded there directly. Raises what
    `ModelFolder.load` raises."""
    if not isinstance(source, ModelFolder):
        graphdef, state = nnx.split(source)
        if isinstance(config, FamilyConfig) and config != source.config:
            assert isinstance(source.config, FamilyConfig), source.config
            graphdef, state = _quantized(source.config, config, state)
        served = ServedModel.create(config, graphdef, abstract_state(state), shards)
        return served, jax.tree.map(placed, state) if shards is None else served.device_put(state)
    computed = source.dtype(dtype)
    graphdef, state = nnx.split(source.load(computed, progress=progress, shards=shards))
    arrays = abstract_state(state) if shards is None else source.shapes(computed)
    state = state if shards is None else with_replica_maps(state, shards.put_maps())
    return ServedModel.create(config, graphdef, arrays, shards), state


def _quantized(
    plain: FamilyConfig, config: FamilyConfig, state: nnx.State[Any, Any]
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
    """A decoder of the config `plain` with the codes and blocks of `config`."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    dtype = leaves["embed"].dtype
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=dtype)))
    numbers = regroup({name: leaf.get_raw_value() for name, leaf in leaves.items()}, plain, config)
    arrays = quantized_arrays(numbers, config.coded_arrays)
    flat = [(path, leaf.replace(arrays[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(shapes)]
    return graphdef, nnx.from_flat_state(flat)


def abstract_state(state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """Return names, shapes and dtypes of the arrays of a state."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _maps(
    config: FamilyConfig, placement: ExpertPlacement, factor: tuple[int, int] | None
) -> dict[str, Int32[np.ndarray, "R ..."]]:
    return replica_maps(config, placement) | ({} if factor is None else capacity_maps(config, factor))


def _placed_partitions(config: DecoderConfig, partitions: Any, placement: ExpertPlacement) -> dict[str, Any]:
    return placed_partitions(_family(config), partitions, placement)


def _family(config: DecoderConfig) -> FamilyConfig:
    if not isinstance(config, FamilyConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise ConfigError(f"model= is a {kind}, whose experts cannot be placed; give the folder, or a FamilyDecoder")
    return config
