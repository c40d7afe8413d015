"""The constants of a delta rule's kernels, and a block of a request's memory. Dims: K key dim, T columns of a block."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.gpu.blocks import product_width

COLUMNS = 32  # of a memory in a block
PART = 32  # key dims of a product: three passes hold its sides in registers, twice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Constants of the kernels."""

    shape: DeltaShape
    tile: int = 1  # tokens of a block of the convolution, or of a chunk
    columns: int = COLUMNS
    exact: bool = False  # products in plain float32: interpreted, where there is no TF32

    @property
    def share(self) -> int:
        """Value heads of a key head."""
        return self.shape.value_heads // self.shape.key_heads

    @property
    def parts(self) -> list[Array]:
        """Key dims of each product."""
        width = min(PART, product_width(self.shape.key_dim))
        return [start + jnp.arange(width) for start in range(0, self.shape.key_dim, width)]

    @property
    def blocks(self) -> int:
        """Blocks of a memory's columns."""
        return pl.cdiv(self.shape.value_dim, self.columns)

    def dot(self, left: Array, right: Array) -> Array:
        """A float32 product: errors would add up along a sequence."""
        precision = lax.Precision.HIGHEST if self.exact else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
        return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)


def memory_block(
    recurrent: Any, index: tuple[Array, Array, Array], block: Array, lanes: Array, sizes: DeltaSizes
) -> tuple[Any, Array]:
    """Some key dims and a block's columns of a memory as a reference, and which of them exist [K T]."""
    columns = block * sizes.columns + jnp.arange(sizes.columns)
    mask = (lanes < sizes.shape.key_dim)[:, None] & (columns < sizes.shape.value_dim)[None, :]
    return recurrent.at[(*index, lanes[:, None], columns[None, :])], mask
