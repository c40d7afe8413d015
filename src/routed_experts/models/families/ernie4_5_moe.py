"""Ernie 4.5 MoE (Baidu 2025): softmax scores, a bias that moves the choice alone, shared experts, dense layers around
the sparse ones, rotary positions in pairs. Its routers compute in float32, and so they do here. Layers that predict
further tokens are dense, and their outputs go through the norm of the last layer."""

import dataclasses

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.expert_names import ExpertNames
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec, PredictorSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, refuse
from routed_experts.models.families.deepseek import num_predicting

_NAMES = ExpertNames(selection_bias="mlp.moe_statics.e_score_correction_bias", selection_bias_rows=True)
_SPELLINGS = {"moe_num_experts": ("num_experts",), "moe_k": ("num_experts_per_tok",)}


def read_ernie4_5_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of ERNIE-4.5-21B-A3B or 300B-A47B."""
    reader = reader.with_synonyms(_SPELLINGS)
    sizes = read_sizes(reader, eps=1e-5, tied=True)
    rotary = read_rotary(reader, sizes.head_dim, theta=500_000.0, interleaved=True)
    refuse(reader, "use_bias")
    experts, top_k = read_experts(reader, key="moe_num_experts", per_token="moe_k", methods=("noaux_tc",))
    refuse(reader, "norm_topk_prob", allowed=(True,), default=True)
    reader.require(
        reader.float("moe_norm_min", default=1e-12) <= 1e-6,
        "moe_norm_min",
        "at most 1e-6: weights are divided by their sum alone",
    )
    router = RouterSpec(num_experts=experts, top_k=top_k, renormalize=True, biased=True)
    width = reader.int("moe_intermediate_size", minimum=1)
    shared = width * reader.int("moe_num_shared_experts", minimum=0, default=2)
    sparse = Sparse(router=router, width=width, names=_NAMES, shared_width=shared, wide_router=True)
    dense = Dense(width=reader.int("intermediate_size", minimum=1))
    first, step = (
        reader.int("moe_layer_start_index", minimum=0, default=1),
        reader.int("moe_layer_interval", minimum=1, default=1),
    )
    last = reader.int("moe_layer_end_index", minimum=-1, default=-1)
    last = sizes.num_layers - 1 if last == -1 else last
    is_sparse = [first <= layer <= last and (layer + 1) % step == 0 for layer in range(sizes.num_layers)]
    layers = [LayerSpec(mixer=sizes.attention(rotary.spec), feed=sparse if routed else dense) for routed in is_sparse]
    config = sizes.within(rotary).decoder(layers, ignored_tensors=("model.mtp*",))
    count = num_predicting(reader)
    if not count:
        return config
    predictor = PredictorSpec(
        num_modules=count,
        layer=LayerSpec(mixer=sizes.attention(rotary.spec), feed=dense),
        first=0,
        tensors="model.mtp*",
        layer_prefix="model.mtp_block.{}.",
        projection="model.mtp_linear_proj.{}",
        embedding_norm="model.mtp_emb_norm.{}",
        hidden_norm="model.mtp_hidden_norm.{}",
    )
    return dataclasses.replace(config, predictor=predictor)
