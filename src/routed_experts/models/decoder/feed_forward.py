"""The feed-forward half of a layer: one dense network, or a router with its experts, and shared experts that every
token runs. Dims: N tokens, D hidden, I dense width, E experts, F expert width, K experts per token, S width of the
shared experts."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.parallel import Capacities
from routed_experts.layers.routing import RouterSpec, Routing
from routed_experts.models.base.partitioning import (
    AxisPartition,
    ParallelConfig,
    Segment,
    column_parallel,
    row_parallel,
)
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.decoder.expert_names import USUAL_NAMES, ExpertNames
from routed_experts.models.decoder.layer_params import LayerParams, ParamKind, ParamSpec
from routed_experts.models.decoder.layer_parts import CheckpointScope, LayerContext, ReplayInputs
from routed_experts.models.decoder.sparse_block import route, route_with_capacity, run_experts

GATED_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Gated network of width I; its tensors are <at>.<parts>: gate, up, down."""

    width: int
    at: str = "mlp"
    parts: tuple[str, str, str] = GATED_PARTS
    activation: str = "silu"

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have for it, in words."""
        own = set() if self.activation == "silu" else {f"a {self.activation} dense network"}
        return frozenset({"a dense network"} | own)

    @property
    def reads_stream(self) -> bool:
        """Whether it norms its input itself."""
        return False

    def shard(self, parallel: ParallelConfig) -> "Dense":
        """One device's share of the width."""
        return dataclasses.replace(self, width=self.width // parallel.tensor)

    def weights(self, hidden: int) -> tuple[ParamSpec, ...]:
        """gate|up side by side, and down."""
        return _gated_weights("dense", hidden, self.width, "columns of a dense layer")

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """The three matrices."""
        yield from _gated_sources(scope, self.at, self.parts, hidden, self.width, "dense")

    def run(
        self,
        x: Float[Array, "N D"],
        params: LayerParams,
        step: LayerContext,
        replay: ReplayInputs | None,
        capture: RoutedExpertsDeviceCache | None,
    ) -> tuple[Float[Array, "N D"], RoutedExpertsDeviceCache | None]:
        """A dense layer routes no tokens. A stream of half precision rounds its inner values once, and its sum once."""
        both = params.project(x, "dense_gate_up", dtype=jnp.float32)
        hidden = params.kernels.rows.gated(both, self.activation).astype(x.dtype)
        return params.project(hidden, "dense_down", summed=True, dtype=jnp.float32), capture


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """K of E experts a token. `shared_width`: of the experts that every token runs, 0 for none; `shared_gated`:
    times the sigmoid of a projection. `wide_router`: its matrix stays float32. `weight_inputs`: the weight
    multiplies the expert's input (K = 1). `local_experts`: experts on this device, 0 for all; `replicas`:
    instances that an expert may have, 0 where none has several; `bounded`: these have capacities."""

    router: RouterSpec
    width: int
    names: ExpertNames = USUAL_NAMES
    shared_width: int = 0
    shared_gated: bool = False
    wide_router: bool = False
    router_bias: bool = False
    biased: bool = False
    activation: str = "silu"
    weight_inputs: bool = False
    local_experts: int = 0
    replicas: int = 0
    bounded: bool = False

    @property
    def reads_stream(self) -> bool:
        """Whether it norms its input itself."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Required features of an MoE backend, in words."""
        words = {"biased experts": self.biased, f"{self.activation} experts": self.activation != "silu"}
        return frozenset(word for word, needed in words.items() if needed)

    @property
    def stack_needs(self) -> frozenset[str]:
        """Features that a kernel of whole layers must have beside those of SiLU-gated experts, in words. The router's
        law is none of them: kernels say themselves which they implement."""
        words = {
            "shared experts": self.shared_width,
            "gated shared experts": self.shared_gated,
            "a float32 router": self.wide_router,
            "a router bias": self.router_bias,
            "a selection bias": self.router.biased,
            "weighted expert inputs": self.weight_inputs,
            "placed experts": self.replicas or self.bounded or self.local_experts,
        }
        return self.needs | {word for word, needed in words.items() if needed}

    def shard(self, parallel: ParallelConfig) -> "Sparse":
        """One device's share of the experts or of their width, and of the shared ones' width."""
        local_experts = (parallel.instances or self.router.num_experts) // parallel.devices
        share = (
            {"local_experts": local_experts} if parallel.expert_parallel else {"width": self.width // parallel.devices}
        )
        return dataclasses.replace(
            self,
            shared_width=self.shared_width // parallel.tensor,
            replicas=parallel.replicas,
            bounded=parallel.bounded,
            **share,
        )

    def weights(self, hidden: int) -> tuple[ParamSpec, ...]:
        """Router, experts, and what a family adds."""
        experts, local_experts, width = (
            self.router.num_experts,
            self.local_experts or self.router.num_experts,
            self.width,
        )
        by_width = _halves(width, "columns of an expert")
        kind = ParamKind.PLAIN if self.wide_router else ParamKind.ROUTER
        specs = [
            ParamSpec(
                name="gate_up", shape=(local_experts, hidden, 2 * width), kind=ParamKind.EXPERTS, partition=by_width
            ),
            ParamSpec(
                name="down",
                shape=(local_experts, width, hidden),
                kind=ParamKind.EXPERTS,
                partition=row_parallel(width, width, "columns of an expert"),
            ),
            ParamSpec(name="router", shape=(hidden, experts), kind=kind, wide=self.wide_router),
        ]
        if self.router_bias:
            specs.append(ParamSpec(name="router_bias", shape=(experts,), fill=0.0))
        if self.router.biased:
            specs.append(ParamSpec(name="selection_bias", shape=(experts,), wide=True, fill=0.0))
        if self.biased:
            specs.append(
                ParamSpec(
                    name="gate_up_bias",
                    shape=(local_experts, 2 * width),
                    kind=ParamKind.EXPERTS,
                    fill=0.0,
                    partition=by_width,
                )
            )
            specs.append(ParamSpec(name="down_bias", shape=(local_experts, hidden), kind=ParamKind.EXPERTS, fill=0.0))
        if self.replicas:
            specs.append(ParamSpec(name="replicas", shape=(experts, self.replicas)))
        if self.bounded:
            specs.append(ParamSpec(name="capacity", shape=(2,)))
        if self.shared_width:
            specs += _gated_weights("shared", hidden, self.shared_width, "columns of the shared experts")
        if self.shared_gated:
            specs.append(ParamSpec(name="shared_gate", shape=(hidden, 1)))
        return tuple(specs)

    def sources(self, hidden: int, scope: CheckpointScope) -> Iterator[WeightSource]:
        """Tensors under the family's names."""
        names, experts = self.names, self.router.num_experts
        yield from names.router_sources(scope, experts, hidden, bias=self.router_bias, selection=self.router.biased)
        yield from names.expert_sources(scope, experts, hidden, self.width)
        if self.shared_width:
            yield from _gated_sources(scope, names.shared, GATED_PARTS, hidden, self.shared_width, "shared")
        if self.shared_gated:
            yield scope.source(names.shared_gate, (1, hidden), "shared_gate")

    def run(
        self,
        x: Float[Array, "N D"],
        params: LayerParams,
        step: LayerContext,
        replay: ReplayInputs | None,
        capture: RoutedExpertsDeviceCache | None,
    ) -> tuple[Float[Array, "N D"], RoutedExpertsDeviceCache | None]:
        """Route, record, run, and add the shared experts."""
        ffn_input, routing, capture = self.route_and_record(x, params, step, replay, capture)
        experts = params.experts(self.router.num_experts)
        replicas = params.get("replicas") if self.replicas else None
        how, activation = (ffn_input, routing, step.valid, experts), self.activation
        y = run_experts(*how, spec=self.router, kernels=step.kernels, activation=activation, replicas=replicas)
        return step.kernels.group.all_reduce(self.add_shared(y, x, params)), capture

    def add_shared(self, y: Float[Array, "N D"], x: Float[Array, "N D"], params: LayerParams) -> Float[Array, "N D"]:
        """`y` and the output of the shared experts, where there are some."""
        add_gated = params.kernels.rows.add_gated
        if self.shared_gated and add_gated is not None:
            return add_gated(y, self._run_ungated(x, params), x, params.get("shared_gate"))
        shared = self.run_shared(x, params)
        return y if shared is None else y + shared

    def route_and_record(
        self,
        x: Float[Array, "N D"],
        params: LayerParams,
        step: LayerContext,
        replay: ReplayInputs | None,
        capture: RoutedExpertsDeviceCache | None,
    ) -> tuple[Float[Array, "N D"], Routing, RoutedExpertsDeviceCache | None]:
        """Route and record; returns the expert inputs too."""
        assert replay is not None, "a sparse layer has a column"
        moe_layer = replay.moe_layer
        bias = params.get("selection_bias") if self.router.biased else None
        logits, rerouter = params.router_logits(x), step.kernels.group.rerouter
        if rerouter is not None and replay.routed is None:
            capacities = Capacities(params.get("replicas"), params.get("capacity"))
            routing, capture = route_with_capacity(
                logits, step.valid, capacities, rerouter, moe_layer, capture, spec=self.router, bias=bias
            )
        else:
            routing, capture = route(
                logits, replay.routed, moe_layer, capture, spec=self.router, kernels=step.kernels, bias=bias
            )
        if not self.weight_inputs:
            return x, routing, capture
        return x * routing.weights.astype(x.dtype), _unweighed(routing), capture

    def run_shared(self, x: Float[Array, "N D"], params: LayerParams) -> Float[Array, "N D"] | None:
        """Output of the shared experts; None without them."""
        if not self.shared_width:
            return None
        shared = self._run_ungated(x, params)
        if self.shared_gated:
            gate = jax.nn.sigmoid(params.kernels.rows.product(x, params.get("shared_gate")))
            shared = (gate * shared.astype(jnp.float32)).astype(shared.dtype)
        return shared

    def _run_ungated(self, x: Float[Array, "N D"], params: LayerParams) -> Float[Array, "N D"]:
        """The shared experts, without their gate."""
        return params.project(params.kernels.rows.gated(params.project(x, "shared_gate_up")), "shared_down")


def _unweighed(routing: Routing) -> Routing:
    """The same experts without a norm on their outputs."""
    assert routing.weights.shape[1] == 1, "inputs of more than one expert cannot be weighed at once"
    return dataclasses.replace(routing, weights=jnp.ones_like(routing.weights))


def _halves(width: int, what: str) -> AxisPartition:
    """gate|up, each partitioned separately."""
    return column_parallel(*(Segment(width, width, what),) * 2)


def _gated_weights(name: str, hidden: int, width: int, what: str) -> tuple[ParamSpec, ParamSpec]:
    return (
        ParamSpec(
            name=f"{name}_gate_up", shape=(hidden, 2 * width), kind=ParamKind.MATRIX, partition=_halves(width, what)
        ),
        ParamSpec(
            name=f"{name}_down",
            shape=(width, hidden),
            kind=ParamKind.MATRIX,
            partition=row_parallel(width, width, what),
        ),
    )


def _gated_sources(
    scope: CheckpointScope, at: str, parts: tuple[str, str, str], hidden: int, width: int, to: str
) -> Iterator[WeightSource]:
    gate, up, down = (f"{at}.{part}.weight" for part in parts)
    yield scope.source(gate, (width, hidden), f"{to}_gate_up")
    yield scope.source(up, (width, hidden), f"{to}_gate_up", offset=width)
    yield scope.source(down, (hidden, width), f"{to}_down")
