"""Exchange experts in the accelerator's tables. Knows nothing of steps, nor of why an expert is where it is.

A table is donated to each write, so it is bound anew after each: a write that fails leaves what the ones before it
wrote. Dims: M MoE layers, N resident experts of a layer, J rows of a store."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.models.offload.layers import LayerGroup, LayerIndex
from routed_experts.models.offload.offloaded_model import OffloadedModel, host_rows

Tables = dict[LayerGroup, ExpertTable]
Programs = Mapping[tuple[object, ...], Any]


def exchange(
    model: OffloadedModel,
    tables: Tables,
    programs: Programs,
    layer: LayerIndex,
    held: Int32[np.ndarray, " N"],
    new: Int32[np.ndarray, " N"],
) -> None:
    """Write the experts of a layer's slots that change; `held` says at any time who is there."""
    for slot in np.flatnonzero(held != new).tolist():
        _write(model, tables, programs, layer, slot, int(new[slot]))
        held[slot] = new[slot]


def refill(
    model: OffloadedModel,
    tables: Tables,
    programs: Programs,
    layers: Sequence[LayerIndex],
    held: Int32[np.ndarray, "M N"],
) -> None:
    """Write every resident of these layers anew, from the model's store; waits until they are there."""
    for layer in layers:
        if layer.kind in tables:
            for slot, expert in enumerate(held[layer.column].tolist()):
                _write(model, tables, programs, layer, slot, expert)
    jax.block_until_ready(tables)


def _write(
    model: OffloadedModel, tables: Tables, programs: Programs, layer: LayerIndex, slot: int, expert: int
) -> None:
    """Copy an expert of the host's store into a slot of its layer."""
    kind, table = layer.kind, tables[layer.kind]
    row = np.array([layer.place * model.residency.num_experts + expert])
    at = np.int32(layer.place * model.residency.num_resident + slot)
    tables[kind] = programs["write", kind](table, host_rows(model.host[kind], row, table.gate_up.dtype), at)
