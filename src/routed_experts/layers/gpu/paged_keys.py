"""Keys and values of a paged pool inside the GPU's attention kernels, codes or numbers, with sinks and scales. Dims: H
query heads, G kv heads, C head dim, L layers of the pool, R layers of the stack, T keys of a step, M rows of a tile (a
token and a head each)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.gpu.blocks import power_of_two, scaled_step
from routed_experts.layers.gpu.kv_write import scale_arrays
from routed_experts.layers.gpu.paged_softmax import State, add_scores
from routed_experts.layers.kv_format import KV_CODES, from_stored

WIDE_KEYS = 32  # at most, of heads of more than 256 dims: shared memory holds the keys and values of all stages
Sinks = tuple[Float[Array, "R H"], Int[Array, ""]]  # of all layers of the stack, and the layer
PLAIN = AttentionFeatures()


def keys_of_step(keys: int, dim: int, dtype: Any) -> int:
    """Keys of a step, for keys and values of `dtype`. Codes become numbers of two bytes in shared memory, so the step
    of heads of more than 128 dims is not longer for them."""
    keys = min(keys, WIDE_KEYS) if dim > 256 else keys
    return keys if dtype == KV_CODES and dim > 128 else scaled_step(keys, dtype)


def add_keys(state: State, rows: Array, keys: Array, values: Array, mask: Array | None, scale: float | Array) -> State:
    return add_scores(state, jnp.dot(rows, keys.T, preferred_element_type=jnp.float32), values, mask, scale)


def load_keys(
    pool: Any, pages: Array, positions: Array, owned: Array | None, group: Array, dtype: Any
) -> tuple[Array, Array]:
    """Keys and values [T C] of the positions in their pages; zeros where not `owned`, unless it is None. Codes become
    numbers of `dtype`, that of queries."""
    page_size, dim = pool.shape[1], pool.shape[3]
    lanes = jnp.arange(power_of_two(dim))
    real = None if lanes.shape[0] == dim else (lanes < dim)[None, :]
    mask = real if owned is None else owned[:, None] if real is None else owned[:, None] & real
    other = None if mask is None else jnp.zeros((), pool.dtype)
    slots = pages[:, None], (positions % page_size)[:, None]
    rows = (2 * group, 2 * group + 1)
    keys, values = (plgpu.load(pool.at[(*slots, row, lanes[None, :])], mask=mask, other=other) for row in rows)
    if pool.dtype != KV_CODES:
        return keys, values
    return from_stored(keys, dtype), from_stored(values, dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class SinksAndScales:
    """Inside a kernel: references to the arrays of `sinks_and_scales`."""

    sinks: list[Any]
    kv_scales: list[Any]

    @staticmethod
    def from_refs(refs: Sequence[Any], *, has_kv_scales: bool) -> "SinksAndScales":
        split = len(refs) - 2 * has_kv_scales
        return SinksAndScales(list(refs[:split]), list(refs[split:]))

    def score_scale(self, features: AttentionFeatures, dim: int) -> float | Array:
        """What products of queries and keys are multiplied by."""
        scale = features.scale or dim**-0.5
        return self._scale(0) * scale if self.kv_scales else scale

    def scale_values(self, mixed: Array) -> Array:
        """Sums of values, float32, times the scale of values."""
        return mixed * self._scale(1) if self.kv_scales else mixed

    def _scale(self, column: int) -> Array:
        values, layer = self.kv_scales
        return values[layer[0], column]


def load_sinks(sinks: list[Any], heads: Array, mask: Array) -> Array | None:
    """Inside a kernel: the heads' sinks, float32; `sinks`: references to those of the stack and to the layer, or
    none."""
    if not sinks:
        return None
    values, layer = sinks
    return plgpu.load(values.at[layer[0], heads], mask=mask, other=0.0).astype(jnp.float32)


def sinks_and_scales(features: AttentionFeatures, sinks: Sinks | None) -> list[Array]:
    """The kernels' inputs for the sinks of a layer, whether they are its own or in a stack, and for the scales of a
    pool of codes; two arrays each, or none."""
    arrays: list[Array] = []
    if sinks is not None or features.sinks is not None:
        values, layer = sinks or (features.sinks, 0)
        assert values is not None
        arrays += [values.reshape(-1, values.shape[-1]), jnp.asarray(layer, jnp.int32).reshape(1)]
    return arrays if features.kv_scales is None else [*arrays, *scale_arrays(features.kv_scales)]


def static_features(features: AttentionFeatures) -> dict[str, Any]:
    """The features of a kernel that are no arrays."""
    plain = dataclasses.replace(features, sinks=None, kv_scales=None)
    return {"features": plain, "has_kv_scales": features.kv_scales is not None}
