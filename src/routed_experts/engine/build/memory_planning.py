"""Plans the memory of an engine from its arguments and the shapes of a model, for `inspect` and for the builder."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.control.served_model import abstract_state
from routed_experts.execution.memory_demand import NO_DRAFT_MODEL, DraftDemand
from routed_experts.execution.memory_plan import MemoryPlan, common_dtype, plan_memory
from routed_experts.layers.attention import AttentionBackend
from routed_experts.layers.kv_format import LayerScales
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.interface import Decoder, DecoderConfig
from routed_experts.models.base.sharding import ModelSharding
from routed_experts.models.decoder.decoder import decoder_shapes
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.model_folder import ModelFolder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The plan of an engine: memory, padded sizes, context length, and capture (None: off)."""

    memory: MemoryPlan
    buckets: Buckets
    context_length: int
    capture: CaptureSpec | None


def plan_engine(
    args: ServerArgs,
    config: DecoderConfig,
    arrays: nnx.State[Any, Any],
    shards: ModelSharding | None,
    attention: AttentionBackend,
    *,
    num_drafts: int = 0,
    draft_demand: Callable[[KVPoolSpec, jnp.dtype], DraftDemand] | None = None,
    lookahead: int = 0,
) -> EnginePlan:
    """Plan a model whose `arrays` (shapes and dtypes are read) are sharded as in `shards`, and whose pool `attention`
    reads and writes. `num_drafts`: the longest draft, 0 without speculative decoding; `draft_demand`: of a model that
    drafts, beside the target's pool and in the dtype of its weights; `lookahead`: as in Buckets. Raises what
    plan_memory raises, and ConfigError for a context_length above the model's."""
    part, per_device = (
        (config, arrays) if shards is None else (config.shard(shards.parallel), shards.local_part(arrays))
    )
    context_length = resolve_context_length(args, config.context_length)
    capture = recorded_spec(args, config)
    shapes = kv_shapes(args, part, arrays, attention)
    sizes = {"context_length": context_length, "num_drafts": num_drafts}
    draft = NO_DRAFT_MODEL if draft_demand is None else draft_demand(shapes, jnp.dtype(common_dtype(arrays)))
    memory = plan_memory(args, shapes, per_device, capture, vocab_size=config.vocab_size, draft=draft, **sizes)
    if shards is not None and args.dp_size > 1:
        memory = dataclasses.replace(memory, rank_weights=shards.rank_bytes(arrays))
    buckets = Buckets.from_args(args, draft_model=draft_demand is not None, lookahead=lookahead, **sizes)
    return EnginePlan(memory=memory, buckets=buckets, context_length=context_length, capture=capture)


def recorded_spec(args: ServerArgs, config: DecoderConfig) -> CaptureSpec | None:
    """What an engine records of a model: its routing, with combine weights where these are asked for; None for
    nothing."""
    if not args.enable_return_routed_experts or config.capture_spec is None:
        return None
    weights_dtype = args.routed_experts_weights_dtype if args.enable_return_routed_experts_weights else None
    return dataclasses.replace(config.capture_spec, weights_dtype=weights_dtype)


def with_checkpoint_form(memory: MemoryPlan, source: ModelFolder | Decoder, dtype: str) -> MemoryPlan:
    """The plan, which names the form of a quantised checkpoint that is served in `dtype` ("auto": its own)."""
    if not isinstance(source, ModelFolder):
        return memory
    num_bytes, form = source.stored_form(source.dtype(dtype))
    return dataclasses.replace(memory, checkpoint_bytes=num_bytes, checkpoint_form=form)


def abstract_arrays(source: ModelFolder | Decoder, config: DecoderConfig, dtype: str) -> nnx.State[Any, Any]:
    """Names, shapes and dtypes of a model's arrays as they will be served, with `config`."""
    if isinstance(source, ModelFolder):
        return source.shapes(source.dtype(dtype))
    state = abstract_state(nnx.state(source))
    if not isinstance(config, FamilyConfig) or config == source.config:
        return state
    return decoder_shapes(config, jnp.dtype(common_dtype(state)))


def kv_shapes(
    args: ServerArgs, config: DecoderConfig, state: nnx.State[Any, Any], attention: AttentionBackend
) -> KVPoolSpec:
    """The pool's shapes before its size is known. Its dtype is that of the weights, or `array_code_dtype` of it: for
    states, and for keys and values that `attention` does not write. With `kv_cache_dtype` keys and values are codes on
    every platform. Raises what `common_dtype` raises, and ConfigError for codes of latent rows."""
    codes = args.kv_cache_dtype != "auto"
    if codes and any(group.latent for group in config.cache.groups):
        text = f"kv_cache_dtype={args.kv_cache_dtype!r} with latent attention (MLA): the rotary numbers of a latent row"
        raise ConfigError(f"{text} lose too much in 8 bits; leave kv_cache_dtype out")
    dtype = common_dtype(state)
    return KVPoolSpec.create(
        config.cache,
        num_pages=0,
        page_size=args.page_size,
        dtype=array_code_dtype(dtype) if attention.write is None else dtype,
        num_requests=args.running_limit + 1,
        platform=jax.default_backend(),
        codes=codes,
        states_dtype=array_code_dtype(dtype),
    )


def array_code_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of an array to which array code writes numbers of `dtype` in every step. float32 holds those of
    bfloat16 on CPU: XLA has no bfloat16 scatter there and would convert the whole array in every layer."""
    return jnp.dtype("float32") if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else dtype


def served_kv_scales(args: ServerArgs, source: ModelFolder | Decoder) -> tuple[LayerScales, ...]:
    """`ModelFolder.kv_scales` where `kv_cache_dtype` makes codes of keys and values; () elsewhere, and for a model that
    is no folder."""
    if args.kv_cache_dtype == "auto" or not isinstance(source, ModelFolder):
        return ()
    return source.kv_scales()


def resolve_context_length(args: ServerArgs, trained: int) -> int:
    if args.context_length is None:
        return trained
    if args.context_length > trained:
        raise ConfigError(
            f"context_length={args.context_length} is above the model's {trained} positions; lower it to {trained}"
        )
    return args.context_length
