"""Steps that verify drafts, on the kernels of a GPU: rows are what the kernels were given, and answers are those of
steps without drafts.

Rows of such steps leave in the table of their tokens there (`ProgramSpec.piggyback_modes`), joined or ahead of the
host."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from oracles.drafters import EveryDraft, OracleDrafter
from oracles.driver import assert_all_faithful, request
from oracles.schedules import EVENTS, ScheduleSetup, run_event, run_schedule
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.engine.loop.speculation import DraftLimits, Speculation
from routed_experts.speculation.cost_table import CostTable
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter
from support.gpu_replay import LARGE, VOCAB_SIZE, gpu_bench, random_model

pytestmark = pytest.mark.gpu

NUM_DRAFTS, NEW = 3, 40
NUM_SCHEDULES = 10


def speculation(drafter):
    limits = DraftLimits(num_drafts=NUM_DRAFTS, vocab_size=VOCAB_SIZE)
    return Speculation(drafter, EveryDraft(NUM_DRAFTS), limits, costs=CostTable())


class DraftingBench:
    """A bench whose drives draft by n-grams."""

    def __init__(self, bench):
        self.args, self._bench, self._speculations = bench.args, bench, []

    def drive(self, **options):
        self._speculations.append(speculation(TextDrafter(CopyRule())))
        return self._bench.drive(speculation=self._speculations[-1], **options)

    @property
    def num_verified(self):
        """Drafts that steps of all drives verified."""
        return sum(own.totals.requests.proposed for own in self._speculations)


@pytest.fixture(scope="module")
def setup():
    sizes = dataclasses.replace(next(iter(LARGE.values())), requests=8, tokens=32)
    states = [nnx.split(random_model(sizes, seed))[1] for seed in (1, 2)]
    bench = gpu_bench(random_model(sizes), sizes, probed=True, context=96, num_draft_tokens=NUM_DRAFTS + 1)
    return ScheduleSetup(bench, VOCAB_SIZE, lambda index: states[index % 2])


def requests(setup):
    """Greedy and sampled requests in turn."""
    rng = np.random.default_rng(3)
    prompts = [setup.prompt(rng, length) for length in (5, 17, 30, 1, 12, 26, 9, 21)]
    how = [dict(temperature=float(index % 2), seed=index, include_last=index % 3 == 0) for index in range(len(prompts))]
    return [request(f"r{index}", prompt, NEW, **how[index]) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def answers(setup):
    """By request id: its prompt and its tokens, without drafts."""
    drive = setup.bench.drive()
    drive.run(*requests(setup), check=False)
    assert assert_all_faithful(drive) > 0
    return {rid: (req.tokens[: req.prompt_len].tolist(), drive.outputs[rid].tokens) for rid, req in drive.reqs.items()}


@pytest.mark.parametrize("is_joined", [False, True], ids=["ahead", "joined"])
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_rows_of_drafts_are_what_the_kernels_were_given(setup, answers, alpha, is_joined, monkeypatch):
    drafting = speculation(OracleDrafter(answers, alpha, vocab_size=VOCAB_SIZE))
    drive = setup.bench.drive(speculation=drafting)
    if is_joined:
        monkeypatch.setattr(drive.core.ranks[0], "schedule_ahead", lambda *_: None)
    drive.run(*requests(setup), check=False)
    assert assert_all_faithful(drive) > 0
    assert {rid: output.tokens for rid, output in drive.outputs.items()} == {
        rid: tokens for rid, (_, tokens) in answers.items()
    }
    totals, verify = drafting.totals.requests, ForwardMode.TARGET_VERIFY
    assert totals.proposed > 0 and (totals.accepted > 0) == (alpha > 0)
    assert any(batch.mode is verify and batch.is_ahead for batch, _ in drive.log.forwards) is not is_joined


@pytest.mark.parametrize("event", EVENTS)
def test_rows_of_every_event_with_drafts(setup, event):
    bench = DraftingBench(setup.bench)
    assert run_event(dataclasses.replace(setup, bench=bench), event) > 0
    assert bench.num_verified > 0


def test_rows_of_random_schedules_with_drafts(setup):
    """Of all together, as answers are short: some schedules have no draft."""
    bench = DraftingBench(setup.bench)
    for seed in range(NUM_SCHEDULES):
        assert run_schedule(dataclasses.replace(setup, bench=bench), seed) > 0
    assert bench.num_verified > 0
