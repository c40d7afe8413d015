"""Two whole steps of a small model, a prefill and a decode with padding, by whatever kernels a test brings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.interface import TokenRouting
from routed_experts.models.families.qwen3_moe import Qwen3Moe, Qwen3MoeConfig

PAGE, PAGES, WIDTH = 4, 12, 3


def tiny_model(dtype: str = "float32", *, renormalize: bool = True) -> Qwen3Moe:
    """Three layers, the first one dense."""
    config = Qwen3MoeConfig(
        vocab_size=50,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        dense_width=24,
        expert_width=16,
        router=RouterSpec(num_experts=6, top_k=2, renormalize=renormalize),
        moe_layers=(1, 2),
        rope_theta=1e4,
        norm_eps=1e-6,
        tie_embeddings=False,
        context_length=64,
    )
    return Qwen3Moe(config, rngs=nnx.Rngs(1), dtype=jnp.dtype(dtype))


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


def run_steps(
    model: Qwen3Moe, kernels: Kernels, attention, *, capture: bool, routed: tuple[np.ndarray, np.ndarray] | None = None
):
    """Prefill two prompts in one step, then decode one token of each; the pool and everything that left the steps.
    `routed` are ids and flags of the first tokens of either step."""
    graphdef, state = nnx.split(model)
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=model.config.capture_spec if capture else None,
        kernels=kernels,
        attention=attention,
        num_pages=PAGES,
        raw_logprobs=False,
    )
    pool = jnp.full((3 * PAGES, PAGE, 4, 8), jnp.nan)
    last, table = jnp.zeros(4, jnp.int32), [[3, 5, 7], [2, 9, 4]]
    extend = BatchShape(mode=ForwardMode.EXTEND, num_tokens=16, num_requests=3, table_width=WIDTH)
    decode = BatchShape(mode=ForwardMode.DECODE, num_tokens=3, num_requests=3, table_width=WIDTH)
    prompt = {
        "token_ids": [7, 8, 9, 1, 2, 30, 31, 32, 33, 34, 35],
        "positions": [*range(5), *range(6)],
        "token_rows": [0] * 5 + [1] * 6,
    }
    first = packed(extend, num_tokens=11, **prompt, query_starts=[0, 5, 11, 11], seq_lens=[5, 6], page_table=table)
    again = {"token_ids": [11, 12], "positions": [5, 6], "token_rows": [0, 1, 2], "query_starts": [0, 1, 2, 3]}
    second = packed(decode, num_tokens=2, **again, seq_lens=[6, 7], page_table=table)
    outs = []
    for shape, words, real in ((extend, first, 11), (decode, second, 2)):
        rows = None if routed is None else TokenRouting(*(jnp.asarray(part[: shape.num_tokens]) for part in routed))
        pool, out = jax.jit(functools.partial(forward, spec=spec, shape=shape))(state, pool, last, words, routed=rows)
        outs.append((np.asarray(out.hidden)[:real], None if out.rows is None else np.asarray(out.rows)[:real]))
    return np.asarray(pool), outs
