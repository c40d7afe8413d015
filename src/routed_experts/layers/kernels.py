"""The bundle of kernels that a model's layers run on, chosen once at build time and passed down. Dims: N tokens, E
experts, M MoE layers, K experts per token, B rows, V vocabulary."""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Float, Int

from routed_experts.layers.layer_stack import LayerStackKernel
from routed_experts.layers.linear import REFERENCE_LINEAR, LinearBackend
from routed_experts.layers.moe import ExpertCall, MoeBackend
from routed_experts.layers.parallel import SINGLE_DEVICE, AxisGroup, row_parallel_linear
from routed_experts.layers.parallel_experts import parallel_moe
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedRouter:
    """Top-k, weights and the write of the executed ids into the step's block as one kernel: (logits [N E], rows to
    replay, block [MK N] or None, MoE layer, spec) -> (routing, block). Rows to replay come without weights. It must
    decide as `replay_topk` does, up to rounding of the scores; equal scores go to the lower id. `supports` tells which
    scoring functions it implements; other routers run as plain array code. `linear`, where there is one, makes the
    logits from the routers of the whole run."""

    name: str
    run: Callable[
        [Float[Array, "N E"], LayerRouting | None, Int[Array, "MK N"] | None, Int[Array, ""], RouterSpec],
        tuple[Routing, Int[Array, "MK N"] | None],
    ]
    linear: LinearBackend | None = None
    supports: Callable[[RouterSpec], bool] = lambda spec: spec.is_plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedSteps:
    """The operations between the matrices of a layer as few kernels, for steps of at most `max_tokens` tokens, where
    launches count. `product`: (x, matrices [R D O], layer) -> S parts of the sums, which the kernel that follows adds
    up. `add_parts`: (x, parts, norms [R D], layer, eps) -> (x plus the parts, its norm). `slots`: each slot's expert
    applied to its row, by a call whose `first_expert` is the layer's offset in the run. `add_slots`: (x, slots,
    weights, valid, norms, layer, eps) -> (x plus the weighted slots, its norm)."""

    max_tokens: int
    product: Callable[[Float[Array, "N D"], Float[Array, "R D O"], Int[Array, ""]], Float[Array, "S N O"]]
    add_parts: Callable[..., tuple[Float[Array, "N D"], Float[Array, "N D"]]]
    slots: Callable[[ExpertCall], Float[Array, "NK D"]]
    add_slots: Callable[..., tuple[Float[Array, "N D"], Float[Array, "N D"]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One way to run each part of a layer. `router` None: plain array code, and a write of the ids of its own.
    `fused_layer` None: no fused kernels for steps of few tokens. `layer_stack` None: no kernel that runs all layers of
    a run at once. `argmax` returns the best token of each row of logits, as `best_token` does, and its logprob; None:
    plain array code. `group`: the devices that share the layers' work."""

    moe: MoeBackend
    linear: LinearBackend = REFERENCE_LINEAR
    router: FusedRouter | None = None
    fused_layer: FusedSteps | None = None
    layer_stack: LayerStackKernel | None = None
    argmax: Callable[[Float[Array, "B V"]], tuple[Int[Array, " B"], Float[Array, " B"]]] | None = None
    group: AxisGroup = SINGLE_DEVICE

    @property
    def lm_head(self) -> LinearBackend:
        """The product with the vocabulary matrix, whose rows are sharded."""
        return row_parallel_linear(self.linear, self.group)

    def with_group(self, group: AxisGroup) -> "Kernels":
        """The same kernels on one device's share of the weights. Kernels that span an all-reduce are
        left out."""
        if group.count == 1:
            return self
        return dataclasses.replace(
            self, moe=parallel_moe(self.moe, group), fused_layer=None, layer_stack=None, group=group
        )
