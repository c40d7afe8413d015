"""Products with codes by warpgroups and their plans: in JAX's interpreter of Mosaic GPU kernels against float64,
lowered for CUDA, and on a Hopper GPU against the Triton kernels."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from routed_experts.layers.gpu import code_plans, linear
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.gpu.code_plans import CodesPlan, plan_down, plan_gate_up, plan_matrix
from routed_experts.layers.gpu.linear import FEWEST_CODE_ROWS, partial_sums
from routed_experts.layers.gpu.scaled_rows import ScaledRows, scale_rows, scale_rows_at
from routed_experts.layers.gpu.warpgroup_codes import _schedule, has_code_blocks, multiply_codes
from routed_experts.layers.gpu.warpgroups import Warpgroups, find_warpgroups
from routed_experts.layers.quantized import QuantizedWeight, quantize_blocks
from support.abstract_gpu import hopper_mesh
from support.gpu_cases import distance

pytestmark = pytest.mark.usefixtures("fast_compilation", "one_program")

INTERPRETED = Warpgroups(num_programs=2, interpret=InterpretGPUParams())
HALF = jnp.bfloat16


def random_codes(inputs, outputs, *, stack=3) -> QuantizedWeight:
    """Of which all but the second are NaN. Blocks have scales of several magnitudes."""
    powers = 2.0 ** np.random.default_rng(inputs + outputs).integers(-4, 5, (inputs // 128, outputs // 128))
    blocks = jnp.asarray(powers.repeat(128, axis=0).repeat(128, axis=1), HALF)
    numbers = jax.random.normal(jax.random.key(0), (stack, inputs, outputs), HALF) * blocks
    codes, scales = quantize_blocks(numbers, segments=(outputs,), group=128, span=128, outputs_first=True)
    codes = jnp.where(jnp.arange(stack)[:, None, None] == 1, codes, jnp.float8_e4m3fn(jnp.nan))
    return QuantizedWeight.create(codes, scales, outputs_first=True, dtype=jnp.dtype(HALF))


def second(weights) -> np.ndarray:
    """Codes times the scale of their block, of the second matrix, [I, O]."""
    codes, scales = np.asarray(weights.codes[1], np.float64), np.asarray(weights.scales[1], np.float64)
    return codes.T * scales.repeat(128, axis=0).repeat(128, axis=1)


def uneven_rows(num_rows, inputs) -> jax.Array:
    """Rows, and groups of their inputs, of all magnitudes."""
    rng = np.random.default_rng(num_rows)
    powers = 2.0 ** rng.integers(-20, 20, (num_rows, 1)) * 2.0 ** rng.integers(-6, 6, (num_rows, inputs // 128))
    return jnp.asarray(rng.standard_normal((num_rows, inputs)) * powers.repeat(128, axis=1), HALF)


def scaled(x, part=None, *, interpret=True) -> ScaledRows:
    """The rows, whole or in parts."""
    if part is None:
        return scale_rows(x, interpret=interpret)
    rows = scale_rows(x.reshape(-1, part), interpret=interpret)
    return ScaledRows(rows.values.reshape(x.shape), rows.inverse.reshape(x.shape[0], -1).T)


def relative_error(actual, x, weights) -> float:
    """The largest, of what the absolute products add up to."""
    rows, matrix = np.asarray(x, np.float64), second(weights)
    return float(np.max(np.abs(np.asarray(actual, np.float64) - rows @ matrix) / (np.abs(rows) @ np.abs(matrix))))


@pytest.mark.parametrize("part", [None, 128])
@pytest.mark.parametrize(
    ("num_rows", "inputs", "outputs", "plan"),
    [
        (16, 512, 128, CodesPlan(tile=16, groups=2, splits=2)),
        (72, 512, 256, CodesPlan(tile=32)),  # the last two tiles share rows
        (72, 256, 512, CodesPlan(tile=64, sets=2, splits=2)),
        (88, 768, 128, CodesPlan(tile=88, groups=2)),  # rows that are no multiple of what a copy is aligned to
        (24, 128, 256, CodesPlan(tile=8, sets=2)),  # one step
        (40, 1024, 128, CodesPlan(tile=40, splits=8)),
    ],
)
def test_sums_of_any_plan_are_those_of_float64(num_rows, inputs, outputs, plan, part):
    x, weights = uneven_rows(num_rows, inputs), random_codes(inputs, outputs)
    run = functools.partial(multiply_codes, warpgroups=INTERPRETED, plan=plan)
    sums = jax.jit(lambda rows, weights: run(rows, weights, jnp.ones(1, jnp.int32), None, None, jnp.float32))(
        scaled(x, part), weights
    )
    parts = np.asarray(sums, np.float64).reshape(plan.splits, num_rows, outputs)
    assert relative_error(parts.sum(axis=0), x, weights) < 1e-6
    depth = inputs // plan.splits
    for split in range(plan.splits):  # each is that of its inputs
        own = slice(split * depth, (split + 1) * depth)
        rows = np.asarray(x, np.float64)[:, own]
        np.testing.assert_allclose(
            parts[split], rows @ second(weights)[own], rtol=1e-4, atol=1e-5 * np.abs(rows).max() * inputs
        )


@pytest.mark.parametrize("dtype", [jnp.float32, HALF])
@pytest.mark.parametrize("num_rows", [64, 72, 128])
def test_a_projection_of_many_rows_equals_plain_code(num_rows, dtype):
    weights, x = random_codes(256, 384), uneven_rows(num_rows, 256)
    project = functools.partial(linear.linear_in_place, warpgroups=INTERPRETED, interpret=True)

    def by_warpgroups(x):
        return "barrier_wait" in str(jax.make_jaxpr(lambda x: project(x, weights, jnp.int32(1), dtype))(x))

    assert by_warpgroups(x) and FEWEST_CODE_ROWS == 64
    assert not any(by_warpgroups(other) for other in (x[:56], x[:63], jnp.tile(x, (2, 1))[:68], x.astype("float32")))
    actual = project(x, weights, jnp.int32(1), dtype)
    assert actual.dtype == dtype and relative_error(actual, x, weights) < (3e-3 if dtype == HALF else 1e-6)


def test_a_fused_product_takes_scaled_rows_whose_parts_are_groups():
    weights, x = random_codes(512, 128), uneven_rows(64, 512)
    product = gpu_kernels(interpret=True, warpgroups=INTERPRETED).fused_layer.product

    def by_warpgroups(rows):
        return "barrier_wait" in str(jax.make_jaxpr(lambda rows: product(rows, weights, jnp.int32(1)))(rows))

    for rows in (x, scaled(x), scaled(x, 128)):
        assert by_warpgroups(rows)
        parts = jax.jit(product)(rows, weights, jnp.int32(1))
        assert parts.shape[0] > 1 and relative_error(parts.sum(axis=0), x, weights) < 1e-6
    assert not by_warpgroups(scaled(x, 64))
    others = jax.jit(product)(scaled(x, 64), weights, jnp.int32(1))
    sums = jax.jit(functools.partial(partial_sums, interpret=True))(scaled(x, 64), weights, jnp.int32(1))
    assert sums.dtype == jnp.float32 and relative_error(sums.sum(axis=0), x, weights) < 1e-6
    assert others.shape[0] == 1, "one part, which is rounded"
    np.testing.assert_array_equal(others, sums.astype(jnp.bfloat16))


@pytest.mark.parametrize(("num_rows", "top_k", "dim"), [(40, 3, 200), (7, 1, 64)])
def test_rows_are_scaled_where_they_are(num_rows, top_k, dim):
    """Those of valid slots are the rows that `scale_rows` makes, bitwise."""
    rng = np.random.default_rng(0)
    slots = num_rows * top_k
    at, valid = rng.permutation(slots + 30)[:slots].reshape(num_rows, top_k), rng.random(num_rows) < 0.7
    x = uneven_rows(slots + 30, 256)[:, :dim]
    own, others = at[valid].reshape(-1), at[~valid].reshape(-1)
    run = jax.jit(lambda x, at, valid: scale_rows_at(x, at, valid, interpret=True))
    actual, expected = run(x, jnp.asarray(at, jnp.int32), jnp.asarray(valid)), scaled(x)
    np.testing.assert_array_equal(np.asarray(actual.values)[own], np.asarray(expected.values)[own])
    np.testing.assert_array_equal(np.asarray(actual.inverse)[:, own], np.asarray(expected.inverse)[:, own])
    assert len(others) and np.isnan(np.asarray(actual.values)[others]).all(), "rows of padding are not written"


def end_of_last(plan, us_a_group, num_rows, inputs, outputs, num_programs) -> float:
    """Blocks one by one, each to the program that ends first; and sums in parts, to be written and read."""
    ends = [0.0] * num_programs
    for _ in range(-(-num_rows // plan.tile) * (outputs // 128) * plan.splits):
        first = ends.index(min(ends))
        ends[first] += inputs // plan.splits // 128 * us_a_group
    parts = plan.splits * num_rows * outputs * code_plans._PART_US if plan.splits > 1 else 0
    return max(ends) + parts


def test_parts_of_sums_are_float32_and_a_whole_sum_is_of_the_dtype():
    weights, x = random_codes(512, 128), uneven_rows(64, 512)
    for warpgroups in (INTERPRETED, None):
        run = functools.partial(partial_sums, dtype=HALF, warpgroups=warpgroups, interpret=True)
        parts = jax.eval_shape(lambda x, run=run: run(x, weights, 1), x)
        assert parts.dtype == (jnp.float32 if parts.shape[0] > 1 else HALF)
    whole = jax.eval_shape(lambda x: partial_sums(x, random_codes(128, 128), 1, dtype=HALF, interpret=True), x[:, :128])
    assert whole.shape[0] == 1 and whole.dtype == HALF


def test_scales_of_single_outputs_and_tiles_by_name_are_left_to_the_other_kernel():
    fine = quantize_blocks(jnp.ones((3, 256, 128)), segments=(128,), group=128, outputs_first=True)
    weights, x = QuantizedWeight.create(*fine, outputs_first=True), uneven_rows(64, 256)
    assert not has_code_blocks(weights) and has_code_blocks(random_codes(256, 128))
    run = functools.partial(partial_sums, warpgroups=INTERPRETED, interpret=True)
    tile = linear.tile_for(64, random_codes(256, 128))
    jaxpr = jax.make_jaxpr(lambda x: run(x, random_codes(256, 128), 1, tile=tile))(x)
    assert "barrier_wait" not in str(jaxpr)


@pytest.mark.parametrize(
    ("num_rows", "inputs", "outputs", "plan"),
    [
        (64, 2048, 5120, CodesPlan(tile=64, groups=2, splits=2)),
        (64, 4096, 2048, CodesPlan(tile=64, groups=2, splits=8)),
        (256, 2048, 5120, CodesPlan(tile=88, groups=2)),
        (256, 4096, 2048, CodesPlan(tile=64, groups=2, splits=2)),
        (8192, 2048, 5120, CodesPlan(tile=128)),
    ],
)
def test_plans_of_measured_shapes_are_those_that_were_measured_best(num_rows, inputs, outputs, plan):
    assert plan_matrix(num_rows, inputs, outputs, 132) == plan


def test_plans_of_experts_are_those_that_were_measured_best():
    for rows, tile in ((16, 32), (32, 64), (64, 72), (256, 72)):
        assert plan_gate_up(rows, 2048).tile == plan_down(rows, 768, 2048).tile == tile
    assert plan_gate_up(16, 2048).groups == plan_down(16, 768, 2048).groups == plan_down(64, 768, 2048).sets == 2
    assert plan_down(64, 768, 384).sets == 1


@hypothesis.given(
    num_rows=st.integers(8, 120).map(lambda eighths: 8 * eighths),
    inputs=st.integers(1, 24).map(lambda groups: 128 * groups),
    outputs=st.integers(1, 12).map(lambda columns: 128 * columns),
    num_programs=st.integers(1, 40),
)
def test_the_plan_of_a_matrix_is_that_whose_last_program_ends_first(num_rows, inputs, outputs, num_programs):
    chosen = plan_matrix(num_rows, inputs, outputs, num_programs)
    cost = {tile: us for tile, _, us in code_plans._TILES}
    others = [
        CodesPlan(tile=tile, splits=splits)
        for tile in cost
        for splits in (1, 2, 4, 8)
        if tile <= num_rows and inputs % (splits * 128) == 0
    ]
    ends = [end_of_last(plan, cost[plan.tile], num_rows, inputs, outputs, num_programs) for plan in [chosen, *others]]
    assert ends[0] <= min(ends[1:]) + 1e-9
    assert inputs % (chosen.splits * chosen.groups * 128) == 0 and chosen.sets == 1


@hypothesis.given(
    expert_rows=st.floats(1, 5000), inputs=st.integers(1, 60), outputs=st.integers(1, 60), num_rows=st.integers(8, 300)
)
def test_all_plans_have_room_for_two_stages(expert_rows, inputs, outputs, num_rows):
    """One that has not would wait for itself; `_schedule` refuses it."""
    inputs, outputs = 128 * inputs, 128 * outputs
    first, down = plan_gate_up(expert_rows, inputs), plan_down(expert_rows, inputs, outputs)
    assert first.tile == down.tile and first.sets == 2 and outputs % (down.sets * 128) == 0
    options = dict(stride=1, num_programs=132)
    _schedule(inputs, outputs, first, activated=True, result_bytes=2, **options)
    schedule = _schedule(inputs, outputs, down, activated=False, result_bytes=2, **options)
    assert schedule.column_blocks * schedule.columns == outputs
    plan = plan_matrix(8 * num_rows, inputs, outputs, 132)
    _schedule(inputs, outputs, plan, activated=False, result_bytes=4, **options)


def test_a_plan_without_room_for_two_stages_is_refused():
    with pytest.raises(AssertionError, match="emptied once the next one is filled"):
        _schedule(
            2048,
            768,
            CodesPlan(tile=64, sets=2, groups=4),
            activated=True,
            result_bytes=2,
            stride=1,
            num_programs=132,
        )


@pytest.mark.parametrize(("num_rows", "part"), [(64, 128), (256, 128), (256, None), (8192, None)])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 5120), (4096, 2048), (7168, 2048)])
def test_products_of_published_shapes_lower_for_cuda(num_rows, part, inputs, outputs):
    """Shared memory suffices: lowering refuses more. Registers are checked on a GPU."""
    codes = jax.ShapeDtypeStruct((4, outputs, inputs), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((4, inputs // 128, outputs // 128), jnp.float32)
    weights = QuantizedWeight.create(codes, scales, outputs_first=True, dtype=jnp.dtype(HALF))
    values = jax.ShapeDtypeStruct((num_rows, inputs), jnp.float16)
    rows = ScaledRows(values, jax.ShapeDtypeStruct((inputs // (part or inputs), num_rows), jnp.float32))
    run = jax.jit(lambda rows, weights: partial_sums(rows, weights, 1, warpgroups=Warpgroups(num_programs=132)))
    with jax.sharding.use_abstract_mesh(hopper_mesh()):
        text = run.trace(rows, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("part", [None, 128])
@pytest.mark.parametrize("num_rows", [64, 72, 128, 256, 384, 512, 1024])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 5120), (4096, 2048), (1152, 640)])
def test_products_equal_the_triton_kernel(num_rows, part, inputs, outputs):
    warpgroups = find_warpgroups()
    assert warpgroups is not None, "this GPU has no Hopper instructions; deselect this test on it"
    weights, rows = random_codes(inputs, outputs), scaled(uneven_rows(num_rows, inputs), part, interpret=False)
    actual, expected = (
        jax.jit(lambda rows, weights, own=own: partial_sums(rows, weights, 1, warpgroups=own).sum(axis=0))(
            rows, weights
        )
        for own in (warpgroups, None)
    )
    assert np.asarray(expected).any() and distance(actual, expected) < 1e-5
