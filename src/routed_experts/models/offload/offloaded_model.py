"""Where the experts of a served model are kept: all of them on the host, and those that are resident in tables on the
accelerator too. Knows no schedule; what is resident is a ResidencyMap's to say.

    checkpoint -> all experts, on the host -> rows of the residents -> tables, on the accelerator
               -> everything else --------------------------------------------> on the accelerator
so an expert that is not resident is never there. Dims: M MoE layers, N resident experts of a layer, E experts, R layers
of a kind, J rows of a block."""

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
from routed_experts.layers.linear import LinearBackend
from routed_experts.models.decoder.decoder import FamilyDecoder, lm_logits
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.offload.layers import LayerGroup, LayerIndex, layers_at
from routed_experts.models.sharding import DonatedBuffers

_TABLE_ARRAYS = ("gate_up", "down")


def is_expert(target: str) -> bool:
    """Whether a dotted name is that of an array of experts."""
    return target.rsplit(".", 1)[-1] in _TABLE_ARRAYS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedHeadArrays:
    """What a step takes before and behind its layers. `head` None: embeddings are tied."""

    embed: Float[Array, "V D"]
    norm: Float[Array, " D"]
    norm_bias: Float[Array, " D"] | None
    head: Float[Array, "D V"] | None
    head_bias: Float[Array, " V"] | None

    def logits(self, hidden: Float[Array, "B D"], *, linear: LinearBackend) -> Float[Array, "B V"]:
        """Scores of the vocabulary, float32."""
        return lm_logits(hidden, self.embed.T if self.head is None else self.head, self.head_bias, linear)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedModel:
    """A model's arrays by where they are. `state`: all that is on the accelerator, as the decoder's own tree (of its
    tables, as they were at first); `rim` is a decoder without layers, what stands before and behind them."""

    config: FamilyConfig
    state: nnx.State[Any, Any]
    rim: tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]
    embed_head: EmbedHeadArrays
    layers: Mapping[LayerGroup, dict[str, Array]]  # but experts
    tables: Mapping[LayerGroup, ExpertTable]
    host: Mapping[LayerGroup, ExpertTable]
    residency: ResidencyMap

    @property
    def whole(self) -> nnx.State[Any, Any]:
        """Names, shapes and dtypes of the model's arrays as they are before it is parted."""
        kept, flat = self._kept(), nnx.to_flat_state(self.state)
        return nnx.from_flat_state(
            [(path, leaf.replace(jax.ShapeDtypeStruct(kept[path].shape, leaf.dtype))) for path, leaf in flat]
        )

    def placed(self, state: nnx.State[Any, Any], *, donate: bool = False) -> nnx.State[Any, Any]:
        """Arrays of a whole model, in the places of this one's: experts on the host, in its number format, the rest on
        the accelerator. What is there already is not copied; with `donate` a device's array that had to be copied is
        deleted."""
        flat, gifts, kept = list[Any](), DonatedBuffers(jax.tree.leaves(state) if donate else ()), self._kept()
        for path, leaf in nnx.to_flat_state(state):
            given, like = leaf.get_raw_value(), kept[path]
            owned = np.array(given) if isinstance(given, np.ndarray) else given  # the caller may change its own
            placed = jax.device_put(owned, like.sharding)
            placed = placed if placed.dtype == like.dtype else placed.astype(like.dtype)
            gifts.copied(given, placed)
            flat.append((path, leaf.replace(placed)))
        return nnx.from_flat_state(flat)

    def device_of(self, name: str) -> Any:
        """The device where the array of a dotted name is kept."""
        (device,) = next(array for path, array in self._kept().items() if ".".join(map(str, path)) == name).devices()
        return device

    def with_arrays(self, state: nnx.State[Any, Any]) -> "OffloadedModel":
        """The same with arrays that `placed` gave, but for its tables: they are written anew, in place."""
        given = dict(nnx.to_flat_state(state))
        flat = [
            (path, leaf if is_expert(str(path[-1])) else given[path]) for path, leaf in nnx.to_flat_state(self.state)
        ]
        host = _stored({path: leaf.get_raw_value() for path, leaf in given.items() if is_expert(str(path[-1]))})
        return _parted(self.config, flat, self.rim[0], self.tables, host, self.residency)

    def _kept(self) -> dict[tuple[Any, ...], Array]:
        """Where the arrays of the whole model are now, by path."""
        found = dict[tuple[Any, ...], Array]()
        for path, leaf in nnx.to_flat_state(self.state):
            stored = self.host[_kind_of(path)] if is_expert(str(path[-1])) else None
            if stored is None:
                found[path] = leaf.get_raw_value()
            else:
                found[path] = stored.gate_up if path[-1] == "gate_up" else stored.down
        return found

    @property
    def host_bytes(self) -> int:
        """Of the host's store."""
        return sum(array.nbytes for array in jax.tree.leaves([*self.host.values()]))


def offload_model(
    model: FamilyDecoder, residency: ResidencyMap, *, device: Any, host: Any, host_dtype: jnp.dtype | None
) -> OffloadedModel:
    """Part a model whose experts may still be anywhere; those that are on the host in `host_dtype` (None: the model's)
    are not copied."""
    config, flat = model.config, nnx.to_flat_state(nnx.split(model)[1])
    experts = dict[tuple[Any, ...], Array]()
    for path, leaf in flat:
        if is_expert(str(path[-1])):
            array = jax.device_put(leaf[...], host)
            experts[path] = array if host_dtype is None else array.astype(host_dtype)
    stored, dtype = _stored(experts), model.embed[...].dtype
    tables = {kind: _fill_table(kind, table, config, residency, device, dtype) for kind, table in stored.items()}
    filled = list[Any]()
    for path, leaf in flat:
        if is_expert(str(path[-1])):
            table = tables[_kind_of(path)]
            filled.append((path, leaf.replace(table.gate_up if path[-1] == "gate_up" else table.down)))
        else:
            filled.append((path, leaf.replace(jax.device_put(leaf[...], device))))
    rim = nnx.split(
        nnx.eval_shape(lambda: FamilyDecoder(dataclasses.replace(config, layers=()), rngs=nnx.Rngs(0), dtype=dtype))
    )[0]
    return _parted(config, filled, rim, tables, stored, residency)


def _stored(experts: Mapping[tuple[Any, ...], Array]) -> dict[LayerGroup, ExpertTable]:
    """Arrays of experts, by path, as stores."""
    found = dict[LayerGroup, dict[str, Array]]()
    for path, array in experts.items():
        found.setdefault(_kind_of(path), {})[str(path[-1])] = array
    return {kind: ExpertTable(**arrays) for kind, arrays in found.items()}


def _parted(
    config: FamilyConfig,
    flat: Sequence[tuple[Any, Any]],
    rim: nnx.GraphDef[Any],
    tables: Mapping[LayerGroup, ExpertTable],
    host: Mapping[LayerGroup, ExpertTable],
    residency: ResidencyMap,
) -> OffloadedModel:
    """A parted model, of the decoder's own tree with tables for experts."""
    layers = dict[LayerGroup, dict[str, Array]]()
    for path, leaf in flat:
        if path[0] == "blocks" and not is_expert(str(path[-1])):
            layers.setdefault(_kind_of(path), {})[str(path[-1])] = leaf.get_raw_value()
    ends = [(path, leaf) for path, leaf in flat if path[0] != "blocks"]
    named = {str(path[0]): leaf.get_raw_value() for path, leaf in ends}
    return OffloadedModel(
        config=config,
        state=nnx.from_flat_state(list(flat)),
        rim=(rim, nnx.from_flat_state(ends)),
        embed_head=EmbedHeadArrays(
            embed=named["embed"],
            norm=named["norm"],
            norm_bias=named.get("norm_bias"),
            head=named.get("head"),
            head_bias=named.get("head_bias"),
        ),
        layers=layers,
        tables=tables,
        host=host,
        residency=residency,
    )


def host_rows(stored: ExpertTable, rows: Int[np.ndarray, " J"], dtype: jnp.dtype) -> ExpertTable:
    """Experts of the host's store as NumPy arrays of the accelerator's dtype; copied unless they are neighbours in
    their own dtype."""
    first, count = int(rows[0]), len(rows)
    neighbours = bool((rows == np.arange(first, first + count)).all())
    picked = slice(first, first + count) if neighbours else rows
    gate_up, down = (np.asarray(array)[picked].astype(dtype, copy=False) for array in (stored.gate_up, stored.down))
    return ExpertTable(gate_up, down)  # pyright: ignore[reportArgumentType]


@functools.partial(jax.jit, donate_argnums=0)
def write_rows(table: ExpertTable, block: ExpertTable, first: Int[Array, ""]) -> ExpertTable:
    """Put a block of experts into the table, in place, from row `first` on."""
    return jax.tree.map(functools.partial(_write, first=first), table, block)


def _write(
    array: Float[Array, "RN ..."], rows: Float[Array, "J ..."], *, first: Int[Array, ""]
) -> Float[Array, "RN ..."]:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, first, axis=0)


def layers_of_kind(config: FamilyConfig, kind: LayerGroup) -> list[LayerIndex]:
    """The MoE layers of a kind."""
    return [layer for layer in layers_at(config) if layer.kind == kind and layer.column >= 0]


def _fill_table(
    kind: LayerGroup, stored: ExpertTable, config: FamilyConfig, residency: ResidencyMap, device: Any, dtype: jnp.dtype
) -> ExpertTable:
    """A table of the residents of every layer of a kind, a layer at a time."""
    layers, size = layers_of_kind(config, kind), residency.num_resident
    shapes = ((len(layers) * size, *array.shape[1:]) for array in (stored.gate_up, stored.down))
    table = ExpertTable(*(jnp.zeros(shape, dtype, device=device) for shape in shapes))
    for layer in layers if size else ():
        rows = layer.place * residency.num_experts + residency.experts[layer.column]
        table = write_rows(table, host_rows(stored, rows, dtype), np.int32(layer.place * size))
    return table


def _kind_of(path: tuple[Any, ...]) -> LayerGroup:
    """blocks.<run>.<index>.<name>"""
    return LayerGroup(run=int(path[1]), index=int(path[2]))
