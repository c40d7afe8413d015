"""Paged KV pool: keys and values of all requests on the device, addressed by slot.

One array [L*P, page, 2G, C], donated to each step and returned by it, so that it is updated in place. Row 2g of a slot
holds the keys of kv head g, row 2g+1 its values; page 0 of each layer takes the writes of padding. With latent
attention a slot has one row [L*P, page, 1, C], which is key and value of all heads. Where layers differ in G or C,
there is such an array for each shape (GroupedPages), and a page is one of each. Keys and values may be codes of 8 bits
(layers/kv_format.py), which latent rows and states never are. Recurrent layers keep a state for each
request slot beside the pages. Dims: L layers, P pages a layer, G kv heads, C head dim, T layers with a state, R request
slots."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from routed_experts.layers.cache_layout import CacheLayout, GroupedPages
from routed_experts.layers.kv_format import KV_CODES
from routed_experts.layers.recurrent import RecurrentShape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridPool:
    """Pages, and the recurrent states [T R ...] of the layers that have one. `inputs`: in a verify step, those of the
    recurrence in each of these layers (execution/recurrent_ops.py)."""

    pages: Any  # Float[Array, "LP page 2G C"] or GroupedPages, or their shapes
    states: Any  # of RecurrentShape.zeros, or their shapes
    inputs: Any = None  # RecurrentInputs with leaves [T ...]

    @property
    def state_dtype(self) -> jnp.dtype:
        """The dtype of what a state holds of a convolution's inputs; pages may have another."""
        return jax.tree.leaves(self.states)[0].dtype


TPU_LANES = 128
TPU_ROWS = 16  # of a tile of half precision; a multiple of those of float32


def row_width(head_dim: int, platform: str) -> int:
    """Return C of a pool for heads of `head_dim`: on a TPU padded to complete lanes, because its compiler would
    otherwise transpose the whole pool in every layer."""
    return -(-head_dim // TPU_LANES) * TPU_LANES if platform == "tpu" else head_dim


def tiled_state(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dims of a request's state in one layer on a TPU: as whole tiles, where its numbers fill some. The compiler orders
    dims that fill none so as to pad least, and a step would copy the states of all requests."""
    size = math.prod(shape)
    is_tiled = len(shape) > 1 and shape[-1] % TPU_LANES == 0 and shape[-2] % TPU_ROWS == 0
    return shape if is_tiled or size % (TPU_LANES * TPU_ROWS) else (size // TPU_LANES, TPU_LANES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSpec:
    """Shape of the pool; `num_pages` counts the padding page, `num_requests` slot 0, which is padding. `others`: layers
    whose rows have another shape. `tiled_states`: states have the dims of `tiled_state`, which every read and
    write converts. `dtype`: of keys and values that are not `codes`, and of states, unless these have
    `states_dtype`."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    latent: bool = False
    num_recurrent: int = 0
    recurrent: RecurrentShape | None = None
    num_requests: int = 0
    others: tuple[CacheLayout, ...] = ()
    tiled_states: bool = False
    codes: bool = False
    states_dtype: jnp.dtype | None = None

    @staticmethod
    def create(
        cache: CacheLayout,
        *,
        num_pages: int,
        page_size: int,
        dtype: jnp.dtype,
        num_requests: int,
        platform: str,
        codes: bool = False,
        states_dtype: jnp.dtype | None = None,
    ) -> "KVPoolSpec":
        """The pool of a model's cache, with rows as wide as a platform has them."""
        assert not (codes and any(group.latent for group in cache.groups)), "latent rows are never codes"
        first, *others = (
            dataclasses.replace(group, head_dim=row_width(group.head_dim, platform)) for group in cache.groups
        )
        return KVPoolSpec(
            num_layers=first.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            dtype=dtype,
            latent=first.latent,
            num_recurrent=cache.num_recurrent,
            recurrent=cache.recurrent,
            num_requests=num_requests,
            others=tuple(others),
            tiled_states=platform == "tpu",
            codes=codes,
            states_dtype=states_dtype,
        )

    @property
    def stored_dtype(self) -> jnp.dtype:
        """The dtype of the arrays of pages."""
        return KV_CODES if self.codes else self.dtype

    @property
    def rows(self) -> int:
        """Rows of a slot in one layer."""
        return 1 if self.latent else 2 * self.num_kv_heads

    @property
    def abstract(self) -> Any:
        """Shape and dtype of the array, or of each of a GroupedPages or a HybridPool."""
        sizes = [(group.num_layers, group.rows, group.head_dim) for group in (self, *self.others)]
        arrays = tuple(
            jax.ShapeDtypeStruct((layers * self.num_pages, self.page_size, rows, width), self.stored_dtype)
            for layers, rows, width in sizes
        )
        pages = GroupedPages(arrays) if self.others else arrays[0]
        if self.recurrent is None:
            return pages
        state = jax.eval_shape(lambda: self.recurrent_shape.zeros(1, self.states_dtype or self.dtype))
        size = (self.num_recurrent, self.num_requests)

        def of_all(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            own = tiled_state(leaf.shape[1:]) if self.tiled_states else leaf.shape[1:]
            return jax.ShapeDtypeStruct((*size, *own), leaf.dtype)

        return HybridPool(pages, jax.tree.map(of_all, state))

    @property
    def recurrent_shape(self) -> RecurrentShape:
        """The state shape of recurrent layers; only where the model has them."""
        assert self.recurrent is not None
        return self.recurrent

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        numbers = sum(group.num_layers * group.rows * group.head_dim for group in (self, *self.others))
        return numbers * self.stored_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, for any number of pages."""
        if self.recurrent is None:
            return 0
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract.states))

    def input_bytes(self, num_tokens: int) -> int:
        """Bytes of the inputs of the recurrence of so many tokens in all layers, as a verify step stores them."""
        if self.recurrent is None:
            return 0
        inputs = jax.eval_shape(lambda: self.recurrent_shape.no_inputs(num_tokens, self.states_dtype or self.dtype))
        return self.num_recurrent * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(inputs))

    @property
    def num_slots(self) -> int:
        """Token slots of the pool, the padding page included."""
        return self.num_pages * self.page_size

    def allocate(self) -> Any:
        """Allocate the pool, zeroed, on the default device."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract)
