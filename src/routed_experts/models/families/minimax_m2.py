"""MiniMax-M2 (MiniMax 2025): sigmoid scores with a bias that moves the choice alone, no shared experts, queries and
keys normed over the whole projection, a part of each head rotated by position."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary, read_rotated_share
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, refuse

_NAMES = ExpertNames(
    router="block_sparse_moe.gate.weight",
    selection_bias="block_sparse_moe.e_score_correction_bias",
    expert="block_sparse_moe.experts.{}",
    gate="w1",
    up="w3",
    down="w2",
)


def read_minimax_m2(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of MiniMax-M2."""
    sizes = read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim, theta=5e6, part=read_rotated_share(reader, sizes.head_dim))
    refuse(reader, "use_qk_norm", allowed=(True,), default=True)
    reader.str("qk_norm_type", default="per_layer", choices=("per_layer",))
    experts, top_k = read_experts(reader, key="num_local_experts", scoring="sigmoid", methods=("noaux_tc",))
    refuse(reader, "norm_topk_prob", allowed=(True,), default=True)
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=True, scoring_func="sigmoid", biased=True)
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="whole")
    layer = LayerSpec(
        mixer=attention, feed=Sparse(router=router, width=reader.int("intermediate_size", minimum=1), names=_NAMES)
    )
    predicting = reader.int("num_mtp_modules", minimum=0, default=0)
    return sizes.within(rotary).decoder([layer] * sizes.num_layers, num_predicting=predicting)
