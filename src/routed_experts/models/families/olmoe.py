"""OLMoE (Muennighoff et al. 2024): queries and keys normed over the whole projection, softmax over all 64 experts, the
best 8 weighed by it without renormalisation."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, refuse


def read_olmoe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of OLMoE; its experts are `intermediate_size` wide."""
    sizes = read_sizes(reader, eps=1e-5)
    rotary = read_rotary(reader, sizes.head_dim)
    refuse(reader, "attention_bias")
    experts, top_k = read_experts(reader)
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=reader.bool("norm_topk_prob", default=False))
    clip = reader.float("clip_qkv", default=0.0)
    reader.require(clip > 0 or not reader.has("clip_qkv"), "clip_qkv", "a positive number")
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="whole", clip=clip)
    layer = LayerSpec(mixer=attention, feed=Sparse(router=router, width=reader.int("intermediate_size", minimum=1)))
    return sizes.within(rotary).decoder([layer] * sizes.num_layers)
