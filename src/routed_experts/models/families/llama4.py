"""Llama 4, text (Meta 2025): one expert a token, whose input is multiplied by the sigmoid of its score; a shared
expert; three of four layers rotate queries and keys by position, norm them, and attend within their chunk, the fourth
sees all and has no positions. A checkpoint with a vision tower is read for its text model; the
tower is not loaded."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames, Stacked
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, refuse

_AT = "feed_forward"
_LAYER_TYPES = ("full_attention", "chunked_attention")
_NAMES = ExpertNames(
    router=f"{_AT}.router.weight",
    stacked=(
        Stacked(name=f"{_AT}.experts.gate_up_proj", to="gate_up"),
        Stacked(name=f"{_AT}.experts.down_proj", to="down"),
    ),
    shared=f"{_AT}.shared_expert",
)


def read_llama4_text(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of the text model."""
    sizes = read_sizes(reader, eps=1e-5)
    rotary = read_rotary(reader, sizes.head_dim, theta=500_000.0, interleaved=True)
    refuse(reader, "attention_bias")
    experts, top_k = read_experts(reader, key="num_local_experts", scoring="sigmoid")
    reader.require(top_k == 1, "num_experts_per_tok", "1: weights multiply what enters an expert")
    interval = reader.int("no_rope_layer_interval", minimum=1, default=4)
    uses_rope = reader.ints("no_rope_layers", default=()) or tuple(
        int((index + 1) % interval != 0) for index in range(sizes.num_layers)
    )
    reader.require(
        len(uses_rope) >= sizes.num_layers,
        "no_rope_layers",
        f"at least {sizes.num_layers} numbers, 1 for a layer that turns",
    )
    reader = reader.with_default("attention_chunk_size", 8192)
    has_chunks = reader.has("attention_chunk_size")
    kinds = tuple(_LAYER_TYPES[has_chunks and flag != 0] for flag in uses_rope)
    layer_types = reader.strings("layer_types", choices=_LAYER_TYPES, default=kinds)
    chunked_where = "chunked_attention where no_rope_layers is 1, else " if has_chunks else ""
    reader.require(layer_types == kinds, "layer_types", f"{chunked_where}full_attention")
    step = reader.int("interleave_moe_layer_step", minimum=1, default=1)
    sparse_layers = reader.ints("moe_layers", default=tuple(range(step - 1, sizes.num_layers, step)))
    plain = sizes.attention(None)
    chunked = dataclasses.replace(
        plain,
        rotary=rotary.spec,
        qk_norm="bare" if reader.bool("use_qk_norm", default=True) else "",
        norm_after_rope=True,
        chunk=reader.int("attention_chunk_size", minimum=1) if has_chunks else 0,
    )
    if _is_tuned(reader):
        floor = reader.int("floor_scale", minimum=1, default=8192)
        plain = dataclasses.replace(plain, tuning=(float(floor), reader.float("attn_scale", default=0.1)))
    width = reader.int("intermediate_size", minimum=1)
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=False, scoring_func="sigmoid")
    sparse = Sparse(router=router, width=width, names=_NAMES, shared_width=width, weight_inputs=True)
    dense = Dense(width=reader.int("intermediate_size_mlp", minimum=1, default=16_384), at=_AT)
    layers = [
        LayerSpec(mixer=chunked if uses_rope[index] else plain, feed=sparse if index in sparse_layers else dense)
        for index in range(sizes.num_layers)
    ]
    return sizes.within(rotary).decoder(layers)


def _is_tuned(reader: ConfigReader) -> bool:
    """Whether queries of layers without positions are scaled; the published files have 4 where transformers has
    true."""
    key = "attn_temperature_tuning"
    return reader.int(key, minimum=0) > 0 if type(reader.values.get(key)) is int else reader.bool(key, default=True)


def read_llama4(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of a checkpoint with a vision tower."""
    config = read_llama4_text(reader.section("text_config"))
    ignored_tensors = ("vision_model.*", "multi_modal_projector.*")
    return dataclasses.replace(
        config, stem="language_model.model.", head="language_model.lm_head", ignored_tensors=ignored_tensors
    )
