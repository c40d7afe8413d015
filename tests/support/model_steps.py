"""Two whole steps of a small model, a prefill and a decode with padding, by whatever kernels a test brings."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.kernels import Kernels
from routed_experts.memory.kv_pool import HybridPool
from routed_experts.models.base.interface import TokenRouting
from routed_experts.models.decoder.decoder import FamilyDecoder
from support.qwen3_configs import qwen3_config

PAGE, PAGES, WIDTH = 4, 12, 3


def tiny_model(dtype: str = "float32", *, renormalize: bool = True) -> FamilyDecoder:
    """Three layers, the first one dense."""
    config = qwen3_config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=renormalize,
        max_position_embeddings=64,
    )
    return FamilyDecoder(config, rngs=nnx.Rngs(1), dtype=jnp.dtype(dtype))


def packed(shape: BatchShape, **values) -> jax.Array:
    """The step's metadata; what is not named is 0."""
    parts = []
    for name, dims in shape.segments().items():
        part = np.zeros(dims, np.int32)
        array = np.asarray(values.get(name, 0), np.int32)
        part[tuple(slice(size) for size in array.shape)] = array
        parts.append(part.reshape(-1))
    return jnp.asarray(np.concatenate(parts))


def drifted_rows(seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Distinct experts [N, M, K] in random order for the tiny model's widest step, and which rows are valid: every
    other one."""
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (16, 2, 1)), axis=-1)[..., :2]
    return ids, np.arange(16) % 2 == 0


def empty_pool(cache: CacheLayout, dtype: str) -> Any:
    """Pages, and states where there are some, that hold NaN."""
    pages = jnp.full((cache.num_layers * PAGES, PAGE, cache.rows, cache.head_dim), jnp.nan, dtype)
    if cache.recurrent is None:
        return pages
    one = cache.recurrent.zeros(4, pages.dtype)
    states = jax.tree.map(lambda leaf: jnp.full((cache.num_recurrent, *leaf.shape), jnp.nan, leaf.dtype), one)
    return HybridPool(pages, states)


def run_steps(
    model: FamilyDecoder,
    kernels: Kernels,
    attention,
    *,
    capture: bool,
    routed: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    pool_dtype: str = "float32",
    prefill: tuple[Kernels, Any] | None = None,
):
    """Prefill two prompts in one step, then decode one token of each; the pool and everything that left the steps.
    `routed`: ids and flags of the first tokens of each step, which may be more than it has. `prefill`: other kernels
    and another attention for the first step."""
    graphdef, state = nnx.split(model)
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=model.config.capture_spec if capture else None,
        kernels=kernels,
        attention=attention,
        num_pages=PAGES,
        raw_logprobs=False,
    )
    first_spec = spec if prefill is None else dataclasses.replace(spec, kernels=prefill[0], attention=prefill[1])
    pool = empty_pool(model.config.cache, pool_dtype)
    last, table = jnp.zeros(4, jnp.int32), [[3, 5, 7], [2, 9, 4]]
    extend = BatchShape(mode=ForwardMode.EXTEND, num_tokens=16, num_requests=3, table_width=WIDTH)
    decode = BatchShape(mode=ForwardMode.DECODE, num_tokens=3, num_requests=3, table_width=WIDTH)
    prompt = {
        "token_ids": [7, 8, 9, 1, 2, 30, 31, 32, 33, 34, 35],
        "positions": [*range(5), *range(6)],
        "token_rows": [0] * 5 + [1] * 6,
    }
    slots = {"page_table": table, "request_slots": [1, 2]}
    first = packed(extend, num_tokens=11, **prompt, query_starts=[0, 5, 11, 11], seq_lens=[5, 6], **slots)
    again = {"token_ids": [11, 12], "positions": [5, 6], "token_rows": [0, 1, 2], "query_starts": [0, 1, 2, 3]}
    second = packed(decode, num_tokens=2, **again, seq_lens=[6, 7], **slots)
    outs = []
    steps = (first_spec, extend, first, 11), (spec, decode, second, 2)
    for (spec, shape, words, real), given in itertools.zip_longest(steps, routed):
        rows = given and TokenRouting(*(jnp.asarray(part[: shape.num_tokens]) for part in given))
        pool, out = jax.jit(functools.partial(forward, spec=spec, shape=shape))(state, pool, last, words, routed=rows)
        outs.append((np.asarray(out.hidden)[:real], None if out.rows is None else np.asarray(out.rows)[:real]))
    return jax.tree.map(np.asarray, pool), outs
