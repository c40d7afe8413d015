"""GLM-4.5 (GLM-4.5 Team 2025): DeepSeek-V3's routing on grouped-query attention, half of each head rotated by position,
with or without a norm on queries and keys; dense layers first, one shared expert."""

import dataclasses

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import read_sizes
from routed_experts.models.families.deepseek import predicting, read_biased_router, shared_width


def read_glm4_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of GLM-4.5, GLM-4.5-Air or GLM-4.6."""
    sizes = read_sizes(reader, eps=1e-5)
    rotary = read_rotary(reader, sizes.head_dim, part=0.5)
    router = read_biased_router(reader, num_groups=1, topk_group=1, scale=1.0)
    norm = "head" if reader.bool("use_qk_norm", default=False) else ""
    attention = sizes.attention(rotary.spec)
    attention = dataclasses.replace(attention, qk_norm=norm, bias_in=reader.bool("attention_bias", default=False))
    width, dense = reader.int("moe_intermediate_size", minimum=1), reader.int("intermediate_size", minimum=1)
    sparse = Sparse(router=router, width=width, shared_width=shared_width(reader, width, default=1))
    first = reader.int("first_k_dense_replace", minimum=0, default=1)
    layers = [
        LayerSpec(mixer=attention, feed=Dense(width=dense) if index < first else sparse)
        for index in range(sizes.num_layers)
    ]
    return predicting(reader, sizes.within(rotary).decoder(layers), LayerSpec(mixer=attention, feed=sparse))
