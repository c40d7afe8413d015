"""OffloadedModel: the arrays of a model whose experts are kept in host memory, with copies of some in device tables.

    checkpoint -> all experts, on the host -> experts that a ResidencyMap names -> tables, on the device
               -> everything else ------------------------------------------------> on the device

Dims: M MoE layers, N resident experts of a layer, E experts, R layers of a group, J rows of a block."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from routed_experts.core.placement import ResidencyMap
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.layers.lm_head import LmHead
from routed_experts.models.base.sharding import DonatedBuffers
from routed_experts.models.base.weight_format import format_of
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.offload.layers import LayerGroup, LayerIndex, layer_indices

_EXPERT_ARRAYS = ("gate_up", "down")


def is_expert(target: str) -> bool:
    """Whether a dotted name is that of an array of experts."""
    return target.rsplit(".", 1)[-1] in _EXPERT_ARRAYS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedHeadArrays:
    """The arrays before and after the layers. `head` None: embeddings are tied. `softcap`: as in LmHead."""

    embed: Float[Array, "V D"]
    norm: Float[Array, " D"]
    norm_bias: Float[Array, " D"] | None
    head: Float[Array, "D V"] | None
    head_bias: Float[Array, " V"] | None
    softcap: float = dataclasses.field(default=0.0, metadata={"static": True})

    @property
    def lm_head(self) -> LmHead:
        """The weights that follow the layers."""
        tied = self.head is None
        return LmHead(
            matrix=self.embed if self.head is None else self.head, bias=self.head_bias, tied=tied, softcap=self.softcap
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedModel:
    """The arrays of an offloaded model. `state`: the arrays on the device, as the decoder's own tree, with the
    initial tables. `layerless`: graph and state of a decoder without layers."""

    config: FamilyConfig
    state: nnx.State[Any, Any]
    layerless: tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]
    embed_head: EmbedHeadArrays
    layers: Mapping[LayerGroup, dict[str, Array]]  # without experts
    tables: Mapping[LayerGroup, ExpertTable]
    host: Mapping[LayerGroup, ExpertTable]
    residency: ResidencyMap

    @property
    def full_state(self) -> nnx.State[Any, Any]:
        """Names, shapes and dtypes of the model's arrays as in a model that is not offloaded."""
        arrays, flat = self._arrays_by_path(), nnx.to_flat_state(self.state)
        return nnx.from_flat_state(
            [(path, leaf.replace(jax.ShapeDtypeStruct(arrays[path].shape, leaf.dtype))) for path, leaf in flat]
        )

    @property
    def host_bytes(self) -> int:
        """Size of the experts in host memory."""
        return sum(array.nbytes for array in jax.tree.leaves([*self.host.values()]))

    def device_put(self, state: nnx.State[Any, Any], *, donate: bool = False) -> nnx.State[Any, Any]:
        """Copy the arrays of a full model to their devices: experts to the host, in its dtype,
        the rest to the accelerator. Arrays already there are not copied. With `donate`, copied arrays are deleted."""
        flat, donated, arrays = (
            list[Any](),
            DonatedBuffers(jax.tree.leaves(state) if donate else ()),
            self._arrays_by_path(),
        )
        for path, leaf in nnx.to_flat_state(state):
            array, target = leaf.get_raw_value(), arrays[path]
            owned = np.array(array) if isinstance(array, np.ndarray) else array  # the caller may change its own
            copied = jax.device_put(owned, format_of(target))
            copied = copied if copied.dtype == target.dtype else copied.astype(target.dtype)
            donated.copied(array, copied)
            flat.append((path, leaf.replace(copied)))
        return nnx.from_flat_state(flat)

    def device_for(self, name: str) -> Any:
        """The device of the array of a dotted name."""
        arrays = {".".join(map(str, path)): array for path, array in self._arrays_by_path().items()}
        (device,) = arrays[name].devices()
        return device

    def with_arrays(self, state: nnx.State[Any, Any]) -> "OffloadedModel":
        """The same model with arrays that `device_put` returned. Its tables stay, for the caller to write in place."""
        new = dict(nnx.to_flat_state(state))
        flat = [(path, leaf if _is_expert(path) else new[path]) for path, leaf in nnx.to_flat_state(self.state)]
        host = _stores({path: leaf.get_raw_value() for path, leaf in new.items() if _is_expert(path)})
        return _build(self.config, flat, self.layerless[0], self.tables, host, self.residency)

    def _arrays_by_path(self) -> dict[tuple[Any, ...], Array]:
        """The model's arrays by path, all experts from the host."""
        arrays = dict[tuple[Any, ...], Array]()
        for path, leaf in nnx.to_flat_state(self.state):
            if _is_expert(path):
                store = self.host[_parse_layer_group(path)]
                arrays[path] = store.gate_up if path[-1] == "gate_up" else store.down
            else:
                arrays[path] = leaf.get_raw_value()
        return arrays


def offload_model(
    model: FamilyDecoder, residency: ResidencyMap, *, device: Any, host: Any, host_dtype: jnp.dtype | None
) -> OffloadedModel:
    """Split a model between a device and its host, wherever its arrays are now. Experts on the host have `host_dtype`
    (None: the model's, without a copy)."""
    config, flat = model.config, nnx.to_flat_state(nnx.split(model)[1])
    experts = dict[tuple[Any, ...], Array]()
    for path, leaf in flat:
        if _is_expert(path):
            array = jax.device_put(leaf[...], host)
            experts[path] = array if host_dtype is None else array.astype(host_dtype)
    stores, dtype = _stores(experts), model.embed[...].dtype
    tables = {group: _fill_table(group, store, config, residency, device, dtype) for group, store in stores.items()}
    on_device = list[Any]()
    for path, leaf in flat:
        if _is_expert(path):
            table = tables[_parse_layer_group(path)]
            on_device.append((path, leaf.replace(table.gate_up if path[-1] == "gate_up" else table.down)))
        else:
            on_device.append((path, leaf.replace(jax.device_put(leaf[...], device))))
    without_layers = dataclasses.replace(config, layers=())
    layerless = nnx.eval_shape(lambda: FamilyDecoder(without_layers, rngs=nnx.Rngs(0), dtype=dtype))
    return _build(config, on_device, nnx.split(layerless)[0], tables, stores, residency)


def gather_host_rows(store: ExpertTable, rows: Int[np.ndarray, " J"], dtype: jnp.dtype) -> ExpertTable:
    """Experts of a store as NumPy arrays in the device's dtype. Consecutive rows in their own dtype are views."""
    first, count = int(rows[0]), len(rows)
    consecutive = bool((rows == np.arange(first, first + count)).all())
    index = slice(first, first + count) if consecutive else rows
    gate_up, down = (np.asarray(array)[index].astype(dtype, copy=False) for array in (store.gate_up, store.down))
    return ExpertTable(gate_up, down)  # pyright: ignore[reportArgumentType]


@functools.partial(jax.jit, donate_argnums=0)
def write_rows(table: ExpertTable, block: ExpertTable, first: Int[Array, ""]) -> ExpertTable:
    """Write a block of experts into the table, in place, from row `first` on."""
    return jax.tree.map(functools.partial(_write, first=first), table, block)


def _write(
    array: Float[Array, "RN ..."], rows: Float[Array, "J ..."], *, first: Int[Array, ""]
) -> Float[Array, "RN ..."]:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, first, axis=0)


def _build(
    config: FamilyConfig,
    flat: Sequence[tuple[Any, Any]],
    layerless: nnx.GraphDef[Any],
    tables: Mapping[LayerGroup, ExpertTable],
    host: Mapping[LayerGroup, ExpertTable],
    residency: ResidencyMap,
) -> OffloadedModel:
    """A model from the decoder's flat state, with tables in place of its experts."""
    layers = dict[LayerGroup, dict[str, Array]]()
    for path, leaf in flat:
        if path[0] == "blocks" and not _is_expert(path):
            layers.setdefault(_parse_layer_group(path), {})[str(path[-1])] = leaf.get_raw_value()
    ends = [(path, leaf) for path, leaf in flat if path[0] != "blocks"]
    named = {str(path[0]): leaf.get_raw_value() for path, leaf in ends}
    return OffloadedModel(
        config=config,
        state=nnx.from_flat_state(list(flat)),
        layerless=(layerless, nnx.from_flat_state(ends)),
        embed_head=EmbedHeadArrays(
            embed=named["embed"],
            norm=named["norm"],
            norm_bias=named.get("norm_bias"),
            head=named.get("head"),
            head_bias=named.get("head_bias"),
            softcap=config.logit_softcap,
        ),
        layers=layers,
        tables=tables,
        host=host,
        residency=residency,
    )


def _stores(experts: Mapping[tuple[Any, ...], Array]) -> dict[LayerGroup, ExpertTable]:
    """Arrays of experts, by path, as stores."""
    groups = dict[LayerGroup, dict[str, Array]]()
    for path, array in experts.items():
        groups.setdefault(_parse_layer_group(path), {})[str(path[-1])] = array
    return {group: ExpertTable(**arrays) for group, arrays in groups.items()}


def _fill_table(
    group: LayerGroup, store: ExpertTable, config: FamilyConfig, residency: ResidencyMap, device: Any, dtype: jnp.dtype
) -> ExpertTable:
    """A table of the resident experts of every layer of a group, written a layer at a time."""
    layers, size = _moe_layers(config, group), residency.num_resident
    shapes = ((len(layers) * size, *array.shape[1:]) for array in (store.gate_up, store.down))
    table = ExpertTable(*(jnp.zeros(shape, dtype, device=device) for shape in shapes))
    for layer in layers if size else ():
        rows = layer.index * residency.num_experts + residency.experts[layer.moe_layer]
        table = write_rows(table, gather_host_rows(store, rows, dtype), np.int32(layer.index * size))
    return table


def _moe_layers(config: FamilyConfig, group: LayerGroup) -> list[LayerIndex]:
    return [layer for layer in layer_indices(config) if layer.group == group and layer.moe_layer >= 0]


def _is_expert(path: tuple[Any, ...]) -> bool:
    return is_expert(str(path[-1]))


def _parse_layer_group(path: tuple[Any, ...]) -> LayerGroup:
    """The group of blocks.<block>.<position>.<name>."""
    return LayerGroup(block=int(path[1]), position=int(path[2]))
