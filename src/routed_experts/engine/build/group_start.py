"""Start a process group: check what it supports, and list by field what must be equal in all of its processes."""

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxlib import xla_client

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.group.process_group import AnyGroup, start_group
from routed_experts.engine.group.rendezvous import Rendezvous
from routed_experts.models.base.config_reader import read_json_object
from routed_experts.models.base.interface import Decoder
from routed_experts.models.loading.checkpoint import Checkpoint

# Each process has its own folders, of equal contents; process 0 alone tells the label of the weights.
_OWN_FIELDS = ("model_path", "tokenizer_path", "revision", "weight_version")
_JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_OWN_XLA_OPTIONS = ("xla_force_host_platform_device_count", "xla_enable_dumping", "xla_detailed_logging")
_LIBRARIES = ("routed-experts", "jax", "jaxlib", "flax", "numpy")


def join_group(
    args: ServerArgs,
    dist: DistConfig,
    *,
    model: Decoder | None = None,
    experts: ExpertOffloadConfig | None = None,
    placement: PlacementConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    load_format: str = "auto",
    settings: Mapping[str, str] | None = None,
    on_rendezvous: Callable[[Rendezvous], None] | None = None,
    on_joined: Callable[[AnyGroup], None] | None = None,
) -> AnyGroup:
    """Join the process group of an engine of `args`, whose `model_path` is a local folder. `settings`: more that must
    be equal; `on_rendezvous` receives the rendezvous of process 0 before others come, `on_joined` the group once all
    processes have met, before JAX starts. Raises ConfigError, CheckpointError, MachineError or PeerLostError."""
    check_supported(args, dist, model=model, experts=experts, speculative=speculative)
    fields, failure = group_fields(args, dist, placement, speculative, load_format) | dict(settings or {}), None
    try:
        fields |= checkpoint_fields(args.model_path, weights=load_format != "dummy")
    except CheckpointError as error:
        if dist.is_leader:
            raise
        failure = str(error)
    return start_group(
        dist,
        fields,
        num_devices=args.tp_size,
        failure=failure,
        on_rendezvous=on_rendezvous,
        on_joined=on_joined,
    )


def check_supported(
    args: ServerArgs,
    dist: DistConfig,
    *,
    model: Decoder | None = None,
    experts: ExpertOffloadConfig | None = None,
    speculative: SpeculativeConfig | None = None,
) -> None:
    """Raise ConfigError for what a process group does not have in this version, and for a tp_size that cannot be
    divided."""
    group = f"nnodes={dist.nnodes}"
    if args.tp_size % dist.nnodes:
        text = f"tp_size={args.tp_size} counts the devices of all {dist.nnodes} processes, which have equally many"
        raise ConfigError(f"{text}; choose a multiple of {dist.nnodes}")
    if model is not None:
        raise ConfigError(f"model= with {group}: every process loads its part from a folder; give the folder instead")
    if experts is not None and experts.num_resident is not None:
        raise ConfigError(f"experts on the host with {group}: one process alone has them; leave kt_num_gpu_experts out")
    if speculative is not None and speculative.has_draft_model:
        text = f"speculation by {speculative.algorithm} with {group}: a draft model runs in one process"
        raise ConfigError(f"{text}; choose NGRAM or SUFFIX, or leave speculative decoding out")
    for name, backend in (("moe_backend", args.moe_backend), ("attention_backend", args.attention_backend)):
        if backend == "native":
            raise ConfigError(f"{name}='native' with {group}: its kernels run in one process; choose auto")


def group_fields(
    args: ServerArgs | None,
    dist: DistConfig,
    placement: PlacementConfig | None,
    speculative: SpeculativeConfig | None,
    load_format: str,
) -> dict[str, str]:
    """By name, as text, what must be equal in all processes, but for the checkpoint; `args` None: no engine."""
    fields = {f"version of {name}": _version(name) for name in _LIBRARIES}
    fields["version of Python"] = ".".join(platform.python_version_tuple()[:2])
    fields |= {name: str(jax.config.values.get(name)) for name in _JAX_SETTINGS}
    fields["XLA's options (of XLA_FLAGS)"] = _xla_options()
    if args is not None:
        fields |= {name: _text(value) for name, value in _values(args).items() if name not in _OWN_FIELDS}
    fields |= {name: _text(value) for name, value in _values(dist).items() if name != "node_rank"}
    fields["load_format"] = load_format
    for prefix, config in (("placement", placement), ("speculative", speculative)):
        fields |= (
            {prefix: "none"}
            if config is None
            else {f"{prefix}.{name}": _text(value) for name, value in _values(config).items()}
        )
    return fields


def checkpoint_fields(model_path: str | None, *, weights: bool) -> dict[str, str]:
    """Digests of config.json and, with `weights`, of names, shapes and dtypes of the tensors, and of samples of their
    values. Raises CheckpointError, ConfigError without a folder."""
    if model_path is None:
        raise ConfigError("model_path=None and no model was given; pass the folder of a checkpoint")
    folder = Path(model_path)
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint folder {folder}; copy the checkpoint to every process's machine")
    fields = {"config.json": _digest(json.dumps(read_json_object(folder / "config.json"), sort_keys=True).encode())}
    if weights:
        with Checkpoint(folder) as checkpoint:
            fields["tensors"] = _digest(repr(sorted(checkpoint.names().items())).encode())
            fields |= {f"values of {name}": digest for name, digest in checkpoint.value_digests().items()}
    return fields


def _values(config: Any) -> dict[str, Any]:
    """By name, the values of a config's fields; those of float fields as floats, however they were written."""
    return {field.name: _as_declared(getattr(config, field.name), field.type) for field in dataclasses.fields(config)}


def _as_declared(value: Any, declared: Any) -> Any:
    is_float = declared is float or float in typing.get_args(declared)
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if is_float and is_number:
        return float(value)
    return value.item() if isinstance(value, np.generic) else value


def _text(value: object) -> str:
    """A value as short text; a placement by a digest."""
    if isinstance(value, ExpertPlacement):
        parts = (value.physical_to_logical_map, value.logical_to_physical_map, np.array([value.num_devices]))
        return _digest(b"".join(part.tobytes() for part in parts))
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:60]}... ({_digest(text.encode())})"


def _xla_options() -> str:
    """A digest of the options that XLA has read from XLA_FLAGS, but for those that may differ between processes: dumps,
    and the number of virtual devices, which is compared once JAX has started."""
    options: Any = xla_client.CompileOptions()
    flags = options.executable_build_options.debug_options
    for name in dir(flags):
        if name.startswith("xla_dump_") or name in _OWN_XLA_OPTIONS:
            setattr(flags, name, type(getattr(flags, name))())
    return _digest(options.SerializeAsString())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
