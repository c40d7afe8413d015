"""Attention to the paged pool on a GPU: decode and verify steps split each request's keys over blocks
(split_attention.py), extend steps walk tiles of query rows (extend_attention.py), also by warpgroups. Keys outside of a
window or chunk are not read.

Query heads that share a kv head are the rows of one tile, so keys and values are read once for all of them. Slots that
a request does not own may hold NaN: their scores become MASK_VALUE and their values 0. Where codes have scales, that of
keys multiplies the scores and that of values the sums, float32. Dims: N tokens, H query heads, G kv heads, C head dim,
L layers of the pool, R layers of the stack."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import AttentionBackend, FusedQKV, PagedBatch
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.gpu.capability import converts_e4m3
from routed_experts.layers.gpu.delta_rule import gpu_delta
from routed_experts.layers.gpu.expert_tiles import takes_scaled_rows
from routed_experts.layers.gpu.extend_attention import extend_attention
from routed_experts.layers.gpu.kv_write import gpu_write
from routed_experts.layers.gpu.latent import gpu_latent, latent_attention
from routed_experts.layers.gpu.paged_keys import PLAIN, Sinks
from routed_experts.layers.gpu.paged_softmax import scales_heads
from routed_experts.layers.gpu.qk_norm_rope import FEATURES, prepare
from routed_experts.layers.gpu.split_attention import decode_attention, fits_verify, verify_attention
from routed_experts.layers.gpu.warpgroup_attention import suits_warpgroup_attention, warpgroup_attention
from routed_experts.layers.gpu.warpgroups import Warpgroups
from routed_experts.layers.quantized import E4M3, ScaledRows


def _own_sinks(features: AttentionFeatures, sinks: Sinks | None) -> Float[Array, " H"] | None:
    """The sinks of a layer, whether they are its own or in a stack."""
    return features.sinks if sinks is None else sinks[0][sinks[1]]


def gpu_attention(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures = PLAIN,
    *,
    sinks: Sinks | None = None,
    stride: int = 1,
    warpgroups: Warpgroups | None = None,
    interpret: bool = False,
) -> Float[Array, "N H C"]:
    """Attention of a step's tokens to the pool. `warpgroups`: those of a Hopper GPU, which compute prompts that suit
    them."""
    mixed = _attend(
        queries,
        pool,
        first_page,
        batch,
        features,
        sinks=sinks,
        stride=stride,
        warpgroups=warpgroups,
        scaled=False,
        interpret=interpret,
    )
    assert not isinstance(mixed, ScaledRows), "scaled only where that is asked for"
    return mixed


def _attend(
    queries: Float[Array, "N H C"],
    pool: Float[Array, "LP page 2G C"],
    first_page: Int[Array, ""],
    batch: PagedBatch,
    features: AttentionFeatures,
    *,
    sinks: Sinks | None,
    stride: int,
    warpgroups: Warpgroups | None,
    scaled: bool,
    interpret: bool,
) -> Float[Array, "N H C"] | ScaledRows:
    """The same. `scaled`: decode and verify return rows of all heads."""
    if features.latent:
        return latent_attention(queries, pool, first_page, batch, features, stride=stride, interpret=interpret)
    share = queries.shape[1] // (pool.shape[2] // 2)
    is_extend = not batch.decode and not fits_verify(batch, share)
    if is_extend and warpgroups is not None and warpgroups.can_mask and suits_warpgroup_attention(queries, pool, batch):
        return warpgroup_attention(
            queries, pool, first_page, batch, features, warpgroups, sinks=_own_sinks(features, sinks), stride=stride
        )
    options: Any = {"sinks": sinks, "stride": stride, "interpret": interpret}
    if is_extend:
        return extend_attention(queries, pool, first_page, batch, features, **options)
    attend = decode_attention if batch.decode else verify_attention
    return attend(queries, pool, first_page, batch, features, scaled=scaled, **options)


def fused_attention(
    projected: FusedQKV,
    pool: Float[Array, "LP page 2G C"],
    layer: Int[Array, ""],
    batch: PagedBatch,
    num_pages: int,
    *,
    warpgroups: Warpgroups | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "N H C"] | ScaledRows, Float[Array, "LP page 2G C"]]:
    """Prepare, write and attend."""
    queries, pool = prepare(projected, pool, layer, batch, stride=num_pages, interpret=interpret)
    traits, sinks = projected.traits, None if projected.sinks is None else (projected.sinks, projected.layer)
    scales = projected.kv_scales
    features = AttentionFeatures(window=traits.window, chunk=traits.chunk, scale=traits.scale, kv_scales=scales)
    num_tokens, _, dim = queries.shape
    mixed = _attend(
        queries,
        pool,
        layer,
        batch,
        features,
        sinks=sinks,
        stride=num_pages,
        warpgroups=warpgroups,
        scaled=scales_heads(dim) and takes_scaled_rows(num_tokens, queries.dtype, projected.next_matrices),
        interpret=interpret,
    )
    return mixed, pool


def gpu_attention_backend(*, interpret: bool, warpgroups: Warpgroups | None = None) -> AttentionBackend:
    """The backend; `interpret` runs it on any device, slowly, for tests. `warpgroups`: those of a Hopper GPU."""
    run = functools.partial(gpu_attention, warpgroups=warpgroups, interpret=interpret)
    return AttentionBackend(
        name="gpu",
        run=run,
        fused=functools.partial(fused_attention, warpgroups=warpgroups, interpret=interpret),
        fused_features=FEATURES | {"a sliding window", "chunks", "sinks", "its own scale"},
        run_with_features=run,
        write=functools.partial(gpu_write, interpret=interpret),
        latent=functools.partial(gpu_latent, interpret=interpret),
        recur=functools.partial(gpu_delta, interpret=interpret),
        kv_formats=frozenset({E4M3} if interpret or converts_e4m3() else ()),
        takes_kv_scales=True,
        fused_takes_kv_scales=True,
    )
