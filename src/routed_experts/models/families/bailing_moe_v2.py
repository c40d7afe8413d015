"""Bailing MoE v2, that is Ling 2.0 (inclusionAI 2025): grouped-query attention with a norm on each head's queries and
keys, half of a head rotated by position; DeepSeek-V3's grouped sigmoid routing; dense layers first. Its checkpoints
bring code, which is never run: the architecture is written here."""

import dataclasses

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary, read_rotated_share
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.decoder.grouped_attention import AttentionNames
from routed_experts.models.families.common_config import read_sizes, refuse
from routed_experts.models.families.deepseek import predicting, read_biased_router

_ATTENTION = AttentionNames(
    at="attention", fused="query_key_value", out="dense", q_norm="query_layernorm.weight", k_norm="key_layernorm.weight"
)
_EXPERTS = ExpertNames(selection_bias="mlp.gate.expert_bias")


def read_bailing_moe_v2(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Ling-mini-2.0, Ling-flash-2.0 or Ling-1T. The first two say which part of a head is rotated
    as `partial_rotary_factor`, Ling-1T as `rotary_dim`."""
    sizes = read_sizes(reader)
    share = read_rotated_share(reader, sizes.head_dim)
    rotary = read_rotary(reader, sizes.head_dim, theta=6e5, part=share)
    agree = not reader.has("rotary_dim") or 2 * len(rotary.spec.inverse) == round(share * sizes.head_dim)
    reader.require(agree, "rotary_dim", "the part of head_dim that partial_rotary_factor says, or no such key")
    for key in ("use_bias", "use_qkv_bias", "use_sliding_window"):
        refuse(reader, key)
    refuse(reader, "use_qk_norm", allowed=(True,), default=True)
    refuse(reader, "moe_router_enable_expert_bias", allowed=(True,), default=True)
    router = read_biased_router(reader, num_groups=8, topk_group=4, scale=1.0, key="num_experts")
    if router.top_k == 1:  # the checkpoints' own code leaves the score of a single expert as it is
        router = dataclasses.replace(router, renormalize=False)
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="head", names=_ATTENTION)
    width, dense = reader.int("moe_intermediate_size", minimum=1), reader.int("intermediate_size", minimum=1)
    shared = reader.int("moe_shared_expert_intermediate_size", minimum=1, default=width)
    shared *= reader.with_null(0, "num_shared_experts").int("num_shared_experts", minimum=0, default=1)
    sparse = Sparse(router=router, width=width, shared_width=shared, names=_EXPERTS)
    first = reader.int("first_k_dense_replace", minimum=0, default=1)
    layers = [
        LayerSpec(mixer=attention, feed=Dense(width=dense) if index < first else sparse)
        for index in range(sizes.num_layers)
    ]
    config = dataclasses.replace(sizes.within(rotary).decoder(layers), embed_name="word_embeddings")
    return predicting(reader, config, LayerSpec(mixer=attention, feed=sparse), output_norm="final_layernorm")
