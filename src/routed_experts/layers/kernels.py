"""The kernels that a model's layers run on, chosen once and passed down. Knows nothing of how they were chosen.
Dims: N tokens, E experts, M MoE layers, K experts per token."""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Float, Int

from routed_experts.layers.linear import REFERENCE_LINEAR, LinearBackend
from routed_experts.layers.moe import MoeBackend
from routed_experts.layers.routing import LayerRouting, RouterSpec, Routing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FusedRouter:
    """Top-k, weights and the write of the executed ids into the step's block as one kernel: (logits [N E], rows to replay, block
    [MK N] or None, MoE layer, spec) -> (routing, block). It must decide as `replay_topk` does, ties included. `can` says which laws
    it knows; routers of others run as plain array code. `linear`, where there is one, makes the logits from the routers of the whole
    run."""

    name: str
    run: Callable[
        [Float[Array, "N E"], LayerRouting | None, Int[Array, "MK N"] | None, Int[Array, ""], RouterSpec],
        tuple[Routing, Int[Array, "MK N"] | None],
    ]
    linear: LinearBackend | None = None
    can: Callable[[RouterSpec], bool] = lambda spec: spec.is_plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One way to run each part of a layer. `router` None: plain array code, and a write of the ids of its own."""

    moe: MoeBackend
    linear: LinearBackend = REFERENCE_LINEAR
    router: FusedRouter | None = None
