"""Tensor, expert and data parallelism inside a layer, from one device's view: collectives over mesh axes. A program on
one device holds none of this.

Each device holds a shard of the heads and of the experts and computes a partial sum; the stream between layers, the
routers and their choices are replicated, in each data rank those of its own rows. Dims: N rows, D hidden, V devices, R
data ranks."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from routed_experts.layers.linear import LinearBackend
from routed_experts.layers.routing import RouterSpec, Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Capacities:
    """A layer's instances, and what each has room for: `factor` is a fraction of the mean load, its denominator 0 for
    no bound."""

    replicas: Int[Array, "E J"]
    factor: Int[Array, " 2"]


# (logits, valid, capacities, spec, bias) -> the routing, and what it changed in each token: slots moved to other
# experts, slots left empty
Rerouter = Callable[
    [Float[Array, "N E"], Bool[Array, " N"], Capacities, RouterSpec, Float[Array, " E"] | None],
    tuple[Routing, Int[Array, "N 2"]],
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """`count` devices on the mesh axis `axis`, or on several, inside a `shard_map` over it; 1: this device alone.
    `ordered`: sums are added in the order of the devices, so that their bits do not depend on how the devices are
    shared by processes.
    `expert_parallel`: each holds some experts, all of them, and not a share of every expert; `instances` of them are
    on all devices together, 0: one an expert. `rerouter`: routes where instances have capacities; None: they have
    not."""

    axis: str | tuple[str, ...] = ""
    count: int = 1
    expert_parallel: bool = False
    instances: int = 0
    rerouter: Rerouter | None = None
    ordered: bool = False

    @property
    def rank(self) -> Int[Array, ""]:
        """Which of them this device is."""
        return lax.axis_index(self.axis)

    def all_reduce(self, partial: Float[Array, "..."]) -> Float[Array, "..."]:
        """The sum of what all hold."""
        if self.count == 1:
            return partial
        return self._ordered_sum(partial) if self.ordered else lax.psum(partial, self.axis)

    def all_mean(self, own: Float[Array, "..."]) -> Float[Array, "..."]:
        """The mean of what all hold."""
        if self.count == 1:
            return own
        return self._ordered_sum(own) / self.count if self.ordered else lax.pmean(own, self.axis)

    def _ordered_sum(self, partial: Float[Array, "..."]) -> Float[Array, "..."]:
        """The sum of what all hold, added in the order of the devices."""
        parts = lax.all_gather(partial, self.axis)
        return functools.reduce(lambda total, index: total + parts[index], range(1, self.count), parts[0])

    def gather_rows(self, rows: Shaped[Array, "N ..."]) -> Shaped[Array, "R*N ..."]:
        """The rows of all, one after another."""
        return rows if self.count == 1 else lax.all_gather(rows, self.axis, tiled=True)

    def sum_own_rows(self, partial: Float[Array, "R*N D"]) -> Float[Array, "N D"]:
        """Sum what all devices hold; returns the rows that this device gave to `gather_rows`."""
        if self.count == 1:
            return partial
        if not self.ordered:
            return lax.psum_scatter(partial, self.axis, scatter_dimension=0, tiled=True)
        parts = lax.all_to_all(partial.reshape(self.count, -1, partial.shape[1]), self.axis, 0, 0)
        return functools.reduce(lambda total, index: total + parts[index], range(1, self.count), parts[0])

    def all_gather(self, columns: Float[Array, "N D/V"]) -> Float[Array, "N D"]:
        """The columns of all, side by side."""
        return columns if self.count == 1 else lax.all_gather(columns, self.axis, axis=1, tiled=True)

    def local_columns(self, full: Float[Array, "N D"], width: int) -> Float[Array, "N D/V"]:
        """This device's share of `width` columns."""
        return full if self.count == 1 else lax.dynamic_slice_in_dim(full, self.rank * width, width, axis=1)


SINGLE_DEVICE = AxisGroup()


def row_parallel_linear(linear: LinearBackend, group: AxisGroup) -> LinearBackend:
    """The same product where each device holds some rows of the matrix, and all of x."""
    if group.count == 1:
        return linear

    def run(
        x: Float[Array, "N D"], weights: Float[Array, "R D/V O"], layer: Int[Array, ""] | int, dtype: object
    ) -> Float[Array, "N O"]:
        return group.all_reduce(linear.run(group.local_columns(x, weights.shape[1]), weights, layer, dtype))

    return dataclasses.replace(linear, run=run)
