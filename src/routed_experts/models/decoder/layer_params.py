"""Parameters of a block of layers: which arrays a part of a layer has, their stacked shapes, and how one layer's
arrays are reached in a scan.

Every array has the layers on its first axis; expert arrays are [R*E, ...] (layers/moe.py). Kernels that read a stack
in place take all of it and the layer's index; the others take the slice that the scan made. Dims: N tokens, R layers
of a stack, E experts of a layer, D inputs, O outputs, F expert width."""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from routed_experts.layers.kernels import Kernels
from routed_experts.layers.quantized import SCALE, QuantizedWeight, Weight
from routed_experts.models.base.partitioning import AxisPartition, expert_parallel
from routed_experts.models.decoder.sparse_block import ExpertWeights

_PLAIN = "input_norm"  # an array of every layer, which has the model's dtype


class ParamKind(enum.Enum):
    """How an array is used: as it is, multiplied by `kernels.linear`, by the router's, or by `kernels.moe`."""

    PLAIN = "plain"
    MATRIX = "matrix"
    ROUTER = "router"
    EXPERTS = "experts"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One array of a part: its shape in one layer, with the experts first. `wide`: float32 for every dtype of
    the model, for routing parameters; its variable has the metadata "wide". `dtype`: one that does not depend on the
    model's, of codes and their scales; its variable has the metadata "quantized". `fill`: the initial value, None for
    small random numbers. `partition`: how devices shard it, None: replicated."""

    name: str
    shape: tuple[int, ...]
    kind: ParamKind = ParamKind.PLAIN
    wide: bool = False
    dtype: jnp.dtype | None = None
    fill: float | None = None
    partition: AxisPartition | None = None

    def partition_in(self, num_layers: int, *, by_expert: bool) -> AxisPartition | None:
        """How the array of a block is sharded; `by_expert`: whole experts."""
        if self.kind is not ParamKind.EXPERTS:
            return self.partition
        if by_expert:
            return expert_parallel(self.shape[0], num_layers)
        return None if self.partition is None else dataclasses.replace(self.partition, over_data=True)

    def stacked(self, num_layers: int) -> tuple[int, ...]:
        """Shape in a run."""
        if self.kind is ParamKind.EXPERTS:
            return (num_layers * self.shape[0], *self.shape[1:])
        return (num_layers, *self.shape)

    def make(self, rngs: nnx.Rngs, num_layers: int, dtype: jnp.dtype) -> nnx.Param[Array]:
        """A fresh array for a run."""
        shape, dtype = self.stacked(num_layers), self.dtype or (jnp.dtype(jnp.float32) if self.wide else dtype)
        if self.fill is not None:
            value = jnp.full(shape, self.fill, dtype)
        else:
            value = (jax.random.normal(rngs.params(), shape) * 0.02).astype(dtype)
        if self.dtype is not None:
            return nnx.Param(value, quantized=True)
        return nnx.Param(value, wide=True) if self.wide else nnx.Param(value)


def make_params(weights: Iterable[ParamSpec], *, rngs: nnx.Rngs, num_layers: int, dtype: jnp.dtype) -> nnx.Dict[Any]:
    """All arrays of one position in a block's pattern, by name."""
    return nnx.Dict({weight.name: weight.make(rngs, num_layers, dtype) for weight in weights})


def takes_stacked(weight: ParamSpec, kernels: Kernels) -> bool:
    """Whether the kernels take the whole run's array."""
    takes_stacked = {
        ParamKind.PLAIN: False,
        ParamKind.MATRIX: kernels.linear.takes_stacked,
        ParamKind.ROUTER: kernels.router is not None and kernels.router.linear is not None,
        ParamKind.EXPERTS: kernels.moe.takes_stacked,
    }
    return takes_stacked[weight.kind]


def scanned_params(
    weights: Iterable[ParamSpec], arrays: Mapping[str, nnx.Param[Array]], kernels: Kernels
) -> dict[str, Array]:
    """The arrays that a scan slices, layer axis first."""
    sliced = [weight for weight in weights if not takes_stacked(weight, kernels)]
    return {
        weight.name: arrays[weight.name][...].reshape(-1, *weight.shape)
        if weight.kind is ParamKind.EXPERTS
        else arrays[weight.name][...]
        for weight in sliced
    }


def weight_stack(arrays: Mapping[str, nnx.Param[Array]] | Mapping[str, Array], name: str, kernels: Kernels) -> Weight:
    """The matrices of that name among the arrays of a layer, with their scales where they are codes."""
    if f"{name}{SCALE}" not in arrays:
        return arrays[name][...]
    scales, dtype = arrays[f"{name}{SCALE}"][...], arrays[_PLAIN][...].dtype
    return QuantizedWeight.create(
        arrays[name][...],
        scales,
        outputs_first=kernels.outputs_first,
        runs=kernels.code_runs,
        dtype=jnp.dtype(dtype),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class LayerParams:
    """The weights of one layer inside a scan: slices, and for kernels that read in place the run's arrays."""

    sliced: Mapping[str, Array]
    stacked: Mapping[str, nnx.Param[Array]] | Mapping[str, Array]
    index: Int[Array, ""]
    kernels: Kernels

    def get(self, name: str) -> Array:
        """Return an array that no kernel reads in place."""
        return self.sliced[name]

    def stack(self, name: str) -> Array:
        """Return the array of all layers, for a kernel that reads it in place."""
        return self.stacked[name][...]

    def matrices(self, name: str) -> tuple[Weight, Int[Array, ""] | int]:
        """The stack of matrices that has this layer's, and its index there: of the run for kernels that read in place,
        else of this layer alone."""
        if name not in self.sliced:
            return weight_stack(self.stacked, name, self.kernels), self.index
        own = {part: self.sliced[part][None] for part in (name, f"{name}{SCALE}") if part in self.sliced}
        return weight_stack({**self.sliced, **own}, name, self.kernels), 0

    def project(
        self, x: Float[Array, "N D"], name: str, *, summed: bool = False, dtype: Any = None
    ) -> Float[Array, "N O"]:
        """Multiply by a matrix, and add its bias `<name>_bias` where there is one. `summed`: devices hold rows of the
        matrix, and their products are added up. `dtype`: of the result, by default that of x."""
        y = self.kernels.linear.run(x, *self.matrices(name), dtype or x.dtype)
        y = self.kernels.group.all_reduce(y) if summed else y
        return y + self.sliced[f"{name}_bias"].astype(y.dtype) if f"{name}_bias" in self.sliced else y

    def router_logits(self, x: Float[Array, "N D"]) -> Float[Array, "N E"]:
        """Multiply by the router, with its bias where there is one; float32."""
        if "router" in self.sliced:
            logits = self.kernels.rows.product(x, self.get("router"))
        else:
            assert self.kernels.router is not None and self.kernels.router.linear is not None, self.kernels
            logits = self.kernels.router.linear.run(x, self.stack("router"), self.index, jnp.float32)
        return logits + self.get("router_bias").astype(jnp.float32) if "router_bias" in self.sliced else logits

    def experts(self, num_experts: int) -> ExpertWeights:
        """The expert arrays: gate_up, down and, where there are, their biases."""
        is_stacked = "gate_up" not in self.sliced
        first = self.index * num_experts if is_stacked else jnp.zeros((), jnp.int32)
        arrays = self.stacked if is_stacked else self.sliced
        gate_up, down = (weight_stack(arrays, name, self.kernels) for name in ("gate_up", "down"))
        biases = (arrays[name][...] if name in arrays else None for name in ("gate_up_bias", "down_bias"))
        return ExpertWeights(gate_up, down, first, *biases)
