"""Qwen2-MoE and Qwen1.5-MoE (Qwen Team 2024): biases on queries, keys and values; experts weighed by their softmax over
all, not renormalised; beside them a shared expert that every token runs, times a sigmoid gate. Layers may be dense."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, read_windows, refuse


def read_qwen2_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen2-MoE."""
    sizes = read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim)
    refuse(reader, "use_sliding_window")
    read_windows(reader, sizes)  # none, or the config contradicts itself
    experts, top_k = read_experts(reader)
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=reader.bool("norm_topk_prob", default=False))
    attention = dataclasses.replace(sizes.attention(rotary.spec), bias_in=reader.bool("qkv_bias", default=True))
    sparse = Sparse(
        router=router,
        width=reader.int("moe_intermediate_size", minimum=1),
        names=ExpertNames(shared="mlp.shared_expert"),
        shared_width=reader.int("shared_expert_intermediate_size", minimum=1),
        shared_gated=True,
    )
    dense = Dense(width=reader.int("intermediate_size", minimum=1))
    return sizes.within(rotary).decoder(
        [
            LayerSpec(mixer=attention, feed=sparse if layer in moe_layers(reader, sizes.num_layers) else dense)
            for layer in range(sizes.num_layers)
        ]
    )


def moe_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer, but for those that are named as dense."""
    step, dense = reader.int("decoder_sparse_step", minimum=1, default=1), reader.ints("mlp_only_layers", default=())
    return frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
