"""A run of MoE layers in few kernels, for steps of few tokens: the same values as the plain layers, rounded at the same places.
Knows no architecture: pre-norm layers of attention and experts, whose arrays are handed over.

The stream is normalised where it is added to, so the carry of the scan holds it twice: as it is, and under the norm of what comes
next. Dims: N tokens, D hidden, R layers of the run, E experts of a layer, F expert width, H query heads, G kv heads, C head dim."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.capture.device_cache import _RoutedExpertsDeviceCache
from routed_experts.layers.attention import Projected
from routed_experts.layers.kernels import FusedSteps, Kernels
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.norm import rms_norm
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.routing import RouterSpec
from routed_experts.models.interface import Attend, TokenRouting
from routed_experts.models.sparse_block import route


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunArrays:
    """The weights of a run, layer axis first; `next_norm` is the norm of what follows the run."""

    input_norm: Float[Array, "R D"]
    post_norm: Float[Array, "R D"]
    next_norm: Float[Array, " D"]
    q_norm: Float[Array, "R C"]
    k_norm: Float[Array, "R C"]
    qkv: Float[Array, "R D HGGC"]
    out: Float[Array, "R HC D"]
    router: Float[Array, "R D E"]
    gate_up: Float[Array, "RE D 2F"]
    down: Float[Array, "RE F D"]
    eps: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """What all layers of a step share."""

    cos: Float[Array, "N C"]
    sin: Float[Array, "N C"]
    valid: Bool[Array, " N"]


def runs_fused(kernels: Kernels, attend: Attend, routed: TokenRouting | None, num_tokens: int, spec: RouterSpec) -> FusedSteps | None:
    """The fused steps, where this step can take them: no rows to replay, paged attention that takes projections, a law
    that the fused router knows, few tokens."""
    takes_projected = isinstance(attend, PagedAttend) and attend.backend.fused is not None
    fused, router = kernels.fused, kernels.router
    if fused is None or router is None or not router.can(spec) or not takes_projected or routed is not None:
        return None
    return fused if num_tokens <= fused.most_tokens else None


def fused_run(
    x: Float[Array, "N D"],
    run: RunArrays,
    step: StepArrays,
    attend: PagedAttend,
    cache: Any,
    capture: _RoutedExpertsDeviceCache | None,
    *,
    first_layer: int,
    first_column: int,
    spec: RouterSpec,
    kernels: Kernels,
    fused: FusedSteps,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Any, _RoutedExpertsDeviceCache | None]:
    """Run the layers; returns the stream, its norm by `next_norm`, the cache and the capture."""
    following = jnp.concatenate([run.input_norm[1:], run.next_norm[None]])
    normed = rms_norm(x, run.input_norm[0], eps=run.eps)

    def layer(place: Int[Array, ""], carry: Any) -> Any:
        x, normed, cache, capture = carry
        arrays = {"q_norm": run.q_norm, "k_norm": run.k_norm, "cos": step.cos, "sin": step.sin}
        projected = Projected(qkv=fused.product(normed, run.qkv, place), layer=place, **arrays, eps=run.eps)
        mixed, cache = attend.from_projected(projected, cache, place + first_layer)
        parts = fused.product(mixed.reshape(x.shape[0], -1), run.out, place)
        x, normed = fused.add_parts(x, parts, run.post_norm, place, eps=run.eps)
        logits = fused.product(normed, run.router, place)
        routing, capture = route(logits, None, place + first_column, capture, spec=spec, kernels=kernels)
        call = ExpertCall(normed, routing.ids, routing.weights, step.valid, run.gate_up, run.down, place, spec.num_experts)
        x, normed = fused.add_slots(x, fused.slots(call), routing.weights, step.valid, following, place, eps=run.eps)
        return x, normed, cache, capture

    return lax.fori_loop(0, run.qkv.shape[0], layer, (x, normed, cache, capture))
