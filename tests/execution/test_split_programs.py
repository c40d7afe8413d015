"""A step that is cut at its experts is the step of programs.py, in every kind of family: hidden states within 1e-5, ids
equal. Here on one device and in one jit; with two devices, an engine and swaps:
tests/engine/test_experts_shared_out.py."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.placement import ResidencyMap
from routed_experts.engine.build.backends import ATTENTION, KERNELS
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.offload.offload_jobs import numbers_of
from routed_experts.execution.offload.offload_programs import (
    OffloadSpec,
    close_step,
    home_step,
    host_step,
    layer_step,
    open_step,
    stream_step,
)
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.offload.layers import layers_at, lightest
from routed_experts.models.offload.offloaded_model import offload_model
from routed_experts.models.registry import FAMILIES
from support.model_steps import PAGE, PAGES, WIDTH, packed

pytestmark = pytest.mark.usefixtures("fast_compilation")

COMMON = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    hidden_act="silu",
    tie_word_embeddings=False,
    head_dim=8,
)
# a dense layer, latent attention, a bias that chooses | states, a pattern, gated shared experts | weighed inputs |
# scales, no head
# | biases, of the head too
CONFIGS = {
    "DeepseekV3ForCausalLM": dict(
        num_key_value_heads=4,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        head_dim=16,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=True,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "Qwen3NextForCausalLM": dict(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        full_attention_interval=2,
        num_hidden_layers=4,
    ),
    "Llama4ForCausalLM": dict(
        num_local_experts=6,
        num_experts_per_tok=1,
        intermediate_size_mlp=24,
        interleave_moe_layer_step=2,
        num_hidden_layers=2,
        attention_chunk_size=4,
    ),
    "GraniteMoeForCausalLM": dict(
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        num_hidden_layers=2,
        tie_word_embeddings=True,
        logits_scaling=2.0,
    ),
    "PhimoeForCausalLM": dict(
        num_local_experts=6, num_experts_per_tok=2, lm_head_bias=True, attention_bias=True, num_hidden_layers=2
    ),
}
SHAPE = BatchShape(mode=ForwardMode.EXTEND, num_tokens=16, num_requests=3, table_width=WIDTH)
REAL = 11  # tokens of the step; the rest is padding
EXPERTS, RESIDENT = 6, 2


@functools.cache
def model_of(name):
    values = {"architectures": [name], **COMMON, **CONFIGS[name]}
    config = FAMILIES[name].read_config(ConfigReader(values, Path("config.json")))
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")))
    )
    noise = np.random.default_rng(0)
    wide = jax.tree.map(lambda leaf: jnp.asarray(noise.standard_normal(leaf.shape) * 0.2, leaf.dtype), state)
    return nnx.merge(graphdef, wide)


def metadata():
    prompt = {
        "token_ids": [7, 8, 9, 1, 2, 30, 31, 32, 33, 34, 35],
        "positions": [*range(5), *range(6)],
        "token_rows": [0] * 5 + [1] * 6,
    }
    table = {
        "query_starts": [0, 5, 11, 11],
        "seq_lens": [5, 6],
        "page_table": [[3, 5, 7], [2, 9, 4]],
        "request_slots": [1, 2],
    }
    return packed(SHAPE, num_tokens=REAL, **prompt, **table)


def pool_of(config):
    cache = config.cache
    return KVPoolSpec(
        num_layers=cache.num_layers,
        num_pages=PAGES,
        page_size=PAGE,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        dtype=jnp.dtype("float32"),
        latent=cache.latent,
        num_recurrent=cache.num_recurrent,
        recurrent=cache.recurrent,
        num_requests=4,
    )


def whole_step(model, spec):
    graphdef, state = nnx.split(model)
    spec = ProgramSpec(graphdef=graphdef, raw_logprobs=False, **spec)
    step = jax.jit(functools.partial(forward, spec=spec, shape=SHAPE))
    return step(state, pool_of(model.config).allocate(), jnp.zeros(4, jnp.int32), metadata())


def cut_step(parted, split, *, streams=False):
    """All programs of a step in one, in the order in which the runner starts them."""
    home_of, away = parted.residency.slot_of, parted.residency.slot_of < 0
    block_slots = jnp.asarray(np.where(away, np.cumsum(away, axis=1) - 1, -1), jnp.int32)

    def step(pool, words):
        stream, tokens, words = open_step(
            parted.embed_head.embed, jnp.zeros(4, jnp.int32), words, spec=split, shape=SHAPE
        )
        given, sent = (), []
        for layer in layers_at(parted.config):
            numbers, kind, arrays = jax.tree.map(jnp.asarray, numbers_of(layer)), layer.kind, parted.layers[layer.kind]
            how = {"spec": split, "shape": SHAPE, "kind": kind}
            stream, errand, pool = layer_step(stream, pool, arrays, numbers, words, given, jnp.asarray(home_of), **how)
            given = ()
            if errand is not None:
                sent.append(errand.away)
                given += (home_step(parted.tables[kind], arrays, numbers, words, errand, **how),)
                stored = parted.host[kind]
                if streams:
                    rows = layer.place * EXPERTS + np.flatnonzero(away[layer.column])
                    block = ExpertTable(stored.gate_up[rows], stored.down[rows])
                    given += (stream_step(block, block_slots[layer.column], errand, spec=split),)
                else:
                    given += (host_step(stored, numbers.place, errand.fed, errand.away, errand.weights, spec=split),)
        return (
            pool,
            close_step(parted.embed_head, stream, given, tokens, words, spec=split, shape=SHAPE),
            stream.tally,
            jnp.stack(sent),
        )

    return jax.jit(step)(pool_of(parted.config).allocate(), metadata())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_that_is_cut_is_the_step(name):
    model = model_of(name)
    spec = {
        "capture": model.config.capture_spec,
        "kernels": KERNELS["tiled"].load(),
        "attention": ATTENTION["paged"].load(),
        "num_pages": PAGES,
    }
    num_moe = model.config.capture_spec.num_moe_layers
    noise = np.random.default_rng(5)
    residency = ResidencyMap.from_experts(
        np.stack([noise.permutation(EXPERTS)[:RESIDENT] for _ in range(num_moe)]), num_experts=EXPERTS
    )
    device = jax.devices()[0]
    parted = offload_model(model, residency, device=device, host=device, host_dtype=None)
    sizes = {"num_moe_layers": num_moe, "num_experts": EXPERTS, "num_resident": RESIDENT}
    split = OffloadSpec(config=model.config, host_experts=KERNELS["reference"].load().moe, **sizes, **spec)
    pool, out = whole_step(model, spec)
    cut_pool, cut, tally, sent = cut_step(parted, split, streams=name == "GraniteMoeForCausalLM")
    np.testing.assert_allclose(cut.hidden[:REAL], out.hidden[:REAL], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(cut.logits, out.logits, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(cut.rows[:REAL], out.rows[:REAL])
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5), cut_pool, pool)

    rows = np.asarray(out.rows[:REAL], np.int64).reshape(
        REAL, num_moe, -1
    )  # logical ids: what the host was sent follows from them
    on_host = residency.slot_of[np.arange(num_moe)[None, :, None], rows] < 0
    waited = np.zeros(num_moe, int)  # nothing is deferred
    np.testing.assert_array_equal(
        tally, np.stack([on_host.sum(axis=(0, 2)), np.full(num_moe, rows[:, 0].size), waited], axis=1)
    )
    sent = np.moveaxis(np.asarray(sent), 0, 1)  # [N, M, K]
    np.testing.assert_array_equal(sent[:REAL], np.where(on_host, rows, -1))
    assert (sent[REAL:] == -1).all()  # padding is no work


def test_the_lightest_slots_are_those_that_a_sort_finds():
    weights = (
        np.random.default_rng(2).integers(0, 4, size=(200, 5)).astype(np.float32)
    )  # many ties: then the last of them
    for count in range(6):
        wanted = np.zeros(weights.shape, bool)
        for row, light in zip(weights, wanted, strict=True):
            light[sorted(range(5), key=lambda slot, row=row: (row[slot], -slot))[:count]] = True
        np.testing.assert_array_equal(lightest(jnp.asarray(weights), count), wanted)
