"""Speculative decoding of models whose layers keep a state: no draft changes a token, logprob, row, end or state.

The reference is an engine without drafts, each request alone. In deterministic mode everything is equal to the last
bit; in default mode the tokens. Drafters know the answer and are right with some probability, or guess. States are
compared after every step with those of an engine that feeds one token a step."""

import contextlib
import functools
import itertools
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx

from oracles.drafters import Adversary, EveryDraft, OracleDrafter, RandomPolicy
from oracles.driver import Bench, assert_all_faithful, request
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.engine.loop.speculation import DraftLimits, Speculation
from routed_experts.models.model_folder import ModelFolder
from routed_experts.speculation.cost_table import CostTable
from support.family_folders import VOCAB_SIZE, write_family
from support.fast_compile import fast_compilation

NEW = 16
SIZES = dict(page_size=8, context_length=64, precompile_bs_paddings=(8,), precompile_token_paddings=(48,))
SIZES |= dict(disable_radix_cache=True)  # as an engine serves these models
BENCHES = {  # a delta rule by head and by channel, in kernels and in array code; short convolutions
    "qwen3-next, deterministic": ("qwen3-next", dict(deterministic=True)),
    "qwen3-next": ("qwen3-next", dict()),
    "qwen3-next, array code": ("qwen3-next", dict(attention_backend="paged")),
    "bailing-hybrid, deterministic": ("bailing-hybrid", dict(deterministic=True)),
    "lfm2-moe, deterministic": ("lfm2-moe", dict(deterministic=True)),
    "lfm2-moe": ("lfm2-moe", dict()),
}
SAMPLING = (
    dict(),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=8, prompt_logprobs_from=0),
    dict(temperature=1.0, presence_penalty=0.5),
    dict(temperature=1.3, min_p=0.05, include_last=True),
)  # one a prompt
CELLS = [
    dict(max_running_requests=8),
    dict(max_running_requests=3, chunked_prefill_size=7, preempt=True),
    dict(max_running_requests=5, chunked_prefill_size=1),
    dict(max_running_requests=8, chunked_prefill_size=16, preempt=True),
]


def make_prompts():
    rng = np.random.default_rng(4)
    return [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (26, 1, 12, 40, 3)]


PROMPTS = make_prompts()


def requests(**options):
    """Two choices of each prompt."""
    return [
        request(f"p{index}c{choice}", prompt, NEW, choice=choice, group=f"p{index}", seed=index, **how, **options)
        for index, (prompt, how) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
        for choice in range(2)
    ]


@functools.cache
def model(family, seed=0):
    with tempfile.TemporaryDirectory() as folder:
        opened = ModelFolder.open(str(write_family(folder, family, seed=seed)))
        return opened.load(opened.dtype("auto"))


@functools.cache
def bench(name, *, speculates):
    family, args = BENCHES[name]
    draft_tokens = 4 if speculates else 0
    return Bench(model(family), moe_backend="probed", num_draft_tokens=draft_tokens, **SIZES, **args)


@functools.cache
def alone(name):
    """By request id: what it gets without drafts, one request at a time."""
    actual = {}
    for req in requests():
        drive = bench(name, speculates=False).drive(max_running_requests=1)
        drive.run(req)
        actual |= results(drive)
    assert len({tuple(result[0]) for result in actual.values()}) > 5, "a constant answer proves nothing"
    return actual


IN_EVERY_RUN = ("bailing-hybrid, deterministic", "lfm2-moe")  # both modes; test_kv_cache_dtype.py: Qwen3-Next


@pytest.fixture(
    scope="module",
    params=[name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in BENCHES],
)
def name(request):
    """Programs in deterministic mode are those that are shipped; of others tokens alone are compared by the bit."""
    with contextlib.nullcontext() if request.param.endswith("deterministic") else fast_compilation():
        yield request.param


def results(drive):
    return results_of(drive, drive.outputs)


def results_of(drive, rids):
    return {
        rid: (
            output.tokens,
            output.end.finish_reason,
            output.logprobs,
            output.prompt_logprobs,
            output.end.routed_experts.ids.tolist(),
        )
        for rid in rids
        for output in [drive.outputs[rid]]
    }


def assert_same(drive, name):
    expected = alone(name)
    assert_all_faithful(drive)
    for rid, result in results(drive).items():
        assert result[:2] == expected[rid][:2], rid
        if name.endswith("deterministic"):
            assert result == expected[rid], rid
        else:
            np.testing.assert_allclose(result[2], expected[rid][2], atol=1e-4, rtol=0)


def answers(name):
    prompts = {req.rid: req.tokens[: req.prompt_len].tolist() for req in requests()}
    return {rid: (prompts[rid], result[0]) for rid, result in alone(name).items()}


def speculation(drafter, num_drafts=3, policy=None):
    limits = DraftLimits(num_drafts=num_drafts, vocab_size=VOCAB_SIZE)
    return Speculation(drafter, policy or EveryDraft(num_drafts), limits, costs=CostTable())


def run_cell(name, cell, drafting, **options):
    sizes = {key: value for key, value in cell.items() if key != "preempt"}
    drive = bench(name, speculates=True).drive(speculation=drafting, **sizes)
    before = (lambda step: step % 3 == 2 and drive.retract_victim()) if cell.get("preempt") else None
    drive.run(*requests(**options), before_step=before)
    return drive


DRAFTERS, DRAFTS = ("oracle 0", "oracle 0.5", "oracle 1", "adversary"), (1, 3)


def is_in_every_run(name, drafter, num_drafts):
    """Of the benches of every run, half of the cases, which hold each pair of a bench, a drafter and a number."""
    if name not in IN_EVERY_RUN:
        return False
    return (IN_EVERY_RUN.index(name) + DRAFTERS.index(drafter) + DRAFTS.index(num_drafts)) % 2 == 0


@pytest.mark.parametrize(
    ("name", "drafter", "num_drafts"),
    [
        pytest.param(*case, marks=[] if is_in_every_run(*case) else pytest.mark.thorough)
        for case in itertools.product(BENCHES, DRAFTERS, DRAFTS)
    ],
    indirect=["name"],
)
def test_every_drafter_gives_what_each_request_gets_alone(name, drafter, num_drafts):
    for seed, cell in enumerate(CELLS[num_drafts // 2 :: 2]):
        make = Adversary if drafter == "adversary" else OracleDrafter
        alpha = 0.0 if drafter == "adversary" else float(drafter.removeprefix("oracle "))
        drafting = speculation(make(answers(name), alpha, vocab_size=VOCAB_SIZE, seed=seed), num_drafts)
        drive = run_cell(name, cell, drafting)
        assert_same(drive, name)
        assert drafting.totals.steps > 0
        if drafter == "oracle 1":
            assert drafting.totals.requests.accept_rate == 1.0
        if drafter == "oracle 0":
            assert drafting.totals.requests.accepted == 0


def test_steps_of_every_kind_follow_each_other(name):
    """Drafts of random lengths, steps without drafts that overlap, and prompts beside requests that decode."""
    kinds = set()
    for seed, cell in enumerate(CELLS):
        drafter = OracleDrafter(answers(name), 0.7, vocab_size=VOCAB_SIZE, seed=seed)
        drive = run_cell(name, cell, speculation(drafter, policy=RandomPolicy(seed)))
        assert_same(drive, name)
        modes = [batch.mode for batch, _ in drive.log.forwards]
        kinds |= set(itertools.pairwise(modes))
    verify, others = ForwardMode.TARGET_VERIFY, {ForwardMode.EXTEND}
    if not name.endswith("deterministic"):
        others.add(ForwardMode.DECODE)
    assert (verify, verify) in kinds
    assert {pair for other in others for pair in ((verify, other), (other, verify))} <= kinds


def states_of(drive, req):
    """The state of a request in all layers."""
    return [np.asarray(leaf)[:, req.slot] for leaf in jax.tree.leaves(drive.bench.runner._pool.states)]


@functools.cache
def states_by_length(name, index):
    """The states of a prompt's request after each number of fed tokens: one token a step, without drafts."""
    drive, actual = bench(name, speculates=False).drive(chunked_prefill_size=1), {}
    drive.add(requests()[index])
    [req] = drive.core.ranks[0].waiting
    while not drive.core.is_idle:
        drive.step()
        drive.drain()
        if req in drive.core.ranks[0].running:
            actual[req.num_dispatched] = states_of(drive, req)
    return actual


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_after_every_step_a_state_is_that_of_the_tokens_that_were_fed(name, alpha):
    drafting = speculation(OracleDrafter(answers(name), alpha, vocab_size=VOCAB_SIZE))
    drive = bench(name, speculates=True).drive(speculation=drafting, chunked_prefill_size=5)
    indices = [0, 3, 5, 9]
    own = [requests()[index] for index in indices]
    drive.add(*own)
    compared = 0
    while not drive.core.is_idle:
        drive.step()
        drive.drain()  # of a step in flight it is not known how many of its tokens are accepted
        for index, req in zip(indices, own, strict=True):
            if req not in drive.core.ranks.running or req.num_dispatched not in states_by_length(name, index):
                continue
            compared += 1
            for leaf, expected in zip(
                states_of(drive, req), states_by_length(name, index)[req.num_dispatched], strict=True
            ):
                if name.endswith("deterministic"):
                    np.testing.assert_array_equal(leaf, expected)
                else:
                    np.testing.assert_allclose(leaf, expected, atol=1e-4, rtol=0)
    assert compared > 20 and drafting.totals.requests.proposed > 0


def test_a_state_after_new_weights_has_its_old_tokens_from_the_old_ones():
    """Weights change between a verify step and the next: the tokens are those of an engine without drafts, whose
    weights change after as many tokens."""
    name = "bailing-hybrid, deterministic"
    prompt, other = PROMPTS[0], nnx.split(model("bailing-hybrid", seed=1))[1]
    answer = alone(name)["p0c0"][0]

    def run(drafting, length):
        """The tokens and logprobs with other weights from the token `length` on."""
        drive = bench(name, speculates=drafting is not None).drive(speculation=drafting)
        req = request("p0c0", prompt, NEW, seed=0)
        drive.add(req)
        while req.num_output < length:
            drive.step()
            drive.drain()
        assert req.num_output == length
        drive.update_weights(other, cache="keep")
        drive.run()
        return drive.outputs["p0c0"]

    for length, alpha in ((5, 1.0), (2, 0.0), (9, 1.0)):
        drafter = OracleDrafter({"p0c0": (prompt.tolist(), answer)}, alpha, vocab_size=VOCAB_SIZE)
        drafter.rest = lambda key, drafter=drafter: np.asarray(drafter.answers[key][1], np.int32)[
            drafter.known[key].size - prompt.size :
        ]  # no longer checked
        drafting = speculation(drafter)
        drafted, plain = run(drafting, length), run(None, length)
        assert drafting.totals.steps > 0
        assert (drafted.tokens, drafted.logprobs) == (plain.tokens, plain.logprobs)
        assert plain.tokens != answer


@pytest.mark.parametrize("name", ["lfm2-moe", "bailing-hybrid, deterministic"])
def test_a_request_that_is_aborted_leaves_nothing_to_the_next_of_its_slot(name):
    drafting = speculation(OracleDrafter(answers(name), 0.5, vocab_size=VOCAB_SIZE))
    drive = bench(name, speculates=True).drive(speculation=drafting, max_running_requests=2)
    drive.add(*requests())
    aborted = set()
    while not drive.core.is_idle:
        drive.step()
        pending = drive.core._pending
        if pending is not None and pending.batches[0].mode is ForwardMode.TARGET_VERIFY and len(aborted) < 3:
            victim = drive.core.ranks[0].running[0].rid
            aborted |= {victim} if drive.core.abort(victim) else set()
    assert len(aborted) == 3
    expected = alone(name)
    for rid, result in results_of(drive, set(drive.outputs) - aborted).items():
        assert result[:2] == expected[rid][:2], rid
