"""Experts on the host beside an NVIDIA GPU: the tests of the queue, of the step and of the engine that judge values,
with a GPU as the default device.

    scripts/test --gpu tests/engine/test_expert_offload_gpu.py"""

import jax
import numpy as np
import pytest

from engine.test_expert_offload import (
    engine,
    folder,
    host_queue,
    test_a_long_step_streams_the_hosts_experts,
    test_deferral_changes_decode_steps_alone_and_is_reported,
    test_in_turn_the_numbers_are_the_same,
    test_residents_change_between_streaming_steps,
    test_scores_are_those_of_an_undivided_engine,
    undivided,
)
from engine.test_offload_two_devices import ask, assert_same
from execution.test_offload_step import (
    test_a_step_with_experts_on_the_host_is_the_step,
    test_deferred_experts_are_added_one_moe_layer_later,
    test_prompts_are_not_deferred,
)
from layers.test_host_expert_queue import (
    test_a_deferred_job_is_awaited_a_layer_later,
    test_a_job_gives_the_loops_sums,
    test_copies_of_weights_are_those_of_the_store,
    test_jobs_in_a_scan_are_those_of_its_layers,
    test_other_stores_are_run_from_the_next_job_on,
    test_serial_jobs_give_the_same_numbers,
    test_the_host_works_while_the_program_runs_on,
)

pytestmark = pytest.mark.gpu

__all__ = [
    "engine",
    "folder",
    "test_a_deferred_job_is_awaited_a_layer_later",
    "test_a_job_gives_the_loops_sums",
    "test_a_long_step_streams_the_hosts_experts",
    "test_a_step_with_experts_on_the_host_is_the_step",
    "test_copies_of_weights_are_those_of_the_store",
    "test_deferral_changes_decode_steps_alone_and_is_reported",
    "test_deferred_experts_are_added_one_moe_layer_later",
    "test_in_turn_the_numbers_are_the_same",
    "test_jobs_in_a_scan_are_those_of_its_layers",
    "test_other_stores_are_run_from_the_next_job_on",
    "test_prompts_are_not_deferred",
    "test_residents_change_between_streaming_steps",
    "test_scores_are_those_of_an_undivided_engine",
    "test_serial_jobs_give_the_same_numbers",
    "test_the_host_works_while_the_program_runs_on",
    "undivided",
]


@pytest.fixture(autouse=True, scope="module")
def full_precision():
    """A GPU multiplies float32 as float32, in the threads that compile too."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.mark.parametrize("callbacks", [False, True])
def test_both_ways_to_signal_give_the_same_answers(engine, undivided, callbacks):
    host_queue(engine).set_signals(callbacks=callbacks)
    engine.flush_cache()
    assert_same(ask(engine), undivided)
    assert host_queue(engine).stats().uses_callbacks == callbacks, "this driver refuses words in memory"


def test_experts_on_the_host_are_not_on_the_gpu(engine):
    runner = engine.components.core.runner
    stores, tables = (jax.tree.leaves([*parts.values()]) for parts in (runner.model.host, runner.tables))
    assert {device.platform for leaf in stores for device in leaf.devices()} == {"cpu"}
    assert {device.platform for leaf in tables for device in leaf.devices()} == {"gpu"}
    assert sum(leaf.nbytes for leaf in tables) * 3 == sum(leaf.nbytes for leaf in stores)  # two of six experts
    assert np.isfinite(np.asarray(tables[0])).all()
