"""Qwen3-Next (Qwen Team 2025) and Qwen3.5-MoE: three of four layers are linear attention with a state that does not
grow, the fourth is grouped-query attention with gated heads, a quarter of each head rotated by position; experts and a
gated shared expert in every layer; norms scale by 1 + w. The layer that predicts further tokens attends. A state cannot
be truncated to a prefix, so prefixes are not cached for these models."""

import dataclasses

from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import MAX_NEXTN_LAYERS, FamilyConfig, LayerSpec, PredictorSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import Sizes, read_experts, read_sizes, refuse
from routed_experts.models.families.qwen2_moe import moe_layers

_LAYER_TYPES: tuple[str, ...] = ("linear_attention", "full_attention")


def read_qwen3_next(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen3-Next."""
    return _decoder(reader, layout="key heads")


def read_qwen3_5_moe_text(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of the text model of Qwen3.5-MoE, whose weights are always renormalised."""
    refuse(reader, "norm_topk_prob", allowed=(True,), default=True)
    return _decoder(reader, layout="purposes")


def read_qwen3_5_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen3.5-MoE with a vision tower, which is not loaded; the outer `tie_word_embeddings` is the
    one that counts."""
    config = read_qwen3_5_moe_text(reader.section("text_config"))
    return dataclasses.replace(
        config,
        stem="model.language_model.",
        tie_embeddings=reader.bool("tie_word_embeddings", default=False),
        ignored_tensors=(*config.ignored_tensors, "model.visual.*"),
    )


def _decoder(reader: ConfigReader, *, layout: str) -> FamilyConfig:
    sizes = read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim, part=0.25)
    refuse(reader, "attention_bias")
    refuse(reader, "attn_output_gate", allowed=(True,), default=True)
    experts, top_k = read_experts(reader)
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=reader.bool("norm_topk_prob", default=True))
    sparse = Sparse(
        router=router,
        width=reader.int("moe_intermediate_size", minimum=1),
        names=ExpertNames(shared="mlp.shared_expert"),
        shared_width=reader.int("shared_expert_intermediate_size", minimum=1),
        shared_gated=True,
    )
    full = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="head", norm_offset=1.0, gated=True)
    mixers = {"full_attention": full, "linear_attention": _read_delta(reader, sizes, layout=layout)}
    routed = moe_layers(reader, sizes.num_layers)
    dense = None if len(routed) == sizes.num_layers else Dense(width=reader.int("intermediate_size", minimum=1))
    layers = [
        LayerSpec(mixer=mixers[kind], feed=sparse if dense is None or index in routed else dense)
        for index, kind in enumerate(_layer_types(reader, sizes))
    ]
    config = sizes.within(rotary).decoder(layers, ignored_tensors=("mtp.*",))
    predictor = _predictor(reader, LayerSpec(mixer=full, feed=sparse))
    return dataclasses.replace(config, norm_offset=1.0, predictor=predictor)


def _predictor(reader: ConfigReader, layer: LayerSpec) -> PredictorSpec | None:
    """Qwen3-Next does not say that it has one. Several layers share all that is around them."""
    count = reader.int("mtp_num_hidden_layers", minimum=0, maximum=MAX_NEXTN_LAYERS, default=1)
    dedicated = reader.bool("mtp_use_dedicated_embeddings", default=False)
    if not count:
        return None
    return PredictorSpec(
        num_modules=count,
        layer=layer,
        first=0,
        tensors="mtp.*",
        layer_prefix="mtp.layers.{}.",
        projection="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        output_norm="mtp.norm",
        refused="mtp_use_dedicated_embeddings=true; expected false" if dedicated else "",
    )


def _layer_types(reader: ConfigReader, sizes: Sizes) -> tuple[str, ...]:
    interval = reader.int("full_attention_interval", minimum=1, default=4)
    default = tuple(_LAYER_TYPES[(index + 1) % interval == 0] for index in range(sizes.num_layers))
    kinds = reader.strings("layer_types", choices=_LAYER_TYPES, default=default)
    reader.require(len(kinds) == sizes.num_layers, "layer_types", f"{sizes.num_layers} words")
    reader.require("full_attention" in kinds, "layer_types", "at least one full_attention")
    return kinds


def _read_delta(reader: ConfigReader, sizes: Sizes, *, layout: str) -> DeltaAttention:
    key_heads, value_heads = (reader.int(f"linear_num_{kind}_heads", minimum=1) for kind in ("key", "value"))
    reader.require(
        value_heads % key_heads == 0, "linear_num_value_heads", f"a multiple of linear_num_key_heads={key_heads}"
    )
    shape = DeltaShape(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=reader.int("linear_key_head_dim", minimum=1),
        value_dim=reader.int("linear_value_head_dim", minimum=1),
        width=reader.int("linear_conv_kernel_dim", minimum=2, default=4),
    )
    return DeltaAttention(shape=shape, eps=sizes.norm_eps, layout=layout)
