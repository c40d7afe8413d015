"""GPT-OSS (OpenAI 2025): every other layer sees a sliding window, a learned sink takes weight in each head, experts and
routers have biases, the gate is clamped. Experts come as bfloat16 [E, D, O], or in 4 bits (MXFP4) [E, O, D]: those stay
codes where kernels take them, and are unpacked as they are loaded elsewhere. Dims: E experts, D inputs, O outputs.

A checkpoint interleaves gate and up; here they are concatenated, so that all kernels see one layout. The table names
gate and up apart, and its `stored` entries say where the checkpoint has them: loading and exports both follow those."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from routed_experts.core.errors import CheckpointError
from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.base.weight_source import StoredEntries
from routed_experts.models.decoder.expert_names import ExpertNames, Stacked
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Sparse
from routed_experts.models.families.common_config import read_experts, read_sizes, refuse
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.virtual_tensors import Header, Mxfp4, StoredView, VirtualTensor

_GATE_UP, _GATE_UP_BIAS, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj"
_GATE = StoredEntries(name=_GATE_UP, start=0, step=2, swapped=True)
_UP = StoredEntries(name=_GATE_UP, start=1, step=2, swapped=True)
_GATE_BIAS = StoredEntries(name=_GATE_UP_BIAS, start=0, step=2)
_UP_BIAS = StoredEntries(name=_GATE_UP_BIAS, start=1, step=2)
_NAMES = ExpertNames(
    router="mlp.router.weight",
    router_bias="mlp.router.bias",
    stacked=(
        Stacked(name="mlp.experts.gate_proj", to="gate_up", half="gate", transposed=True, stored=_GATE),
        Stacked(name="mlp.experts.up_proj", to="gate_up", half="up", transposed=True, stored=_UP),
        Stacked(name="mlp.experts.gate_proj_bias", to="gate_up_bias", half="gate", stored=_GATE_BIAS),
        Stacked(name="mlp.experts.up_proj_bias", to="gate_up_bias", half="up", stored=_UP_BIAS),
        Stacked(name=_DOWN, to="down", transposed=True, stored=StoredEntries(name=_DOWN, swapped=True)),
        Stacked(name="mlp.experts.down_proj_bias", to="down_bias"),
    ),
)
_POSITIONS = (  # defaults for configs without these keys
    ("rope_type", "yarn"),
    ("factor", 32.0),
    ("original_max_position_embeddings", 4096),
    ("truncate", False),
)
_LAYER_TYPES: tuple[str, ...] = ("sliding_attention", "full_attention")


def read_gpt_oss(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of gpt-oss-20b or gpt-oss-120b."""
    sizes = read_sizes(reader, eps=1e-5)
    if not reader.has("rope_parameters") and not reader.section("rope_scaling").values:
        reader = dataclasses.replace(reader, values={**reader.values, "rope_scaling": dict(_POSITIONS)})
    rotary = read_rotary(reader, sizes.head_dim, theta=150_000.0)
    experts, top_k = read_experts(reader, key="num_local_experts")
    refuse(reader, "norm_topk_prob", allowed=(True,), default=True)
    reader.require(reader.float("swiglu_limit", default=7.0) == 7.0, "swiglu_limit", "7.0")
    reader.require(reader.float("swiglu_alpha", default=1.702) == 1.702, "swiglu_alpha", "1.702")
    default = tuple(_LAYER_TYPES[layer % 2] for layer in range(sizes.num_layers))
    kinds = reader.strings("layer_types", choices=_LAYER_TYPES, default=default)
    reader.require(len(kinds) == sizes.num_layers, "layer_types", f"{sizes.num_layers} words")
    bias = reader.bool("attention_bias", default=True)
    full = dataclasses.replace(sizes.attention(rotary.spec), bias_in=bias, bias_out=bias, sinks=True)
    sliding = dataclasses.replace(full, window=reader.int("sliding_window", minimum=1, default=128))
    sparse = Sparse(
        router=RouterSpec(num_experts=experts, top_k=top_k, renormalize=True, scoring_func="logits"),
        width=reader.int("intermediate_size", minimum=1),
        names=_NAMES,
        router_bias=True,
        biased=True,
        activation="clamped swiglu",
    )
    mixers = dict(zip(_LAYER_TYPES, (sliding, full), strict=True))
    return sizes.within(rotary).decoder([LayerSpec(mixer=mixers[kind], feed=sparse) for kind in kinds])


def gpt_oss_tensors(checkpoint: Checkpoint) -> dict[str, VirtualTensor]:
    """Gate and up separated, packed tensors unpacked, and all matrices [E, O, D]. Raises CheckpointError for packed
    tensors that are no MXFP4, lack their scales, or are there in bfloat16, too, and for plain ones of other axes."""
    headers = checkpoint.names()
    virtual: dict[str, VirtualTensor] = {}
    for stack in _NAMES.stacked:
        if (entries := stack.stored) is None:
            continue
        for name in headers:
            stored = name.removesuffix("_blocks")
            if not stored.endswith(entries.name):
                continue
            read = _plain if stored == name else _packed
            virtual[stored.removesuffix(entries.name) + stack.name] = read(entries, stored, headers, checkpoint.path)
    return virtual


def _plain(entries: StoredEntries, stored: str, headers: Mapping[str, Header], path: Path) -> StoredView:
    """The entries of the tensor `stored` of numbers."""
    shape, axes = headers[stored][0], ["experts", *(["inputs"] if entries.swapped else []), "outputs"]
    if len(shape) != len(axes) or shape[-1] % entries.step:
        fits = f"[{', '.join(axes)}]{', gate and up in turn' if entries.step > 1 else ''}"
        raise CheckpointError(f"{path}: {stored} is {list(shape)}; expected {fits}; copy the checkpoint again")
    return StoredView(dataclasses.replace(entries, name=stored))


def _packed(entries: StoredEntries, stored: str, headers: Mapping[str, Header], path: Path) -> Mxfp4:
    """The entries of the matrix `stored`, of which the file has blocks and scales."""
    packed = Mxfp4(f"{stored}_blocks", f"{stored}_scales", entries.start if entries.step > 1 else None)
    if stored in headers:
        raise CheckpointError(
            f"{path}: {packed.blocks} and {stored} are both there; expected one of them; copy the checkpoint again"
        )
    packed.check(headers, path)
    return packed
