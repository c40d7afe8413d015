"""HunYuan V1 MoE (Tencent 2025): grouped-query attention whose queries and keys are normed a head at a time after their
rotary positions, at a base stretched by `alpha`; in every layer top-k of a softmax, and a shared expert of the same
width. Published files give some numbers once for each layer; all layers must have the same."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.decoder.grouped_attention import AttentionNames
from routed_experts.models.families.common_config import read_experts, read_sizes, refuse

_ATTENTION = AttentionNames(q_norm="query_layernorm.weight", k_norm="key_layernorm.weight")
_EXPERTS = ExpertNames(router="mlp.gate.wg.weight", shared="mlp.shared_mlp")
_SPELLINGS = {"moe_topk": ("num_experts_per_tok",)}
_BY_LAYER = ("num_experts", "moe_topk", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")


def read_hunyuan_v1_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Hunyuan-A13B."""
    reader = _same_in_all_layers(reader).with_synonyms(_SPELLINGS)
    sizes = read_sizes(reader, eps=1e-5)
    rotary = read_rotary(reader, sizes.head_dim, stretched=True)
    for key in ("mlp_bias", "use_cla", "group_limited_greedy"):
        refuse(reader, key)
    for key in ("use_qk_norm", "use_mixed_mlp_moe", "norm_topk_prob"):
        refuse(reader, key, allowed=(True,), default=True)
    width = reader.int("intermediate_size", minimum=1)
    fixed = {"num_shared_expert": 1, "moe_layer_num_skipped": 0, "attention_head_dim": sizes.head_dim}
    for key, value in (fixed | {"moe_intermediate_size": width}).items():
        reader.require(reader.int(key, default=value) == value, key, f"{value}")
    reader.require(reader.float("routed_scaling_factor", default=1.0) == 1.0, "routed_scaling_factor", "1.0")
    experts, top_k = read_experts(reader, per_token="moe_topk")
    bias = reader.bool("attention_bias", default=False)
    attention = dataclasses.replace(
        sizes.attention(rotary.spec),
        qk_norm="head",
        norm_after_rope=True,
        bias_in=bias,
        bias_out=bias,
        names=_ATTENTION,
    )
    sparse = Sparse(
        router=RouterSpec(num_experts=experts, top_k=top_k, renormalize=True),
        width=width,
        names=_EXPERTS,
        shared_width=width,
        wide_router=True,
    )
    return sizes.within(rotary).decoder([LayerSpec(mixer=attention, feed=sparse)] * sizes.num_layers)


def _same_in_all_layers(reader: ConfigReader) -> ConfigReader:
    """One number in place of a list that gives it to every layer."""
    lists = {key: reader.ints(key) for key in _BY_LAYER if isinstance(reader.values.get(key), list)}
    for key, numbers in lists.items():
        reader.require(len(set(numbers)) == 1, key, "the same number for all layers")
    numbers = {key: numbers[0] for key, numbers in lists.items()}
    return dataclasses.replace(reader, values={**reader.values, **numbers}) if lists else reader
