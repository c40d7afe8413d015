"""Contract of a kernel that runs a stack of neighbouring layers at once: its arrays and its call.

The layers are pre-norm, attention with a q/k norm and rotary positions, then routed experts or a dense network; a
family's additions are StackTraits and arrays that are None elsewhere. Layers that alternate are a pattern, each with
arrays of its own. Dims: N tokens, D hidden, R layers of the stack (of one position of its pattern), E experts of a
layer, F expert width, H query heads, G kv heads, C head dim, M MoE layers, K experts per token, S width of the shared
experts or of the dense network, O outputs of the projection."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt

from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.quantized import Weight
from routed_experts.layers.routing import RouterSpec, RoutingBlock
from routed_experts.layers.stack_traits import PLAIN_TRAITS, StackTraits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    """The weights of a run, layer axis first; `next_norm` is the norm that follows the run. `norm_offset` is added to
    the scales of the norms of the stream, `residual_scale` multiplies what is added to it. A layer without a router has
    a dense network, in the arrays of the shared experts. Matrices may be codes and scales, each on its own."""

    input_norm: Float[Array, "R D"]
    post_norm: Float[Array, "R D"]
    next_norm: Float[Array, " D"]
    q_norm: Float[Array, "R C"] | Float[Array, "R HC"] | None = None
    k_norm: Float[Array, "R C"] | Float[Array, "R GC"] | None = None
    qkv: Weight  # [R, D, O]
    out: Weight  # [R, HC, D]
    eps: float
    router: Float[Array, "R D E"] | None = None
    gate_up: Weight | None = None  # [RE, D, 2F]
    down: Weight | None = None  # [RE, F, D]
    qkv_bias: Float[Array, "R O"] | None = None
    out_bias: Float[Array, "R D"] | None = None
    sinks: Float[Array, "R H"] | None = None
    router_bias: Float[Array, "R E"] | None = None
    selection_bias: Float[Array, "R E"] | None = None
    gate_up_bias: Float[Array, "RE 2F"] | None = None
    down_bias: Float[Array, "RE D"] | None = None
    shared_gate_up: Weight | None = None  # [R, D, 2S]
    shared_down: Weight | None = None  # [R, S, D]
    shared_gate: Float[Array, "R D 1"] | None = None
    traits: StackTraits = PLAIN_TRAITS
    norm_offset: float = 0.0
    residual_scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs shared by all layers of a step."""

    cos: Float[Array, "N C"] | Float[Array, "N F"]  # each frequency twice, or F of them
    sin: Float[Array, "N C"] | Float[Array, "N F"]
    valid: Bool[Array, " N"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackOffsets:
    """Offsets of the stack: its first layer in the pool, and its first MoE layer in the block of what is recorded."""

    first_layer: int
    first_moe_layer: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunRouting:
    """Rows to run in place of the routers' choice in all M MoE layers of a run, where `valid`."""

    ids: UInt[Array, "M N K"] | Int[Array, "M N K"]
    valid: Bool[Array, " N"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerStackKernel:
    """A run of layers as one kernel: (stream [N D], arrays, step, attend, pool, block or None, rows to replay or
    None, offsets, spec) -> (stream, its norm by `next_norm`, pool, block). Rows are replayed only where a block is
    written; the spec is None where no layer has experts. It rounds where the layers one by one do on the same kernels
    (`Kernels.stream_dtype`); the norm has the dtype of the weights. `arrays` may be a tuple: the layers of a pattern,
    which repeats. `supports`: the routers that it implements; `features`: what it takes beside plain layers;
    `attention`: the backend whose page layout it reads."""

    name: str
    attention: str
    run: Callable[
        [
            Float[Array, "N D"],
            StackWeights | tuple[StackWeights, ...],
            StepInputs,
            PagedAttend,
            Any,
            RoutingBlock | None,
            RunRouting | None,
            StackOffsets,
            RouterSpec | None,
        ],
        tuple[Float[Array, "N D"], Float[Array, "N D"], Any, RoutingBlock | None],
    ]
    supports: Callable[[RouterSpec], bool] = lambda spec: spec.is_plain
    features: frozenset[str] = frozenset()  # of `FamilyConfig.stack_needs`
