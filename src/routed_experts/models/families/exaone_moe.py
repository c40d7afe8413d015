"""K-EXAONE (LG AI Research 2025): DeepSeek-V3's routing on grouped-query attention with a norm on each head's queries
and keys. Layers with a sliding window have rotary positions, full layers have none; dense layers first, shared experts.
Routers are float32 in every dtype."""

import dataclasses

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import read_sizes, read_window
from routed_experts.models.families.deepseek import read_biased_router, shared_width

_KINDS = ("sliding_attention", "full_attention")
_FEEDS = ("sparse", "dense")
_NAMES = ExpertNames(selection_bias="mlp.e_score_correction_bias")
_SPELLINGS = {
    "n_shared_experts": ("num_shared_experts",),
    "first_k_dense_replace": ("first_last_k_dense_replace",),  # the first published files
}


def read_exaone_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of K-EXAONE-236B-A23B."""
    reader = reader.with_synonyms(_SPELLINGS)
    sizes = read_sizes(reader, eps=1e-5)
    rotary = read_rotary(reader, sizes.head_dim)
    router = read_biased_router(reader, num_groups=1, topk_group=1, scale=2.5, key="num_experts")
    full = dataclasses.replace(sizes.attention(None), qk_norm="head")
    reader = reader.with_default("sliding_window", 4096)
    expected = "a number: positions of a model without windows are not known"
    reader.require(reader.has("sliding_window"), "sliding_window", expected)
    sliding = dataclasses.replace(full, rotary=rotary.spec, window=read_window(reader))
    width = reader.int("moe_intermediate_size", minimum=1)
    shared = shared_width(reader, width, default=1)
    sparse = Sparse(router=router, width=width, shared_width=shared, names=_NAMES, wide_router=True)
    dense = Dense(width=reader.int("intermediate_size", minimum=1))
    layers = [
        LayerSpec(mixer=sliding if kind == _KINDS[0] else full, feed=sparse if feed == _FEEDS[0] else dense)
        for kind, feed in zip(*_read_layers(reader, sizes.num_layers), strict=True)
    ]
    return sizes.within(rotary).decoder(layers, ignored_tensors=("mtp.*",))


def _read_layers(reader: ConfigReader, count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for the attention and the feed-forward network of each layer. `is_moe_layer` of the first published files
    must agree."""
    first = reader.int("first_k_dense_replace", minimum=0, default=1)
    period = 1 if reader.has("layer_types") else reader.int("sliding_window_pattern", minimum=1, default=4)
    by_period = tuple(_KINDS[(index + 1) % period == 0] for index in range(count))
    kinds = reader.strings("layer_types", choices=_KINDS, default=by_period)
    feeds = reader.strings(
        "mlp_layer_types", choices=_FEEDS, default=tuple(_FEEDS[index < first] for index in range(count))
    )
    for key, words in (("layer_types", kinds), ("mlp_layer_types", feeds)):
        reader.require(len(words) == count, key, f"{count} words")
    published = reader.values.get("is_moe_layer")
    agrees = published in (None, [feed == _FEEDS[0] for feed in feeds])
    reader.require(agrees, "is_moe_layer", f"true in the sparse layers alone: {', '.join(feeds)}")
    return kinds, feeds
