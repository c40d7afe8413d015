"""What a model caches per token: the shape of a pool's rows. Fixed by the model's config. Dims: L layers with a
cache, G kv heads, C head dim."""

import dataclasses
from typing import Any

import jax

from routed_experts.layers.recurrent import RecurrentShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """L layers, each with keys and values of G heads; or with one row of C numbers a token that all heads share
    (`latent`). Layers that keep a state instead, one for each request, are counted apart, and so are layers whose rows
    have another shape (`others`)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: bool = False
    num_recurrent: int = 0
    recurrent: RecurrentShape | None = None
    others: tuple["CacheLayout", ...] = ()

    @property
    def rows(self) -> int:
        """Rows of a slot in one layer."""
        return 1 if self.latent else 2 * self.num_kv_heads

    @property
    def groups(self) -> tuple["CacheLayout", ...]:
        """One layout for each shape of rows, in the order of the arrays of a GroupedPages."""
        return dataclasses.replace(self, others=(), num_recurrent=0, recurrent=None), *self.others


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedPages:
    """Pages of layers whose rows differ in shape: one array for each shape. The same pages of each hold a token."""

    arrays: tuple[Any, ...]  # Float[Array, "LP page 2G C"], their shapes or their specs

    def replace(self, group: int, pages: Any) -> "GroupedPages":
        """The same with other pages for one shape."""
        return GroupedPages((*self.arrays[:group], pages, *self.arrays[group + 1 :]))
