"""What a model caches per token: the shape of a pool's rows. Fixed by the model's config. Dims: L layers with a
cache, G kv heads, C head dim."""

import dataclasses

from routed_experts.layers.recurrent import RecurrentShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """L layers, each with keys and values of G heads; or with one row of C numbers a token that all heads share
    (`latent`). Layers that keep a state instead, one for each request, are counted apart."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: bool = False
    num_recurrent: int = 0
    recurrent: RecurrentShape | None = None

    @property
    def rows(self) -> int:
        """Rows of a slot in one layer."""
        return 1 if self.latent else 2 * self.num_kv_heads
