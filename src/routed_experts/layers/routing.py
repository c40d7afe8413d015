"""Routing laws: from router logits to the experts a token runs on, live or replayed.
Knows nothing of experts' weights. One function serves live, replayed and mixed rows, so they cannot differ.

Law (REPLAY: replay ids, recompute weights). z = logits in float32, s = softmax(z) over E, native = top_k(stop_gradient(s)),
ties to the lower id; ids = replayed where the row is valid, else native; weights = s gathered at ids, renormalised over the
K slots when the family does: that is softmax over the K gathered z, which stays finite where all K scores are 0 in float32
(replayed ids may be far below the best). Dims: N tokens, E experts, K experts per token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The static part of a router: hashable, read from a model's config."""

    num_experts: int
    top_k: int
    renormalize: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerRouting:
    """Ids to replay in one layer. Ids of a row that is not valid are never read."""

    ids: UInt[Array, "N K"] | Int[Array, "N K"]
    valid: Bool[Array, " N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What a router decided: executed ids in executed order, and the weights that multiply the experts' outputs."""

    weights: Float[Array, "N K"]
    ids: Int[Array, "N K"]
    native_ids: Int[Array, "N K"]
    replaced: Bool[Array, " N"]


def replay_topk(logits: Float[Array, "N E"], routed: LayerRouting | None, *, spec: RouterSpec) -> Routing:
    """Choose K experts a token by softmax scores, or take `routed` where it is valid.

    Source: Qwen3 technical report (softmax over E, top-k, optional renormalisation over the K slots)."""
    wide = logits.astype(jnp.float32)
    scores = jax.nn.softmax(wide, axis=-1)
    _, native = jax.lax.top_k(jax.lax.stop_gradient(scores), spec.top_k)
    native = native.astype(jnp.int32)
    if routed is None:
        ids, replaced = native, jnp.zeros(logits.shape[0], bool)
    else:
        ids, replaced = jnp.where(routed.valid[:, None], routed.ids.astype(jnp.int32), native), routed.valid
    weights = jnp.take_along_axis(wide if spec.renormalize else scores, ids, axis=-1)
    if spec.renormalize:
        weights = jax.nn.softmax(weights, axis=-1)
    return Routing(weights=weights, ids=ids, native_ids=native, replaced=replaced)
