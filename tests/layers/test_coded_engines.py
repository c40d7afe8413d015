"""Engines whose matrices are codes, on the kernels of a GPU or a TPU for experts, projections and router, interpreted:
they answer as engines with the dequantised numbers by array code, up to the order of sums. Attention is array code in
both."""

import pytest
from flax import nnx

from routed_experts import Engine
from routed_experts.engine.build.backends import BackendEntry, BackendRegistry
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.tpu.backends import tpu_kernels
from support.quantized_families import ENGINE, GPT_OSS, answers, write

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

ORDER_OF_SUMS = 2e-5  # of logprobs
KERNELS = {"gpu": gpu_kernels, "tpu": tpu_kernels}
ARRAY_CODE = dict(moe_backend="tiled", attention_backend="paged", quantization="none")


CODED = {
    "GPT-OSS in mxfp4": (GPT_OSS, None, "uint8", 2),
    "Qwen3-MoE in int4": ("Qwen3-MoE", "int4", "int8", 8),
    "Qwen3-MoE in fp8 blocks": ("Qwen3-MoE", "fp8 blocks", "float8_e4m3fn", 8),
}
IN_EVERY_RUN = (("gpu", "Qwen3-MoE in int4"), ("tpu", "GPT-OSS in mxfp4"))  # each device, and each form of 4 bits


@pytest.mark.parametrize(
    ("device", "family", "form", "dtype", "num_arrays"),
    [
        pytest.param(
            device, *case, id=f"{device}-{name}", marks=() if (device, name) in IN_EVERY_RUN else pytest.mark.thorough
        )
        for device in KERNELS
        for name, case in CODED.items()
    ],
)
def test_an_engine_of_codes_answers_as_one_of_their_numbers(tmp_path, device, family, form, dtype, num_arrays):
    entry = BackendEntry(load=lambda: KERNELS[device](interpret=True))
    kernels = dict(
        registry=BackendRegistry(moe={device: entry}), moe_backend=device, attention_backend="paged", dtype="float32"
    )
    written = write(tmp_path, family, form)
    with Engine(str(written.copy), dtype="float32", **ENGINE | ARRAY_CODE) as engine:
        expected = answers(engine)
    with Engine(str(written.quantized), **ENGINE | kernels) as engine:
        leaves = [leaf for _, leaf in nnx.to_flat_state(engine.components.served.arrays)]
        assert sum(leaf.dtype == dtype for leaf in leaves) >= num_arrays
        own = answers(engine)
    for (tokens, logprobs, rows), (other_tokens, other_logprobs, other_rows) in zip(own, expected, strict=True):
        assert tokens == other_tokens and rows == other_rows
        pairs = zip(logprobs, other_logprobs, strict=True)
        assert max(abs(value - other) for (value, *_), (other, *_) in pairs) < ORDER_OF_SUMS
