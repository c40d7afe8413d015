"""Where the experts of a served model are kept: all of them on the host, and those that are resident in tables on the accelerator too.
Knows no schedule; what is resident is a ResidencyMap's to say.

    checkpoint -> all experts, on the host -> rows of the residents -> tables, on the accelerator
               -> everything else --------------------------------------------> on the accelerator
so an expert that is not resident is never there. Dims: M MoE layers, N resident experts of a layer, E experts, R layers of a kind,
J rows of a block."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from routed_experts.core.placement import ResidencyMap
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.models.decoder import FamilyDecoder
from routed_experts.models.family_config import FamilyConfig
from routed_experts.models.split_layers import LayerAt, LayerKind, layers_at

_TABLE_ARRAYS = ("gate_up", "down")


def is_expert(target: str) -> bool:
    """Whether a dotted name is that of an array of experts."""
    return target.rsplit(".", 1)[-1] in _TABLE_ARRAYS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RimArrays:
    """What a step takes before and behind its layers."""

    embed: Float[Array, "V D"]
    norm: Float[Array, " D"]
    norm_bias: Float[Array, " D"] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model's arrays by where they are. `state`: all that is on the accelerator, as the decoder's own tree; `rim` is a decoder without
    layers, what stands before and behind them."""

    config: FamilyConfig
    state: nnx.State[Any, Any]
    rim: tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]
    rim_arrays: RimArrays
    layers: Mapping[LayerKind, dict[str, Array]]  # but experts
    tables: Mapping[LayerKind, ExpertTable]
    host: Mapping[LayerKind, ExpertTable]
    residency: ResidencyMap

    @property
    def host_bytes(self) -> int:
        """Of the host's store."""
        return sum(array.nbytes for array in jax.tree.leaves([*self.host.values()]))


def split_model(model: FamilyDecoder, residency: ResidencyMap, *, device: Any, host: Any, host_dtype: jnp.dtype | None) -> SplitModel:
    """Part a model whose experts may still be anywhere; those that are on the host in `host_dtype` (None: the model's) are not copied."""
    config, flat = model.config, nnx.to_flat_state(nnx.split(model)[1])
    experts: dict[LayerKind, dict[str, Array]] = {}
    for path, leaf in flat:
        if is_expert(str(path[-1])):
            array = jax.device_put(leaf[...], host)
            there = array if host_dtype is None else array.astype(host_dtype)
            experts.setdefault(_kind_of(path), {})[str(path[-1])] = there
    stored = {kind: ExpertTable(**arrays) for kind, arrays in experts.items()}
    dtype = model.embed[...].dtype
    tables = {kind: _fill_table(kind, table, config, residency, device, dtype) for kind, table in stored.items()}
    filled, layers = [], dict[LayerKind, dict[str, Array]]()
    for path, leaf in flat:
        if is_expert(str(path[-1])):
            table = tables[_kind_of(path)]
            array = table.gate_up if path[-1] == "gate_up" else table.down
        else:
            array = jax.device_put(leaf[...], device)
            if path[0] == "runs":
                layers.setdefault(_kind_of(path), {})[str(path[-1])] = array
        filled.append((path, leaf.replace(array)))
    rim = nnx.split(nnx.eval_shape(lambda: FamilyDecoder(dataclasses.replace(config, layers=()), rngs=nnx.Rngs(0), dtype=dtype)))[0]
    around = nnx.from_flat_state([(path, leaf) for path, leaf in filled if path[0] != "runs"])
    ends = {str(path[0]): leaf[...] for path, leaf in filled if path[0] != "runs"}
    return SplitModel(
        config=config,
        state=nnx.from_flat_state(filled),
        rim=(rim, around),
        rim_arrays=RimArrays(embed=ends["embed"], norm=ends["norm"], norm_bias=ends.get("norm_bias")),
        layers=layers,
        tables=tables,
        host=stored,
        residency=residency,
    )


def host_rows(stored: ExpertTable, rows: Int[np.ndarray, " J"], dtype: jnp.dtype) -> ExpertTable:
    """Experts of the host's store as NumPy arrays of the accelerator's dtype; copied unless they are neighbours in their own dtype."""
    first, count = int(rows[0]), len(rows)
    neighbours = bool((rows == np.arange(first, first + count)).all())
    picked = slice(first, first + count) if neighbours else rows
    gate_up, down = (np.asarray(array)[picked].astype(dtype, copy=False) for array in (stored.gate_up, stored.down))
    return ExpertTable(gate_up, down)  # pyright: ignore[reportArgumentType]


@functools.partial(jax.jit, donate_argnums=0)
def write_rows(table: ExpertTable, block: ExpertTable, first: Int[Array, ""]) -> ExpertTable:
    """Put a block of experts into the table, in place, from row `first` on."""
    return jax.tree.map(functools.partial(_write, first=first), table, block)


def _write(array: Float[Array, "RN ..."], rows: Float[Array, "J ..."], *, first: Int[Array, ""]) -> Float[Array, "RN ..."]:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, first, axis=0)


def layers_of_kind(config: FamilyConfig, kind: LayerKind) -> list[LayerAt]:
    """The MoE layers of a kind."""
    return [layer for layer in layers_at(config) if layer.kind == kind and layer.column >= 0]


def _fill_table(
    kind: LayerKind, stored: ExpertTable, config: FamilyConfig, residency: ResidencyMap, device: Any, dtype: jnp.dtype
) -> ExpertTable:
    """A table of the residents of every layer of a kind, a layer at a time."""
    layers, size = layers_of_kind(config, kind), residency.num_resident
    shapes = ((len(layers) * size, *array.shape[1:]) for array in (stored.gate_up, stored.down))
    table = ExpertTable(*(jnp.zeros(shape, dtype, device=device) for shape in shapes))
    for layer in layers if size else ():
        rows = layer.place * residency.num_experts + residency.experts[layer.column]
        table = write_rows(table, host_rows(stored, rows, dtype), np.int32(layer.place * size))
    return table


def _kind_of(path: tuple[Any, ...]) -> LayerKind:
    """runs.<run>.<index>.<name>"""
    return LayerKind(run=int(path[1]), index=int(path[2]))
