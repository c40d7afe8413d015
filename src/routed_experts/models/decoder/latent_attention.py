"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from one compressed row
a token, which is all that is cached.

The matrices that would expand a row into keys and values are applied on the other side (section 2.1.2, "absorbed"):
queries are mapped into the space of the rows, and mixed rows are mapped to values. Dims: N tokens, D hidden, H
heads, R rank of a row, P rotary dims beside it (the row is R + P wide), C key dim without them, V value dim, Q rank
of the queries."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import LatentQKV
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.paged_attend import AnyPagedAttend
from routed_experts.layers.rotary import RotarySpec
from routed_experts.models.base.partitioning import ParallelConfig, Segment, column_parallel, row_parallel
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext

_EPS = 1e-6  # of the norms of compressed rows, regardless of rms_norm_eps: DeepSeek's code does not pass it on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Latent attention (MLA): keys and values of a token are one compressed row, which all heads share.

    `query_rank` 0: queries are projected at once. `scale`: of the scores. `gated`: each head's values are multiplied
    by the sigmoid of a number of their own. `at` and `out` name tensors in a checkpoint."""

    num_heads: int
    query_rank: int
    rank: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    rotary: RotarySpec
    scale: float
    gated: bool = False
    at: str = "self_attn"
    out: str = "o_proj"

    @property
    def needs(self) -> frozenset[str]:
        """Required features of an attention backend, in words."""
        return frozenset({"latent rows"})

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have for it, in words."""
        return self.needs

    def cache(self, num_layers: int) -> CacheLayout:
        """One row a token."""
        return CacheLayout(num_layers=num_layers, num_kv_heads=1, head_dim=self.rank + self.rotary_dim, latent=True)

    def shard(self, parallel: ParallelConfig) -> "LatentAttention":
        """One device's heads; the compressed rows are on all."""
        return dataclasses.replace(self, num_heads=self.num_heads // parallel.tensor)

    def weights(self, hidden: int) -> tuple[ParamSpec, ...]:
        """Down to rows, up to heads, out."""
        heads, what = self.num_heads, "query heads"
        queries, expanded = heads * (self.key_dim + self.rotary_dim), heads * (self.key_dim + self.value_dim)
        by_head = column_parallel(Segment(expanded, heads, what))
        out = row_parallel(heads * self.value_dim, heads, what)
        specs = [
            ParamSpec(
                name="q",
                shape=(self.query_rank or hidden, queries),
                kind=ParamKind.MATRIX,
                partition=column_parallel(Segment(queries, heads, what)),
            ),
            ParamSpec(name="kv_down", shape=(hidden, self.rank + self.rotary_dim), kind=ParamKind.MATRIX),
            ParamSpec(name="kv_norm", shape=(self.rank,), fill=1.0),
            ParamSpec(name="kv_up", shape=(self.rank, expanded), partition=by_head),
            ParamSpec(name="out", shape=(heads * self.value_dim, hidden), kind=ParamKind.MATRIX, partition=out),
        ]
        if self.query_rank:
            specs.append(ParamSpec(name="q_down", shape=(hidden, self.query_rank), kind=ParamKind.MATRIX))
            specs.append(ParamSpec(name="q_norm", shape=(self.query_rank,), fill=1.0))
        if self.gated:
            gate = column_parallel(Segment(heads, heads, what))
            specs.append(ParamSpec(name="gate", shape=(hidden, heads), kind=ParamKind.MATRIX, partition=gate))
        return tuple(specs)

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """DeepSeek's names: a is down, b is up."""
        names = {
            "kv_down": "kv_a_proj_with_mqa",
            "kv_norm": "kv_a_layernorm",
            "kv_up": "kv_b_proj",
            "out": self.out,
            "gate": "g_proj",
            "q": "q_b_proj" if self.query_rank else "q_proj",
            "q_down": "q_a_proj",
            "q_norm": "q_a_layernorm",
        }
        for weight in self.weights(hidden):
            yield scope.source(f"{self.at}.{names[weight.name]}.weight", weight.shape[::-1], weight.name)

    def run(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N D"], Any]:
        """Mix and project."""
        values, cache = self.mix(x, params, step, cache, layer)
        return params.project(values, "out", summed=True), cache

    def mix(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N HV"], Any]:
        """Compress, absorb, mix rows, expand."""
        angles, rms_norm = step.cos_sin[self.rotary], params.kernels.rows.rms_norm
        query_input = rms_norm(params.project(x, "q_down"), params.get("q_norm"), eps=_EPS) if self.query_rank else x
        queries = params.project(query_input, "q").reshape(x.shape[0], self.num_heads, -1)
        compressed = params.project(x, "kv_down")
        if isinstance(step.attend, AnyPagedAttend) and step.attend.backend.latent is not None:
            projected = LatentQKV(
                queries=queries,
                compressed=compressed,
                norm=params.get("kv_norm"),
                up=params.get("kv_up"),
                angles=angles,
                interleaved=self.rotary.interleaved,
                scale=self.scale,
                eps=_EPS,
                stacked_up=params.stack("kv_up"),
                layer=params.index,
            )
            values, cache = step.attend.attend_latent(projected, cache, layer)
            return self._gated(values, x, params), cache
        row = rms_norm(compressed[:, : self.rank], params.get("kv_norm"), eps=_EPS)
        rotated = self.rotary.apply(compressed[:, None, self.rank :], angles)
        up = params.get("kv_up").astype(x.dtype).reshape(self.rank, self.num_heads, -1)
        absorbed = jnp.einsum("nhc,rhc->nhr", queries[..., : self.key_dim], up[..., : self.key_dim])
        queries = jnp.concatenate([absorbed, self.rotary.apply(queries[..., self.key_dim :], angles)], axis=-1)
        rows = jnp.concatenate([row[:, None], rotated], axis=-1)
        mixed, cache = step.attend(
            queries, rows, None, cache, layer, AttentionFeatures(latent=self.rank, scale=self.scale)
        )
        values = jnp.einsum("nhr,rhv->nhv", mixed, up[..., self.key_dim :])
        return self._gated(values, x, params), cache

    def _gated(
        self, values: Float[Array, "N H V"], x: Float[Array, "N D"], params: LayerParams
    ) -> Float[Array, "N HV"]:
        """The values side by side, those of each head times its gate."""
        if self.gated:
            values = values * jax.nn.sigmoid(params.project(x, "gate", dtype=jnp.float32)).astype(x.dtype)[..., None]
        return values.reshape(x.shape[0], -1)
