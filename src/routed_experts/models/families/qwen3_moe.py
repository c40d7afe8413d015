"""Qwen3-MoE (Qwen Team 2025): queries and keys normed a head at a time, top-k of a softmax; layers may be dense."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import USUAL_NAMES, ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import check_routing, read_sizes, refuse
from routed_experts.models.families.qwen2_moe import moe_layers


def read_qwen3_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen3-MoE; without experts, all layers are dense."""
    return read_qwen3_layers(reader, theta=10_000.0, renormalize=reader.bool("norm_topk_prob", default=False))


def read_qwen3_layers(
    reader: ConfigReader, *, theta: float, renormalize: bool, names: ExpertNames = USUAL_NAMES
) -> FamilyConfig:
    """The same for a family built like it; `theta` is the default of its base."""
    sizes, experts = read_sizes(reader), reader.int("num_experts", minimum=0)
    rotary, top_k = read_rotary(reader, sizes.head_dim, theta=theta), reader.int("num_experts_per_tok", minimum=1)
    check_routing(reader)
    refuse(reader, "attention_bias")
    refuse(reader, "use_sliding_window")
    sparse_layers = moe_layers(reader, sizes.num_layers) if experts else ()
    reader.require(not sparse_layers or top_k <= experts, "num_experts_per_tok", f"at most num_experts={experts}")
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="head")
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=renormalize)
    sparse = Sparse(router=router, width=reader.int("moe_intermediate_size", minimum=1), names=names)
    dense = Dense(width=reader.int("intermediate_size", minimum=1))
    layers = [
        LayerSpec(mixer=attention, feed=sparse if index in sparse_layers else dense)
        for index in range(sizes.num_layers)
    ]
    return sizes.within(rotary).decoder(layers)
