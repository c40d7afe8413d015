"""Attention between its two projections: queries and keys are normalised a head at a time and rotated, values are
mixed. Attention and its cache are arguments. Dims: N tokens, H query heads, G kv heads, C head dim, R layers of the
stack."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Int

from routed_experts.layers.attention import FusedQKV
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.rotary import apply_rotary
from routed_experts.models.base.interface import AttentionFn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """The norms of queries and keys: this layer's own, and those of the whole run for a kernel that reads them in
    place."""

    q_norm: Float[Array, " C"]
    k_norm: Float[Array, " C"]
    run_q_norm: Float[Array, "R C"]
    run_k_norm: Float[Array, "R C"]
    stack_index: Int[Array, ""]  # of the layer in the stack
    eps: float


def qk_norm_attention(
    qkv: Float[Array, "N HGGC"],
    norms: HeadNorms,
    angles: tuple[Float[Array, "N C"], Float[Array, "N C"]],
    attend: AttentionFn,
    cache: Any,
    layer: Int[Array, ""],
    *,
    heads: int,
    groups: int,
) -> tuple[Float[Array, "N HC"], Any]:
    """Mix values, and return the cache with the new keys and values."""
    num_tokens, (cos, sin) = qkv.shape[0], angles
    if isinstance(attend, PagedAttend) and attend.backend.fused is not None:
        arrays = {
            "q_norm": norms.run_q_norm,
            "k_norm": norms.run_k_norm,
            "layer": norms.stack_index,
            "cos": cos,
            "sin": sin,
        }
        attended, cache = attend.attend_fused(FusedQKV(qkv=qkv, **arrays, eps=norms.eps), cache, layer)
        return attended.reshape(num_tokens, -1), cache
    mixed = qkv.reshape(num_tokens, heads + 2 * groups, -1)
    queries, keys, values = mixed[:, :heads], mixed[:, heads : heads + groups], mixed[:, heads + groups :]
    queries, keys = (
        apply_rotary(rms_norm(part, norm, eps=norms.eps), cos, sin)
        for part, norm in ((queries, norms.q_norm), (keys, norms.k_norm))
    )
    attended, cache = attend(queries, keys, values, cache, layer)
    return attended.reshape(num_tokens, -1), cache
