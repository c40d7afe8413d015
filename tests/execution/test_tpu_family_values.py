"""A whole step of tiny families on the TPU's backends, interpreted, against the plain ones from the same pool: hidden
states, executed ids and the pool. The pool has the dims of a TPU's; slots without an owner are NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.forward_batch import pack
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.tpu.backends import tpu_attention, tpu_kernels
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.registry import FAMILIES
from support.small_runner import EXTEND, NUM_PAGES, NUM_SLOTS, PAGE_SIZE, Fed, build_step

pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 128,
}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
KEYS = {
    "GptOssForCausalLM": {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 5},
    "DeepseekV3ForCausalLM": MLA
    | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    "Qwen3NextForCausalLM": {"head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2}
    | {"shared_expert_intermediate_size": 24, "full_attention_interval": 2},
    "Lfm2MoeForCausalLM": {"hidden_size": 1024, "head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4}
    | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "norm_eps": 1e-5},
}
IN_EVERY_RUN = ("DeepseekV3ForCausalLM", "Qwen3NextForCausalLM")  # latent rows, and states beside heads
PROMPTS = [tuple(range(3, 16)), (40, 41, 42, 43, 44, 45)]
PAGES = [(1, 5, 2, 9, 20), (7, 3, 30, 31)]
MORE = [(99, 98, 97, 96, 95), (77,)]  # a chunk of a prompt, and a decoded token


@functools.cache
def model(architecture):
    """Random weights: wide routers, and biases, norms and sinks away from their initial values."""
    config = FAMILIES[architecture].read_config(ConfigReader({**SIZES, **KEYS[architecture]}, architecture))
    graphdef, state = nnx.split(FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32))
    rng = np.random.default_rng(0)

    def moved(path, leaf):
        scale = 1.0 if "router" in jax.tree_util.keystr(path) else 0.1
        return leaf + scale * jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)

    return config, graphdef, jax.tree_util.tree_map_with_path(moved, state)


def step(architecture, backends, batch, pool):
    config, graphdef, state = model(architecture)
    kernels, attention = DEFAULT_BACKENDS.choose(
        ServerArgs(enable_return_routed_experts=True, moe_backend="tiled", attention_backend="paged"), config.needs
    )
    if backends == "tpu":
        kernels, attention = tpu_kernels(interpret=True), tpu_attention(interpret=True)
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec,
        kernels=kernels,
        attention=attention,
        num_pages=NUM_PAGES,
        raw_logprobs=False,
    )
    last = jnp.zeros(NUM_SLOTS, jnp.int32)
    pool, out = jax.jit(functools.partial(forward, spec=spec, shape=EXTEND))(state, pool, last, pack(batch))
    count = batch.num_tokens
    return pool, np.asarray(out.hidden)[:count], np.asarray(out.rows)[:count]


@pytest.mark.parametrize(
    "architecture", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in KEYS]
)
def test_a_step_equals_that_of_the_plain_backends(architecture):
    cache = model(architecture)[0].cache
    abstract = KVPoolSpec.create(
        cache,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        dtype=jnp.dtype(jnp.float32),
        num_requests=NUM_SLOTS,
        platform="tpu",
    ).abstract
    pool = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, jnp.float32), abstract)
    slots = list(enumerate(zip(PAGES, PROMPTS, MORE, strict=True), start=1))
    prefill = build_step(*[Fed(slot, pages, ids) for slot, (pages, ids, _) in slots])
    mixed = build_step(*[Fed(slot, pages, more, start=len(ids)) for slot, (pages, ids, more) in slots])
    pool, _, _ = step(architecture, "plain", prefill, pool)
    (own_pool, hidden, rows), (plain_pool, plain_hidden, plain_rows) = (
        step(architecture, backends, mixed, pool) for backends in ("tpu", "plain")
    )
    assert np.array_equal(rows, plain_rows) and len(np.unique(rows)) > 4
    np.testing.assert_allclose(hidden, plain_hidden, atol=2e-4)
    if cache.num_recurrent:
        owned = [slot for slot, _ in slots]
        for own, plain in zip(jax.tree.leaves(own_pool.states), jax.tree.leaves(plain_pool.states), strict=True):
            np.testing.assert_allclose(own[:, owned], plain[:, owned], atol=2e-4)
        own_pool, plain_pool = own_pool.pages, plain_pool.pages
    layers = np.arange(cache.num_layers)[:, None] * NUM_PAGES
    pages = (layers + np.array([page for own in PAGES for page in own])).reshape(-1)  # not page 0: it takes padding
    own, plain = np.asarray(own_pool)[pages], np.asarray(plain_pool)[pages]
    assert np.array_equal(np.isnan(own), np.isnan(plain)) and np.isnan(own).any()
    np.testing.assert_allclose(own, plain, atol=2e-4)
