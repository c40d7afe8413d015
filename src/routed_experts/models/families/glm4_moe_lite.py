"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's latent attention and routing in one group; each layer is named as dense or
sparse."""

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.families.deepseek import (
    latent_decoder,
    read_biased_router,
    read_interleaved,
    read_rotating_sizes,
)

_LAYER_TYPES = ("sparse", "dense")


def read_glm4_moe_lite(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of GLM-4.7-Flash. `mlp_layer_types` and `first_k_dense_replace` must agree where both are
    there."""
    sizes = read_rotating_sizes(reader, eps=1e-5)
    router = read_biased_router(reader, num_groups=1, topk_group=1, scale=1.8)
    first = reader.int("first_k_dense_replace", minimum=0, default=1)
    by_count = tuple(_LAYER_TYPES[index < first] for index in range(sizes.num_layers))
    kinds = reader.strings("mlp_layer_types", choices=_LAYER_TYPES, default=by_count)
    reader.require(len(kinds) == sizes.num_layers, "mlp_layer_types", f"{sizes.num_layers} words")
    agree = kinds == by_count or not reader.has("first_k_dense_replace")
    reader.require(agree, "mlp_layer_types", f"dense in the first {first} layers alone, as first_k_dense_replace says")
    dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
    return latent_decoder(reader, sizes, router, interleaved=read_interleaved(reader), dense=dense, shared=1)
