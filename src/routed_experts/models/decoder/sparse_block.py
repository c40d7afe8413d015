"""The sparse block of every family: route, record, run the chosen experts. The recorded ids are the ids that the
experts run: one value, used twice. Dims: N tokens, D hidden, F expert width, R layers of the stack, E experts, K
experts per token."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Bool, Float, Int

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.parallel import Capacities, Rerouter
from routed_experts.layers.quantized import Weight
from routed_experts.layers.routing import (
    LayerRouting,
    RouterSpec,
    Routing,
    replay_topk,
    router_probabilities,
)
from routed_experts.models.decoder.step_record import to_block, with_block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Experts of one layer: the whole run's arrays and the layer's first expert, or one layer's own with 0."""

    gate_up: Weight  # [RE, D, 2F]
    down: Weight  # [RE, F, D]
    first: Int[Array, ""]
    gate_up_bias: Float[Array, "RE 2F"] | None = None
    down_bias: Float[Array, "RE D"] | None = None


def route(
    logits: Float[Array, "N E"],
    routed: LayerRouting | None,
    moe_layer: Int[Array, ""],
    capture: RoutedExpertsDeviceCache | None,
    *,
    spec: RouterSpec,
    kernels: Kernels,
    bias: Float[Array, " E"] | None = None,
) -> tuple[Routing, RoutedExpertsDeviceCache | None]:
    """Decide the experts of each token and record them in the layer's column. `bias` affects the choice only. Replayed
    weights run through array code."""
    if kernels.router is not None and kernels.router.supports(spec) and (routed is None or routed.weights is None):
        recorded = to_block(capture)
        routing, recorded = kernels.router.run(logits, routed, recorded, moe_layer, spec, bias)
        capture = with_block(capture, recorded)
        return routing, capture
    routing = replay_topk(logits, routed, spec=spec, bias=bias)
    if capture is not None:
        probabilities = functools.partial(router_probabilities, logits, spec=spec)
        capture = capture.capture_fwd_routed_experts(
            moe_layer, routing.ids, routing.native_ids, probabilities, routing.weights
        )
    return routing, capture


def route_with_capacity(
    logits: Float[Array, "N E"],
    valid: Bool[Array, " N"],
    capacities: Capacities,
    rerouter: Rerouter,
    moe_layer: Int[Array, ""],
    capture: RoutedExpertsDeviceCache | None,
    *,
    spec: RouterSpec,
    bias: Float[Array, " E"] | None = None,
) -> tuple[Routing, RoutedExpertsDeviceCache | None]:
    """`route` under capacities; the changes are recorded with the ids."""
    routing, rerouting = rerouter(logits, valid, capacities, spec, bias)
    if capture is not None:
        capture = capture.capture_fwd_routed_experts(
            moe_layer, routing.ids, routing.native_ids, weights=routing.weights
        ).add_rerouting(rerouting)
    return routing, capture


def run_experts(
    x: Float[Array, "N D"],
    routing: Routing,
    valid: Bool[Array, " N"],
    experts: ExpertWeights,
    *,
    spec: RouterSpec,
    kernels: Kernels,
    activation: str = "silu",
    replicas: Int[Array, "E J"] | None = None,
) -> Float[Array, "N D"]:
    """Run exactly the experts of `routing`; `replicas` are the instances of each, where there are several."""
    call = ExpertCall(
        x,
        routing.ids,
        routing.weights,
        valid,
        experts.gate_up,
        experts.down,
        experts.first,
        spec.num_experts,
        experts.gate_up_bias,
        experts.down_bias,
        activation,
        replicas,
        routing.instances,
    )
    return kernels.moe.run(call)
