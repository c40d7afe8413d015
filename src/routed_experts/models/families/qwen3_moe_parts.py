"""Qwen3-MoE as the parts that other families are made of, for steps that are cut at the experts
(models/offload/layers.py); it computes what models/families/qwen3_moe.py does. Knows nothing of caches."""

import dataclasses

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import read_sizes
from routed_experts.models.families.qwen3_moe import Qwen3MoeConfig


def read_qwen3_moe_parts(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen3-MoE, as strictly as its own module does."""
    config, sizes = Qwen3MoeConfig.from_reader(reader), read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim)
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="head")
    dense, sparse = Dense(width=config.dense_width), Sparse(router=config.router, width=config.expert_width)
    layers = [
        LayerSpec(mixer=attention, feed=sparse if at in config.moe_layers else dense) for at in range(config.num_layers)
    ]
    return sizes.within(rotary).decoder(layers)
