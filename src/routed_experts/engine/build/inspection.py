"""Inspects a checkpoint without loading its weights: shapes, experts and memory plan."""

import dataclasses
import math

import jax

from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.engine.build.memory_planning import plan_engine, served_kv_scales, with_checkpoint_form
from routed_experts.engine.control.served_model import code_support, create_sharding, serve_codes
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.loading.model_source import find_model
from routed_experts.models.model_folder import ModelFolder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint as it would be served with some arguments. Bytes; tokens of KV; lines of the memory plan."""

    architecture: str
    dtype: str
    num_parameters: int
    context_length: int
    vocab_size: int
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    row_bytes: int
    kv_tokens: int
    layer_paths: dict[str, str]  # by platform
    memory_plan: tuple[str, ...]


def inspect_model(args: ServerArgs, *, load_format: str = "auto") -> Inspection:
    """Read config and headers, and plan. Raises CheckpointError and ConfigError as building the engine would."""
    if args.model_path is None:
        raise ConfigError("model_path=None; give the folder of a checkpoint or a Hugging Face id")
    path = find_model(args.model_path, revision=args.revision, weights=load_format != "dummy")
    folder = ModelFolder.open(str(path), load_format=load_format)
    kernels, attention = DEFAULT_BACKENDS.choose(args, folder.config.needs)
    plain, shards = folder, create_sharding(args, folder.config)
    folder, config, shards = serve_codes(args, folder, folder.config, shards, code_support(args, kernels), None)
    assert isinstance(folder, ModelFolder) and isinstance(config, FamilyConfig)
    dtype = folder.dtype(args.dtype)
    arrays, spec = folder.shapes(dtype), config.capture_spec
    planned = plan_engine(args, config, arrays, shards, attention)
    plan = dataclasses.replace(planned.memory, has_kv_scales=bool(served_kv_scales(args, folder)))
    plan = with_checkpoint_form(plan, folder, args.dtype)
    return Inspection(
        architecture=folder.architecture,
        dtype=str(dtype),
        num_parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plain.shapes(dtype))),
        context_length=planned.context_length,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        moe_layer_ids=() if spec is None else spec.layer_ids,
        num_experts=0 if spec is None else spec.num_experts,
        top_k=0 if spec is None else spec.top_k,
        row_bytes=0 if spec is None else spec.row_bytes,
        layer_paths=DEFAULT_BACKENDS.layer_paths(folder.config),
        kv_tokens=(plan.pool.num_pages - 1) * args.page_size,
        memory_plan=tuple(plan.lines()),
    )
