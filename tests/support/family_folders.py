"""Random checkpoints of any family, written from its own table of names: no oracle, for tests that compare the engine
with itself. Weights are wide and routers wider, so that routing differs by token."""

import json
from pathlib import Path

import numpy as np

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.family_config import weight_sources
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.registry import FAMILIES

VOCAB_SIZE = 211
SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    hidden_act="silu",
)
CONFIGS = {
    "deepseek": dict(
        architectures=["DeepseekV2ForCausalLM"],
        num_key_value_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        kv_lora_rank=24,
        q_lora_rank=20,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
    ),
    "gpt-oss": dict(
        architectures=["GptOssForCausalLM"],
        num_hidden_layers=2,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=12,
        head_dim=16,
    ),
    "olmoe": dict(
        architectures=["OlmoeForCausalLM"], num_experts=16, num_experts_per_tok=4, intermediate_size=16, clip_qkv=2.0
    ),
    "qwen3-next": dict(
        architectures=["Qwen3NextForCausalLM"],
        num_hidden_layers=2,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        full_attention_interval=2,
    ),
    "bailing-hybrid": dict(
        architectures=["BailingHybridForCausalLM"],
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=0,
        num_hidden_layers=2,
        layer_group_size=2,
        head_dim=8,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
    ),
    "gemma4": dict(
        architectures=["Gemma4ForCausalLM"],
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=16,
        top_k_experts=4,
        moe_intermediate_size=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        final_logit_softcapping=3.0,
    ),
    "lfm2-moe": dict(
        architectures=["Lfm2MoeForCausalLM"],
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=16,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
        conv_bias=True,
    ),
    "dense": dict(architectures=["Qwen3ForCausalLM"], head_dim=24, tie_word_embeddings=True),
}


def write_family(path, name, *, seed=0, **changed) -> Path:
    """Write config.json and the tensors that the family's own table names."""
    config = {**SIZES, **CONFIGS[name], **changed, "torch_dtype": "float32"}
    Path(path).mkdir(parents=True, exist_ok=True)
    (Path(path) / "config.json").write_text(json.dumps(config), encoding="utf-8")
    family = FAMILIES[config["architectures"][0]]
    read = family.read_config(ConfigReader(config, Path(path) / "config.json"))
    rng = np.random.default_rng(seed)
    tensors = {source.name: _random(rng, source.name, source.shape) for source in weight_sources(read)}
    for layer in [layer for layer in tensors if name == "gpt-oss" and layer.endswith("experts.down_proj")]:
        tensors[layer] = np.ascontiguousarray(tensors[layer].swapaxes(1, 2))  # stored [E, F, D], read [E, D, F]
    return save(path, config, tensors)


def _random(rng, name, shape):
    if "norm" in name or name.endswith(("scale", "scalar")):
        return (1.0 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    std = 0.3 if ".gate.weight" in name or "router" in name else 1.0 if "embed" in name else 0.12
    return (std * rng.standard_normal(shape)).astype(np.float32)
