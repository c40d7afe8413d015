"""What attention by warpgroups does in registers and shared memory, compiled or interpreted.

JAX's interpreter of Mosaic GPU kernels has no layouts, no stores to accumulators, no products with a left operand in
registers or a transposed block, and no two views of one memory. Interpreted, these are plain code, and accumulators are
in shared memory. Dims: C head dim."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from routed_experts.layers.gpu.warpgroups import accumulator

R = TypeVar("R")


class Views(NamedTuple):
    """64 rows in shared memory, as a product takes them, [64, C], and as a copy does: those of a token are one more
    axis, unless they are one."""

    product: Any
    copy: Any


class Operations(Protocol):
    """Those of a warpgroup. Products run while it goes on."""

    def place_rows(self, values: Array) -> Array:
        """A value of each of 64 rows, in the layout that reductions of scores have."""
        ...

    def place_scores(self, values: Array) -> Array:
        """Values in the layout of scores."""
        ...

    def run_with_sums(self, run: Callable[[Any], R], columns: int) -> R:
        """Run it with the sums of a warpgroup, [64, columns], which start at 0."""
        ...

    def run_with_scores(self, run: Callable[[Any], R], columns: int) -> R:
        """Run it with accumulators for the scores of a step, [64, columns]."""
        ...

    def start_scores(self, scores: Any, queries: Views, keys: Any) -> None:
        """Start to multiply queries and keys, blocks in shared memory."""
        ...

    def start_mix(self, sums: Any, weights: Array, values: Any) -> None:
        """Start to add weights, in registers, times values, a block in shared memory."""
        ...

    def load(self, sums: Any, *, running: int) -> Array:
        """Accumulators once at most so many of the products that were started last run."""
        ...

    def store(self, views: Views, warpgroup: Array, values: Float[Array, "64 C"]) -> None:
        """Write a warpgroup's values to shared memory, for a copy."""
        ...


class CompiledOperations:
    """On a GPU: accumulators are in registers."""

    def place_rows(self, values: Array) -> Array:
        return plgpu.layout_cast(values, plgpu.Layout.WGMMA.reduce(1))

    def place_scores(self, values: Array) -> Array:
        return plgpu.layout_cast(values, plgpu.Layout.WGMMA)

    def run_with_sums(self, run: Callable[[Any], R], columns: int) -> R:
        return pl.run_scoped(run, accumulator(columns))

    def run_with_scores(self, run: Callable[[Any], R], columns: int) -> R:
        return pl.run_scoped(run, accumulator(columns))

    def start_scores(self, scores: Any, queries: Views, keys: Any) -> None:
        plgpu.wgmma(scores, queries.product, keys.T)

    def start_mix(self, sums: Any, weights: Array, values: Any) -> None:
        plgpu.wgmma(sums, weights, values)

    def load(self, sums: Any, *, running: int) -> Array:
        return plgpu.wgmma_accumulator_load(sums, wait_n=running)

    def store(self, views: Views, warpgroup: Array, values: Float[Array, "64 C"]) -> None:
        views.product[warpgroup] = values
        plgpu.commit_smem()


@dataclasses.dataclass(frozen=True, slots=True)
class InterpretedOperations:
    """In JAX's interpreter. `scores`, `sums`: a warpgroup's accumulators, in shared memory."""

    scores: Any
    sums: Any

    def place_rows(self, values: Array) -> Array:
        return values

    def place_scores(self, values: Array) -> Array:
        return values

    def run_with_sums(self, run: Callable[[Any], R], columns: int) -> R:
        self.sums[...] = jnp.zeros(self.sums.shape, self.sums.dtype)
        return run(self.sums)

    def run_with_scores(self, run: Callable[[Any], R], columns: int) -> R:
        return run(self.scores)

    def start_scores(self, scores: Any, queries: Views, keys: Any) -> None:
        rows = queries.copy[...].reshape(queries.product.shape)
        scores[...] = jnp.dot(rows, keys[...].T, preferred_element_type=jnp.float32)

    def start_mix(self, sums: Any, weights: Array, values: Any) -> None:
        sums[...] = sums[...] + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

    def load(self, sums: Any, *, running: int) -> Array:
        return sums[...]

    def store(self, views: Views, warpgroup: Array, values: Float[Array, "64 C"]) -> None:
        views.copy[warpgroup] = values.reshape(views.copy.shape[1:])
        plgpu.commit_smem()
