"""The attention function of a served model: writes new keys and values to the paged pool, then attends to the pool.
Called once a layer. Dims as in attention.py; A width of a latent row."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import AttentionBackend, FusedQKV, LatentQKV, PagedBatch, write_kv
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import write_latent
from routed_experts.layers.kv_format import KV_CODES, KVScales
from routed_experts.layers.quantized import ScaledRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttend:
    """One step's pages and the backend that reads them. `num_pages`: of one layer. `kv_scales`: where a pool of codes
    has scales, those of keys and of values, an array for each shape of rows (CacheLayout.groups); `group`: which of
    these shapes the pages have. `backend` is then one `for_kv_scales`."""

    backend: AttentionBackend
    batch: PagedBatch
    num_pages: int
    kv_scales: tuple[Float[Array, "L 2"], ...] = ()
    group: int = 0

    def of_group(self, group: int) -> "PagedAttend":
        """The same on pages of another shape of rows."""
        return dataclasses.replace(self, group=group)

    def __call__(
        self,
        queries: Float[Array, "N H C"],
        keys: Float[Array, "N G C"],
        values: Float[Array, "N G C"] | None,
        pool: Float[Array, "LP page 2G C"],
        layer: Int[Array, ""],
        features: AttentionFeatures | None = None,
    ) -> tuple[Float[Array, "N H C"], Float[Array, "LP page 2G C"]]:
        """Write the new keys and values (no values: `keys` are latent rows), then attend, by `features` where there are
        some."""
        first_page = layer * self.num_pages
        batch, scales = self.batch, self._scales_of(layer, pool)
        if scales is not None:
            assert values is not None, "latent rows are never codes"
            keys, values = scales.divide(keys, values)
        if self.backend.write is not None:
            pool = self.backend.write(pool, keys, values, first_page, batch)
        elif values is None:
            pool = write_latent(pool, keys, first_page, batch)
        else:
            pool = write_kv(pool, keys, values, first_page, batch)
        if scales is None:
            return self._run(queries, pool, first_page, features), pool
        if self.backend.takes_kv_scales:
            scaled = dataclasses.replace(features or AttentionFeatures(), kv_scales=scales)
            return self._run(queries, pool, first_page, scaled), pool
        return scales.around(lambda rows: self._run(rows, pool, first_page, features), queries), pool

    def _run(
        self,
        queries: Float[Array, "N H C"],
        pool: Float[Array, "LP page 2G C"],
        first_page: Int[Array, ""],
        features: AttentionFeatures | None,
    ) -> Float[Array, "N H C"]:
        if features is None:
            return self.backend.run(queries, pool, first_page, self.batch)
        assert self.backend.run_with_features is not None, self.backend.name
        return self.backend.run_with_features(queries, pool, first_page, self.batch, features)

    def _scales_of(self, layer: Int[Array, ""], pool: Float[Array, "LP page 2G C"]) -> KVScales | None:
        if not self.kv_scales:
            return None
        assert pool.dtype == KV_CODES, pool.dtype
        return KVScales(self.kv_scales[self.group], layer)

    def attend_fused(
        self, projected: FusedQKV, pool: Float[Array, "LP page 2G C"], layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N H C"] | ScaledRows, Float[Array, "LP page 2G C"]]:
        """The same from the projection's own output, for a backend that does it all."""
        assert self.backend.fused is not None, self.backend.name
        scales = self._scales_of(layer, pool)
        if scales is not None:
            assert self.backend.fused_takes_kv_scales, self.backend.name
            projected = dataclasses.replace(projected, kv_scales=scales)
        return self.backend.fused(projected, pool, layer, self.batch, self.num_pages)

    def attend_latent(
        self, projected: LatentQKV, pool: Float[Array, "LP page 1 A"], layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N H V"], Float[Array, "LP page 1 A"]]:
        """Latent attention from its projections to values, for a backend that does it all."""
        assert self.backend.latent is not None, self.backend.name
        return self.backend.latent(projected, pool, layer, self.batch, self.num_pages)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HybridAttend:
    """The same on the `pages` of a pool that holds states of requests beside them."""

    paged: PagedAttend

    @property
    def backend(self) -> AttentionBackend:
        """What reads the pages."""
        return self.paged.backend

    def __call__(
        self,
        queries: Float[Array, "N H C"],
        keys: Float[Array, "N G C"],
        values: Float[Array, "N G C"] | None,
        cache: Any,
        layer: Int[Array, ""],
        features: AttentionFeatures | None = None,
    ) -> tuple[Float[Array, "N H C"], Any]:
        """`PagedAttend.__call__`."""
        mixed, pages = self.paged(queries, keys, values, cache.pages, layer, features)
        return mixed, dataclasses.replace(cache, pages=pages)

    def attend_fused(
        self, projected: FusedQKV, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N H C"] | ScaledRows, Any]:
        """`PagedAttend.attend_fused`."""
        mixed, pages = self.paged.attend_fused(projected, cache.pages, layer)
        return mixed, dataclasses.replace(cache, pages=pages)

    def attend_latent(
        self, projected: LatentQKV, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N H V"], Any]:
        """`PagedAttend.attend_latent`."""
        values, pages = self.paged.attend_latent(projected, cache.pages, layer)
        return values, dataclasses.replace(cache, pages=pages)


AnyPagedAttend = PagedAttend | HybridAttend  # of a model without states, and of one with states
