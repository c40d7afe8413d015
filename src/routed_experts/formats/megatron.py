"""Megatron's router replay: one int64 [S, K] a MoE layer, and a bool mask [S] of the tokens that are replayed.

Outside the mask the router chooses. Dims: S tokens of a sequence, M MoE layers, K experts per token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int64

from routed_experts.core.error_text import short_repr
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.layout import (
    TO_LIVE_ROUTER,
    Missing,
    SequenceInfo,
    check_missing,
    pad_to_tokens,
    refuse,
    require_whole,
    to_int_array,
    to_mask,
    to_record,
)


def encode(
    record: RoutedExperts, *, missing: Missing = "error"
) -> tuple[list[Int64[np.ndarray, "S K"]], Bool[np.ndarray, " S"]]:
    """Encode as `RouterReplay` targets in order of MoE layers, and the mask. The mask leaves out the last token of a
    rollout and, with missing="gate", rows that are not known, which raise RoutingFormatError otherwise. Ids outside the
    mask are spread, so that a forward which ignores it loads no expert twice as much."""
    check_missing(record, "megatron", missing)
    require_whole(record, "megatron", cut=missing, fix=TO_LIVE_ROUTER)
    rows = pad_to_tokens(record, np.int64)
    mask = rows[:, 0, 0] >= 0
    tokens = np.arange(record.num_tokens)[:, None, None]
    rows = np.where(mask[:, None, None], rows, (tokens * record.top_k + np.arange(record.top_k)) % record.num_experts)
    return [np.ascontiguousarray(rows[:, column]) for column in range(rows.shape[1])], mask


def decode(payload: tuple[Sequence[Int[Any, "T K"]], Bool[Any, " T"] | None], info: SequenceInfo) -> RoutedExperts:
    """Decode (layers, mask), one [T, K] a MoE layer of T = S or S - 1 tokens; mask None takes every token, those
    outside the mask are not known."""
    if not isinstance(payload, tuple) or len(payload) != 2:
        refuse("megatron", short_repr(payload), "the pair (layers, mask)")
    routed, mask = payload
    try:
        layers = [to_int_array(layer, "megatron") for layer in routed]
    except TypeError:  # a number, or an array without dims
        refuse("megatron", f"layers are {short_repr(routed)}", f"{info.spec.num_moe_layers}, one [T, K] a MoE layer")
    shapes = {layer.shape for layer in layers}
    if len(layers) != info.spec.num_moe_layers or len(shapes) != 1 or layers[0].ndim != 2:
        received = f"{len(layers)} layers of shapes {[layer.shape for layer in layers][:4]}"
        refuse("megatron", received, f"{info.spec.num_moe_layers}, one [T, K] a MoE layer")
    if info.start != 0:
        refuse("megatron", f"rows begin at token {info.start}", "0")
    rows = np.stack(layers, axis=1).astype(np.int64)
    if mask is not None:
        known = to_mask(mask, "megatron")
        if known.shape != rows.shape[:1]:
            refuse("megatron", f"a mask of shape {known.shape}", f"({rows.shape[0]},)")
        rows[~known] = -1
    return to_record(rows, info, layout="megatron", columns="moe")
