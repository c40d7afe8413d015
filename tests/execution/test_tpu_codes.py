"""A run of layers by codes and scales through the real TPU compiler: projections and experts of all layers are read
where they lie, from inside of the loop over layers. Values: tests/layers/tpu/."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.quantized import QuantizedWeight
from routed_experts.layers.tpu.backends import TPU_KERNELS
from support.tpu_aot import REPLICATED, tpu_mesh, without_compilation_cache
from support.tpu_programs import kernels, whole_pool_operations

pytestmark = pytest.mark.tpu_aot

MIB = 1 << 20
LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH, GROUP = 16, 128, 8, 2048, 768, 128  # Qwen3-30B-A3B, but for its 48 layers
QKV, ATTENTION = 5120, 4096


def run_of_layers(x, weights, ids, combine_weights, valid):
    def layer(x, index):
        qkv = TPU_KERNELS.linear.run(x, weights["qkv"], index, x.dtype)
        x = x + TPU_KERNELS.linear.run(qkv[:, :ATTENTION], weights["out"], index, x.dtype)
        call = ExpertCall(
            x=x,
            ids=ids,
            weights=combine_weights,
            valid=valid,
            gate_up=weights["gate_up"],
            down=weights["down"],
            first_expert=index * EXPERTS,
            num_experts=EXPERTS,
        )
        return x + TPU_KERNELS.moe.run(call), None

    return lax.scan(layer, x, jnp.arange(LAYERS))[0]


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("num_tokens", [16, pytest.param(512, marks=pytest.mark.thorough)])
def test_a_run_of_layers_reads_codes_in_place_and_makes_no_numbers_of_them(chip, num_tokens):
    sharding = NamedSharding(tpu_mesh(chip), REPLICATED)

    def array(shape, dtype):
        """In the order of its dimensions."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=Format(Layout(tuple(range(len(shape)))), sharding))

    def codes(stack, inputs, outputs):
        scales = array((stack, inputs // GROUP, outputs), jnp.float32)
        return QuantizedWeight(codes=array((stack, inputs, outputs), jnp.float8_e4m3fn), scales=scales, group=GROUP)

    weights = {
        "qkv": codes(LAYERS, HIDDEN, QKV),
        "out": codes(LAYERS, ATTENTION, HIDDEN),
        "gate_up": codes(LAYERS * EXPERTS, HIDDEN, 2 * WIDTH),
        "down": codes(LAYERS * EXPERTS, WIDTH, HIDDEN),
    }
    rows = array((num_tokens, HIDDEN), jnp.bfloat16), weights, array((num_tokens, TOP_K), jnp.int32)
    with jax.sharding.use_abstract_mesh(tpu_mesh(chip).abstract_mesh), without_compilation_cache():
        lowered = jax.jit(run_of_layers).lower(
            *rows, array((num_tokens, TOP_K), jnp.float32), array((num_tokens,), jnp.bool_)
        )
        program = lowered.compile()
    slots = num_tokens * TOP_K * HIDDEN  # numbers of sorted rows, which a step of many tokens has
    assert whole_pool_operations(program, jax.ShapeDtypeStruct((max(HIDDEN * WIDTH, slots + 1),), jnp.int8)) == []
    temp = program.memory_analysis().temp_size_in_bytes
    assert temp <= MIB < HIDDEN * WIDTH, temp
    assert {"layered_linear": 2, "fused_experts": 1}.items() <= kernels(program).items(), kernels(program)
    print(f"{chip} {num_tokens} rows: {temp:,} temporary bytes")
