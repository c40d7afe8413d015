"""Programs of verify steps through the real TPU compiler: the pool is updated in place, temporaries are bounded, and
capture adds nothing to a layer."""

import dataclasses

import pytest

from routed_experts.core.model_worker_batch import ForwardMode, SamplingMode
from support.tpu_aot import assert_in_place
from support.tpu_programs import SMALL, compiled, jobs, operations, program_name, whole_pool_operations

pytestmark = pytest.mark.tpu_aot

DECODE, _ = SMALL.runner.shapes
DRAFTS, MIB = 3, 1 << 20
SHAPE = dataclasses.replace(DECODE, mode=ForwardMode.TARGET_VERIFY, num_tokens=DECODE.num_requests * (DRAFTS + 1))
WORLD = dataclasses.replace(SMALL, runner=dataclasses.replace(SMALL.runner, shapes=(SHAPE,)), num_drafts=DRAFTS)
FORWARD = "forward target_verify"
SCORES = SHAPE.num_tokens * SMALL.runner.vocab_size * 4  # bytes of one array of scores


def test_the_table_has_a_forward_pass_and_a_sampler_of_each_mode():
    names = {program_name(key) for key in jobs("v5e", capture=True, world=WORLD)}
    assert names == {
        FORWARD,
        "count target_verify",
        *(f"accept target_verify {mode.name.lower()}" for mode in SamplingMode),
        "locate target_verify",
        "advance target_verify",
    }


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)])
def test_a_step_ahead_is_located_by_a_small_program_and_positions_are_updated_in_place(chip):
    locate, advance = (
        compiled(chip, f"{name} target_verify", capture=True, world=WORLD) for name in ("locate", "advance")
    )
    assert advance.memory_analysis().alias_size_in_bytes >= 4 * WORLD.runner.num_request_slots
    assert locate.memory_analysis().temp_size_in_bytes < MIB


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.thorough)])
def test_the_kv_pool_is_updated_in_place(chip):
    program = compiled(chip, FORWARD, capture=True, world=WORLD)
    assert_in_place(program, WORLD.pool, max_temp_bytes=4 * MIB)
    assert whole_pool_operations(program, WORLD.pool) == []


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_temporaries_of_the_sampler_are_a_few_arrays_of_scores(mode):
    name = f"accept target_verify {mode.name.lower()}"
    temp = compiled("v5e", name, capture=True, world=WORLD).memory_analysis().temp_size_in_bytes
    assert temp <= 4 * SCORES, f"{name}: {temp} bytes, {temp / SCORES:.1f} arrays of scores"


def test_capture_adds_no_operation_to_a_layer():
    on, off = (operations(compiled("v5e", FORWARD, capture=capture, world=WORLD)) for capture in (True, False))
    assert on.in_loops == off.in_loops
    assert on.once - off.once <= 4
