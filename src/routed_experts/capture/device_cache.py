"""Routed experts of one step, on the device: a pytree value made inside the jitted step.

Each write returns a new value, which rides in a scan's carry and leaks no tracer. The ids stay int32 and
token-minor, [M*K, N], until `rows` narrows and transposes them at once, or `packed_rows` packs them into the
sampler's output. On TPU the number of small operations counts, and top-k leaves its ids token-minor: a layer's write
is one or two operations and a step adds two to four (a block [M, N*K] takes three a layer and six or seven a step;
benchmarks/compiled.py counts them).
Where the spec records combine weights, they are a second block of the same form, float32; a layer's write is twice as
many operations, and rows always leave packed.
A slot that is not written holds -1, which narrows to an id that no router gives (with 255 or 256 experts the row
then repeats an expert). Dims: N padded tokens, M MoE layers, K experts per token, W words of a packed row; run:
layers of a run."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt

from routed_experts.core.capture_spec import CaptureSpec

_NOT_WRITTEN = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _RoutedExpertsDeviceCache:
    """The ids of one step: row m*K + k holds choice k of every token in MoE layer m. `weights` hold alike what the
    outputs of these experts are multiplied by; None where the spec records none."""

    ids: Int[Array, "M*K N"]
    spec: CaptureSpec = field(metadata={"static": True})
    # Slots that capacities moved to other experts, and slots left empty; None without capacities.
    rerouting: Int[Array, "N 2"] | None = None
    weights: Float32[Array, "M*K N"] | None = None

    @staticmethod
    def create(num_tokens: int, spec: CaptureSpec, *, capacity_limited: bool = False) -> "_RoutedExpertsDeviceCache":
        """Make the value of a step of `num_tokens` padded tokens; called inside the step, at trace time.
        `capacity_limited`: instances of experts have capacities, and `rerouting` is counted."""
        shape = (spec.row_ids, num_tokens)
        rerouting = jnp.zeros((num_tokens, 2), jnp.int32) if capacity_limited else None
        weights = None if spec.weights_dtype is None else jnp.zeros(shape, jnp.float32)
        ids = jnp.full(shape, _NOT_WRITTEN, jnp.int32)
        return _RoutedExpertsDeviceCache(ids=ids, spec=spec, rerouting=rerouting, weights=weights)

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.ids.shape[1]

    def capture_fwd_routed_experts(
        self,
        moe_layer: int | Int[Array, ""],
        topk_ids: Int[Array, "N K"],
        native_ids: Int[Array, "N K"] | None = None,
        probabilities: Callable[[], Float[Array, "N E"]] | None = None,
        weights: Float32[Array, "N K"] | None = None,
    ) -> "_RoutedExpertsDeviceCache":
        """Write the executed ids of one layer and, where they are recorded, the combine `weights`. `moe_layer` is its
        ordinal among MoE layers, traced or not; fused shared experts are left out. `native_ids`, the live router's
        choice, and its `probabilities` serve the recorder of a training forward (replay/recorder.py); they are not
        stored here."""
        expected = (self.num_tokens, self.spec.top_k)
        assert topk_ids.shape == expected, (
            f"ids of a layer have the shape {topk_ids.shape}; expected {expected}, without shared experts"
        )
        last = self.spec.num_moe_layers - 1
        if isinstance(moe_layer, int):  # a traced index cannot be checked here: dynamic_update_slice would clamp it
            assert 0 <= moe_layer <= last, f"MoE layer {moe_layer}; expected 0 to {last}"
        row = jnp.asarray(moe_layer, jnp.int32) * self.spec.top_k
        cache = replace(self, ids=_write_rows(self.ids, topk_ids.astype(jnp.int32).T, row))
        if self.weights is None:
            return cache
        assert weights is not None, "a cache of combine weights needs those of every layer"
        return replace(cache, weights=_write_rows(self.weights, weights.T, row))

    def write_weights(
        self, moe_layer: int | Int[Array, ""], weights: Float32[Array, "N K"]
    ) -> "_RoutedExpertsDeviceCache":
        """Write the combine weights of one layer again, where they are recorded: its experts multiply by others than
        the router gave."""
        if self.weights is None:
            return self
        row = jnp.asarray(moe_layer, jnp.int32) * self.spec.top_k
        return replace(self, weights=_write_rows(self.weights, weights.T, row))

    def add_rerouting(self, rerouting: Int[Array, "N 2"]) -> "_RoutedExpertsDeviceCache":
        """Add the slots that the capacities of one layer moved or left empty."""
        return self if self.rerouting is None else replace(self, rerouting=self.rerouting + rerouting)

    def count_experts(
        self,
        counts: Int32[Array, "F M E"],
        valid: Bool[Array, " N"],
        generated: Bool[Array, " N"],
        *,
        sum_ranks: Callable[[Array], Array] | None = None,
    ) -> Int32[Array, "F M E"]:
        """Add the step's slots to counts by phase (prompt, generated), MoE layer and expert; padding and empty slots
        do not count. `sum_ranks`: the sum over data ranks, whose tokens are counted together; None: there is one."""
        layers, experts = counts.shape[1:]
        block = self.ids.reshape(layers, self.spec.top_k, self.num_tokens)
        keys = jnp.where(valid & (block >= 0), block + generated.astype(jnp.int32) * experts, -1)  # [M, K, N]
        before = counts if sum_ranks is None else jnp.zeros_like(counts)
        own = lax.platform_dependent(before, keys, tpu=_count_by_comparing, default=_count_by_scattering)
        return own if sum_ranks is None else counts + sum_ranks(own)

    def rows(self) -> UInt[Array, "N M*K"] | Int32[Array, "N W"]:
        """Return the step's rows, one for each token: ids narrowed to the spec's dtype, or with combine weights packed
        words."""
        if self.weights is not None:
            return self.packed_rows().T
        return self.ids.T.astype(self.spec.dtype)  # [M*K, N] -> [N, M*K]

    def packed_rows(self) -> Int32[Array, "W N"]:
        """Return the same rows packed into words (CaptureSpec.row_words), still token-minor: a little-endian host reads
        them as narrow ids, and behind these as the bits of the combine weights."""
        bits = 8 * self.spec.dtype.itemsize
        words = _packed(self.ids & ((1 << bits) - 1), bits)  # as `rows` narrows
        if self.weights is None:
            return words
        if self.spec.weights_dtype == "bfloat16":
            halves = lax.bitcast_convert_type(self.weights.astype(jnp.bfloat16), jnp.uint16)
            return jnp.concatenate([words, _packed(halves.astype(jnp.int32), 16)])
        return jnp.concatenate([words, lax.bitcast_convert_type(self.weights, jnp.int32)])


RoutedExpertsDeviceCache = _RoutedExpertsDeviceCache  # the name for other modules; SGLang's has the underscore


def create_device_cache(
    spec: CaptureSpec | None, num_tokens: int, *, capacity_limited: bool = False
) -> RoutedExpertsDeviceCache | None:
    """Make a step's cache; None, the empty pytree, when nothing is recorded. A jitted step closes over `spec` alone."""
    return (
        None if spec is None else _RoutedExpertsDeviceCache.create(num_tokens, spec, capacity_limited=capacity_limited)
    )


def _write_rows(block: Array, rows: Array, first: Int[Array, ""]) -> Array:
    """The block with these rows from `first` on. Wrapping negative indices would take three more operations a layer."""
    return lax.dynamic_update_slice_in_dim(block, rows, first, axis=0, allow_negative_indices=False)


def _packed(values: Int32[Array, "X N"], bits: int) -> Int32[Array, "W N"]:
    """Values of so many bits as words, the first in the lowest bits."""
    in_word = 32 // bits
    padded = jnp.pad(values, ((0, -values.shape[0] % in_word), (0, 0)))
    block = padded.reshape(-1, in_word, values.shape[1])
    return functools.reduce(jnp.bitwise_or, (block[:, part] << bits * part for part in range(in_word)))


def _count_by_scattering(counts: Int32[Array, "F M E"], keys: Int32[Array, "M K N"]) -> Int32[Array, "F M E"]:
    """Add 1 where each key points: phase * E + expert, of its layer; -1 points nowhere."""
    layers, experts = counts.shape[1:]
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None, None]
    indices = jnp.where(keys < 0, counts.size, (keys // experts * layers + layer) * experts + keys % experts)
    return counts.reshape(-1).at[indices.reshape(-1)].add(1, mode="drop").reshape(counts.shape)


def _count_by_comparing(counts: Int32[Array, "F M E"], keys: Int32[Array, "M K N"]) -> Int32[Array, "F M E"]:
    """Count where scatters are slow: compare all keys with all numbers and sum in registers."""
    phases, layers, experts = counts.shape
    # [M, F*E, K, N], never in memory
    matches = keys[:, None] == jnp.arange(phases * experts, dtype=jnp.int32)[:, None, None]
    added = jnp.sum(matches, axis=(2, 3), dtype=jnp.int32)
    return counts + jnp.swapaxes(added.reshape(layers, phases, experts), 0, 1)
