"""Granite-MoE (Granite Team 2024): Mixtral's shape with constants on embeddings, residuals, attention scores and
logits; the experts of a layer are two tensors."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames, Stacked
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, refuse

_NAMES = ExpertNames(
    router="block_sparse_moe.router.layer.weight",
    stacked=(
        Stacked(name="block_sparse_moe.input_linear.weight", to="gate_up", transposed=True),
        Stacked(name="block_sparse_moe.output_linear.weight", to="down", transposed=True),
    ),
)


def read_granite_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Granite-3.0-1B-A400M or 3B-A800M."""
    sizes = read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim)
    experts, top_k = read_experts(reader, key="num_local_experts")
    refuse(reader, "norm_topk_prob", allowed=(True,), default=True)
    bias = reader.bool("attention_bias", default=False)
    scales = {key: reader.float(key, default=1.0) for key in ("attention_multiplier", "logits_scaling")}
    for key, value in scales.items():
        reader.require(value > 0, key, "a positive number")
    attention = sizes.attention(rotary.spec)
    attention = dataclasses.replace(attention, bias_in=bias, bias_out=bias, scale=scales["attention_multiplier"])
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=True, scoring_func="logits")
    layer = LayerSpec(
        mixer=attention, feed=Sparse(router=router, width=reader.int("intermediate_size", minimum=1), names=_NAMES)
    )
    return dataclasses.replace(
        sizes.within(rotary).decoder([layer] * sizes.num_layers),
        embed_scale=reader.float("embedding_multiplier", default=1.0),
        residual_scale=reader.float("residual_multiplier", default=1.0),
        logit_scale=1.0 / scales["logits_scaling"],
    )
