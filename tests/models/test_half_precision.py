"""Half precision on a CPU: families whose layers run in pieces, against transformers in float32 on the same weights.
With the native kernels the stream is float32. The error must be well below that of a stream in the weights' dtype."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.interface import TokenRouting
from routed_experts.models.decoder.fused_path import describe_path
from routed_experts.models.model_folder import ModelFolder
from support.model_steps import packed

pytestmark = pytest.mark.usefixtures("fast_compilation")

LENGTH, PAGE = 120, 8
ROUNDED_STREAM = dataclasses.replace(NATIVE_KERNELS, stream_dtype=None)
MOST = 0.7  # of the mean error of a rounded stream. Measured: 0.28 to 0.59
IN_PIECES = (
    *("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "BailingHybrid", "Qwen3Next", "Qwen3_5Moe", "Lfm2Moe", "Gemma4"),
    *("Llama4", "Phimoe"),
)


def rounded_oracle(case, folder, dtype):
    """The oracle with weights that `dtype` holds, and its folder."""
    import torch

    oracle = Oracle(case, folder)
    with torch.no_grad():
        for name, weight in [*oracle.model.named_parameters(), *oracle.model.named_buffers()]:
            if "inv_freq" not in name:
                weight.copy_(weight.to(getattr(torch, dtype)).to(weight.dtype))
    oracle.model.save_pretrained(folder)
    return oracle


def logprobs(model, kernels, tokens, ids):
    """[S, V] of a prefill on the experts `ids` [S, M, K]."""
    graphdef, state = nnx.split(model)
    width = LENGTH // PAGE
    dtype, cache = model.norm.dtype, model.config.cache
    sizes = dict(num_pages=width + 1, page_size=PAGE, dtype=dtype, num_requests=2, platform="cpu")
    pool = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), KVPoolSpec.create(cache, **sizes).abstract)
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=model.config.capture_spec,
        kernels=kernels,
        attention=NATIVE_ATTENTION,
        num_pages=width + 1,
        raw_logprobs=False,
    )
    shape = BatchShape(mode=ForwardMode.EXTEND, num_tokens=LENGTH, num_requests=1, table_width=width)
    words = packed(
        shape,
        num_tokens=LENGTH,
        token_ids=tokens,
        positions=np.arange(LENGTH),
        query_starts=[0, LENGTH],
        seq_lens=[LENGTH],
        page_table=[np.arange(1, width + 1)],
        request_slots=[1],
    )
    routed = TokenRouting(jnp.asarray(ids, jnp.uint8), jnp.ones(LENGTH, bool))
    step = jax.jit(functools.partial(forward, spec=spec, shape=shape))
    _, out = step(state, pool, jnp.zeros(2, jnp.int32), words, routed=routed)
    assert out.hidden.dtype == dtype, "what the head reads"
    return np.asarray(jax.nn.log_softmax(model.logits(out.hidden)), np.float64)


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in IN_PIECES), ("DeepseekV3", "float16")])
def test_a_stream_of_float32_brings_logprobs_nearer_to_those_of_float32(tmp_path, name, dtype):
    oracle = rounded_oracle(CASES[name], tmp_path, dtype)
    model = ModelFolder.open(tmp_path).load(jnp.dtype(dtype))
    assert describe_path(model.config, NATIVE_KERNELS, NATIVE_ATTENTION).startswith("pieces: ")
    tokens = np.random.default_rng(5).integers(0, VOCAB_SIZE, LENGTH)
    judged = oracle.judge(tokens)
    wide, rounded = (
        np.abs(logprobs(model, kernels, tokens, judged.ids) - judged.logprobs)
        for kernels in (NATIVE_KERNELS, ROUNDED_STREAM)
    )
    sizes = ", ".join(f"{np.mean(each):.1e} (largest {np.max(each):.1e})" for each in (wide, rounded))
    print(f"{name} in {dtype}: mean error of logprobs, and with a rounded stream: {sizes}")
    assert np.mean(wide) < MOST * np.mean(rounded)
