"""Steps of families through the real TPU compiler, on the backends that an engine picks: heads and rows of the
cache as published, and few, narrow layers. The pool and its states are updated in place, no kernel is too large for
VMEM, and each part of a layer runs by the kernels that the declared path promises. Proves no value: tests/layers/tpu/
and test_tpu_family_values.py do."""

import collections
import dataclasses
import functools

import jax
import pytest

from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.layers.tpu.delta_chunks import takes_chunks
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.decoder.latent_attention import LatentAttention
from routed_experts.models.decoder.layer_params import ParamKind
from routed_experts.models.registry import FAMILIES
from support.tpu_aot import assert_in_place
from support.tpu_programs import build_world, compiled, kernels, reordered_weights, whole_pool_operations

pytestmark = pytest.mark.tpu_aot

MIB = 1 << 20
SIZES = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 2048,
}
MLA = {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 256, "kv_lora_rank": 512}
MLA |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 0}
GROUPS = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1}
GLM = {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
GLM |= {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 0}
# As published but for the layers: 2,880 columns are no multiple of 128, and 128 experts of a run's 4 layers are one.
GPT_OSS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 8}
GPT_OSS |= {"hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201_088}
GEMMA = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512}
GEMMA |= {"num_global_key_value_heads": 2, "num_experts": 128, "top_k_experts": 8, "enable_moe_block": True}
GEMMA |= {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 2}
DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
DELTA |= {"linear_value_head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
BAILING = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "kv_lora_rank": 512}
BAILING |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "layer_group_size": 2}
KEYS = {  # beside SIZES; pages of 64 tokens: the pool takes 130 to 256 MiB
    "DeepseekV3ForCausalLM": (MLA | GROUPS | {"routed_scaling_factor": 2.5}, 512),
    "Glm4MoeForCausalLM": (GLM | {"partial_rotary_factor": 0.5, "routed_scaling_factor": 1.0}, 320),
    "Gemma4ForCausalLM": (GEMMA | {"attention_k_eq_v": True, "sliding_window": 1024}, 320),
    "GptOssForCausalLM": (GPT_OSS | {"num_local_experts": 32, "num_experts_per_tok": 4}, 160),
    "Qwen3NextForCausalLM": (
        DELTA
        | {"num_experts": 64, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 256}
        | {"full_attention_interval": 2},
        550,
    ),
    "BailingHybridForCausalLM": (
        BAILING | {"num_experts": 64, "num_experts_per_tok": 8, "first_k_dense_replace": 0, "num_shared_experts": 1},
        1100,
    ),
}


@functools.cache
def world(architecture):
    keys, num_pages = KEYS[architecture]
    config = FAMILIES[architecture].read_config(ConfigReader({**SIZES, **keys}, architecture))
    slots = 1425 if config.cache.num_recurrent else 33  # so many that each kind of state is larger than VMEM
    return build_world(config, num_pages=num_pages, decode=16, extend=128, num_request_slots=slots)


# One chip each, and one step: kernels at other sizes are in tests/layers/tpu/test_published_shapes.py.
CHIPS = {
    "DeepseekV3ForCausalLM": "v5e",
    "Glm4MoeForCausalLM": "v6e",
    "Gemma4ForCausalLM": "v5e",
    "GptOssForCausalLM": "v6e",
    "Qwen3NextForCausalLM": "v6e",
    "BailingHybridForCausalLM": "v5e",
}
# Latent rows, heads of 64 with sinks and windows, and states: each kernel in one of them.
IN_EVERY_RUN = ("DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM")
TEMPORARIES = {"BailingHybridForCausalLM": 10 * MIB}  # 4 of them a copy of weights with 4,128 columns


def kernels_of_parts(config):
    """The kernels that a step has for each part of its layers, in the order of the declared path. A block of layers is
    a loop, whose body has the layers of one repeat. `prepare` norms no values."""
    parts = collections.defaultdict(collections.Counter)
    for layer in (layer for block in config.blocks for layer in block.pattern):
        mixer, recurs = layer.mixer, isinstance(layer.mixer, DeltaAttention)
        sparse = isinstance(layer.feed, Sparse)
        parts["projections"]["layered_linear"] += sum(
            weight.kind is ParamKind.MATRIX for weight in layer.weights(config)
        )
        parts["attention"]["ragged_attention"] += not recurs
        fused_norm = "q/k norm" if isinstance(mixer, GroupedAttention) and mixer.qk_norm else "attention"
        parts[fused_norm]["prepare"] += isinstance(mixer, GroupedAttention) and not mixer.value_norm
        parts["attention"]["write_rows"] += isinstance(mixer, LatentAttention)
        parts["delta rule"].update({"delta_step": recurs, "delta_chunks": recurs and takes_chunks(mixer.shape)})
        parts["router"]["fused_router"] += sparse
        parts["experts"].update({"grid_steps": sparse, "fused_experts": sparse})
    order = ("projections", "q/k norm", "attention", "delta rule", "router", "experts")
    return {part: parts[part] for part in order if parts[part].total()}


@pytest.mark.parametrize(
    "architecture", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in CHIPS]
)
def test_a_decode_step_of_a_family_runs_the_kernels_of_its_path_in_place(architecture):
    own = world(architecture)
    program = compiled(CHIPS[architecture], "forward decode", capture=True, world=own)
    leaves = jax.tree.leaves(own.pool)
    pages = leaves[0]
    assert pages.size * pages.dtype.itemsize > 128 * MIB, "a pool that fits in VMEM may be fetched whole"
    assert_in_place(program, pages, max_temp_bytes=TEMPORARIES.get(architecture, 8 * MIB))
    for leaf in leaves:
        if leaf.size * leaf.dtype.itemsize > 128 * MIB:  # pages, and states of the delta rule
            assert whole_pool_operations(program, leaf) == []
    aliased = program.memory_analysis().alias_size_in_bytes
    assert aliased >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    expected = kernels_of_parts(own.config)
    assert DEFAULT_BACKENDS.layer_paths(own.config)["tpu"] == f"pieces: {', '.join(expected)}"
    assert kernels(program) == sum(expected.values(), collections.Counter())
    assert reordered_weights(program) == []


DRAFTS = 3


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3NextForCausalLM", pytest.param("BailingHybridForCausalLM", marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("name", ["forward target_verify", "commit target_verify"])
def test_a_verify_step_leaves_states_in_place_and_a_program_after_it_writes_them_there(architecture, name):
    own = world(architecture)
    decode, _ = own.runner.shapes
    shape = dataclasses.replace(decode, mode=ForwardMode.TARGET_VERIFY, num_tokens=decode.num_requests * (DRAFTS + 1))
    own = dataclasses.replace(own, runner=dataclasses.replace(own.runner, shapes=(shape,)), num_drafts=DRAFTS)
    program = compiled(CHIPS[architecture], name, capture=True, world=own)
    leaves = jax.tree.leaves(own.pool)
    copied = decode.num_requests * own.config.cache.recurrent.zeros(1, jax.numpy.float32).recurrent.nbytes
    assert_in_place(program, leaves[0], max_temp_bytes=8 * MIB + (copied if name.startswith("forward") else 0))
    for leaf in leaves:
        if leaf.size * leaf.dtype.itemsize > 128 * MIB:
            assert whole_pool_operations(program, leaf) == []
    aliased = program.memory_analysis().alias_size_in_bytes
    assert aliased >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
