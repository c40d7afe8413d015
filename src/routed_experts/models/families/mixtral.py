"""Mixtral (Jiang et al. 2024): grouped-query attention, in every layer 8 experts of which 2 run, weighed by a
softmax over the two. PhiMoE (Abdin et al. 2024) has the same structure, with layer norms, biases, longrope and
sparsemixer routing."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, read_window, refuse

_NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight", expert="block_sparse_moe.experts.{}", gate="w1", up="w3", down="w2"
)


def read_mixtral(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Mixtral."""
    sizes = read_sizes(reader, eps=1e-5)
    rotary = read_rotary(reader, sizes.head_dim, theta=1e6)
    sizes = sizes.within(rotary)
    experts, top_k = read_experts(reader, key="num_local_experts")
    refuse(reader, "norm_topk_prob", allowed=(True,), default=True)
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=True)
    attention = dataclasses.replace(sizes.attention(rotary.spec), window=read_window(reader))
    layer = LayerSpec(
        mixer=attention, feed=Sparse(router=router, width=reader.int("intermediate_size", minimum=1), names=_NAMES)
    )
    return sizes.decoder([layer] * sizes.num_layers)


def read_phimoe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of PhiMoE. The jitter of its inputs is for training; that of its router is the width of
    sparsemixer's choice."""
    sizes = read_sizes(reader, eps=1e-5)
    rotary = read_rotary(reader, sizes.head_dim, theta=1e6, kinds=("default", "longrope"), uses_short_mscale=True)
    sizes = sizes.within(rotary)
    experts, top_k = read_experts(reader, key="num_local_experts", scoring="sparsemixer")
    reader.require(top_k == 2, "num_experts_per_tok", "2: sparsemixer is defined for two experts")
    jitter_eps = reader.float("router_jitter_noise", default=0.01)
    reader.require(jitter_eps >= 0, "router_jitter_noise", "a number of at least 0")
    router = RouterSpec(
        num_experts=experts, top_k=top_k, renormalize=False, scoring_func="sparsemixer", jitter_eps=jitter_eps
    )
    bias = reader.bool("attention_bias", default=False)
    attention = sizes.attention(rotary.spec)
    attention = dataclasses.replace(attention, window=read_window(reader), bias_in=bias, bias_out=bias)
    layer = LayerSpec(
        mixer=attention, feed=Sparse(router=router, width=reader.int("intermediate_size", minimum=1), names=_NAMES)
    )
    decoder = sizes.decoder([layer] * sizes.num_layers)
    return dataclasses.replace(decoder, layer_norms=True, head_bias=reader.bool("lm_head_bias", default=False))
