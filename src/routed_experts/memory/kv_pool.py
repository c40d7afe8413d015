"""Paged KV pool: where keys and values live on the device. Knows nothing of requests.

One array [L*P, page, 2G, C], donated to each step and returned by it, so that it is updated in place. Row 2g of a slot holds
the keys of kv head g, row 2g+1 its values; page 0 of each layer takes the writes of padding. Dims: L layers, P pages a layer,
G kv heads, C head dim."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TPU_LANES = 128


def row_width(head_dim: int, platform: str) -> int:
    """C of a pool for heads of `head_dim`: on a TPU whole rows of lanes, with zeros beside narrower heads, because its compiler would
    else turn the whole pool around in every layer."""
    return -(-head_dim // TPU_LANES) * TPU_LANES if platform == "tpu" else head_dim


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolSpec:
    """Shape of the pool; `num_pages` counts the padding page."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the array."""
        shape = (self.num_layers * self.num_pages, self.page_size, 2 * self.num_kv_heads, self.head_dim)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers that one token takes."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def num_slots(self) -> int:
        """Tokens that the pool has places for, the padding page included."""
        return self.num_pages * self.page_size

    def allocate(self) -> Float[Array, "LP page 2G C"]:
        """Make the pool, zeroed, on the default device."""
        return jnp.zeros(self.abstract.shape, self.dtype)
