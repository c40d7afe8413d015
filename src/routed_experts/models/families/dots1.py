"""dots.llm1 (rednote 2025): DeepSeek-V3's routing on grouped-query attention with a norm on each head's queries and
keys; dense layers first, shared experts; layers may have a sliding window."""

import dataclasses

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import Sizes, read_sizes, read_window
from routed_experts.models.families.deepseek import read_biased_router, shared_width

_LAYER_TYPES = ("full_attention", "sliding_attention")
_SCORING = "scoring_func"


def read_dots1(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of dots.llm1, whose published files name the scores by the method, noaux_tc."""
    if reader.str(_SCORING, default="sigmoid", choices=("sigmoid", "noaux_tc")) == "noaux_tc":
        reader = dataclasses.replace(reader, values={**reader.values, _SCORING: "sigmoid"})
    sizes = read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim)
    router = read_biased_router(reader, num_groups=1, topk_group=1, scale=1.0, renormalize=False)
    reader.require(reader.int("moe_layer_freq", minimum=1, default=1) == 1, "moe_layer_freq", "1")
    bias = reader.bool("attention_bias", default=False)
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="head", bias_in=bias, bias_out=bias)
    width, dense = reader.int("moe_intermediate_size", minimum=1), reader.int("intermediate_size", minimum=1)
    sparse = Sparse(router=router, width=width, shared_width=shared_width(reader, width, default=0))
    first = reader.int("first_k_dense_replace", minimum=0, default=0)
    layers = [
        LayerSpec(
            mixer=dataclasses.replace(attention, window=window), feed=Dense(width=dense) if index < first else sparse
        )
        for index, window in enumerate(_read_windows(reader, sizes))
    ]
    return sizes.within(rotary).decoder(layers)


def _read_windows(reader: ConfigReader, sizes: Sizes) -> tuple[int, ...]:
    """Tokens that each layer sees, 0 for all. Layers from `max_window_layers` on slide, or those that `layer_types`
    names; none do where `sliding_window` is null."""
    first, reader = reader.int("max_window_layers", minimum=0, default=62), reader.with_default("sliding_window", 4096)
    slides = reader.has("sliding_window")
    default = tuple(_LAYER_TYPES[slides and index >= first] for index in range(sizes.num_layers))
    kinds = reader.strings("layer_types", choices=_LAYER_TYPES, default=default)
    reader.require(len(kinds) == sizes.num_layers, "layer_types", f"{sizes.num_layers} words")
    reader.require(
        slides or "sliding_attention" not in kinds, "layer_types", "full_attention alone without sliding_window"
    )
    return tuple(read_window(reader) if kind == "sliding_attention" else 0 for kind in kinds)
