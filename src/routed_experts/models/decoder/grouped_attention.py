"""Grouped-query attention with the additions of families: q/k norm of a head or of the whole projection, biases,
partial rotary positions, windows, sinks, an output gate. Dims: N tokens, D hidden, H query heads, G kv heads, C head
dim."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import AttentionBackend, FusedQKV
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.paged_attend import AnyPagedAttend
from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup
from routed_experts.layers.quantized import ScaledRows
from routed_experts.layers.rotary import RotarySpec, apply_rotary
from routed_experts.layers.stack_traits import StackTraits
from routed_experts.models.base.partitioning import ParallelConfig, Segment, column_parallel, row_parallel
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNames:
    """How a checkpoint names the tensors, each below the layer. `fused`: queries, keys and values are one tensor of
    this name."""

    at: str = "self_attn"
    fused: str = ""
    out: str = "o_proj"
    q_norm: str = "q_norm.weight"
    k_norm: str = "k_norm.weight"


USUAL_NAMES = AttentionNames()
PROJECTION_BIASES = frozenset({"input biases", "an output bias"})  # added before and after fused attention


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Attention whose heads share keys and values in groups; with as many groups as heads, plain multi-head attention.

    `qk_norm`: "", "head", "whole", or "bare", of each head without a scale. `norm_offset`: added to the scale of a q/k
    norm. `norm_after_rope`: the norm follows the rotary positions. `scale`: of the scores, 0 for C^-0.5. `gated`: each
    head's output is multiplied by a sigmoid of its own projection. `clip`: bounds of q, k and v, 0 for none; a q/k norm
    comes before it. `value_norm`: each head's values are normed without a scale. `keys_are_values`: values have no
    projection, they are the keys as projected. `tuning` (f, s): queries times 1 + s log(1 + floor((position + 1) /
    f))."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec | None
    eps: float
    qk_norm: str = ""
    norm_offset: float = 0.0
    bias_in: bool = False
    bias_out: bool = False
    window: int = 0
    chunk: int = 0
    sinks: bool = False
    gated: bool = False
    scale: float = 0.0
    clip: float = 0.0
    norm_after_rope: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    tuning: tuple[float, float] = (0.0, 0.0)
    names: AttentionNames = USUAL_NAMES

    @property
    def query_rows(self) -> int:
        """Outputs of q_proj: queries and, where heads are gated, their gates."""
        return self.num_heads * self.head_dim * (2 if self.gated else 1)

    @property
    def widths(self) -> dict[str, int]:
        """Outputs of each projection, in the order in which they are concatenated."""
        keys = self.num_kv_heads * self.head_dim
        return {"q": self.query_rows, "k": keys} | ({} if self.keys_are_values else {"v": keys})

    @property
    def needs(self) -> frozenset[str]:
        """Required features of an attention backend, in words."""
        words = {
            "a sliding window": self.window,
            "chunks": self.chunk,
            "sinks": self.sinks,
            "its own scale": self.scale,
        }
        return frozenset(word for word, needed in words.items() if needed)

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have beside norms of each head's queries and keys, and rotary
        positions of whole heads; in words."""
        rotary = self.rotary
        words = {
            "no q/k norm": not self.qk_norm,
            "a q/k norm of all heads": self.qk_norm == "whole",
            "a q/k norm without a scale": self.qk_norm == "bare",
            "an offset q/k norm": self.norm_offset,
            "no rotary positions": rotary is None,
            "partial rotary positions": rotary is not None and 2 * len(rotary.inverse) < self.head_dim,
            "interleaved rotary positions": rotary is not None and rotary.interleaved,
            "a norm after rotary positions": self.norm_after_rope and self.qk_norm,
            "a norm of all heads after rotary positions": self.norm_after_rope and self.qk_norm == "whole",
            "input biases": self.bias_in,
            "an output bias": self.bias_out,
            "gated heads": self.gated,
            "a norm of values": self.value_norm,
            "keys that are values": self.keys_are_values,
            "clipped projections": self.clip,
            "tuned queries": self.tuning[0],
        }
        return self.needs | {word for word, needed in words.items() if needed}

    @property
    def traits(self) -> StackTraits:
        """What a fused kernel is told about the layer, without its experts."""
        return StackTraits(
            qk_norm=self.qk_norm,
            qk_norm_offset=self.norm_offset,
            norm_after_rope=self.norm_after_rope,
            rotary=self.rotary is not None,
            interleaved=self.rotary is not None and self.rotary.interleaved,
            gated=self.gated,
            window=self.window,
            chunk=self.chunk,
            scale=self.scale,
        )

    def is_fused_by(self, backend: AttentionBackend, group: AxisGroup = SINGLE_DEVICE) -> bool:
        """Whether the backend takes the projection's output, with its biases, and does all up to the mixed values. A
        norm of the whole projection is no device's own where `group` shares the heads."""
        is_own = group.count == 1 or self.qk_norm != "whole"
        return backend.fused is not None and is_own and self.stack_needs - PROJECTION_BIASES <= backend.fused_features

    def cache(self, num_layers: int) -> CacheLayout:
        """Keys and values by head."""
        return CacheLayout(num_layers=num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def shard(self, parallel: ParallelConfig) -> "GroupedAttention":
        """One device's heads; a kv head that several devices need is on each of them."""
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // parallel.tensor,
            num_kv_heads=max(1, self.num_kv_heads // parallel.tensor),
        )

    def _segments(self) -> tuple[Segment, ...]:
        """Queries, keys and, where they are projected, values, partitioned between heads."""
        names = {"q": ("query heads", self.num_heads), "k": ("kv heads", self.num_kv_heads)}
        query, key = (Segment(self.widths[part], units, what, part == "k") for part, (what, units) in names.items())
        return (query, key) if self.keys_are_values else (query, key, key)

    def weights(self, hidden: int) -> tuple[ParamSpec, ...]:
        """Queries, keys and values are one concatenated matrix."""
        mixed, total = self.num_heads * self.head_dim, sum(self.widths.values())
        segments = self._segments()
        query, key = segments[:2]
        heads = row_parallel(mixed, self.num_heads, query.what)
        specs = [
            ParamSpec(name="qkv", shape=(hidden, total), kind=ParamKind.MATRIX, partition=column_parallel(*segments)),
            ParamSpec(name="out", shape=(mixed, hidden), kind=ParamKind.MATRIX, partition=heads),
        ]
        if self.bias_in:
            specs.append(ParamSpec(name="qkv_bias", shape=(total,), fill=0.0, partition=column_parallel(*segments)))
        if self.bias_out:
            specs.append(ParamSpec(name="out_bias", shape=(hidden,), fill=0.0))
        if self.qk_norm in ("head", "whole"):
            sizes = {"head": (self.head_dim, self.head_dim), "whole": (mixed, self.widths["k"])}[self.qk_norm]
            partitions = (
                (column_parallel(dataclasses.replace(query, size=mixed)), column_parallel(key))
                if self.qk_norm == "whole"
                else (None, None)
            )
            specs += [
                ParamSpec(name=name, shape=(size,), fill=1.0 - self.norm_offset, partition=partition)
                for name, size, partition in zip(("q_norm", "k_norm"), sizes, partitions, strict=True)
            ]
        if self.sinks:
            own = column_parallel(dataclasses.replace(query, size=self.num_heads))
            specs.append(ParamSpec(name="sinks", shape=(self.num_heads,), fill=0.0, partition=own))
        return tuple(specs)

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """Tensors under the family's names."""
        names, offset = self.names, 0
        for part, rows in {names.fused: sum(self.widths.values())}.items() if names.fused else self.widths.items():
            name = f"{names.at}.{part}" if names.fused else f"{names.at}.{part}_proj"
            yield scope.source(f"{name}.weight", (rows, hidden), "qkv", offset=offset)
            if self.bias_in:
                yield scope.source(f"{name}.bias", (rows,), "qkv_bias", offset=offset)
            offset += rows
        yield scope.source(f"{names.at}.{names.out}.weight", (hidden, self.num_heads * self.head_dim), "out")
        others = {"out_bias": f"{names.out}.bias", "q_norm": names.q_norm, "k_norm": names.k_norm, "sinks": "sinks"}
        for weight in self.weights(hidden):
            if weight.name in others:
                yield scope.source(f"{names.at}.{others[weight.name]}", weight.shape, weight.name)

    def run(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N D"], Any]:
        """Mix and project."""
        values, cache = self.mix(x, params, step, cache, layer)
        return params.project(values, "out", summed=True), cache

    def mix(
        self, x: Float[Array, "N D"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N HC"], Any]:
        """Project, normalise, rotate, attend."""
        mixed, attend = params.project(x, "qkv"), step.attend
        if isinstance(attend, AnyPagedAttend) and self.is_fused_by(attend.backend, step.kernels.group):
            attended, cache = attend.attend_fused(self._fused_inputs(mixed, params, step), cache, layer)
            assert not isinstance(attended, ScaledRows), "values are scaled where the next matrices are given"
        else:
            attended, cache = self._attend(mixed, params, step, cache, layer)
        return attended.reshape(x.shape[0], -1), cache

    def _fused_inputs(self, mixed: Float[Array, "N O"], params: LayerParams, step: LayerContext) -> FusedQKV:
        """The projection with the layer's arrays and angles."""
        none, has_scales = jnp.zeros((mixed.shape[0], 0), jnp.float32), self.qk_norm in ("head", "whole")
        cos, sin = (none, none) if self.rotary is None else fused_angles(self.rotary, self.head_dim, step)
        return FusedQKV(
            qkv=mixed,
            q_norm=params.stack("q_norm") if has_scales else None,
            k_norm=params.stack("k_norm") if has_scales else None,
            layer=params.index,
            cos=cos,
            sin=sin,
            eps=self.eps,
            sinks=params.stack("sinks") if self.sinks else None,
            head_dim=self.head_dim,
            is_biased=self.bias_in,
            traits=self.traits,
        )

    def _attend(
        self, mixed: Float[Array, "N O"], params: LayerParams, step: LayerContext, cache: Any, layer: Int[Array, ""]
    ) -> tuple[Float[Array, "N H C"], Any]:
        """Normalise, rotate, attend, gate."""
        if self.clip and not self.qk_norm:
            mixed = jnp.clip(mixed, -self.clip, self.clip)
        gates, queries, keys, values = self._parts(mixed)
        if self.value_norm:
            values = params.kernels.rows.rms_norm(values, jnp.ones(self.head_dim, values.dtype), eps=self.eps)
        if not self.norm_after_rope:
            queries, keys = self._norm(queries, "q_norm", params), self._norm(keys, "k_norm", params)
        if self.clip and self.qk_norm:
            queries, keys, values = (jnp.clip(part, -self.clip, self.clip) for part in (queries, keys, values))
        if self.rotary is not None:
            queries, keys = (_rotate(part, self.rotary, step) for part in (queries, keys))
        if self.norm_after_rope:
            queries, keys = self._norm(queries, "q_norm", params), self._norm(keys, "k_norm", params)
        if self.tuning[0]:
            steps = jnp.floor((step.positions.astype(jnp.float32) + 1.0) / self.tuning[0])
            grown = jnp.log1p(steps) * self.tuning[1] + 1.0
            queries = (queries.astype(jnp.float32) * grown[:, None, None]).astype(queries.dtype)
        if self.needs:
            sinks = params.get("sinks") if self.sinks else None
            features = AttentionFeatures(sinks=sinks, window=self.window, chunk=self.chunk, scale=self.scale)
            attended, cache = step.attend(queries, keys, values, cache, layer, features)
        else:
            attended, cache = step.attend(queries, keys, values, cache, layer)
        return attended if gates is None else attended * jax.nn.sigmoid(gates), cache

    def _parts(
        self, mixed: Float[Array, "N O"]
    ) -> tuple[Float[Array, "N H C"] | None, Float[Array, "N H C"], Float[Array, "N G C"], Float[Array, "N G C"]]:
        """Gates (if any), queries, keys and values, by head."""
        heads = mixed.reshape(mixed.shape[0], -1, self.head_dim)
        first = self.query_rows // self.head_dim
        queries, keys, values = (
            heads[:, :first],
            heads[:, first : first + self.num_kv_heads],
            heads[:, first if self.keys_are_values else first + self.num_kv_heads :],
        )
        if not self.gated:
            return None, queries, keys, values
        return queries[:, 1::2], queries[:, 0::2], keys, values  # each head's query and gate are side by side

    def _norm(self, x: Float[Array, "N H C"], name: str, params: LayerParams) -> Float[Array, "N H C"]:
        if not self.qk_norm:
            return x
        group, rows = params.kernels.group, params.kernels.rows
        flat = x.reshape(x.shape[0], -1) if self.qk_norm == "whole" else x
        scale = jnp.ones(self.head_dim, x.dtype) if self.qk_norm == "bare" else params.get(name)
        if self.qk_norm == "whole" and group.count > 1:
            return rms_norm(flat, scale, eps=self.eps, offset=self.norm_offset, group=group).reshape(x.shape)
        return rows.rms_norm(flat, scale, eps=self.eps, offset=self.norm_offset).reshape(x.shape)


def fused_angles(
    rotary: RotarySpec, head_dim: int, step: LayerContext
) -> tuple[Float[Array, "N F"], Float[Array, "N F"]]:
    """Angles as fused kernels take them: of whole heads each twice."""
    is_whole = not rotary.interleaved and 2 * len(rotary.inverse) == head_dim
    return (step.head_cos_sin if is_whole else step.cos_sin)[rotary]


def _rotate(x: Float[Array, "N H C"], rotary: RotarySpec, step: LayerContext) -> Float[Array, "N H C"]:
    """Rotate every head. XLA rounds two forms of one sum differently: on one device, whole heads take that of the fused
    kernels; on several, the form whose bits do not depend on what follows in the program."""
    if rotary.interleaved or 2 * len(rotary.inverse) < x.shape[2] or step.kernels.group.count > 1:
        return rotary.apply(x, step.cos_sin[rotary])
    return apply_rotary(x, *step.head_cos_sin[rotary])
