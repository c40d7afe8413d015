"""The text model of Qwen3-VL-MoE (Qwen Team 2025): Qwen3-MoE's layers, always renormalised, with the experts of a layer
in one tensor. For text alone the three kinds of its positions are equal, so they are plain ones. The vision tower is
not loaded. Published files hold the experts' matrices as [E, inputs, outputs], files that transformers 5 writes as
[E, outputs, inputs]; both are read, and an export has the published form."""

import dataclasses

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.expert_names import ExpertNames, Stacked
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.families.common_config import refuse
from routed_experts.models.families.qwen3_moe import read_qwen3_layers
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.virtual_tensors import VirtualTensor, with_axes_swapped

_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_NAMES = ExpertNames(stacked=(Stacked(name=_GATE_UP, to="gate_up"), Stacked(name=_DOWN, to="down")))


def read_qwen3_vl_moe(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen3-VL-MoE; the outer `tie_word_embeddings` is the one that counts."""
    text = reader.section("text_config")
    refuse(text, "norm_topk_prob", allowed=(True,), default=True)
    return dataclasses.replace(
        read_qwen3_layers(text, theta=500_000.0, renormalize=True, names=_NAMES),
        stem="model.language_model.",
        tie_embeddings=reader.bool("tie_word_embeddings", default=False),
        ignored_tensors=("model.visual.*",),
    )


def qwen3_vl_moe_tensors(checkpoint: Checkpoint) -> dict[str, VirtualTensor]:
    """The experts' matrices as published files hold them."""
    headers = checkpoint.names()
    virtual: dict[str, VirtualTensor] = {}
    for gate_up in (name for name in headers if name.endswith(_GATE_UP)):
        down = gate_up.removesuffix(_GATE_UP) + _DOWN
        shapes = [headers[name][0] for name in (gate_up, down) if name in headers]
        if [len(shape) for shape in shapes] == [3, 3] and shapes[0][1:] == (2 * shapes[1][2], shapes[1][1]):
            virtual |= {name: with_axes_swapped(name) for name in (gate_up, down)}  # [E, 2F, D] and [E, D, F]
    return virtual
