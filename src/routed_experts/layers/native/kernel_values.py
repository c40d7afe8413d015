"""Static values of layers as the native kernels take them: numbers and attributes; and the arrays of matrices."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from routed_experts.layers.quantized import CODE_DTYPES, QuantizedWeight, Weight
from routed_experts.layers.routing import SCORING_FUNCS, RouterSpec

ACTIVATION_ORDER = ("silu", "clamped swiglu", "tanh gelu")  # of Activation in experts.h
QK_NORMS = ("", "head", "whole")  # in the order of QkNorm in qk_prepare.h
# Of attention, in the words of `GroupedAttention.stack_needs`, without biases of projections.
ATTENTION_FEATURES = frozenset(
    {
        *("a sliding window", "chunks", "sinks", "its own scale", "gated heads"),
        *("no q/k norm", "a q/k norm of all heads", "an offset q/k norm", "a norm after rotary positions"),
        "a norm of all heads after rotary positions",
        *("no rotary positions", "partial rotary positions", "interleaved rotary positions"),
    }
)


def router_law(spec: RouterSpec) -> dict[str, Any]:
    """A router's law as the attributes of a native kernel."""
    numbers = {"scale": spec.scale, "epsilon": spec.epsilon, "jitter_eps": spec.jitter_eps}
    counts = {
        "scoring": SCORING_FUNCS.index(spec.scoring_func),
        "num_groups": spec.num_groups,
        "topk_group": spec.topk_group,
        "group_score_topk": spec.group_score_topk,
    }
    return (
        {"renormalize": spec.renormalize}
        | {name: np.float32(value) for name, value in numbers.items()}
        | {name: np.int64(value) for name, value in counts.items()}
    )


def weight_arrays(weight: Weight) -> tuple[Array, Float[Array, "..."]]:
    """Numbers or codes, and scales, [0] beside numbers."""
    if not isinstance(weight, QuantizedWeight):
        return weight, jnp.zeros(0, jnp.float32)
    formats = [name for name, dtype in CODE_DTYPES.items() if dtype == weight.codes.dtype]  # as the kernels tell it
    assert formats in ([], [weight.format]) and not weight.outputs_first, (weight.format, weight.outputs_first)
    return weight.codes, weight.scales


def scale_group(weight: Weight | None) -> int:
    """Inputs that share a scale; 0 where there are no scales."""
    return weight.group if isinstance(weight, QuantizedWeight) else 0
