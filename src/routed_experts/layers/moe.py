"""Expert computation: y[n] = sum over k of weights[n, k] * expert(ids[n, k])(x[n]), gated experts, some with biases.
A backend runs exactly the ids in the call: that is why recording them is exact.

Expert weights of all layers of a stack are one array [R*E, ...]; a backend takes the whole array and the first
expert of its layer, because a scan would copy a layer's experts in order to slice them. Dims: N tokens, K experts
per token, E experts of a layer, R layers of the stack, D hidden, F expert width, T rows of a tile."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.quantized import QuantizedWeight, Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertCall:
    """One layer's expert computation. Rows that are not `valid` are padding: they may be skipped and yield zeros; of
    many devices that share the experts, each has all rows, and one in `devices` is valid there."""

    x: Float[Array, "N D"]
    ids: Int[Array, "N K"]
    weights: Float[Array, "N K"]
    valid: Bool[Array, " N"]
    gate_up: Weight  # [RE, D, 2F]
    down: Weight  # [RE, F, D]
    first_expert: Int[Array, ""]
    num_experts: int = dataclasses.field(metadata={"static": True})
    gate_up_bias: Float[Array, "RE 2F"] | None = None
    down_bias: Float[Array, "RE D"] | None = None
    activation: str = dataclasses.field(default="silu", metadata={"static": True})  # a key of ACTIVATIONS
    replicas: Int[Array, "E J"] | None = None  # instances of each expert, where experts are on several devices
    instances: Int[Array, "N K"] | None = None  # those that run each slot, where the router has chosen them; -1: none
    devices: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def expert_rows(self) -> int:
        """Rows of an expert, on average, if all rows are valid on some device."""
        return self.ids.size // (self.num_experts * self.devices)

    @property
    def needs(self) -> frozenset[str]:
        """Required features besides SiLU-gated experts without biases."""
        words = {
            "biased experts": self.gate_up_bias is not None,
            f"{self.activation} experts": self.activation != "silu",
        }
        return frozenset(word for word, needed in words.items() if needed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoeBackend:
    """A way to run experts. `reveals_ids`: it runs the ids of the call; a backend that routes inside itself does
    not, and capture refuses it. `takes_stacked`: it takes the weights (and biases) of the whole run; otherwise one
    layer's [E, ...]. `batch_invariant`: in programs of one shape, a row's bits depend on that row alone; deterministic
    mode takes no other."""

    name: str
    run: Callable[["ExpertCall"], Float[Array, "N D"]]
    reveals_ids: bool = True
    takes_stacked: bool = True
    features: frozenset[str] = frozenset()  # of `ExpertCall.needs`
    batch_invariant: bool = False


def gated(x: Float[Array, "... 2F"], activation: str = "silu") -> Float[Array, "... F"]:
    """Activate gate and up, side by side in the last axis: SiLU(gate) * up, or another of ACTIVATIONS."""
    gate, up = jnp.split(x, 2, axis=-1)
    return ACTIVATIONS[activation](gate, up)


def clamped_swiglu(gate: Float[Array, "... F"], up: Float[Array, "... F"]) -> Float[Array, "... F"]:
    """GPT-OSS: gate up to 7, up within 7 of 0; gate * sigmoid(1.702 gate) * (up + 1)."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(gate * 1.702) * (up + 1)


ACTIVATIONS: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "silu": lambda gate, up: jax.nn.silu(gate) * up,
        "clamped swiglu": clamped_swiglu,
        "tanh gelu": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    }
)
ALL_EXPERTS = frozenset({"biased experts", "clamped swiglu experts", "tanh gelu experts"})


def biased(
    outputs: Float[Array, "... F"], bias: Float[Array, "RE F"] | None, experts: Int[Array, "..."]
) -> Float[Array, "... F"]:
    """Add each expert's bias to its rows; `experts` are indices in the run's arrays, broadcast against all axes but the
    last."""
    return outputs if bias is None else outputs + jnp.take(bias, experts, axis=0)


def reference_experts(call: ExpertCall) -> Float[Array, "N D"]:
    """Run every expert on every row and pick: no row's result depends on another row. The oracle of all backends."""
    gate_up = neighbours(call.gate_up, call.first_expert, call.num_experts)
    down = neighbours(call.down, call.first_expert, call.num_experts)
    experts = (call.first_expert + jnp.arange(call.num_experts))[:, None]
    x = _for_product(call.x, call.gate_up)
    hidden = gated(biased(jnp.einsum("nd,edf->enf", x, gate_up), call.gate_up_bias, experts), call.activation)
    outputs = biased(jnp.einsum("enf,efd->end", hidden, down), call.down_bias, experts)  # [E, N, D]
    rows = jnp.arange(call.x.shape[0])[:, None]
    return combine(outputs[call.ids, rows], call.weights, call.valid).astype(call.x.dtype)


def _for_product(x: Float[Array, "N D"], weights: Weight) -> Float[Array, "N D"]:
    """Rows as array code multiplies them: in float32 with codes."""
    return x.astype(jnp.float32) if isinstance(weights, QuantizedWeight) else x


def neighbours(weights: Weight, first: Int[Array, ""], count: int) -> Float[Array, "count D O"]:
    """Some matrices of a stack; those of codes as float32."""
    if isinstance(weights, QuantizedWeight):
        return weights.slice(first, count).dequantize()
    return lax.dynamic_slice_in_dim(weights, first, count)


def _picked(weights: Weight, experts: Int[Array, " T"]) -> Float[Array, "T D O"]:
    """Matrices by index; those of codes as float32."""
    if isinstance(weights, QuantizedWeight):
        return weights.take(experts).dequantize()
    return jnp.take(weights, experts, axis=0)


def combine(
    outputs: Float[Array, "N K D"], weights: Float[Array, "N K"], valid: Bool[Array, " N"]
) -> Float[Array, "N D"]:
    """Weighted sum over the K slots in executed order, accumulated in float32; padding rows become 0."""
    summed = jnp.sum(outputs.astype(jnp.float32) * weights[..., None], axis=1)
    return jnp.where(valid[:, None], summed, 0.0).astype(outputs.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """Slots sorted by expert and cut into tiles of T rows, each of one expert. The rows of a tile past its expert's
    last one belong to the next expert, whose own tile overwrites them."""

    order: Int[Array, " NK"]  # slot (n*K + k) at each sorted position
    position: Int[Array, " NK"]  # sorted position of each slot
    row: Int[Array, " NK"]  # tile * T + row in the tile, of each slot
    tile_expert: Int[Array, " tiles"]
    tile_start: Int[Array, " tiles"]  # sorted position of the tile's first row
    num_tiles: Int[Array, ""]


def plan_tiles(ids: Int[Array, "N K"], valid: Bool[Array, " N"], *, num_experts: int, tile: int) -> TilePlan:
    """Sort slots by expert (padding last, in no tile) and cut each expert's rows into tiles."""
    slots = ids.size
    key = jnp.where(valid[:, None], ids, num_experts).reshape(-1)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    position = jnp.zeros(slots, jnp.int32).at[order].set(jnp.arange(slots, dtype=jnp.int32), unique_indices=True)
    counts = jnp.sum(key[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts
    tiles = (counts + tile - 1) // tile
    ends = jnp.cumsum(tiles)
    index = jnp.arange(min(slots, slots // tile + num_experts), dtype=jnp.int32)
    expert = jnp.minimum(
        jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32), num_experts - 1
    )
    first = ends - tiles
    start = starts[expert] + (index - first[expert]) * tile
    own = jnp.minimum(key, num_experts - 1)
    row = jnp.clip(first[own] * tile + position - starts[own], 0, index.shape[0] * tile - 1)
    return TilePlan(order=order, position=position, row=row, tile_expert=expert, tile_start=start, num_tiles=ends[-1])


def tile_rows(num_slots: int, num_experts: int) -> int:
    """Rows of a tile: about twice the mean load of an expert, as a power of two between 2 and 32 (measured best on
    CPU)."""
    rows = 2
    while rows < 32 and rows * num_experts < 2 * num_slots:
        rows *= 2
    return rows


def tiled_experts(call: ExpertCall) -> Float[Array, "N D"]:
    """Loop over the tiles that hold rows; reads only the experts that were chosen. Best on CPU."""
    (num_rows, top_k), width = call.ids.shape, call.x.shape[1]
    tile = tile_rows(call.ids.size, call.num_experts)
    plan = plan_tiles(call.ids, call.valid, num_experts=call.num_experts, tile=tile)
    sorted_x = jnp.take(_for_product(call.x, call.gate_up), plan.order // top_k, axis=0)
    sorted_x = jnp.concatenate([sorted_x, jnp.zeros((tile, width), sorted_x.dtype)])

    def run_tile(index: Int[Array, ""], outputs: Float[Array, "NKT D"]) -> Float[Array, "NKT D"]:
        expert, start = call.first_expert + plan.tile_expert[index], plan.tile_start[index]
        rows = lax.dynamic_slice_in_dim(sorted_x, start, tile)
        gate_up = neighbours(call.gate_up, expert, 1)[0]
        down = neighbours(call.down, expert, 1)[0]
        hidden = gated(biased(rows @ gate_up, call.gate_up_bias, expert), call.activation)
        return lax.dynamic_update_slice_in_dim(outputs, biased(hidden @ down, call.down_bias, expert), start, axis=0)

    outputs = lax.fori_loop(0, plan.num_tiles, run_tile, jnp.zeros_like(sorted_x))
    outputs = jnp.take(outputs, plan.position, axis=0).reshape(num_rows, top_k, width)
    return combine(outputs, call.weights, call.valid).astype(call.x.dtype)


def grouped_experts(call: ExpertCall) -> Float[Array, "N D"]:
    """All tiles as one batched product; differentiable in x, weights and expert weights. For training."""
    (num_rows, top_k), width = call.ids.shape, call.x.shape[1]
    tile = tile_rows(call.ids.size, call.num_experts)
    plan = plan_tiles(call.ids, call.valid, num_experts=call.num_experts, tile=tile)
    index = jnp.arange(plan.tile_expert.shape[0])
    positions = plan.tile_start[:, None] + jnp.arange(tile)  # [tiles, T]
    slots = jnp.take(plan.order, jnp.clip(positions, 0, plan.order.shape[0] - 1))
    rows = jnp.take(_for_product(call.x, call.gate_up), slots // top_k, axis=0)  # [tiles, T, D]
    experts = call.first_expert + jnp.where(index < plan.num_tiles, plan.tile_expert, 0)
    hidden = jnp.einsum("itd,idf->itf", rows, _picked(call.gate_up, experts))
    hidden = gated(biased(hidden, call.gate_up_bias, experts[:, None]), call.activation)
    outputs = jnp.einsum("itf,ifd->itd", hidden, _picked(call.down, experts))
    outputs = biased(outputs, call.down_bias, experts[:, None]).reshape(-1, width)
    outputs = jnp.take(outputs, plan.row, axis=0).reshape(num_rows, top_k, width)
    return combine(outputs, call.weights, call.valid).astype(call.x.dtype)


MOE_BACKENDS: Mapping[str, MoeBackend] = MappingProxyType(
    {
        "reference": MoeBackend(name="reference", run=reference_experts, features=ALL_EXPERTS, batch_invariant=True),
        "tiled": MoeBackend(name="tiled", run=tiled_experts, features=ALL_EXPERTS),
        "grouped": MoeBackend(name="grouped", run=grouped_experts, takes_stacked=False, features=ALL_EXPERTS),
    }
)
