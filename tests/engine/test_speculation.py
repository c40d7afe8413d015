"""Speculative decoding changes no token, logprob, row or end of a request: any drafter, draft length and schedule.

The reference is an engine without drafts, each request alone. Drafters: one that knows the answer and is right with
some probability, one that guesses, those that copy text. In deterministic mode everything is equal to the last bit; in
default mode the tokens, and the rows are those of the passes that fed them (the probe)."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from oracles.drafters import Adversary, BrokenDrafter, EveryDraft, OracleDrafter, RandomPolicy
from oracles.driver import CollectedOutput, assert_all_faithful, request
from oracles.testbeds import other_weights, random_prompt, tiny_testbed
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.engine.loop import speculation as speculation_module
from routed_experts.engine.loop.guarded_drafter import MAX_FAILURES
from routed_experts.engine.loop.speculation import DraftLimits, Speculation
from routed_experts.scheduling.schedule_batch import ReqState
from routed_experts.speculation.cost_table import CostTable
from routed_experts.speculation.drafter import DraftSample
from routed_experts.speculation.namespace_texts import NamespaceTexts
from routed_experts.speculation.rollouts import RolloutStore
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash
from support.tiny_checkpoint import VOCAB_SIZE

DRAFTS, NEW = (1, 3, 7), 24
MODES = ("deterministic", "default")
SIZES = dict(page_size=8, context_length=64, precompile_bs_paddings=(16,), precompile_token_paddings=(64,))
SAMPLING = (
    dict(),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=8),
    dict(temperature=1.0, top_p=0.8, presence_penalty=0.5),
    dict(prompt_logprobs_from=0, top_logprobs=3),
    dict(temperature=1.3, min_p=0.05),
    dict(logit_bias={5: 3.0}),
    dict(temperature=1.0, min_tokens=9, stop_token_ids=tuple(range(0, VOCAB_SIZE, 9))),
    dict(frequency_penalty=0.4, repetition_penalty=1.3),
    dict(temperature=1.0, frequency_penalty=-0.8, repetition_penalty=0.7, logit_bias={7: 1.5}),
)  # one a prompt, in turn
MOST_CHOICES = 4
WITH_MOST_CHOICES = (1, 4)  # prompts; the others have two, so that a run stays short
CELLS = [
    dict(batch=batch, chunk=chunk, radix=radix, preempt=preempt, choices=choices)
    for batch, chunk, radix, preempt, choices in (
        (1, None, "off", False, 1),  # hundreds of steps, and the choices of a prompt share nothing
        (2, 7, "on", True, 2),
        (3, 16, "warm", False, 2),
        (8, None, "on", True, MOST_CHOICES),
        (16, 1, "off", True, 1),
        (16, 64, "warm", True, 2),
    )
]


# Every run has the mode that is compared to the last bit, and one case of the other.
MODE_IN_EVERY_RUN = "deterministic"
EACH_MODE = [mode if mode == MODE_IN_EVERY_RUN else pytest.param(mode, marks=pytest.mark.thorough) for mode in MODES]


def by_turns(*grids):
    """A grid of the modes and of `grids`, for scripts/thorough. Every run has, in its mode, each value of one grid; of
    two grids the cases whose indices have an even sum, so that each value occurs."""

    def is_in_every_run(mode, indices):
        return mode == MODE_IN_EVERY_RUN and (len(grids) == 1 or sum(indices) % 2 == 0)

    return [
        pytest.param(mode, *values, marks=[] if is_in_every_run(mode, indices) else pytest.mark.thorough)
        for mode, *case in itertools.product(MODES, *map(enumerate, grids))
        for indices, values in [zip(*case, strict=True)]
    ]


def make_prompts():
    rng = np.random.default_rng(11)
    prompts = [random_prompt(rng, length) for length in (26, 17, 12, 1, 40, 33, 9, 5, 20, 14)]
    prompts[1], prompts[8] = np.tile(prompts[1][:4], 5), np.tile(prompts[8][:3], 6)  # the n-gram drafter finds these
    prompts[5][:26] = prompts[0]  # a common prefix
    return prompts


PROMPTS = make_prompts()


def requests(choices=2, **options):
    return [
        request(f"p{index}c{choice}", prompt, NEW, choice=choice, group=f"p{index}", seed=index, **how, **options)
        for index, (prompt, how) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
        for choice in range(choices if index in WITH_MOST_CHOICES else min(choices, 2))
    ]


@pytest.fixture(scope="module", params=EACH_MODE)
def mode(request):
    return request.param


@pytest.fixture(scope="module")
def testbed(mode):
    """An engine that speculates, and records combine weights."""
    how = {"moe_backend": "probed", "enable_return_routed_experts_weights": True}
    return tiny_testbed(deterministic=mode == "deterministic", num_draft_tokens=8, **how, **SIZES)


@pytest.fixture(scope="module")
def alone(mode):
    return answers_alone(mode)


@functools.cache
def answers_alone(mode):
    """By request id: its tokens, logprobs, prompt logprobs, rows, end and best tokens, from an engine without drafts,
    one request at a time."""
    plain = tiny_testbed(deterministic=mode == "deterministic", moe_backend="probed", **SIZES)
    actual = {}
    for req in requests(MOST_CHOICES):
        drive = plain.drive(max_running_requests=1, disable_radix_cache=True)
        drive.run(req)
        actual |= results(drive)
    return actual


def results(drive):
    return {
        rid: (
            output.tokens,
            output.logprobs,
            output.prompt_logprobs,
            output.end.routed_experts.ids.tolist(),
            output.end.finish_reason,
            output.top,
        )
        for rid, output in drive.outputs.items()
    }


def assert_same(drive, expected, *, bitwise):
    """Tokens and ends are equal; logprobs and rows too, to the last bit or up to rounding."""
    assert_all_faithful(drive)
    for rid, (tokens, logprobs, of_prompt, rows, end, top) in results(drive).items():
        assert (tokens, end) == (expected[rid][0], expected[rid][4]), rid
        if bitwise:
            assert (logprobs, of_prompt, rows, top) == (*expected[rid][1:4], expected[rid][5]), rid
        else:
            np.testing.assert_allclose(logprobs, expected[rid][1], atol=1e-4, rtol=0)
            of_best = [[[value for value, _ in own or ()] for own in best] for best in (top, expected[rid][5])]
            np.testing.assert_allclose(*of_best, atol=1e-4, rtol=0)


def speculation(drafter, policy=None, num_drafts=7):
    limits = DraftLimits(num_drafts=num_drafts, vocab_size=VOCAB_SIZE)
    return Speculation(drafter, policy or EveryDraft(num_drafts), limits, costs=CostTable())


def answers(expected):
    prompts = {req.rid: req.tokens[: req.prompt_len].tolist() for req in requests(MOST_CHOICES)}
    return {rid: (prompts[rid], result[0]) for rid, result in expected.items()}


def make_drafter(name, expected, seed):
    if name == "ngram":
        return TextDrafter(CopyRule())
    if name == "rollouts":
        return make_rollout_drafter(expected, seed)
    sizes = dict(vocab_size=VOCAB_SIZE, seed=seed)
    if name == "adversary":
        return Adversary(answers(expected), 0.0, **sizes)
    return OracleDrafter(answers(expected), float(name.removeprefix("oracle ")), **sizes)


def make_rollout_drafter(expected, seed):
    """SUFFIX with a store of earlier answers: of half of the requests the true one, of the others one with errors."""
    rule, rng = CopyRule(max_window=24, counts=True, max_factor=4.0), np.random.default_rng(seed)
    contexts = context_hash(rule)
    texts = NamespaceTexts(contexts, max_bytes=1 << 24)
    drafter = TextDrafter(rule, store=RolloutStore(max_bytes=1 << 24), texts=texts, contexts=contexts)
    for number, req in enumerate(requests(MOST_CHOICES)):
        prompt, answer = (np.asarray(part, np.int32) for part in answers(expected)[req.rid])
        wrong = rng.random(answer.size) < (0.0 if number % 2 else 0.2)
        answer = np.where(wrong, rng.integers(0, VOCAB_SIZE, answer.size), answer).astype(np.int32)
        sampling = req.source.sampling
        noise = None if sampling.temperature == 0 else (sampling.seed, req.source.choice)
        drafter.remember(prompt, answer, DraftSample(noise=noise))
    return drafter


def run_cell(testbed, cell, drafting):
    drive = testbed.drive(
        max_running_requests=cell["batch"],
        chunked_prefill_size=cell["chunk"],
        disable_radix_cache=cell["radix"] == "off",
        speculation=drafting,
    )
    if cell["radix"] == "warm":
        drive.run(*(request(f"warm{index}", prompt, 1) for index, prompt in enumerate(PROMPTS)), check=False)
        drive.outputs.clear()
        drive.reqs.clear()
    before = (lambda step: step % 3 == 2 and drive.retract_victim()) if cell["preempt"] else None
    drive.run(*requests(cell["choices"]), before_step=before, check=False)
    return drive


# Wrong drafts are those of oracle 0; the policy of random lengths has some right and some wrong ones.
DRAFTERS = ("ngram", "rollouts", "oracle 0", "oracle 1", "oracle 0.5", "adversary")
TEXT_DRAFTERS = ("rollouts", "ngram")
DRAFTERS_IN_EVERY_RUN = DRAFTERS[:4]
OF_ONE_CELL = (("deterministic", "oracle 0.5", 3), ("deterministic", "adversary", 7))  # in every run
OF_DEFAULT_MODE = ("default", "oracle 0.5", 3)


def is_in_every_run(mode, name, num_drafts):
    has_mode = mode == MODE_IN_EVERY_RUN and name in DRAFTERS_IN_EVERY_RUN
    return has_mode or (mode, name, num_drafts) in (*OF_ONE_CELL, OF_DEFAULT_MODE)


@pytest.mark.parametrize(
    ("mode", "name", "num_drafts"),
    [
        pytest.param(
            *case,
            marks=[] if is_in_every_run(*case) else pytest.mark.thorough,
        )
        for case in itertools.product(MODES, DRAFTERS, DRAFTS)
    ],
    indirect=["mode"],
)
def test_every_drafter_gives_what_each_request_gets_alone(testbed, alone, mode, name, num_drafts, is_thorough):
    offset = DRAFTS.index(num_drafts)
    cells = CELLS[offset::3]  # each cell meets every drafter, but of the two that copy text one
    if name in TEXT_DRAFTERS:
        cells = cells[TEXT_DRAFTERS.index(name) :][:1]
    if (mode, name, num_drafts) in OF_ONE_CELL:
        cells = cells[:1]
    if is_thorough:
        cells = CELLS
    for seed, cell in enumerate(cells):
        drafting = speculation(make_drafter(name, alone, seed), num_drafts=num_drafts)
        drive = run_cell(testbed, cell, drafting)
        assert_same(drive, alone, bitwise=mode == "deterministic")
        verifies = sum(batch.mode is ForwardMode.TARGET_VERIFY for batch, _ in drive.log.forwards)
        assert verifies == drafting.totals.steps > 0
        if name == "oracle 1":
            assert drafting.totals.requests.accept_rate == 1.0
        if name == "oracle 0":
            assert drafting.totals.requests.accepted == 0


def test_a_policy_of_random_lengths_changes_nothing_but_the_steps(testbed, alone, mode, is_thorough):
    for seed, cell in enumerate(CELLS if is_thorough else CELLS[MODES.index(mode) :: 2]):
        drafter = OracleDrafter(answers(alone), 0.7, vocab_size=VOCAB_SIZE, seed=seed)
        drive = run_cell(testbed, cell, speculation(drafter, RandomPolicy(seed)))
        assert_same(drive, alone, bitwise=mode == "deterministic")
        modes = [batch.mode for batch, _ in drive.log.forwards]
        assert {ForwardMode.TARGET_VERIFY} < set(modes), "steps with drafts and without"


@pytest.mark.parametrize(
    ("mode", "failure"),
    by_turns(("raises", "ids above the vocabulary", "negative ids", "more than most", "floats", "two dims")),
    indirect=["mode"],
)
def test_a_drafter_that_fails_costs_its_drafts_alone(testbed, alone, mode, failure, caplog):
    drafter = BrokenDrafter(answers(alone), failure, vocab_size=VOCAB_SIZE)
    drafting = speculation(drafter)
    drive = run_cell(testbed, CELLS[3], drafting)
    assert_same(drive, alone, bitwise=mode == "deterministic")
    assert drafting.has_failed and drafter.calls == MAX_FAILURES == drafting.totals.skipped["drafter_failed"]
    assert drafting.totals.steps == 0 and "no_match" not in drafting.totals.skipped, "counted once"
    assert sum("drafter failed" in record.message for record in caplog.records) == 2, "once, and when it is off"


def assert_no_row_past_the_committed(drive):
    """No slot of a running request's pages has a valid row at or behind its committed tokens."""
    core = drive.core
    for req in core.ranks[0].running:
        slots = core.ranks[0].pages.kv_slots(req, req.num_committed, req.num_pages * drive.args.page_size)
        _, valid, _ = core.capturers[0].get_routed_experts(slots)
        assert not valid.any(), (req.rid, req.num_committed, np.flatnonzero(valid))


def test_no_row_of_a_rejected_draft_is_ever_filed(testbed, alone):
    drafter = OracleDrafter(answers(alone), 0.5, vocab_size=VOCAB_SIZE)
    drive = testbed.drive(speculation=speculation(drafter))
    drive.run(*requests(), before_step=lambda _: assert_no_row_past_the_committed(drive))
    assert drive.core.speculation.totals.requests.proposed > drive.core.speculation.totals.requests.accepted > 0


@pytest.mark.parametrize(
    ("mode", "name", "preempt"), by_turns(("ngram", "oracle 0.5", "adversary"), (False, True)), indirect=["mode"]
)
def test_counts_of_a_slot_are_those_of_its_accepted_tokens_after_every_step(testbed, alone, mode, name, preempt):
    """The device may be one step ahead of the host, so tables are compared with what the request has in the end: by
    their sums, which lie between what the host has read and what it has dispatched."""
    drive = testbed.drive(max_running_requests=4, speculation=speculation(make_drafter(name, alone, 0)))
    seen = []

    def look(step):
        counts = jax.tree.map(np.array, drive.bench.runner._token_counts)
        for req in drive.core.ranks[0].running:
            if req.source.sampling.is_penalized and req.num_dispatched >= req.prompt_len:
                in_flight = drive.core.ranks[0].count_in_flight().get(req.rid, 0)
                span = req.num_committed, max(req.num_dispatched if in_flight else 0, req.num_committed + in_flight)
                seen.append((req, span, counts.generated[req.slot], counts.prompt[req.slot]))
        if preempt and step % 5 == 4:
            drive.retract_victim()

    drive.run(*requests(), before_step=look, check=False)
    assert len(seen) > 50
    for req, (least, most), generated, prompt in seen:
        end = req.prompt_len + int(generated.sum())
        assert least <= end <= most
        counted = req.tokens[req.prompt_len : end]
        np.testing.assert_array_equal(generated, np.bincount(counted, minlength=VOCAB_SIZE))
        np.testing.assert_array_equal(prompt, np.isin(np.arange(VOCAB_SIZE), req.tokens[: req.prompt_len]))


def test_a_stream_that_loses_its_pages_has_shown_all_that_the_host_knows(testbed):
    """Two requests need their next page in one step, and there is none. The younger one returns to the queue when that
    step is scheduled, and the outputs of the step before are made after that."""
    rng, page = np.random.default_rng(3), SIZES["page_size"]
    prompts = {rid: random_prompt(rng, page) for rid in ("older", "younger")}

    def both(**options):
        return [request(rid, prompt, 3 * page, **options) for rid, prompt in prompts.items()]

    plain = testbed.drive()
    plain.run(*both())
    known = {rid: (prompt.tolist(), plain.outputs[rid].tokens) for rid, prompt in prompts.items()}
    drive = testbed.drive(pages=4, speculation=speculation(OracleDrafter(known, 1.0, vocab_size=VOCAB_SIZE)))
    drive.add(*both(stream=True))
    num_lost = 0
    while not drive.core.is_idle:
        before = {rid: req.num_output for rid, req in drive.reqs.items()}
        drive.step()
        for rid, req in drive.reqs.items():
            if req.state is ReqState.WAITING and req.num_output > before[rid]:
                num_lost += 1
                assert len(drive.outputs[rid].tokens) == req.num_output
    assert num_lost > 0
    assert all(drive.outputs[rid].tokens == answer for rid, (_, answer) in known.items())


def test_the_sums_over_requests_are_the_totals(testbed, alone):
    drafting = speculation(OracleDrafter(answers(alone), 0.6, vocab_size=VOCAB_SIZE))
    drive = testbed.drive(speculation=drafting)
    drive.run(*requests())
    counts = [drafting.counts_of(req) for req in drive.reqs.values()]
    total = drafting.totals.requests
    for name in ("verify_steps", "proposed", "accepted", "emitted"):
        assert sum(getattr(own, name) for own in counts) == getattr(total, name), name
    histograms = [own.histogram for own in counts if own.verify_steps]
    assert total.histogram == tuple(map(sum, zip(*histograms, strict=True)))
    assert sum(total.histogram) == total.verify_steps
    assert sum(drafting.totals.accepted_at.values()) == total.accepted
    assert sum(index * count for index, count in enumerate(total.histogram)) == total.accepted
    penalised = [req for req in drive.reqs.values() if req.source.sampling.is_penalized]
    assert len(penalised) == 6 and all(drafting.counts_of(req).accepted > 0 for req in penalised)


def test_sums_that_are_read_while_a_step_is_counted_are_parts_of_their_total(testbed, alone, monkeypatch):
    drafting = speculation(OracleDrafter(answers(alone), 0.6, vocab_size=VOCAB_SIZE))
    seen, observe = [], drafting._estimates.observe

    def look(*args):
        totals = drafting.totals.copy()
        seen.append((sum(totals.accepted_at.values()), sum(totals.accepted_by.values()), totals.requests.accepted))
        return observe(*args)

    monkeypatch.setattr(drafting._estimates, "observe", look)
    testbed.drive(speculation=drafting).run(*requests())
    assert len(seen) > 50 and seen[-1][0] > 0
    assert all(by_place <= total and by_source <= total for by_place, by_source, total in seen)


@pytest.mark.parametrize("drafts", [False, True], ids=["overlapped", "joined"])
def test_rows_are_taken_off_the_device_once_the_next_step_is_dispatched(testbed, alone, drafts):
    drafting = speculation(OracleDrafter(answers(alone), 0.6, vocab_size=VOCAB_SIZE)) if drafts else None
    drive, events = testbed.drive(speculation=drafting), []
    (capturer,) = drive.core.capturers

    def noting(event, call):
        def note(*args):
            events.append(event)
            return call(*args)

        return note

    capturer.on_forward_end = noting("rows", capturer.on_forward_end)
    capturer.on_step_end = noting("end", capturer.on_step_end)
    drive.core.runner.dispatch = noting("dispatch", drive.core.runner.dispatch)
    drive.run(*requests())
    steps = " ".join(events).split("end")
    assert all(step.count("rows") <= 1 for step in steps), "a device keeps the rows of one step that was read"
    assert "rows" not in steps[-1]
    order = "rows dispatch" if drafts else "dispatch rows"
    assert sum(order in step for step in steps) > 10


@pytest.mark.parametrize(
    ("mode", "kind", "include_last"), by_turns(("stop id", "length", "min_tokens"), (False, True)), indirect=["mode"]
)
def test_a_request_ends_at_the_same_token_at_every_offset_of_a_run(testbed, alone, mode, kind, include_last):
    prompt, answer = PROMPTS[0].tolist(), alone["p0c0"][0]
    plain = tiny_testbed(deterministic=mode == "deterministic", moe_backend="probed", **SIZES)
    for length in range(1, 12):
        options = dict(include_last=include_last)
        new = length if kind == "length" else NEW
        if kind != "length":
            options["stop_token_ids"] = (answer[length - 1],)
        if kind == "min_tokens":
            options["min_tokens"] = max(1, length - 1)
        make = lambda: request("r", prompt, new, seed=0, **options)  # noqa: B023, E731
        expected = plain.drive(max_running_requests=1, disable_radix_cache=True)
        expected.run(make())
        tokens = expected.outputs["r"].tokens
        follow = tokens + answer[len(tokens) :]  # drafts go on where the request ends
        drafter = OracleDrafter({"r": (prompt, follow)}, 1.0, vocab_size=VOCAB_SIZE)
        drive = testbed.drive(speculation=speculation(drafter))
        drive.run(make())
        assert_same(drive, results(expected), bitwise=mode == "deterministic")
        req, plain_req = drive.reqs["r"], expected.reqs["r"]
        assert req.num_committed == plain_req.num_committed, (length, kind)


@pytest.mark.parametrize(("mode", "include_last"), by_turns((False, True)), indirect=["mode"])
def test_the_context_ends_a_request_at_every_offset_of_a_run(testbed, mode, include_last):
    """The drafter goes on behind the context, with tokens that nothing verifies."""
    context, num_drafts = SIZES["context_length"], 7
    plain = tiny_testbed(deterministic=mode == "deterministic", moe_backend="probed", **SIZES)
    text = random_prompt(np.random.default_rng(8), context)
    for new in range(1, num_drafts + 4):
        prompt = text[: context - new]
        make = lambda: request("r", prompt, new, seed=0, include_last=include_last)  # noqa: B023, E731
        expected = plain.drive(max_running_requests=1, disable_radix_cache=True)
        expected.run(make())
        answer = expected.outputs["r"].tokens
        drafter = OracleDrafter({"r": (prompt.tolist(), [*answer, *answer])}, 1.0, vocab_size=VOCAB_SIZE)
        drive = testbed.drive(speculation=speculation(drafter, num_drafts=num_drafts))
        drive.run(make())
        assert_same(drive, results(expected), bitwise=mode == "deterministic")
        assert drive.reqs["r"].num_known == context and drive.outputs["r"].end.finish_reason.type == "length"
        assert drive.reqs["r"].num_committed == expected.reqs["r"].num_committed == context - (not include_last)
        drafted = drive.core.speculation.totals.requests
        assert drafted.accepted == drafted.proposed < new
        assert drafted.proposed > 0 or new <= 3, "the first steps overlap, and have no drafts"


STARTS = {"in the prompt": 0.5, "with the output": 1.0}  # parts of a prompt


@pytest.mark.parametrize(("mode", "where"), by_turns(tuple(STARTS)), indirect=["mode"])
def test_rows_may_begin_later_than_the_prompt(testbed, alone, mode, where):
    """Rows of the tokens from `start` on, with requests that are sent back and cached prefixes."""
    begin = {req.rid: int(req.prompt_len * STARTS[where]) for req in requests()}
    drafting = speculation(OracleDrafter(answers(alone), 0.7, vocab_size=VOCAB_SIZE))
    drive = testbed.drive(max_running_requests=4, chunked_prefill_size=7, speculation=drafting)
    made = requests()
    for req in made:
        options = dataclasses.replace(req.source.routed_experts, start=begin[req.rid])
        req.source = dataclasses.replace(req.source, routed_experts=options)
    drive.run(*made, before_step=lambda step: step % 5 == 4 and drive.retract_victim())
    expected = {rid: (*of[:3], of[3][first:], *of[4:]) for rid, first in begin.items() for of in [alone[rid]]}
    assert_same(drive, expected, bitwise=mode == "deterministic")
    assert all(output.end.routed_experts.start == begin[rid] for rid, output in drive.outputs.items())
    assert drafting.totals.requests.accepted > 0


@dataclasses.dataclass
class StopAfter:
    """A detokenizer of tests: token t is the text "t,", and the stop string is the text of the tokens `match`."""

    match: list
    seen: list = dataclasses.field(default_factory=list)
    stopped: str | None = None

    def push(self, token_ids):
        self.seen += token_ids
        if self.seen[-len(self.match) :] == self.match:
            self.stopped = "match"
        return "".join(f"{token}," for token in token_ids)

    def finish(self, *, search=True):
        return ""

    def fork(self):
        return dataclasses.replace(self, seen=list(self.seen))


@pytest.mark.parametrize(("mode", "width"), by_turns((1, 2, 3)), indirect=["mode"])
def test_a_stop_string_ends_a_request_inside_of_a_run_and_across_its_border(testbed, alone, mode, width):
    prompt, answer = PROMPTS[0].tolist(), alone["p0c0"][0]
    plain = tiny_testbed(deterministic=mode == "deterministic", moe_backend="probed", **SIZES)
    for last in range(width, 14):
        match = answer[last - width : last]

        def run(drive):
            req = request("r", prompt, NEW, seed=0)
            drive.core.add([req], {"r": StopAfter(match)})  # noqa: B023
            drive.outputs["r"], drive.reqs["r"] = CollectedOutput(), req
            while not drive.core.is_idle:
                drive.step()
            return drive

        expected = run(plain.drive(max_running_requests=1, disable_radix_cache=True))
        drafter = OracleDrafter({"r": (prompt, answer)}, 1.0, vocab_size=VOCAB_SIZE)
        drive = run(testbed.drive(speculation=speculation(drafter)))
        assert_same(drive, results(expected), bitwise=mode == "deterministic")
        assert drive.outputs["r"].end.text == expected.outputs["r"].end.text
        assert drive.outputs["r"].end.finish_reason.matched == "match"


def test_a_prefix_that_ended_inside_of_a_run_is_cached_as_without_drafts(testbed, alone, mode):
    """A request ends at every offset around a page border; the next of the same tokens finds as much in the cache."""
    prompt, answer = PROMPTS[0].tolist(), alone["p0c0"][0]
    plain = tiny_testbed(deterministic=mode == "deterministic", moe_backend="probed", **SIZES)
    for length in range(1, 2 * SIZES["page_size"] + 3):
        actual = []
        for drafts in (False, True):
            rest = {"a": (prompt, answer), "b": (prompt + answer[:length], alone["p0c0"][0])}
            drafter = OracleDrafter(rest, 1.0, vocab_size=VOCAB_SIZE)
            drive = testbed.drive(speculation=speculation(drafter)) if drafts else plain.drive()
            drive.run(request("a", prompt, length, seed=0))
            drive.run(request("b", prompt + answer[:length], 1, seed=0))
            assert_all_faithful(drive)
            pages = drive.core.ranks[0].pages
            cached = drive.outputs["b"].end.cached_tokens
            actual.append((cached, pages.num_available, pages.cache.num_evictable, results(drive)["b"][3]))
        assert actual[0][:3] == actual[1][:3], length
        if mode == "deterministic":
            assert actual[0][3] == actual[1][3]


def test_a_request_that_is_aborted_while_its_drafts_are_verified_leaves_nothing(testbed, alone):
    drafter = OracleDrafter(answers(alone), 1.0, vocab_size=VOCAB_SIZE)
    drive = testbed.drive(speculation=speculation(drafter))
    drive.add(*requests())
    while drive.core._pending is None or drive.core._pending.batches[0].mode is not ForwardMode.TARGET_VERIFY:
        drive.step()
    for rid in ("p0c0", "p4c1"):
        assert drive.core.abort(rid)
    drive.run()
    assert {drive.outputs[rid].end.finish_reason.type for rid in ("p0c0", "p4c1")} == {"abort"}
    assert not drafter.known
    for rid, result in results(drive).items():
        if rid not in ("p0c0", "p4c1"):
            assert result[0] == alone[rid][0]


def test_rows_of_a_stream_are_those_of_the_whole(testbed, alone, mode):
    drafter = OracleDrafter(answers(alone), 0.8, vocab_size=VOCAB_SIZE)
    drive = testbed.drive(speculation=speculation(drafter))
    drive.run(*requests(stream=True))
    for rid, result in results(drive).items():
        assert result[0] == alone[rid][0]
    runs = [output.num_outputs for output in drive.outputs.values()]
    assert min(runs) < NEW, "an output may hold many tokens"


def test_drafts_survive_new_weights_between_steps(testbed, alone):
    """Weights change in the middle, and the drafter goes on with the old answers: each row is that of the pass and the
    version that fed its token. The tokens differ, because drafts move the step at which weights change."""
    for drafts in (False, True):
        drafter = OracleDrafter(answers(alone), 1.0, vocab_size=VOCAB_SIZE)
        drafter.rest = lambda key, drafter=drafter: np.asarray(drafter.answers[key][1], np.int32)  # no longer checked
        drive = testbed.drive(speculation=speculation(drafter) if drafts else None)
        drive.add(*requests())
        drive.steps(4)
        drive.update_weights(other_weights(3), cache="flush")
        drive.run()
        assert_all_faithful(drive)
        spans = [len(output.end.routed_experts.version_spans) for output in drive.outputs.values()]
        assert max(spans) == 2, "some requests ran under both versions"
        if drafts:
            assert drive.core.speculation.totals.requests.proposed > 0


def test_weights_change_every_seven_steps_while_old_answers_are_followed(testbed, alone):
    drive = testbed.drive(speculation=speculation(make_rollout_drafter(alone, 0)))
    drive.add(*requests())
    versions = 1
    while not drive.core.is_idle:
        drive.steps(7)
        drive.update_weights(other_weights(versions % 3), cache="keep" if versions % 2 else "flush")
        versions += 1
    assert_all_faithful(drive)
    assert versions > 2 and drive.core.speculation.totals.accepted_by["rollout"] > 0


class Resting(EveryDraft):
    """A policy that drafts nothing and writes down what it hears."""

    is_off = True

    def __init__(self):
        super().__init__()
        self.heard, self.pays = [], False

    def should_try(self, step):
        return False

    def expect(self, survivals, num_requests):
        self.heard.append((survivals, num_requests))
        return self.pays


def test_while_nothing_is_drafted_estimates_follow_the_tokens_that_come(testbed, alone, mode):
    """Drafts that no step verifies are compared with the answers: the estimates fall for one that guesses, and rise for
    one that knows."""
    last = {}
    for alpha in (0.0, 1.0):
        policy = Resting()
        drafting = speculation(OracleDrafter(answers(alone), alpha, vocab_size=VOCAB_SIZE), policy)
        drive = testbed.drive(speculation=drafting)
        drive.run(*requests()[:2])
        assert_same(drive, alone, bitwise=mode == "deterministic")
        assert drafting.totals.steps == drafting.totals.requests.proposed == 0
        last[alpha] = np.mean(
            [survival[0] for survivals, _ in policy.heard[-3:] for survival in survivals if survival.size]
        )
    assert last[0.0] < 0.9 < last[1.0]


def watched_steps(drive, policy, *, until=lambda: False):
    """The steps of a drive at which its policy is asked what drafts would gain."""
    steps = []
    while not drive.core.is_idle and not until():
        before = len(policy.heard)
        drive.step()
        steps += [drive.core.num_steps] * (len(policy.heard) - before)
    return steps


@pytest.fixture
def resting(testbed, monkeypatch):
    """A drive whose drafting is off, watched every second step of one request, and its policy."""
    monkeypatch.setattr(speculation_module, "WATCH_EVERY", 2)
    policy = Resting()
    return testbed.drive(speculation=speculation(TextDrafter(CopyRule()), policy)), policy


def test_text_is_watched_more_rarely_while_no_draft_of_it_would_pay(resting):
    drive, policy = resting
    drive.add(request("one", np.arange(4), 58))
    before = watched_steps(drive, policy, until=lambda: len(policy.heard) == 5)
    assert np.diff(before).tolist() == [4, 8, 8, 8]
    policy.pays = True
    after = watched_steps(drive, policy)
    assert np.diff(before[-1:] + after).tolist()[:4] == [8, 2, 2, 2]


def test_a_new_request_ends_the_back_off_of_watching(resting):
    drive, policy = resting
    drive.add(request("one", np.arange(4), 58))
    before = watched_steps(drive, policy, until=lambda: len(policy.heard) == 4)
    drive.step()
    drive.add(request("two", np.arange(5, 9), 20))
    after = watched_steps(drive, policy, until=lambda: len(policy.heard) == 5)
    assert after[0] - before[-1] <= 4, "two requests: every fourth step"


def test_a_batch_that_has_shrunk_is_watched_as_often_as_a_small_one(resting):
    drive, policy = resting
    drive.add(*(request(f"short {index}", np.arange(index, index + 4), 12) for index in range(5)))
    drive.add(request("long", np.arange(9, 13), 56))
    steps = watched_steps(drive, policy)
    assert np.diff(steps).max() <= 12, steps


def test_one_resting_step_in_eight_is_timed_and_stands_for_the_others(resting, monkeypatch):
    drive, _ = resting
    followed, costs = [], drive.core.speculation.costs
    monkeypatch.setattr(costs, "follow", lambda *shape, steps: followed.append(steps))
    drive.run(request("one", np.arange(4), 58))
    assert len(followed) >= 5 and set(followed) == {8}


def test_requests_that_are_not_drafted_for_are_counted_by_reason(testbed):
    """A decoding request beside a long prompt in chunks; then one that asks for no drafts, alone."""
    prompt = np.tile(np.arange(5), 3)
    drafting = speculation(TextDrafter(CopyRule()))
    drive = testbed.drive(speculation=drafting, chunked_prefill_size=4)
    drive.add(request("first", prompt, 20))
    while drive.core.request_table.find("first").num_output == 0:
        drive.step()
    before = drafting.totals.skipped["prompts"]
    drive.run(request("second", np.arange(40) % VOCAB_SIZE, 2))
    assert drafting.totals.skipped["prompts"] - before >= 5, "forty tokens in chunks of four"
    assert drafting.totals.skipped["not_requested"] == 0
    drive.run(request("third", prompt, 6, speculative=False))
    assert drafting.totals.skipped["not_requested"] >= 5
    assert drafting.counts_of(drive.reqs["third"]).verify_steps == 0
