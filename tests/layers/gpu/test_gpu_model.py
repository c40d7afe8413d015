"""A whole step on the GPU's kernels, interpreted, against the plain code: the fused run of layers, the capture, the pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.attention import ATTENTION_BACKENDS
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.routing import RouterSpec
from routed_experts.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig

PAGE, PAGES, WIDTH = 4, 12, 3


def tiny_model() -> Qwen3Moe:
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
        router=RouterSpec(num_experts=6, top_k=2, renormalize=True),
        moe_layers=(1, 2),
        rope_theta=1e4,
        norm_eps=1e-6,
        tie_embeddings=False,
        context_length=64,
    )
    return Qwen3Moe(config, rngs=nnx.Rngs(1), dtype=jnp.dtype("float32"))


def packed(shape: BatchShape, **values) -> jax.Array:
    """The step's metadata; what is not named is 0."""
    parts = []
    for name, dims in shape.segments().items():
        part = np.zeros(dims, np.int32)
        given = np.asarray(values.get(name, 0), np.int32)
        part[tuple(slice(size) for size in given.shape)] = given
        parts.append(part.reshape(-1))
    return jnp.asarray(np.concatenate(parts))


def run_steps(model: Qwen3Moe, kernels: Kernels, attention, *, capture: bool):
    """Prefill two prompts in one step, then decode one token of each; the pool and everything that left the steps."""
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
    prompt = {"token_ids": [7, 8, 9, 1, 2, 30, 31, 32, 33, 34, 35], "positions": [*range(5), *range(6)], "token_rows": [0] * 5 + [1] * 6}
    first = packed(extend, num_tokens=11, **prompt, query_starts=[0, 5, 11, 11], seq_lens=[5, 6], page_table=table)
    again = {"token_ids": [11, 12], "positions": [5, 6], "token_rows": [0, 1, 2], "query_starts": [0, 1, 2, 3]}
    second = packed(decode, num_tokens=2, **again, seq_lens=[6, 7], page_table=table)
    outs = []
    for shape, words, real in ((extend, first, 11), (decode, second, 2)):
        pool, out = jax.jit(functools.partial(forward, spec=spec, shape=shape))(state, pool, last, words)
        outs.append((np.asarray(out.hidden)[:real], None if out.rows is None else np.asarray(out.rows)[:real]))
    return np.asarray(pool), outs


@functools.cache
def on_gpu_kernels(*, capture: bool):
    return run_steps(tiny_model(), gpu_kernels(interpret=True), gpu_attention_backend(interpret=True), capture=capture)


def test_a_step_equals_plain_code():
    pool, outs = on_gpu_kernels(capture=True)
    plain = Kernels(moe=MOE_BACKENDS["reference"])
    wanted_pool, wanted = run_steps(tiny_model(), plain, ATTENTION_BACKENDS["reference"], capture=True)
    for (hidden, rows), (wanted_hidden, wanted_rows) in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(rows, wanted_rows)
        np.testing.assert_allclose(hidden, wanted_hidden, rtol=2e-4, atol=2e-5)
    for layer in range(3):  # page 0 of a layer takes padding in the one and nothing in the other
        mine, plain_pages = (x[layer * PAGES + 1 : (layer + 1) * PAGES] for x in (pool, wanted_pool))
        np.testing.assert_allclose(mine, plain_pages, rtol=2e-4, atol=2e-5)


def test_capture_changes_no_value():
    (pool_on, on), (pool_off, off) = on_gpu_kernels(capture=True), on_gpu_kernels(capture=False)
    np.testing.assert_array_equal(pool_on, pool_off)
    for (hidden_on, rows_on), (hidden_off, rows_off) in zip(on, off, strict=True):
        assert rows_on is not None and rows_off is None
        np.testing.assert_array_equal(hidden_on, hidden_off)
