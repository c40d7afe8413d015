"""Contract of a kernel that runs a stack of neighbouring layers, attention and experts, at once: its arrays and its
call.

The layers are pre-norm, with norms of queries and keys, rotary positions and softmax routing. Dims: N tokens, D
hidden, R layers of the stack, E experts of a layer, F expert width, H query heads, G kv heads, C head dim, M MoE
layers, K experts per token."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int, UInt

from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.routing import RouterSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    """The weights of a run, layer axis first; `next_norm` is the norm that follows the run."""

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
class StepInputs:
    """Inputs shared by all layers of a step."""

    cos: Float[Array, "N C"]
    sin: Float[Array, "N C"]
    valid: Bool[Array, " N"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackOffsets:
    """Offsets of the stack: its first layer in the pool, and its first MoE layer in the block of ids."""

    first_layer: int
    first_moe_layer: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunRouting:
    """Rows to run in place of the routers' choice in all layers of a run, where `valid`."""

    ids: UInt[Array, "R N K"] | Int[Array, "R N K"]
    valid: Bool[Array, " N"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerStackKernel:
    """A run of layers as one kernel: (stream [N D], arrays, step, attend, pool, block [MK N] or None, rows to replay or
    None, offsets, spec) -> (stream, its norm by `next_norm`, pool, block). Rows are replayed only where a block is
    written. It decides as the layers one by one, up to rounding: where they round to a half precision, it may keep
    float32. `supports`: the routers that it implements; `attention`: the backend whose page layout it reads."""

    name: str
    attention: str
    run: Callable[
        [
            Float[Array, "N D"],
            StackWeights,
            StepInputs,
            PagedAttend,
            Any,
            Int[Array, "MK N"] | None,
            RunRouting | None,
            StackOffsets,
            RouterSpec,
        ],
        tuple[Float[Array, "N D"], Float[Array, "N D"], Any, Int[Array, "MK N"] | None],
    ]
    supports: Callable[[RouterSpec], bool] = lambda spec: spec.is_plain
