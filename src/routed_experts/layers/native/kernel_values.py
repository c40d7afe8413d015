"""Static values of layers as the native kernels take them: numbers and attributes."""

from typing import Any

import numpy as np

from routed_experts.layers.routing import SCORING_FUNCS, RouterSpec

ACTIVATION_ORDER = ("silu", "clamped swiglu", "tanh gelu")  # of Activation in experts.h


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
