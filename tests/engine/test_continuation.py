"""Abort and continue: prompt and answer so far, sent again, and the records of both merged. Compared with the MoE
probe at the experts.

Every row of the merged record must be the one that its first writer executed, whatever happened between, or marked as
not known; none may be wrong. Schedules are random: arrivals, chunks, prefix hits, n > 1, retraction, flushes, weight
updates."""

import numpy as np
import pytest

from oracles.driver import request
from oracles.schedules import EVENTS, ScheduleSetup, assert_merged, run_event, run_schedule, sequence_tokens
from oracles.testbeds import other_weights, random_prompt, tiny_testbed
from routed_experts import Engine
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.replay.turns import merge_turns
from support.engines import SMALL, PausedRequests
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

NUM_SCHEDULES = 25  # benchmarks/replay.py --schedules 1000 runs more of them


@pytest.fixture(scope="module")
def testbed():
    return tiny_testbed(moe_backend="probed")


def test_an_aborted_rollout_goes_on_where_it_was(testbed):
    """Weights change between: the rows of the first part keep their version, and its last token's row is the second
    part's."""
    drive, prompt = testbed.drive(), random_prompt(np.random.default_rng(1), 21)
    drive.run(request("a", prompt, 30), before_step=lambda step: step == 12 and drive.core.abort("a"))
    part = sequence_tokens(drive, "a")
    assert prompt.size < part.size < prompt.size + 30
    old = drive.core.runner.weight_version
    drive.update_weights(other_weights(3), cache="flush")
    drive.run(request("b", part, 30 - (part.size - prompt.size)))
    whole = sequence_tokens(drive, "b")
    record = merge_turns(
        [(part, drive.outputs["a"].end.routed_experts), (whole, drive.outputs["b"].end.routed_experts)], whole
    )
    assert_merged(drive, ["a", "b"], record, whole)
    assert record.version_spans == ((0, part.size - 1, old), (part.size - 1, whole.size - 1, old + 1))
    assert record.num_prompt_tokens == prompt.size


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_no_row_is_wrong_in_any_schedule(testbed, seed):
    assert run_schedule(ScheduleSetup(testbed.bench, VOCAB_SIZE, other_weights), seed) > 0


@pytest.mark.parametrize("event", EVENTS)
def test_no_row_is_wrong_after_any_event(testbed, event):
    assert run_event(ScheduleSetup(testbed.bench, VOCAB_SIZE, other_weights), event) > 50


def test_a_continued_rollout_equals_an_uninterrupted_one(tmp_path):
    """Through Engine.generate: noise depends on seed and position alone, so the parts join to the whole, tokens and
    rows."""
    folder = write_tiny_checkpoint(tmp_path)
    prompt = np.random.default_rng(8).integers(3, 313, 25).tolist()
    params = {"temperature": 1.0, "seed": 12, "ignore_eos": True}
    options = dict(enable_return_routed_experts=True, deterministic=True, **SMALL)
    with lazy_compilation(), Engine(str(folder), **options) as engine:
        whole = engine.generate(input_ids=prompt, sampling_params=params, max_new_tokens=50, return_routed_experts=True)
        calls = PausedRequests(
            engine, prompt, outputs=9, sampling_params=params, max_new_tokens=50, return_routed_experts=True, rid="part"
        )
        engine.abort("part")
        engine.resume()
        (part,) = calls.results()
        prefix = [*prompt, *part["output_ids"]]
        left = 50 - len(part["output_ids"])
        assert part["meta_info"]["finish_reason"]["type"] == "abort" and left > 0
        start = len(prefix) - 1  # the first row that the first part does not have
        rest = engine.generate(
            input_ids=prefix,
            sampling_params=params,
            max_new_tokens=left,
            return_routed_experts=True,
            routed_experts_start_len=start,
        )
    tokens = [*prefix, *rest["output_ids"]]
    assert tokens == [*prompt, *whole["output_ids"]]
    merged = merge_turns([(prefix, record_from_meta_info(part)), (tokens, record_from_meta_info(rest))], tokens)
    assert merged.num_rows == len(tokens) - 1 and merged == record_from_meta_info(whole)
