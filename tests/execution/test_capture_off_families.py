"""Capture on, without its output, is capture off, for families whose layers differ. JAX's own dead code
elimination removes what only the rows need; the rest must lower to the same text. (For one family,
test_capture_off_is_free.py compares with a source without the feature.)"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

from routed_experts.engine.build.backends import ATTENTION, KERNELS
from routed_experts.execution import aot_programs, programs
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.registry import FAMILIES
from support.small_runner import DECODE, EXTEND, NUM_PAGES, NUM_SLOTS, PAGE_SIZE

COMMON = dict(
    vocab_size=313,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    hidden_act="silu",
    tie_word_embeddings=False,
)
CONFIGS = {
    "MixtralForCausalLM": dict(num_local_experts=8, num_experts_per_tok=2),
    "DeepseekV3ForCausalLM": dict(
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
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
}


@functools.cache
def decoder(name):
    values = {"architectures": [name], **COMMON, **CONFIGS[name]}
    return FAMILIES[name].read_config(ConfigReader(values, Path("config.json")))


def lowered_without_rows(name, shape, kernels, attention, *, capture):
    """The text of a forward program whose rows, if any, are not read; and the number of its outputs."""
    config, cache = decoder(name), decoder(name).cache
    graphdef, state = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)))
    spec = programs.ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec if capture else None,
        num_pages=NUM_PAGES,
        raw_logprobs=False,
        kernels=KERNELS[kernels].load(),
        attention=ATTENTION[attention].load(),
    )
    pool = KVPoolSpec(
        num_layers=cache.num_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        dtype=jnp.dtype(jnp.float32),
        latent=cache.latent,
    )
    runner = aot_programs.RunnerConfig(
        pool=pool, num_request_slots=NUM_SLOTS, shapes=(shape,), vocab_size=COMMON["vocab_size"]
    )
    inputs = aot_programs.abstract_inputs(state, spec, runner, shape)
    traced = jax.make_jaxpr(functools.partial(programs.forward, spec=spec, shape=shape))(*inputs)
    used = [True] * len(traced.out_avals)
    used[-1] = not capture
    left = ClosedJaxpr(partial_eval.dce_jaxpr(traced.jaxpr, used, instantiate=True)[0], traced.consts)
    return jax.jit(jaxpr_as_fun(left)).lower(*traced.in_avals).as_text(), len(used)


@pytest.mark.parametrize("shape", [DECODE, EXTEND], ids=["decode", "extend"])
@pytest.mark.parametrize("name", CONFIGS)
def test_on_without_its_output_is_off(name, shape):
    (on, num_on), (off, num_off) = (
        lowered_without_rows(name, shape, "tiled", "paged", capture=capture) for capture in (True, False)
    )
    assert num_on == num_off + 1
    assert on == off
