"""Products with codes and scales at the shapes of published models, through the real TPU compiler: weights are read
where they lie, a byte or half of one each and their scales, and nothing makes numbers of them in memory. Values:
test_experts.py and test_linear.py, interpreted.

Scales lie in the order of their dimensions: by itself the compiler puts matrices before groups where the groups are no
whole tile of 8 rows."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from routed_experts.layers.moe import ExpertCall
from routed_experts.layers.quantized import CODE_DTYPES, E2M1, E4M3, INT4, QuantizedWeight
from routed_experts.layers.tpu.backends import TPU_KERNELS
from routed_experts.layers.tpu.experts import fused_experts
from routed_experts.layers.tpu.linear import layered_linear
from support.tpu_aot import REPLICATED, compile_tpu, tpu_mesh, without_compilation_cache
from support.tpu_programs import whole_pool_operations

pytestmark = pytest.mark.tpu_aot

MIB = 1 << 20
S = jax.ShapeDtypeStruct
QWEN3 = (128, 8, 2048, 768)  # E, K, D, F of Qwen3-30B-A3B
GPT_OSS = (32, 4, 2880, 2880)
KIMI_K2 = (32, 8, 7168, 2048)  # of 384 experts those of one of 12 devices


def compile_in_order(chip, fn, *args):
    """Compile for one chip, with every argument in the order of its dimensions."""
    sharding = NamedSharding(tpu_mesh(chip), REPLICATED)

    def in_order(leaf):
        return S(leaf.shape, leaf.dtype, sharding=Format(Layout(tuple(range(len(leaf.shape)))), sharding))

    with jax.sharding.use_abstract_mesh(tpu_mesh(chip).abstract_mesh), without_compilation_cache():
        return jax.jit(fn).lower(*jax.tree.map(in_order, args)).compile()


def codes_of(stack, inputs, outputs, group, form=E4M3):
    scales = S((stack, math.ceil(inputs / group), outputs), jnp.float32)
    rows = inputs if form == E4M3 else inputs // 2
    return QuantizedWeight(codes=S((stack, rows, outputs), CODE_DTYPES[form]), scales=scales, group=group, format=form)


def bytes_of(weight):
    """Of one matrix, with its scales in whole tiles of 8 rows, and codes of 4 bits in those of 32."""
    _, inputs, outputs = weight.shape
    rows = inputs if weight.format == E4M3 else 32 * math.ceil(inputs / 64)
    return outputs * (rows + 4 * 8 * math.ceil(inputs / weight.group / 8))


def compile_experts(chip, num_tokens, shape, group, *, layers, biased=False, form=E4M3):
    experts, top_k, dim, width = shape
    stack, half = layers * experts, jnp.bfloat16
    arrays = {
        "x": S((num_tokens, dim), half),
        "ids": S((num_tokens, top_k), jnp.int32),
        "weights": S((num_tokens, top_k), jnp.float32),
        "valid": S((num_tokens,), jnp.bool_),
        "gate_up": codes_of(stack, dim, 2 * width, group, form),
        "down": codes_of(stack, width, dim, group, form),
        "first_expert": S((), jnp.int32),
    }
    if biased:
        arrays |= {"gate_up_bias": S((stack, 2 * width), half), "down_bias": S((stack, dim), half)}
    activation = "clamped swiglu" if biased else "silu"

    def run(arrays):
        return fused_experts(ExpertCall(**arrays, num_experts=experts, activation=activation))

    program = compile_in_order(chip, run, arrays)
    visited = min(num_tokens * top_k, experts) * (bytes_of(arrays["gate_up"]) + bytes_of(arrays["down"]))
    return program, visited


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("chip", "num_tokens", "shape", "group"),
    [
        thorough("v5e", 1, QWEN3, 128),
        ("v5e", 16, QWEN3, 128),
        thorough("v5e", 64, QWEN3, 128),
        ("v5e", 256, QWEN3, 128),
        *(thorough("v6e", num_tokens, QWEN3, 128) for num_tokens in (1, 16, 64, 256)),
        *(thorough(chip, 64, QWEN3, group) for chip in ("v5e", "v6e") for group in (64, 32, 16)),
        ("v5e", 16, (64, 8, 2048, 576), 64),  # a short group of chunks, and of 9 groups
        thorough("v6e", 16, (64, 8, 2048, 576), 128),  # a short group of inputs
        thorough("v5e", 256, (32, 8, 7168, 2048), 64),
    ],
    ids=str,
)
def test_experts_of_codes_are_read_in_place_a_byte_a_weight(chip, num_tokens, shape, group):
    program, visited = compile_experts(chip, num_tokens, shape, group, layers=2)
    _, _, dim, width = shape
    assert whole_pool_operations(program, S((dim, width), jnp.int8)) == []
    temp, accessed = program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["bytes accessed"]
    assert temp <= MIB < dim * width, temp
    rows = 2 * 2 * num_tokens * dim
    assert visited <= accessed <= visited + rows + 2 * MIB, (visited, accessed)
    print(f"{chip} {num_tokens} rows: {accessed:,.0f} bytes accessed, {visited:,} of weights, {temp:,} temporary")


@pytest.mark.parametrize(
    ("chip", "num_tokens", "group"),
    [
        ("v5e", 16, 128),  # the last group and the last part of down are short
        *(thorough("v5e", num_tokens, group) for num_tokens in (256, 1024) for group in (128, 32)),
        thorough("v6e", 16, 32),
        thorough("v6e", 256, 64),
    ],
)
def test_experts_of_codes_of_gpt_oss_are_cut_and_read_in_place(chip, num_tokens, group):
    program, _ = compile_experts(chip, num_tokens, GPT_OSS, group, layers=3, biased=True)
    temp = program.memory_analysis().temp_size_in_bytes
    assert temp <= 64 * MIB if num_tokens > 256 else MIB, temp
    layer_of_codes = S((32, 2880, 2880), jnp.int8)
    assert whole_pool_operations(program, layer_of_codes) == []


@pytest.mark.parametrize(
    ("chip", "form", "num_tokens", "shape", "layers"),
    [
        ("v5e", E2M1, 16, GPT_OSS, 3),
        *(thorough(chip, E2M1, num_tokens, GPT_OSS, 3) for chip in ("v5e", "v6e") for num_tokens in (1, 64, 256, 1024)),
        thorough("v6e", E2M1, 16, GPT_OSS, 3),
        ("v5e", INT4, 16, KIMI_K2, 2),
        *(thorough(chip, INT4, num_tokens, KIMI_K2, 2) for chip in ("v5e", "v6e") for num_tokens in (1, 64, 256, 1024)),
        thorough("v6e", INT4, 16, KIMI_K2, 2),
        *(thorough(chip, form, 64, QWEN3, 1) for chip in ("v5e", "v6e") for form in (INT4, E2M1)),
        thorough("v5e", INT4, 16, (64, 6, 2048, 1408), 2),
    ],
    ids=str,
)
def test_experts_of_codes_of_4_bits_are_read_in_place_half_a_byte_a_weight(chip, form, num_tokens, shape, layers):
    program, visited = compile_experts(chip, num_tokens, shape, 32, layers=layers, biased=shape is GPT_OSS, form=form)
    experts, top_k, dim, width = shape
    rows = 2 * 2 * num_tokens * dim
    slots = top_k * rows if num_tokens > 256 else 0  # a step of many rows has them sorted, one a slot
    temp, accessed = program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["bytes accessed"]
    assert temp <= MIB + 2 * slots, temp
    codes_of_layer = S((experts, dim, width // 2), jnp.int8)  # a copy of them, or of the numbers of one expert in four
    assert whole_pool_operations(program, codes_of_layer) == []
    if not slots:
        assert temp < dim * width // 2 and whole_pool_operations(program, S((dim, width // 2), jnp.int8)) == []
        assert visited <= accessed <= visited + 2 * rows + 2 * MIB, (visited, accessed)
    print(f"{chip} {num_tokens} rows: {accessed:,.0f} bytes accessed, {visited:,} of weights, {temp:,} temporary")


# Chip, N, R, D, O, group, format
PROJECTIONS = {
    "qkv": ("v5e", 16, 8, 2048, 5120, 128, E4M3),
    "rows in tiles": ("v5e", 512, 8, 2048, 5120, 128, E4M3),
    "short groups": ("v5e", 16, 8, 2880, 5120, 128, E4M3),
    "one layer": ("v5e", 1, 1, 4096, 2048, 128, E4M3),
    "int4": ("v5e", 16, 8, 2048, 5120, 32, INT4),
    "e2m1, the last tile short": ("v5e", 16, 8, 1440, 5120, 32, E2M1),
}
MORE_PROJECTIONS = {
    "v6e": ("v6e", 16, 8, 2048, 5120, 128, E4M3),
    "v6e, many rows and groups": ("v6e", 512, 8, 2048, 5120, 32, E4M3),
    "many groups": ("v5e", 256, 8, 2880, 5120, 16, E4M3),
    "one row": ("v5e", 1, 8, 2048, 5120, 64, E4M3),
    "few columns": ("v5e", 16, 8, 2048, 128, 16, E4M3),
    "v6e, int4, many rows": ("v6e", 512, 8, 2048, 5120, 128, INT4),
    "v6e, e2m1": ("v6e", 16, 8, 2048, 5120, 16, E2M1),
    "int4, the last tile short": ("v5e", 16, 8, 160, 2048, 64, INT4),
    "e2m1, one row": ("v5e", 1, 8, 192, 5120, 32, E2M1),
}


@pytest.mark.parametrize(
    ("chip", "num_tokens", "layers", "inputs", "outputs", "group", "form"),
    [*PROJECTIONS.values(), *(thorough(*values) for values in MORE_PROJECTIONS.values())],
    ids=[*PROJECTIONS, *MORE_PROJECTIONS],
)
def test_projections_by_codes_are_read_in_place(chip, num_tokens, layers, inputs, outputs, group, form):
    x, weight = S((num_tokens, inputs), jnp.bfloat16), codes_of(layers, inputs, outputs, group, form)

    def run(x, weight):
        def layer(x, index):
            mixed = layered_linear(x, weight, index, x.dtype)
            return x + jnp.resize(mixed[:, :128], x.shape), None

        return lax.scan(layer, x, jnp.arange(layers))[0]

    program = compile_in_order(chip, run, x, weight)
    assert whole_pool_operations(program, S((weight.codes.size // layers,), jnp.int8)) == []
    assert program.memory_analysis().temp_size_in_bytes <= num_tokens * max(inputs, outputs) * 4 + MIB
    one = compile_in_order(chip, lambda x, weight: layered_linear(x, weight, 0, x.dtype), x, weight)
    read, rows = bytes_of(weight), 2 * num_tokens * (inputs + outputs)
    accessed = one.cost_analysis()["bytes accessed"]
    assert read <= accessed <= read + 2 * rows + MIB, (read, accessed)
    assert one.memory_analysis().temp_size_in_bytes <= MIB


def test_scales_in_the_compilers_own_order_are_copied():
    """Why they are placed in the order of their dimensions: 23 groups of 48 matrices."""
    x, weight = S((16, 2880), jnp.bfloat16), codes_of(48, 2880, 512, 128)
    own = compile_tpu(lambda x, weight: layered_linear(x, weight, 0, x.dtype), x, weight, mesh=tpu_mesh("v5e"))
    assert whole_pool_operations(own, weight.scales), "the compiler keeps their order now; is ours still needed?"


def test_the_kernels_of_a_tpu_take_codes():
    assert TPU_KERNELS.code_formats == {E4M3, INT4, E2M1} and not TPU_KERNELS.outputs_first
