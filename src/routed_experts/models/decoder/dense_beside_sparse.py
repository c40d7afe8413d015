"""A dense network beside routed experts, each with norms of its own: the feed-forward half of Gemma 4's MoE layers.

    dense    norm(dense(norm(x; post_norm)); dense_norm)
    experts  norm(experts(norm(x; experts_input_norm)); experts_norm), chosen by the router of norm(x; router_scale)
    output   dense + experts

Dims: N tokens, D hidden, E experts."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
from jaxtyping import Array, Float

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.decoder.layer_params import LayerParams, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext, ReplayInputs
from routed_experts.models.decoder.sparse_block import run_experts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DenseBesideSparse(Sparse):
    """Experts and the network `dense`, both of the same stream. The weight of a chosen expert is multiplied by a number
    of that expert. `norm_sources`: names of the three norms `dense_norm`, `experts_input_norm` and `experts_norm` in a
    checkpoint; `router_scale`, `expert_scale`: of the scale of the router's norm and of the experts' numbers."""

    dense: Dense
    eps: float
    norm_sources: tuple[str, str, str]
    router_scale: str
    expert_scale: str

    @property
    def reads_stream(self) -> bool:
        """It norms its input itself, three times."""
        return True

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have for it, in words."""
        return super(DenseBesideSparse, self).stack_needs | self.dense.stack_needs

    def shard(self, parallel: ParallelConfig) -> "DenseBesideSparse":
        """One device's share of both."""
        share = super(DenseBesideSparse, self).shard(parallel)
        assert isinstance(share, DenseBesideSparse), share
        return dataclasses.replace(share, dense=self.dense.shard(parallel))

    def weights(self, hidden: int) -> tuple[ParamSpec, ...]:
        """Those of experts and dense network, and the norms between."""
        scales = {name: hidden for name in (*_NORMS, "router_scale")} | {"expert_scale": self.router.num_experts}
        own = (ParamSpec(name=name, shape=(size,), fill=1.0) for name, size in scales.items())
        return (*super(DenseBesideSparse, self).weights(hidden), *self.dense.weights(hidden), *own)

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """Tensors under the family's names."""
        yield from super(DenseBesideSparse, self).sources(hidden, scope)
        yield from self.dense.sources(hidden, scope)
        for name, to in zip(self.norm_sources, _NORMS, strict=True):
            yield scope.source(name, (hidden,), to)
        yield scope.source(self.router_scale, (hidden,), "router_scale")
        yield scope.source(self.expert_scale, (self.router.num_experts,), "expert_scale")

    def run(
        self,
        x: Float[Array, "N D"],
        params: LayerParams,
        step: LayerContext,
        replay: ReplayInputs | None,
        capture: RoutedExpertsDeviceCache | None,
    ) -> tuple[Float[Array, "N D"], RoutedExpertsDeviceCache | None]:
        """Both halves of the stream `x`. Weights that are recorded, and those that are replayed, have the experts'
        numbers in them."""

        def norm(rows: Float[Array, "N D"], scale: Float[Array, " D"]) -> Float[Array, "N D"]:
            return params.kernels.rows.rms_norm(rows.astype(x.dtype), scale, eps=self.eps)

        dense, _ = self.dense.run(norm(x, params.get("post_norm")), params, step, None, None)
        router_input = norm(x, params.get("router_scale")) * x.shape[1] ** -0.5
        _, routing, capture = self.route_and_record(router_input, params, step, replay, capture)
        weights = routing.weights * params.get("expert_scale").astype(jnp.float32)[routing.ids]
        if replay is not None and replay.routed is not None and replay.routed.weights is not None:
            weights = jnp.where(routing.replaced[:, None], routing.weights, weights)
        routing = dataclasses.replace(routing, weights=weights)
        if capture is not None and replay is not None:
            capture = capture.write_weights(replay.moe_layer, weights)
        experts_input, experts = norm(x, params.get("experts_input_norm")), params.experts(self.router.num_experts)
        replicas = params.get("replicas") if self.replicas else None
        how, activation = (experts_input, routing, step.valid, experts), self.activation
        y = run_experts(*how, spec=self.router, kernels=step.kernels, activation=activation, replicas=replicas)
        y = norm(step.kernels.group.all_reduce(y), params.get("experts_norm"))
        return norm(dense, params.get("dense_norm")) + y, capture


_NORMS = ("dense_norm", "experts_input_norm", "experts_norm")
