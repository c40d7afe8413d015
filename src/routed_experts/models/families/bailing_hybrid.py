"""Bailing hybrid, that is Ling 3.0 (inclusionAI 2026): most layers are Kimi delta attention, whose state decays each
key channel by itself, every sixth is latent attention with a gate on each head; DeepSeek-V3's grouped sigmoid routing;
dense layers first. A state cannot be truncated to a prefix, so prefixes are not cached for these models."""

import dataclasses

from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.delta_attention import DeltaAttention
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import Sizes, read_sizes, refuse
from routed_experts.models.families.deepseek import num_predicting, read_biased_router, read_latent, shared_width

_KINDS = {"layer_types": ("linear_attention", "full_attention"), "mlp_layer_types": ("sparse", "dense")}
_EXPERTS = ExpertNames(selection_bias="mlp.gate.expert_bias")
_SPELLINGS = {
    "max_position_embeddings": ("model_max_length",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
    "num_experts": ("num_local_experts",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
}


def read_bailing_hybrid(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Ling 3.0. The width of rotary positions is qk_rope_head_dim, whatever part of a head a file
    names beside it."""
    reader = reader.with_synonyms(_SPELLINGS)
    positions = reader.section("rope_scaling").values or reader.section("rope_parameters").values
    if reader.has("partial_rotary_factor"):
        reader = dataclasses.replace(reader, values={**reader.values, "partial_rotary_factor": None})
    if "partial_rotary_factor" in positions and positions.get("rope_type", positions.get("type")) in (None, "default"):
        whole = {key: value for key, value in positions.items() if key != "partial_rotary_factor"}
        replaced = {key: whole for key in ("rope_scaling", "rope_parameters") if reader.section(key).values}
        reader = dataclasses.replace(reader, values={**reader.values, **replaced})
    if positions.get("rope_theta") not in (None, reader.values.get("rope_theta")):
        # transformers writes its default beside the one that counts
        reader = dataclasses.replace(reader, values={**reader.values, "rope_theta": None})
    sizes = read_sizes(reader, latent=True)
    for key in ("use_bias", "use_qkv_bias", "use_sliding_window"):
        refuse(reader, key)
    refuse(reader, "moe_router_enable_expert_bias", allowed=(True,), default=True)
    reader.require(reader.int("q_lora_rank", default=0) == 0, "q_lora_rank", "none")
    latent, rotary = read_latent(reader, sizes, interleaved=True, theta=6e6)
    latent = dataclasses.replace(latent, gated=True, at="attention", out="dense")
    router = read_biased_router(reader, num_groups=8, topk_group=4, scale=2.5, key="num_experts")
    width = reader.int("moe_intermediate_size", minimum=1)
    shared = shared_width(reader, width, default=1)
    sparse = Sparse(router=router, width=width, shared_width=shared, names=_EXPERTS)
    mixers = {"linear_attention": _read_delta(reader, sizes), "full_attention": latent}
    feeds = {"sparse": sparse, "dense": Dense(width=reader.int("intermediate_size", minimum=1))}
    group, first = (
        reader.int("layer_group_size", minimum=1, default=6),
        reader.int("first_k_dense_replace", minimum=0, default=2),
    )
    last = {"layer_types": lambda index: (index + 1) % group == 0, "mlp_layer_types": lambda index: index < first}
    kinds = {}
    for key, choices in _KINDS.items():
        default = tuple(choices[last[key](index)] for index in range(sizes.num_layers))
        kinds[key] = reader.strings(key, choices=choices, default=default)
        reader.require(len(kinds[key]) == sizes.num_layers, key, f"{sizes.num_layers} words")
    reader.require("full_attention" in kinds["layer_types"], "layer_types", "at least one full_attention")
    layers = [
        LayerSpec(mixer=mixers[mixer], feed=feeds[feed])
        for mixer, feed in zip(kinds["layer_types"], kinds["mlp_layer_types"], strict=True)
    ]
    decoder = sizes.within(rotary).decoder(layers, num_predicting=num_predicting(reader))
    return dataclasses.replace(decoder, embed_name="word_embeddings")


def _read_delta(reader: ConfigReader, sizes: Sizes) -> DeltaAttention:
    """Published files give the heads' size as head_dim, those of transformers beside it."""
    for key in ("no_kda_lora", "use_qk_norm"):  # transformers always scales queries and keys to length 1
        refuse(reader, key, allowed=(True,), default=True)
    dim = reader.int("linear_head_dim", minimum=1, default=reader.int("head_dim", minimum=1, default=128))
    bound = reader.float("kda_lower_bound", default=-5.0)
    reader.require(bound < 0, "kda_lower_bound", "a negative number")
    shape = DeltaShape(
        key_heads=sizes.num_heads,
        value_heads=sizes.num_heads,
        key_dim=dim,
        value_dim=dim,
        width=reader.int("short_conv_kernel_size", minimum=2, default=4),
        by_channel=True,
    )
    bound = bound if reader.bool("kda_safe_gate", default=True) else 0.0
    return DeltaAttention(shape=shape, eps=sizes.norm_eps, layout="separate", gate="sigmoid", lower_bound=bound)
