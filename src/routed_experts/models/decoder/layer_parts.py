"""What the parts of a decoder layer are called with: the context of a step, rows to replay, and a checkpoint's names.

A part is a frozen value, static under jit. A mixer (attention, or a recurrence) mixes tokens, and a feed-forward part
(one network, or a choice of experts) works on each. Both say what kernels must do for them (`stack_needs`), name their
arrays (`weights`) and the tensors that fill them (`sources`), give one device's share of themselves (`shard`), and
compute from LayerParams (`run`; a mixer's `mix` is all of it but the projection `out`). Dims: N tokens, F frequencies,
D hidden, K experts per token."""

import dataclasses
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from routed_experts.layers.kernels import Kernels
from routed_experts.layers.rotary import RotarySpec
from routed_experts.layers.routing import LayerRouting
from routed_experts.models.base.interface import AttentionFn, RecurrentFn, SequenceOps
from routed_experts.models.base.weight_source import WeightSource


@dataclasses.dataclass(frozen=True, slots=True)
class LayerContext:
    """Inputs shared by all layers of a step; made at trace time. `head_cos_sin` are the angles of whole heads, each
    twice, as fused kernels read them."""

    positions: Int[Array, " N"]
    valid: Bool[Array, " N"]
    attend: AttentionFn
    recur: RecurrentFn | None
    kernels: Kernels
    cos_sin: Mapping[RotarySpec, tuple[Float[Array, "N F"], Float[Array, "N F"]]]
    head_cos_sin: Mapping[RotarySpec, tuple[Float[Array, "N C"], Float[Array, "N C"]]]

    @staticmethod
    def create(
        positions: Int[Array, " N"],
        valid: Bool[Array, " N"],
        ops: SequenceOps,
        kernels: Kernels,
        rotary: Iterable[RotarySpec],
    ) -> "LayerContext":
        """Inputs of a step at these positions, with the angles of each kind of rotary positions."""
        angles = {spec: spec.cos_sin(positions) for spec in rotary}
        doubled = {spec: _double(pair) for spec, pair in angles.items()}
        return LayerContext(positions, valid, ops.attend, ops.recur, kernels, angles, doubled)


def _double(angles: tuple[Float[Array, "N F"], Float[Array, "N F"]]) -> tuple[Array, Array]:
    cos, sin = (jnp.concatenate([part, part], axis=-1) for part in angles)
    return cos, sin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReplayInputs:
    """One MoE layer's column of the record, and the ids to run there."""

    moe_layer: Int[Array, ""]
    routed: LayerRouting | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScope:
    """Where a layer's tensors go: the arrays at `target`, row `row` of each stack; `prefix` is the layer's prefix in
    the checkpoint."""

    target: str
    row: int
    prefix: str

    def source(
        self,
        name: str,
        shape: tuple[int, ...],
        to: str,
        *,
        row: int | None = None,
        offset: int = 0,
        transpose: bool | None = None,
        optional: bool = False,
    ) -> WeightSource:
        """A tensor of this layer; matrices are transposed unless `transpose` says otherwise."""
        swap = len(shape) == 2 if transpose is None else transpose
        index = (self.row if row is None else row,)
        return WeightSource(
            name=self.prefix + name,
            shape=shape,
            target=f"{self.target}.{to}",
            index=index,
            transpose=swap,
            offset=offset,
            optional=optional,
        )
