"""Drafts are verified behind a step that the host has not read (ahead): answers, rows and ends of requests are those
of joined steps, and of an engine without drafts, whatever happens between two steps.

Drafts of a model are on the device: the draft model is the target with noise on its head, which is right often, and
seldom all the way. Drafts of the host are those of an oracle, from a text that begins before the step in flight."""

import contextlib
import functools

import numpy as np
import pytest

from oracles.drafters import EveryDraft, OracleDrafter
from oracles.driver import request
from routed_experts import SpeculativeConfig
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build import draft_model
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.loop.core import PauseMode
from routed_experts.execution.draft_chain import CHAIN_MODES
from routed_experts.speculation.drafter import Draft
from support.fast_compile import fast_compilation
from support.lazy_compile import lazy_compilation
from support.small_qwen3_moe import V, write_target

NUM_DRAFTS = 3
SAMPLING = (
    dict(max_tokens=23),
    dict(max_tokens=40, temperature=1.0),
    dict(max_tokens=17, temperature=0.7, top_k=9, include_last=True),
    dict(max_tokens=31, temperature=1.0, presence_penalty=0.6, frequency_penalty=0.2),
    dict(max_tokens=1),
    dict(max_tokens=30, temperature=1.0, min_tokens=12, stop_token_ids=tuple(range(0, V, 5))),
    dict(max_tokens=2, include_last=True),
    dict(max_tokens=50, temperature=1.0, stop_token_ids=(3, 4), include_last=True),
    dict(max_tokens=20, logit_bias={5: 3.0}, speculative=False),
    dict(max_tokens=26, temperature=1.2, top_p=0.9, min_p=0.02),
)  # one a prompt


def write_models(folder):
    """The folders of the target, and of a draft model with another head."""
    import torch

    model = write_target(folder / "target")
    with torch.no_grad():
        model.lm_head.weight += 0.15 * torch.randn(model.lm_head.weight.shape)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


class Run:
    """An engine's loop, step by step, and what its steps were."""

    def __init__(self, core, *, joined=False):
        self.core, self.runner, self.scheduler = core, core.runner, core.ranks[0]
        self.joined, self.outs, self.calls, self.open = joined, {}, [], {}

    def requests(self):
        rng = np.random.default_rng(7)
        lengths = (5, 17, 9, 30, 3, 12, 8, 21, 14, 6)
        common = rng.integers(0, V, 20)
        made = []
        for index, (length, how) in enumerate(zip(lengths, SAMPLING, strict=True)):
            ids = rng.integers(0, V, length)
            ids[: min(length, 12)] = common[: min(length, 12)] if index % 3 == 0 else ids[: min(length, 12)]
            how = {"seed": index} | how
            made += [request(f"r{index}-{choice}", ids, group=f"r{index}", choice=choice, **how) for choice in range(2)]
        return made

    def step(self, monkeypatch):
        with monkeypatch.context() as patch:
            if self.joined:
                patch.setattr(self.scheduler, "schedule_ahead", lambda *_: None)
            dispatch, read = self.runner.dispatch, self.runner.read
            patch.setattr(
                self.runner, "dispatch", lambda batches: self.note("dispatch", batches[0]) or dispatch(batches)
            )
            patch.setattr(self.runner, "read", lambda step: self.note("read", step.batches[0]) or read(step))
            for out in self.core.step().outs:
                self.file(out)

    def note(self, what, batch):
        self.calls.append((what, batch.step, batch.mode, batch.is_ahead))

    def file(self, out):
        assert out.error is None, (out.rid, out.error)
        if out.finish_reason is not None:
            self.outs[out.rid] = out

    def play(self, monkeypatch, *, every=0, events=lambda run, tick: None):
        """Run all requests to their end; `every` so many steps one more pair arrives, 0: all at once."""
        self.core.resume()  # the run before may have ended in a pause
        self.core.flush_cache()
        waiting = self.requests()
        tick = 0
        while waiting or not self.core.is_idle:
            if waiting and (not every or tick % every == 0):
                count = 2 if every else len(waiting)
                self.core.add(waiting[:count])
                waiting = waiting[count:]
            events(self, tick)
            if self.core.has_work:
                self.step(monkeypatch)
                assert not self.core.check_integrity()
            tick += 1
            assert tick < 2000
        return self.answers()

    def answers(self):
        """What is compared to the last bit."""
        return {
            rid: (
                list(out.new_token_ids),
                out.output_logprobs,
                out.finish_reason,
                None if out.routed_experts is None else out.routed_experts.ids.tolist(),
            )
            for rid, out in self.outs.items()
        }

    @property
    def ahead(self):
        """Steps that were verified ahead."""
        return [step for what, step, _, is_ahead in self.calls if what == "dispatch" and is_ahead]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def args(folder, **options):
    sizes = dict(page_size=8, precompile_bs_paddings=(6,), precompile_token_paddings=(32,), deterministic=True)
    return ServerArgs(model_path=str(folder), enable_return_routed_experts=True, **sizes | options)


@pytest.fixture(
    scope="module",
    params=[
        "plenty of pages",
        pytest.param("no prefixes", marks=pytest.mark.thorough),
        "few pages",
        "programs by mode",
        "drafts of the host",
    ],
)
def served(request, folders):
    """The loop of an engine with drafts, and the answers of one without. The last two run programs that are compiled
    without optimisations."""
    is_fast = request.param in ("few pages", "programs by mode")
    with fast_compilation() if is_fast else contextlib.nullcontext():
        plain = answers_without_drafts(folders[0], is_fast)
        if request.param == "drafts of the host":
            yield text_core(folders[0], plain), plain
        else:
            yield draft_core(request.param, folders), plain


@functools.cache
def answers_without_drafts(folder, is_fast):
    """Of an engine whose programs are compiled as those that it is compared with."""
    with lazy_compilation(), pytest.MonkeyPatch.context() as patch:
        return Run(build_engine(args(folder)).core).play(patch)


def draft_core(name, folders):
    options = {"few pages": dict(max_total_tokens=264), "no prefixes": dict(disable_radix_cache=True)}
    speculative = SpeculativeConfig(
        algorithm="STANDALONE", draft_model_path=str(folders[1]), num_steps=NUM_DRAFTS, adaptive=False
    )
    with lazy_compilation(), pytest.MonkeyPatch.context() as patch:
        if name == "programs by mode":
            patch.setattr(draft_model, "HOST_BRANCHES", ("cpu",))
        core = build_engine(args(folders[0], **options.get(name, {})), speculative=speculative).core
    modes = {key[3] for key in core.runner._programs.jobs if key[0] == "draft" and key[2]}
    assert modes == (set(CHAIN_MODES) if name == "programs by mode" else {None})
    return core


def text_core(folder, plain):
    """An engine whose host drafts with an oracle."""
    speculative = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=NUM_DRAFTS + 1, adaptive=False)
    with lazy_compilation():
        core = build_engine(args(folder), speculative=speculative).core
    prompts = {req.rid: req.source.input_ids.tolist() for req in Run(core).requests()}
    answers = {rid: (prompts[rid], answer[0]) for rid, answer in plain.items()}
    core.speculation._drafter.inner = OracleDrafter(answers, 0.8, vocab_size=V)
    return core


@pytest.fixture(scope="module")
def core(served):
    return served[0]


@pytest.fixture
def is_model(core):
    """Whether a model drafts."""
    return core.speculation._drafter.model is not None


@pytest.fixture(scope="module")
def plain(served):
    return served[1]


def test_steps_ahead_answer_as_joined_steps_and_as_none(core, plain, monkeypatch):
    joined, ahead = Run(core, joined=True), Run(core)
    assert joined.play(monkeypatch) == ahead.play(monkeypatch) == plain
    assert not joined.ahead
    verified = [step for what, step, mode, _ in ahead.calls if what == "dispatch" and mode is ForwardMode.TARGET_VERIFY]
    assert len(ahead.ahead) > len(verified) / 4 > 5
    counts = core.speculation.totals.requests
    assert 0.3 < counts.accepted / counts.proposed < 0.95, "drafts are right, but not all of them"


def test_no_step_ahead_waits_for_the_one_before(core, monkeypatch):
    """A step that is ahead is dispatched before its predecessor is read."""
    run = Run(core)
    run.play(monkeypatch)
    order = {(what, step): index for index, (what, step, *_) in enumerate(run.calls)}
    assert run.ahead
    for step in run.ahead:
        assert order["dispatch", step] < order["read", step - 1]


@pytest.mark.parametrize("every", [3, 11])
def test_arrivals_join_for_a_step_and_change_nothing(core, plain, monkeypatch, every):
    run = Run(core)
    assert run.play(monkeypatch, every=every) == plain
    assert run.ahead


@pytest.mark.parametrize("every", [0, 3])
def test_counts_of_requests_add_up_to_those_of_the_engine_and_nothing_of_them_is_left(
    core, is_model, monkeypatch, every
):
    speculation, totals = core.speculation, core.speculation.totals
    before = totals.requests
    run = Run(core)
    run.play(monkeypatch, every=every)
    assert run.ahead
    for name in ("verify_steps", "proposed", "accepted", "emitted"):
        counted = getattr(totals.requests, name) - getattr(before, name)
        assert counted == sum(getattr(out.speculative, name) for out in run.outs.values()), name
    source = "model" if is_model else "context"
    assert totals.proposed_by == {source: totals.requests.proposed}
    assert totals.accepted_by == {source: totals.requests.accepted}
    if is_model:
        assert not any(speculation._drafter.inner.last_offer(rid)[1].tokens.size for rid in run.outs)
    else:
        assert not speculation._text_ahead._proposed and not speculation._drafter.inner.known


class OnlyTheFirst(EveryDraft):
    """A policy: the first request alone has drafts."""

    def choose(self, survivals, num_requests):
        return [survival.size if index == 0 else 0 for index, survival in enumerate(survivals)]


@pytest.mark.parametrize("served", ["plenty of pages"], indirect=True)
def test_a_request_that_has_no_drafts_in_steps_ahead_is_tried_again_in_time(core, monkeypatch):
    """What was observed of its drafts fades, as in joined steps."""
    speculation, run = core.speculation, Run(core)
    monkeypatch.setattr(speculation, "policy", OnlyTheFirst())
    rests = request("rests", [1, 2, 3], 60)
    core.add([request("drafts", [4, 5, 6], 60), rests])
    claim = Draft(np.zeros(1, np.int32), np.array([0.9]))
    while not run.ahead:
        run.step(monkeypatch)
    for _ in range(30):
        speculation._estimates.survival("rests", claim)
        speculation._estimates.observe("rests", 1, 0)
    before = speculation._estimates._requests["rests"].ratio(0)
    first = rests.num_known
    while rests.num_known < first + 12:
        run.step(monkeypatch)
    assert len(run.ahead) > 10
    assert speculation._estimates._requests["rests"].ratio(0) > before
    while not core.is_idle:
        run.step(monkeypatch)


def retract_one(run, tick):
    if tick % 5 == 4 and len(run.scheduler.running) > 1:
        for out in run.core.drain().outs:
            run.file(out)
        if run.scheduler.running:
            run.core.retract(run.scheduler.running[tick % len(run.scheduler.running)])


def pause_in_turn(run, tick):
    if tick % 9 == 5:
        for out in run.core.drain().outs:
            run.file(out)
        run.core.pause((PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.WAIT)[tick // 9 % 3])
    if tick % 9 == 7:
        run.core.resume()


def flush(run, tick):
    if tick % 6 == 3:
        run.core.flush_cache()


@pytest.mark.parametrize("events", [retract_one, pause_in_turn, flush])
def test_what_happens_between_two_steps_changes_no_answer(core, plain, monkeypatch, events):
    run = Run(core)
    assert run.play(monkeypatch, events=events) == plain
    assert run.ahead


def test_aborted_requests_end_with_a_prefix_and_others_do_not_notice(core, plain, monkeypatch):
    def abort(run, tick):
        running = [req.rid for req in run.scheduler.running]
        if tick % 7 == 6 and running:
            run.core.abort(running[tick % len(running)])

    run = Run(core)
    actual = run.play(monkeypatch, events=abort)
    aborted = [rid for rid, out in run.outs.items() if out.finish_reason.type == "abort"]
    assert run.ahead and len(aborted) > 3 and actual.keys() == plain.keys()
    for rid, answer in actual.items():
        tokens = answer[0]
        assert tokens == plain[rid][0][: len(tokens)]
        assert rid in aborted or answer == plain[rid]


@pytest.mark.parametrize("served", ["drafts of the host"], indirect=True)
def test_a_drafter_that_fails_ahead_costs_its_drafts_alone_and_is_counted_once(core, plain, monkeypatch):
    speculation, run = core.speculation, Run(core)
    oracle, before = speculation._drafter.inner, dict(speculation.totals.skipped)
    with monkeypatch.context() as patch:
        patch.setattr(speculation._drafter, "inner", FailingOnce(oracle, NUM_DRAFTS))
        assert run.play(monkeypatch) == plain
    assert run.ahead
    assert speculation.totals.skipped["drafter_failed"] - before.get("drafter_failed", 0) == 1


@pytest.mark.parametrize("served", ["drafts of the host"], indirect=True)
def test_what_a_step_ahead_took_is_told_without_the_host_work_before_a_joined_one(core, monkeypatch):
    """By a clock that stands still but for that work."""
    speculation, run, timed, clock = core.speculation, Run(core), [], Clock()
    propose, wait_s = speculation.propose, 10.0

    def slow(running):
        clock.now += wait_s
        return propose(running)

    def note(batch, seconds, *, waited_s=None):
        timed.append((batch.is_ahead, seconds, waited_s))

    monkeypatch.setattr("routed_experts.engine.loop.core.time", clock)
    monkeypatch.setattr(core, "last_progress", clock.now)
    monkeypatch.setattr(speculation, "propose", slow)
    monkeypatch.setattr(speculation, "time_step", note)
    monkeypatch.setattr(speculation, "policy", AheadEveryOther())
    run.play(monkeypatch)
    ahead = [seconds for is_ahead, seconds, _ in timed if is_ahead]
    waits = [waited_s for _, _, waited_s in timed if waited_s is not None]
    assert len(ahead) > 5 and wait_s in waits and set(waits) <= {0.0, wait_s}
    assert all(seconds == 0 for seconds in ahead)


class Clock:
    """A clock that others move."""

    def __init__(self):
        self.now = 1e6

    def monotonic(self):
        return self.now


def test_drafts_of_which_a_text_does_not_hold_two_steps_are_never_ahead(folders):
    speculative = SpeculativeConfig(algorithm="NGRAM", num_draft_tokens=17, adaptive=False)
    with lazy_compilation():
        core = build_engine(args(folders[0]), speculative=speculative).core
    running = [request("a", [1, 2, 3, 1, 2, 3], 60)]
    assert core.speculation.choose_ahead(running, {"a": 3}, 1) is None


class FailingOnce:
    """A drafter that fails at its first proposal for a step that is ahead."""

    def __init__(self, drafter, num_drafts):
        self._inner, self._num_drafts, self._count = drafter, num_drafts, 0

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def propose(self, key, most):
        self._count += most > self._num_drafts
        if most > self._num_drafts and self._count == 1:
            raise RuntimeError("no draft today")
        return self._inner.propose(key, most)


class AheadEveryOther(EveryDraft):
    """A policy: steps are ahead and joined in turn."""

    def __init__(self):
        super().__init__()
        self._turn = False

    def choose_ahead(self, survivals, num_requests, *, joined_gain):
        self._turn = not self._turn
        return self.choose(survivals, num_requests) if self._turn else [0] * len(survivals)
