"""Routing: from router logits to the experts a token runs on, live or replayed. One function serves live, replayed and
mixed rows, so they cannot differ.

z = logits in float32, s = scores, c = what is chosen by (s, a selection bias added, groups that were not chosen at
-inf), v = s at ids:

    scoring_func   s            weights at ids                              source
    softmax        softmax(z)   v, or softmax over the K gathered z         Qwen3, OLMoE, Mixtral, DeepSeek-V2
    sigmoid        sigmoid(z)   v, or v / (sum v + epsilon)                 DeepSeek-V3, GLM-4.5, MiniMax-M2, Llama 4
    logits         z            softmax over the K gathered z               GPT-OSS, Granite
    sparsemixer    z            softmax over the z near the best one left   PhiMoE (SparseMixer-v2, Liu et al. 2024)

each times `scale`. native = top_k(stop_gradient(c)), ties to the lower id; ids = replayed where the row is valid, else
native; v is gathered from the full, unmasked, unbiased s. A renormalised softmax is softmax over the gathered z: that
stays finite where all K scores are 0 in float32 (replayed ids may be far below the best). Dims: N tokens, E experts, M
MoE layers, K experts per token, T groups."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int, UInt

ROUTED_IDS = "routed_ids"  # what rematerialisation must save: a choice near a tie could fall otherwise the second time
SCORING_FUNCS = ("softmax", "sigmoid", "logits", "sparsemixer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """The static part of a router: hashable, read from a model's config. The defaults are Qwen3's.

    `num_groups` equal parts of the experts are ranked by the sum of their `group_score_topk` scores, and experts are
    chosen from the best `topk_group`. `biased`: a selection bias is among the weights. `jitter_eps`: sparsemixer keeps
    z with (best - z) / max(|z|, best) <= 2 jitter_eps."""

    num_experts: int
    top_k: int
    renormalize: bool
    scoring_func: str = "softmax"
    scale: float = 1.0
    epsilon: float = 0.0
    num_groups: int = 1
    topk_group: int = 1
    group_score_topk: int = 1
    biased: bool = False
    jitter_eps: float = 0.0

    def __post_init__(self) -> None:
        assert self.scoring_func in SCORING_FUNCS, self.scoring_func
        assert self.num_groups >= self.topk_group >= 1 and self.num_experts % self.num_groups == 0, self

    @property
    def is_plain(self) -> bool:
        """Softmax over all experts, top-k of the scores themselves, weights unscaled: what every fused router can
        do."""
        return (
            self.scoring_func == "softmax"
            and self.num_groups == self.topk_group
            and not self.biased
            and self.scale == 1.0
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerRouting:
    """Ids to replay in one layer. Ids of a row that is not valid are never read. `weights`, where given, replace those
    of valid rows, without gradient."""

    ids: UInt[Array, "N K"] | Int[Array, "N K"]
    valid: Bool[Array, " N"]
    weights: Float[Array, "N K"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What a router decided: executed ids in executed order, and the weights that multiply the experts' outputs.
    `instances`: where slots run, -1 for nowhere; None leaves it to the executing backend."""

    weights: Float[Array, "N K"]
    ids: Int[Array, "N K"]
    native_ids: Int[Array, "N K"]
    replaced: Bool[Array, " N"]
    instances: Int[Array, "N K"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutingBlock:
    """What a step records of all M MoE layers: row m*K + k holds choice k of every token in MoE layer m, executed ids
    and, where they are recorded, combine weights."""

    ids: Int[Array, "MK N"]
    weights: Float32[Array, "MK N"] | None = None

    def write_weights(self, moe_layer: Int[Array, ""], weights: Float[Array, "N K"]) -> "RoutingBlock":
        """Write the weights of one layer, where they are recorded; for kernels that write the ids alone."""
        if self.weights is None:
            return self
        row = jnp.asarray(moe_layer, jnp.int32) * weights.shape[1]
        own = weights.astype(jnp.float32).T
        written = jax.lax.dynamic_update_slice_in_dim(self.weights, own, row, axis=0, allow_negative_indices=False)
        return dataclasses.replace(self, weights=written)


def replay_topk(
    logits: Float[Array, "N E"],
    routed: LayerRouting | None,
    *,
    spec: RouterSpec,
    bias: Float[Array, " E"] | None = None,
) -> Routing:
    """Choose K experts a token by the spec, or take `routed` where it is valid. `bias` moves the choice, never a
    weight."""
    assert (bias is not None) == spec.biased, "a selection bias and RouterSpec.biased belong together"
    wide = logits.astype(jnp.float32)
    scores = _scores(wide, spec)
    _, native = jax.lax.top_k(_choice(scores, bias, spec), spec.top_k)
    native = native.astype(jnp.int32)
    if routed is None:
        ids, replaced = native, jnp.zeros(logits.shape[0], bool)
    else:
        ids, replaced = jnp.where(routed.valid[:, None], routed.ids.astype(jnp.int32), native), routed.valid
    ids = checkpoint_name(ids, ROUTED_IDS)
    weights = (
        sparsemixer_weights(wide, ids, jitter_eps=spec.jitter_eps)
        if spec.scoring_func == "sparsemixer"
        else _weights(wide, scores, ids, spec)
    )
    if spec.scale != 1.0:
        weights = weights * spec.scale
    if routed is not None and routed.weights is not None:
        weights = jnp.where(routed.valid[:, None], jax.lax.stop_gradient(routed.weights.astype(jnp.float32)), weights)
    if routed is not None:  # a replayed id that is no expert: an index would wrap or be clipped
        weights = jnp.where((ids < 0) | (ids >= logits.shape[1]), jnp.nan, weights)
    return Routing(weights=weights, ids=ids, native_ids=native, replaced=replaced)


def selection_scores(
    logits: Float[Array, "N E"], *, spec: RouterSpec, bias: Float[Array, " E"] | None = None
) -> Float[Array, "N E"]:
    """The c that experts are chosen by, float32 and without gradient."""
    return _choice(_scores(logits.astype(jnp.float32), spec), bias, spec)


def _choice(scores: Float[Array, "N E"], bias: Float[Array, " E"] | None, spec: RouterSpec) -> Float[Array, "N E"]:
    """The c of these scores. Both zeros become one: top_k would put the negative one last."""
    choice = jax.lax.stop_gradient(scores if bias is None else scores + bias.astype(jnp.float32))
    return keep_groups(jnp.where(choice == 0.0, 0.0, choice), spec)


def router_probabilities(logits: Float[Array, "N E"], *, spec: RouterSpec) -> Float[Array, "N E"]:
    """A router's scores as a distribution over all experts: softmax of the logits, or sigmoids over their sum
    (DeepSeek-V3, eq. 19)."""
    wide = logits.astype(jnp.float32)
    if spec.scoring_func != "sigmoid":
        return jax.nn.softmax(wide, axis=-1)
    scores = jax.nn.sigmoid(wide)
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def keep_groups(choice: Float[Array, "N E"], spec: RouterSpec) -> Float[Array, "N E"]:
    """Put the experts of all but the best groups at -inf (DeepSeek-V2, section 2.1.2: device-limited routing)."""
    if spec.num_groups == spec.topk_group:
        return choice
    grouped = choice.reshape(choice.shape[0], spec.num_groups, -1)
    ranks = jnp.sum(jax.lax.top_k(grouped, spec.group_score_topk)[0], axis=-1)  # [N, T]
    _, best_groups = jax.lax.top_k(ranks, spec.topk_group)
    keeps = jnp.any(best_groups[:, :, None] == jnp.arange(spec.num_groups), axis=1)
    return jnp.where(keeps[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def sparsemixer_weights(
    logits: Float[Array, "N E"], ids: Int[Array, "N K"], *, jitter_eps: float
) -> Float[Array, "N K"]:
    """Slot k: softmax over those z, not taken by an earlier slot, that are near the best of them; a replayed id always
    counts."""
    experts = jnp.arange(logits.shape[1])
    left, weights = logits, []
    for slot in range(ids.shape[1]):
        chosen = ids[:, slot, None] == experts
        best = jnp.max(left, axis=-1, keepdims=True)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * jitter_eps
        near = jnp.where(jax.lax.stop_gradient(far) & ~chosen, -jnp.inf, left)
        weights.append(jnp.sum(jnp.where(chosen, jax.nn.softmax(near, axis=-1), 0.0), axis=-1))
        left = jnp.where(chosen, -jnp.inf, left)
    return jnp.stack(weights, axis=-1)


def _scores(wide: Float[Array, "N E"], spec: RouterSpec) -> Float[Array, "N E"]:
    if spec.scoring_func == "softmax":
        return jax.nn.softmax(wide, axis=-1)
    return jax.nn.sigmoid(wide) if spec.scoring_func == "sigmoid" else wide


def _weights(
    wide: Float[Array, "N E"], scores: Float[Array, "N E"], ids: Int[Array, "N K"], spec: RouterSpec
) -> Float[Array, "N K"]:
    """Weights at ids, before the scale."""
    by_logits = spec.scoring_func == "logits" or (spec.scoring_func == "softmax" and spec.renormalize)
    weights = jnp.take_along_axis(wide if by_logits else scores, ids, axis=-1)
    if by_logits:
        return jax.nn.softmax(weights, axis=-1)
    if spec.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + spec.epsilon)
    return weights
