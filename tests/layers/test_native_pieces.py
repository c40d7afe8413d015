"""Layers in pieces have the bits of one kernel, whatever a family adds to them: an engine may run some blocks either
way, as one whose draft model reads the output of a layer does. Compiled as engines are, with XLA's optimisations, which
round array code otherwise: each operation between two products has a kernel."""

import numpy as np
import pytest

from layers.test_native_batch_invariance import bits
from layers.test_native_stack_families import (
    CASES,
    GPT_OSS,
    GPT_OSS_FEED,
    PARTIAL,
    PIECES,
    SIGMOID,
    build_model,
    layer,
    random_model,
)
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS
from routed_experts.models.decoder.fused_path import block_kernel
from support.model_steps import run_steps

NORMED, SHARED = dict(bias_in=True, bias_out=True), dict(shared_width=12)
MORE = {  # layers, and changes of the config
    "Dots1": ([layer(NORMED | dict(window=window), SHARED, SIGMOID) for window in (0, 3)] * 2, {}),
    "EXAONE-MoE": ([layer(mixer, SHARED, SIGMOID) for mixer in (dict(window=3), dict(rotary=None))] * 2, {}),
    "Qwen3-Next": (
        [layer(dict(gated=True, norm_offset=1.0, rotary=PARTIAL), dict(shared_width=12, shared_gated=True))] * 2,
        dict(norm_offset=1.0),
    ),
    "sinks beside norms": ([layer(GPT_OSS | dict(qk_norm="head", scale=0.2), GPT_OSS_FEED)] * 2, {}),
}
IN_EVERY_RUN = {
    *((name, "float32") for name in ("GPT-OSS", "Dots1", "EXAONE-MoE", "Qwen3-Next", "MiniMax-M2")),
    *((name, "bfloat16") for name in ("Qwen2-MoE", "HunYuan", "Dots1")),
}


def models():
    for name in (*CASES, *MORE):
        for dtype in ("float32", "bfloat16"):
            yield pytest.param(name, dtype, marks=[] if (name, dtype) in IN_EVERY_RUN else pytest.mark.thorough)


@pytest.mark.parametrize(("name", "dtype"), list(models()))
def test_layers_in_pieces_have_the_bits_of_one_kernel(name, dtype):
    """Normalised streams of a prefill and a decode, stored keys and values, and ids."""
    model = build_model(name, dtype) if name in CASES else random_model(MORE[name][0], dtype, **MORE[name][1])
    assert block_kernel(model.config, model.config.blocks[0], NATIVE_KERNELS, NATIVE_ATTENTION) is not None
    (stored, outs), (pool, others) = (
        run_steps(model, kernels, NATIVE_ATTENTION, capture=True) for kernels in (NATIVE_KERNELS, PIECES)
    )
    np.testing.assert_array_equal(bits(pool), bits(stored))
    for (hidden, ids), (other, own) in zip(outs, others, strict=True):
        np.testing.assert_array_equal(bits(other), bits(hidden))
        np.testing.assert_array_equal(own, ids)
