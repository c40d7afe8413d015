"""Gemma 4 MoE, text (Google 2026): sliding and full layers differ in heads, rotary positions and rows of the cache;
full layers may take their values from the projection of keys; each layer has a dense network beside its experts;
outputs are normed and scores of the vocabulary bounded. Images are not read.

A published file says `global_head_dim` and `num_global_key_value_heads`; transformers 5 writes `per_layer_config`."""

import dataclasses
import math

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import MAX_HEAD_DIM, ConfigReader
from routed_experts.models.base.rotary_reader import Rotary, read_rotary
from routed_experts.models.decoder.dense_beside_sparse import DenseBesideSparse
from routed_experts.models.decoder.expert_names import ExpertNames, Stacked
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.families.common_config import Sizes, read_experts, read_sizes, refuse

_GATE_UP, _DOWN, _GELU = "experts.gate_up_proj", "experts.down_proj", "gelu_pytorch_tanh"
_NAMES = ExpertNames(
    router="router.proj.weight",
    stacked=(Stacked(name=_GATE_UP, to="gate_up", transposed=True), Stacked(name=_DOWN, to="down", transposed=True)),
)
_AFTER = "post_feedforward_layernorm"
_HALVES = (f"{_AFTER}_1.weight", "pre_feedforward_layernorm_2.weight", f"{_AFTER}_2.weight")
_KINDS = ("sliding_attention", "full_attention")
_THETA = {"sliding_attention": 10_000.0, "full_attention": 1e6}
_ROTARY = {  # of configs without rope_parameters
    "sliding_attention": {"rope_type": "default"},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}
_OWN = {"head_dim", "num_key_value_heads"}


def read_gemma4_text(reader: ConfigReader, *, stem: str = "model.") -> FamilyConfig:
    """Read config.json of a text model with experts in each layer."""
    sizes = dataclasses.replace(
        read_sizes(reader, tied=True),
        head_dim=reader.int("head_dim", minimum=2, maximum=MAX_HEAD_DIM, default=256),
        num_kv_heads=reader.int("num_key_value_heads", minimum=1, default=4),
    )
    reader.str("hidden_activation", default=_GELU, choices=(_GELU,))
    refuse(reader, "enable_moe_block", allowed=(True,))
    refuse(reader, "attention_bias")
    for key, default in (("hidden_size_per_layer_input", 256), ("num_kv_shared_layers", 0)):
        reader.require(reader.int(key, default=default) == 0, key, "0")
    if reader.has("use_bidirectional_attention"):
        reader.str("use_bidirectional_attention", choices=("vision",))  # of images alone
    default = tuple(_KINDS[(index + 1) % 6 == 0] for index in range(sizes.num_layers))
    kinds = reader.strings("layer_types", choices=_KINDS, default=default)
    reader.require(len(kinds) == sizes.num_layers, "layer_types", f"{sizes.num_layers} words")
    kinds = (*kinds[:-1], "full_attention")  # as transformers has it
    experts, top_k = read_experts(reader, per_token="top_k_experts")
    feed = DenseBesideSparse(
        router=RouterSpec(num_experts=experts, top_k=top_k, renormalize=True),
        width=reader.int("moe_intermediate_size", minimum=1),
        names=_NAMES,
        activation="tanh gelu",
        dense=Dense(width=reader.int("intermediate_size", minimum=1), activation="tanh gelu"),
        eps=sizes.norm_eps,
        norm_sources=_HALVES,
        router_scale="router.scale",
        expert_scale="router.per_expert_scale",
    )
    mixers: dict[str, GroupedAttention] = {}
    for kind in sorted(set(kinds)):
        mixers[kind], rotary = _attention(reader, sizes, kind, kinds)
        sizes = sizes.within(rotary)
    return dataclasses.replace(
        sizes.decoder([LayerSpec(mixer=mixers[kind], feed=feed, output_norms=True, scaled=True) for kind in kinds]),
        stem=stem,
        embed_scale=math.sqrt(sizes.hidden_size),
        logit_softcap=_read_softcap(reader),
        norm_names=("input_layernorm", "pre_feedforward_layernorm"),
        output_norm_names=("post_attention_layernorm", _AFTER),
        stream_scale="layer_scalar",
    )


def _read_softcap(reader: ConfigReader) -> float:
    """What bounds logits; 0 where the file has none."""
    cap = reader.float("final_logit_softcapping", default=0.0)
    reader.require(cap > 0 or not reader.has("final_logit_softcapping"), "final_logit_softcapping", "a positive number")
    return cap


def read_gemma4(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of a model with image and audio towers, which are not loaded."""
    towers = ("model.vision_tower.*", "model.embed_vision.*", "model.audio_tower.*", "model.embed_audio.*")
    text = read_gemma4_text(reader.section("text_config"), stem="model.language_model.")
    tied = reader.bool("tie_word_embeddings", default=True)  # the outer one counts
    return dataclasses.replace(text, ignored_tensors=towers, tie_embeddings=tied)


def _layer_section(reader: ConfigReader, layer: int, num_layers: int) -> ConfigReader:
    """What per_layer_config says of one layer. transformers pads the numbers of layers with zeros to one width."""
    section = reader.section("per_layer_config")
    keys = {int(key) if key.isdecimal() else -1: key for key in section.values}
    known = len(keys) == len(section.values) and all(0 <= index < num_layers for index in keys)
    reader.require(known, "per_layer_config", f"keys that are layers, each once, from 0 to {num_layers - 1}")
    return section.section(keys.get(layer, str(layer)))


def _attention(
    reader: ConfigReader, sizes: Sizes, kind: str, kinds: tuple[str, ...]
) -> tuple[GroupedAttention, Rotary]:
    """The attention of one kind of layers, and its positions."""
    is_full = kind == "full_attention"
    shared = is_full and reader.bool("attention_k_eq_v", default=False)
    head_dim, kv_heads = sizes.head_dim, sizes.num_kv_heads
    if reader.has("per_layer_config"):
        layers = [_layer_section(reader, index, len(kinds)) for index, own in enumerate(kinds) if own == kind]
        alike = all(layer.values == layers[0].values and layer.values.keys() <= _OWN for layer in layers)
        reader.require(alike, "per_layer_config", f"for all {kind} layers the same {' and '.join(sorted(_OWN))}")
        head_dim = layers[0].int("head_dim", minimum=2, maximum=MAX_HEAD_DIM, default=head_dim)
        kv_heads = layers[0].int("num_key_value_heads", minimum=1, default=kv_heads)
    elif is_full:
        head_dim = reader.int("global_head_dim", minimum=2, maximum=MAX_HEAD_DIM, default=512)
        kv_heads = reader.int("num_global_key_value_heads", minimum=1, default=kv_heads) if shared else kv_heads
    reader.require(sizes.num_heads % kv_heads == 0, "num_key_value_heads", f"a divisor of {sizes.num_heads} in {kind}")
    sections = reader.section("rope_parameters")
    if reader.has("rope_scaling") or (sections.values and not sections.has(kind)):
        read_rotary(reader, head_dim)  # refuses unknown kinds by name
        reader.require(False, "rope_parameters", f"positions of {kind} layers in a section of their own")
    positions = sections.section(kind).values or _ROTARY[kind]
    base = {} if sections.values else {"rope_theta": None}  # without sections transformers takes its own, with bases
    own = dataclasses.replace(reader, values={**reader.values, **base, "rope_parameters": positions})
    is_proportional = "proportional" in (positions.get("rope_type"), positions.get("type"))
    part = 1.0 if is_proportional else None  # transformers cuts no other kind's heads
    rotary = read_rotary(own, head_dim, theta=_THETA[kind], part=part)
    holds = rotary.context_length in (None, sizes.context_length)
    reader.require(holds, "rope_parameters", "positions that hold up to the trained length")
    sized = dataclasses.replace(sizes, head_dim=head_dim, num_kv_heads=kv_heads).attention(rotary.spec)
    window = 0 if is_full else reader.int("sliding_window", minimum=1, default=512)
    attention = dataclasses.replace(
        sized, qk_norm="head", value_norm=True, keys_are_values=shared, scale=1.0, window=window
    )
    return attention, rotary
