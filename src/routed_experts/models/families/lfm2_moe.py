"""LFM2-MoE (Liquid AI 2025): most layers mix tokens by a short gated convolution, the others by grouped-query attention
with a norm on each head's queries and keys; sigmoid routing with a bias on the choice; dense layers first. The state of
a convolution cannot be truncated to a prefix, so prefixes are not cached for these models."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.layers.short_conv import ConvShape
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.decoder.grouped_attention import AttentionNames
from routed_experts.models.decoder.short_convolution import ShortConvolution
from routed_experts.models.families.common_config import read_experts, read_sizes

_AT, _PARTS, _LAYER_TYPES = "feed_forward", ("w1", "w3", "w2"), ("conv", "full_attention")
_ATTENTION = AttentionNames(out="out_proj", q_norm="q_layernorm.weight", k_norm="k_layernorm.weight")
_EXPERTS = ExpertNames(
    router=f"{_AT}.gate.weight",
    selection_bias=f"{_AT}.expert_bias",
    expert=f"{_AT}.experts.{{}}",
    gate="w1",
    up="w3",
    down="w2",
)


def read_lfm2_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of LFM2-8B-A1B."""
    sizes = read_sizes(reader, eps=1e-5, tied=True, eps_key="norm_eps")
    sizes = dataclasses.replace(
        sizes,
        tie_embeddings=reader.bool("tie_embedding", default=sizes.tie_embeddings),  # the published files' word
    )
    rotary = read_rotary(reader, sizes.head_dim, theta=1e6)
    experts, top_k = read_experts(reader, scoring="sigmoid")
    router = RouterSpec(
        num_experts=experts,
        top_k=top_k,
        renormalize=reader.bool("norm_topk_prob", default=True),
        scoring_func="sigmoid",
        scale=reader.float("routed_scaling_factor", default=1.0),
        epsilon=1e-6,
        biased=reader.bool("use_expert_bias", default=True),
    )
    kinds = reader.strings("layer_types", choices=_LAYER_TYPES, default=())
    reader.require(len(kinds) == sizes.num_layers, "layer_types", f"{sizes.num_layers} words")
    reader.require("full_attention" in kinds, "layer_types", "at least one full_attention")
    mixers = {
        "conv": ShortConvolution(
            shape=ConvShape(channels=sizes.hidden_size, width=reader.int("conv_L_cache", minimum=2, default=3)),
            biased=reader.bool("conv_bias", default=False),
        ),
        "full_attention": dataclasses.replace(sizes.attention(rotary.spec), qk_norm="head", names=_ATTENTION),
    }
    dense = Dense(width=reader.int("intermediate_size", minimum=1), at=_AT, parts=_PARTS)
    sparse = Sparse(router=router, width=reader.int("moe_intermediate_size", minimum=1), names=_EXPERTS)
    first = reader.int("num_dense_layers", minimum=0, default=2)
    layers = [
        LayerSpec(mixer=mixers[kind], feed=dense if index < first else sparse) for index, kind in enumerate(kinds)
    ]
    return dataclasses.replace(
        sizes.within(rotary).decoder(layers),
        norm_names=("operator_norm", "ffn_norm"),
        final_norm="embedding_norm",
    )
