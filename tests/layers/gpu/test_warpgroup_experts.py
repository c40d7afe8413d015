"""Experts by warpgroups: rows in tiles against a loop, the products against plain code in JAX's interpreter of Mosaic
GPU kernels, lowered for CUDA, and on a Hopper GPU against the Triton kernels, bit by bit."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax.sharding import PartitionSpec

from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.layers.gpu import expert_rows, linear, warpgroup_numbers
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.gpu.expert_rows import group_rows
from routed_experts.layers.gpu.moe import gpu_experts
from routed_experts.layers.gpu.scaled_rows import scale_rows
from routed_experts.layers.gpu.warpgroup_experts import (
    FEWEST_CODE_ROWS,
    FEWEST_ROWS,
    suits_warpgroups,
    tiled_outputs,
    warpgroup_experts,
)
from routed_experts.layers.gpu.warpgroups import Schedule, Warpgroups, find_warpgroups
from routed_experts.layers.kernels import SharedExperts, SlotOutputs, StreamNorm
from routed_experts.layers.moe import ExpertCall, MoeBackend, reference_experts
from routed_experts.layers.parallel import AxisGroup
from routed_experts.layers.parallel_experts import parallel_moe
from routed_experts.layers.quantized import QuantizedWeight, quantize_blocks
from support.abstract_gpu import hopper_mesh
from support.gpu_cases import distance, random_ids

pytestmark = pytest.mark.usefixtures("fast_compilation", "one_program")

INTERPRETED = Warpgroups(num_programs=2, interpret=InterpretGPUParams())


def make_call(shape, kind="spread", *, dtype=jnp.bfloat16, activation="silu", seed=0) -> ExpertCall:
    """The second of three layers; the others are NaN, and so are the rows of padding."""
    rows, top_k, experts, dim, width = shape
    rng, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), 3)
    valid = rng.random(rows) < (0.7 if kind == "padding" else 2)
    ids = np.where(valid[:, None], random_ids(rng, rows, experts, top_k, kind), 7 * experts)

    @functools.partial(jax.jit, static_argnums=(1, 2))  # one program, not one of each operation
    def stack(key, inputs, outputs):
        layers = jnp.repeat(jnp.array([jnp.nan, 1, jnp.nan], dtype), experts)[:, None, None]
        own = (jax.random.normal(key, (experts, inputs, outputs), dtype) * inputs**-0.5).astype(dtype)
        return layers * jnp.tile(own, (3, 1, 1))

    scale = 1 if activation == "silu" else 5  # reaches the bounds of a clamped activation
    return ExpertCall(
        x=jnp.asarray(np.where(valid[:, None], rng.standard_normal((rows, dim)) * scale, np.nan), dtype),
        ids=jnp.asarray(ids, jnp.int32),
        weights=jnp.asarray(rng.random((rows, top_k)), jnp.float32),
        valid=jnp.asarray(valid),
        gate_up=stack(keys[1], dim, 2 * width),
        down=stack(keys[2], width, dim),
        first_expert=jnp.int32(experts),
        num_experts=experts,
        activation=activation,
    )


def make_coded_call(shape, kind="spread", *, activation="silu", seed=0) -> ExpertCall:
    """The same with codes, in blocks of 128 x 128; those of the other layers are NaN."""
    call, (dim, width) = make_call(shape, kind, activation=activation, seed=seed), shape[3:]

    @functools.partial(jax.jit, static_argnums=1)
    def coded(stack, segments):
        codes, scales = quantize_blocks(
            jnp.nan_to_num(stack), segments=segments, group=128, span=128, outputs_first=True
        )
        others = jnp.isnan(stack[:, :1, :1])
        codes = jnp.where(others, jnp.float8_e4m3fn(jnp.nan), codes)
        return QuantizedWeight.create(codes, scales, outputs_first=True, dtype=jnp.dtype(jnp.bfloat16))

    return dataclasses.replace(call, gate_up=coded(call.gate_up, (width, width)), down=coded(call.down, (dim,)))


def plain(call: ExpertCall) -> jax.Array:
    """By plain code, which multiplies rows of padding too; codes as the float32 that they stand for."""
    x, ids = jnp.where(call.valid[:, None], call.x, 0), jnp.where(call.valid[:, None], call.ids, 0)
    call = dataclasses.replace(call, x=x, ids=ids)
    if isinstance(call.down, QuantizedWeight):
        numbers = {name: jnp.asarray(decoded(vars(call)[name])) for name in ("gate_up", "down")}
        call = dataclasses.replace(call, x=x.astype(jnp.float32), **numbers)
    return jax.jit(reference_experts)(call)


def decoded(weight: QuantizedWeight) -> np.ndarray:
    """Codes times the scale of their block, [R, I, O]."""
    codes, scales = np.asarray(weight.codes, np.float32), np.asarray(weight.scales)
    return codes.transpose(0, 2, 1) * scales.repeat(128, axis=1).repeat(128, axis=2)


def by_warpgroups(call: ExpertCall) -> jax.Array:
    """By interpreted ones."""
    return jax.jit(lambda call: warpgroup_experts(call, INTERPRETED, interpret=True))(call)


def jit_grouped():
    """`group_rows`, traced anew."""
    return jax.jit(
        lambda *args, **options: group_rows(*args, **options, interpret=True), static_argnames=("num_experts", "tile")
    )


grouped = jit_grouped()


@hypothesis.given(
    size=st.sampled_from([(1, 1, 1), (40, 3, 2), (33, 9, 4)]), tile=st.sampled_from([1, 16]), seed=st.integers(0, 2**16)
)
def test_each_row_is_in_a_tile_of_each_of_its_experts(size, tile, seed):
    check_grouped(grouped, size, tile, seed)


@pytest.mark.parametrize("chunk", [8, 32])
def test_slots_of_several_chunks_are_ranked_as_those_of_one(chunk, monkeypatch):
    """66 and 132 slots: the last chunk is not full."""
    monkeypatch.setattr(expert_rows, "_CHUNK", chunk)
    own = jit_grouped()
    for seed, size in enumerate([(33, 3, 2), (33, 9, 4)]):
        check_grouped(own, size, 16, seed)


def check_grouped(grouped, size, tile, seed):
    (rows, experts, top_k), rng = size, np.random.default_rng(seed)
    valid = rng.random(rows) < 0.8
    ids = np.where(valid[:, None], [rng.permutation(experts)[:top_k] for _ in range(rows)], 99)
    x = rng.standard_normal((rows, 5)).astype(np.float32)
    args = (jnp.asarray(x), jnp.asarray(ids, jnp.int32), jnp.asarray(valid))
    values, rows_of_slots, tiles = grouped(*args, num_experts=experts, tile=tile)
    values, rows_of_slots, tile_expert = np.asarray(values), np.asarray(rows_of_slots), np.asarray(tiles.expert)

    next_row, expected = 0, {}  # (token, k) -> row, in order of experts and tokens
    tile_experts = []
    for expert in range(experts):
        slots = [(n, k) for n in range(rows) for k in range(top_k) if valid[n] and ids[n, k] == expert]
        expected |= {slot: next_row + i for i, slot in enumerate(slots)}
        tile_experts += [expert] * -(-len(slots) // tile)
        next_row = len(tile_experts) * tile
    assert tiles.total.tolist() == [len(tile_experts)]
    assert tile_expert[: len(tile_experts)].tolist() == tile_experts and tile_expert.max() < experts
    assert len(values) == len(tile_expert) * tile >= next_row
    for (n, k), row in expected.items():
        assert rows_of_slots[n, k] == row
        np.testing.assert_array_equal(values[row], x[n])


@pytest.mark.parametrize(("blocks", "group", "num_programs"), [(5, 1, 3), (1, 4, 2), (3, 16, 7), (4, 3, 1)])
def test_programs_compute_each_block_once_and_a_group_column_by_column(blocks, group, num_programs):
    most, sizes = 35, dict(columns=64, steps=1, step_inputs=64, stages=1, halves=1, stride=1)
    schedule = Schedule(outputs=64 * blocks, num_programs=num_programs, group=group, **sizes)

    @jax.jit
    def compute(num_tiles):
        indices = jnp.arange(most * blocks)

        def of_program(_):
            return schedule.num_blocks(num_tiles), jax.vmap(lambda index: schedule.block(index, num_tiles))(indices)

        return jax.vmap(of_program, axis_name="program")(jnp.arange(num_programs))

    for num_tiles in (0, 1, group - 1, group, group + 1, most):
        counts, (tiles, columns) = jax.tree.map(np.asarray, compute(jnp.int32(num_tiles)))
        computed = [  # in the order in which programs that are equally fast compute them
            (tiles[program, index], columns[program, index])
            for index in range(most * blocks)
            for program in range(num_programs)
            if index < counts[program]
        ]
        groups = [range(first, min(first + group, num_tiles)) for first in range(0, num_tiles, group)]
        assert computed == [(tile, 64 * block) for own in groups for block in range(blocks) for tile in own]


@pytest.mark.parametrize(
    ("matrix", "expert_rows", "tiles"),
    [
        ((4096, 14336, 2), 4096, 16),  # Mixtral-8x7B: gate and up, and down
        ((14336, 4096, 1), 4096, 16),
        ((4096, 1408, 2), 256, 16),  # GLM-4.5-Air
        ((4096, 1408, 2), 255, 1),
        ((1408, 4096, 1), 1024, 16),
        ((2048, 768, 2), 1024, 1),  # Qwen3-30B-A3B
        ((768, 2048, 1), 1024, 1),
        ((1536, 3072, 1), 1024, 1),  # MiniMax-M2: 9 MiB, and 18
        ((3072, 1536, 2), 1024, 16),
    ],
)
def test_tiles_are_grouped_where_large_matrices_have_several(matrix, expert_rows, tiles):
    inputs, outputs, halves = matrix
    options = dict(halves=halves, stride=1, num_programs=132, expert_rows=expert_rows)
    assert warpgroup_numbers._schedule(inputs, outputs, **options).group == tiles


@pytest.mark.parametrize(
    ("shape", "kind", "activation", "dtype", "group"),
    [
        ((150, 2, 3, 64, 192), "spread", "clamped swiglu", jnp.bfloat16, 1),  # experts of one tile and of two; one step
        ((60, 2, 5, 320, 128), "padding", "silu", jnp.float16, 3),  # more steps than the ring has; groups of 3 and of 2
        ((30, 1, 4, 256, 64), "few experts", "tanh gelu", jnp.bfloat16, 1),  # experts without a row
    ],
)
def test_experts_equal_plain_code(shape, kind, activation, dtype, group, monkeypatch):
    if group > 1:
        monkeypatch.setattr(warpgroup_numbers, "_GROUP_TILES", group)
        monkeypatch.setattr(warpgroup_numbers, "_GROUP_BYTES", 0)
        monkeypatch.setattr(ExpertCall, "expert_rows", 256)
    call = make_call(shape, kind, dtype=dtype, activation=activation)
    actual = by_warpgroups(call)
    assert distance(actual, plain(call)) < 1e-2
    assert not np.asarray(actual)[~np.asarray(call.valid)].any()


@pytest.mark.parametrize(
    ("shape", "kind", "activation"),
    [
        ((70, 2, 3, 256, 128), "padding", "silu"),  # experts of one tile and of two; down has a group a step
        ((20, 1, 3, 128, 256), "few experts", "clamped swiglu"),  # down has two groups a step
        ((80, 1, 1, 256, 128), "padding", "silu"),  # tiles of 72 rows, and of two sets of columns
        ((80, 1, 1, 384, 128), "spread", "silu"),  # an odd number of sets
    ],
)
def test_experts_of_codes_equal_plain_code(shape, kind, activation):
    call = make_coded_call(shape, kind, activation=activation)
    actual = by_warpgroups(call)
    assert distance(actual, plain(call)) < 1e-2
    assert not np.asarray(actual)[~np.asarray(call.valid)].any()


def test_rows_that_are_scaled_are_read_in_place_of_others():
    call = make_coded_call((48, 1, 2, 128, 128), "padding")
    no_numbers = dataclasses.replace(call, x=jnp.full_like(call.x, jnp.nan))
    run = jax.jit(lambda call, scaled: tiled_outputs(call, INTERPRETED, scaled_x=scaled, interpret=True))
    (outputs, rows), (expected, _) = run(no_numbers, scale_rows(call.x, interpret=True)), run(call, None)
    own = np.asarray(rows)[np.asarray(call.valid)]
    np.testing.assert_array_equal(outputs[own].astype(jnp.float32), expected[own].astype(jnp.float32))


@pytest.mark.parametrize("is_coded", [False, True])
def test_slots_of_a_fused_step_are_added_where_they_are(is_coded):
    """The layer's number counts in layers, and slots of padding rows are never read."""
    rows, experts = (48, 2) if is_coded else (2 * FEWEST_ROWS, 2)
    call = (make_coded_call if is_coded else make_call)((rows, 1, experts, 128, 128), "padding")
    fused = gpu_kernels(interpret=True, warpgroups=INTERPRETED).fused_layer
    assert suits_warpgroups(call)
    own = dataclasses.replace(call, first_expert=jnp.int32(1))
    slots, rows_of_slots = jax.jit(lambda call: fused.slots(call, None, None))(own)
    unread = jnp.where(call.valid[:, None], rows_of_slots, 10**6)
    x, norm = jnp.ones_like(call.x), StreamNorm(scales=jnp.ones((3, 128), call.x.dtype), layer=jnp.int32(1), eps=1e-6)
    outputs = SlotOutputs(slots=slots, weights=call.weights, valid=call.valid, inputs=call.x, slot_rows=unread)
    stream, _ = jax.jit(lambda: fused.add_slots(x, outputs, norm))()
    assert distance(stream - x, plain(call)) < 2e-2  # of a sum with 1, in bfloat16


def test_steps_with_shared_experts_are_left_to_the_other_kernels():
    call = dataclasses.replace(make_coded_call((24, 1, 2, 128, 128)), first_expert=jnp.int32(1))
    shared = SharedExperts(gate_up=jnp.ones((3, 128, 256), jnp.bfloat16), down=jnp.ones((3, 128, 128), jnp.bfloat16))
    fused = gpu_kernels(interpret=True, warpgroups=INTERPRETED).fused_layer
    outputs, rows_of_slots = jax.eval_shape(lambda: fused.slots(call, shared, None))
    assert suits_warpgroups(call) and rows_of_slots is None and outputs.shape == (48, 128)


def test_a_projection_of_many_rows_equals_plain_code_and_slices_nothing(monkeypatch):
    monkeypatch.setattr(linear, "FEWEST_NUMBER_ROWS", 256)
    weights = jax.random.normal(jax.random.key(0), (3, 128, 320), jnp.bfloat16).at[0].set(jnp.nan)
    x = jax.random.normal(jax.random.key(1), (256, 128), jnp.bfloat16)

    def project(x, weights=weights, dtype=jnp.bfloat16):
        return linear.linear_in_place(x, weights, jnp.int32(1), dtype, warpgroups=INTERPRETED, interpret=True)

    def by_warpgroups(*args):
        return "barrier_wait" in str(jax.make_jaxpr(project, static_argnums=2)(*args))

    assert by_warpgroups(x, weights, jnp.bfloat16) and "dynamic_slice" not in str(jax.make_jaxpr(project)(x)).split()
    others = {
        "few rows": (x[:128], weights, jnp.bfloat16),
        "half a tile": (jnp.tile(x, (2, 1))[:320], weights, jnp.bfloat16),
        "another result": (x, weights, jnp.float32),
        "a wider matrix": (x, weights.astype(jnp.float32), jnp.bfloat16),
        "half a step": (x[:, :96], weights[:, :96], jnp.bfloat16),
    }
    assert not [name for name, args in others.items() if by_warpgroups(*args)]
    expected = np.asarray(x, np.float64) @ np.asarray(weights[1], np.float64)
    assert distance(project(x), expected) < 3e-3


def test_a_step_without_a_row_has_no_tile_and_ends():
    call = make_call((8, 2, 3, 64, 64))
    nothing = dataclasses.replace(call, valid=jnp.zeros(8, bool))
    *_, tiles = group_rows(call.x, call.ids, nothing.valid, 3, 16, interpret=True)
    assert tiles.total.tolist() == [0]
    assert not np.asarray(by_warpgroups(nothing)).any()


@pytest.mark.parametrize(
    ("shape", "is_coded"),
    [
        pytest.param((16384, 8, 128, 2048, 768), False, marks=pytest.mark.thorough),
        ((4096, 2, 8, 4096, 14336), False),
        ((2048, 4, 32, 2880, 2880), False),
        ((256, 8, 128, 2048, 768), True),
        pytest.param((4096, 8, 128, 2048, 768), True, marks=pytest.mark.thorough),
        ((2048, 8, 256, 7168, 2048), True),
    ],
)
def test_products_of_published_shapes_lower_for_cuda(shape, is_coded):
    """Shared memory suffices: lowering refuses more. Registers are checked on a GPU."""
    rows, top_k, experts, dim, width = shape

    def stack(inputs, outputs):
        if not is_coded:
            return jax.ShapeDtypeStruct((experts, inputs, outputs), jnp.bfloat16)
        codes = jax.ShapeDtypeStruct((experts, outputs, inputs), jnp.float8_e4m3fn)
        scales = jax.ShapeDtypeStruct((experts, inputs // 128, outputs // 128), jnp.float32)
        return QuantizedWeight.create(codes, scales, outputs_first=True, dtype=jnp.dtype(jnp.bfloat16))

    call = ExpertCall(
        x=jax.ShapeDtypeStruct((rows, dim), jnp.bfloat16),
        ids=jax.ShapeDtypeStruct((rows, top_k), jnp.int32),
        weights=jax.ShapeDtypeStruct((rows, top_k), jnp.float32),
        valid=jax.ShapeDtypeStruct((rows,), bool),
        gate_up=stack(dim, 2 * width),
        down=stack(width, dim),
        first_expert=jax.ShapeDtypeStruct((), jnp.int32),
        num_experts=experts,
    )
    assert suits_warpgroups(call)
    run = jax.jit(lambda call: gpu_experts(call, warpgroups=Warpgroups(num_programs=132)))
    with jax.sharding.use_abstract_mesh(hopper_mesh()):
        text = run.trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2


def test_calls_that_do_not_suit_are_left_to_the_other_kernels():
    call, coded = make_call((2 * FEWEST_ROWS, 2, 4, 64, 64)), make_coded_call((2 * FEWEST_CODE_ROWS, 2, 4, 128, 128))
    assert suits_warpgroups(call) and suits_warpgroups(coded)
    fine = QuantizedWeight.create(
        *quantize_blocks(jnp.ones((12, 128, 128)), segments=(128,), group=64, outputs_first=True), outputs_first=True
    )
    few = dict(ids=coded.ids[1:], x=coded.x[1:], valid=coded.valid[1:], weights=coded.weights[1:])
    others = {
        "few rows": make_call((2 * FEWEST_ROWS - 1, 2, 4, 64, 64)),
        "float32": make_call((2 * FEWEST_ROWS, 2, 4, 64, 64), dtype=jnp.float32),
        "a width of half a step": make_call((2 * FEWEST_ROWS, 2, 4, 64, 96)),
        "biases": dataclasses.replace(call, gate_up_bias=jnp.zeros((12, 128)), down_bias=jnp.zeros((12, 64))),
        "few rows of codes": dataclasses.replace(coded, **few),
        "rows of float32 and codes": dataclasses.replace(coded, x=coded.x.astype(jnp.float32)),
        "scales that outputs do not share": dataclasses.replace(coded, down=fine),
        "codes beside numbers": dataclasses.replace(coded, down=jnp.zeros((12, 128, 128), jnp.bfloat16)),
    }
    assert not [name for name, other in others.items() if suits_warpgroups(other)]


def test_calls_of_a_device_count_the_rows_that_are_valid_there():
    """With experts on several devices each has all rows, of which most are padding there."""
    call = make_call((2 * FEWEST_ROWS, 2, 4, 64, 64))
    assert suits_warpgroups(call) and not suits_warpgroups(dataclasses.replace(call, devices=2))


@dataclasses.dataclass(frozen=True)
class Client:
    """What is read of a device's client."""

    platform_version: str = "PJRT C API\ncuda 13000"


@dataclasses.dataclass(frozen=True)
class Device:
    """What is read of a device."""

    platform: str
    compute_capability: str = ""
    core_count: int = 0
    client: Client = Client()


def test_warpgroups_are_those_of_hopper_gpus():
    cpu, hopper, small, blackwell = (
        Device("cpu"),
        Device("gpu", "9.0", 132),
        Device("gpu", "9.0", 114),
        Device("gpu", "10.0", 148),
    )
    assert find_warpgroups() is None and find_warpgroups([cpu]) is None
    assert find_warpgroups([blackwell]) is None and find_warpgroups([hopper, blackwell]) is None
    assert find_warpgroups([cpu, hopper]) == Warpgroups(num_programs=132)
    assert find_warpgroups([hopper, small]) == Warpgroups(num_programs=114)


@pytest.mark.parametrize(
    ("version", "can_mask"),
    [("12070", True), ("12080", False), ("12090", False), ("13000", True)],
)
def test_a_cuda_that_may_compile_masks_wrongly_can_mask_no_attention(version, can_mask):
    device = Device("gpu", "9.0", 132, Client(f"PJRT C API\ncuda {version}"))
    assert find_warpgroups([device]) == Warpgroups(num_programs=132, can_mask=can_mask)


def test_the_kernels_of_a_hopper_gpu_are_given_its_warpgroups(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("gpu", "9.0", 132)])
    expected = {"warpgroups": Warpgroups(num_programs=132), "interpret": False}
    attention = DEFAULT_BACKENDS.attention["gpu"].load.__wrapped__()  # that of this process stays as it is
    assert attention.run.keywords == attention.fused.keywords == attention.run_with_features.keywords == expected
    kernels = DEFAULT_BACKENDS.moe["gpu"].load.__wrapped__()
    assert kernels.moe.run.keywords == kernels.linear.run.keywords == expected


def test_experts_of_several_devices_lower_for_cuda():
    """Each has whole experts, and rows of which most are padding there."""
    group = AxisGroup(axis="x", count=2, expert_parallel=True)
    moe = MoeBackend(name="gpu", run=functools.partial(gpu_experts, warpgroups=Warpgroups(num_programs=132)))
    sizes = [((2048, 512), jnp.bfloat16), ((2048, 4), jnp.int32), ((2048, 4), jnp.float32), ((2048,), bool)]
    sizes += [((16, 512, 512), jnp.bfloat16), ((16, 256, 512), jnp.bfloat16)]

    def run(x, ids, weights, valid, gate_up, down):
        call = ExpertCall(x, ids, weights, valid, gate_up, down, jnp.int32(0), 16)
        return jax.lax.psum(parallel_moe(moe, group).run(call), "x")

    mesh = hopper_mesh(2)
    specs = (*(PartitionSpec(),) * 4, *(PartitionSpec("x"),) * 2)
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = sharded.trace(*(jax.ShapeDtypeStruct(*size) for size in sizes))
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "kind", "activation", "dtype"),
    [
        ((1024, 8, 128, 2048, 768), "spread", "silu", jnp.bfloat16),
        ((4096, 8, 128, 2048, 768), "padding", "silu", jnp.bfloat16),
        ((3000, 4, 32, 2880, 2880), "spread", "clamped swiglu", jnp.bfloat16),
        ((2000, 2, 8, 4096, 14336), "one hot expert", "silu", jnp.bfloat16),
        ((1000, 6, 64, 2048, 1408), "few experts", "tanh gelu", jnp.float16),
        ((700, 8, 16, 320, 192), "padding", "silu", jnp.float16),
    ],
)
def test_bits_are_those_of_the_triton_kernels(shape, kind, activation, dtype):
    call = make_call(shape, kind, dtype=dtype, activation=activation)
    actual, expected = on_this_gpu(call), jax.jit(gpu_experts)(call)
    if activation == "tanh gelu":  # a few numbers in 10,000 are rounded differently
        assert distance(actual, expected) < 1e-4
    else:
        np.testing.assert_array_equal(actual, expected)
    assert np.isfinite(np.asarray(actual, np.float32)).all() and np.asarray(actual).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "kind", "activation"),
    [
        ((256, 8, 128, 2048, 768), "spread", "silu"),  # tiles of 32 rows
        ((4096, 8, 128, 2048, 768), "padding", "silu"),
        ((2000, 8, 16, 7168, 2048), "one hot expert", "silu"),
        ((1000, 6, 64, 2048, 1408), "few experts", "tanh gelu"),  # an odd number of groups
        ((700, 2, 8, 384, 128), "padding", "clamped swiglu"),
    ],
)
def test_codes_equal_the_triton_kernels(shape, kind, activation):
    call = make_coded_call(shape, kind, activation=activation)
    actual, expected = on_this_gpu(call), jax.jit(gpu_experts)(call)
    assert distance(actual, expected) < 1e-3  # sums of groups are rounded in other places
    if shape[0] * shape[3] < 2**20:
        assert distance(actual, plain(call)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(2048, 2048, 5120), (4096, 2880, 576)])
def test_projections_equal_the_library(rows, inputs, outputs):
    weights = jax.random.normal(jax.random.key(0), (3, inputs, outputs), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.bfloat16)
    actual, expected = (
        jax.jit(lambda x, w, own=own: linear.linear_in_place(x, w, jnp.int32(1), x.dtype, warpgroups=own))(x, weights)
        for own in (these_warpgroups(), None)
    )
    assert distance(actual, expected) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("is_coded", [False, True])
def test_fused_steps_equal_those_of_the_triton_kernels(is_coded):
    shape = (256, 8, 128, 2048, 768) if is_coded else (512, 2, 8, 4096, 14336)
    call = (make_coded_call if is_coded else make_call)(shape, "padding")
    call, dim = dataclasses.replace(call, first_expert=jnp.int32(1)), shape[3]
    norm = StreamNorm(scales=jnp.ones((3, dim), call.x.dtype), layer=jnp.int32(1), eps=1e-6)
    inputs = jnp.nan_to_num(call.x)
    assert suits_warpgroups(call)

    def run(call, fused):
        slots, rows = fused.slots(call, None, None)
        outputs = SlotOutputs(slots=slots, weights=call.weights, valid=call.valid, inputs=inputs, slot_rows=rows)
        return fused.add_slots(jnp.zeros_like(inputs), outputs, norm)[0]

    bundles = (gpu_kernels(interpret=False, warpgroups=own) for own in (these_warpgroups(), None))
    actual, expected = (jax.jit(functools.partial(run, fused=own.fused_layer))(call) for own in bundles)
    assert distance(actual, expected) < (1e-3 if is_coded else 1e-30)


def on_this_gpu(call: ExpertCall) -> jax.Array:
    """By warpgroups."""
    assert suits_warpgroups(call)
    return jax.jit(lambda call: gpu_experts(call, warpgroups=these_warpgroups()))(call)


def these_warpgroups() -> Warpgroups:
    """Those of the GPU, which must have some."""
    warpgroups = find_warpgroups()
    assert warpgroups is not None, "this GPU has no Hopper instructions; deselect this test on it"
    return warpgroups
