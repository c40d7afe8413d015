"""The grid of deterministic mode (RELIABILITY I8): ids, tokens and logprobs to the last bit, whatever the batch.

Each cell is a way to run the same requests: how many at once, in chunks of what size, with a prefix cache or none or a
warm one, retracted or not, one choice or four, in shuffled order. Each is compared with every request alone: one at a
time, in one chunk, no cache, never retracted. Default mode is held to the margin rule, against NumPy."""

import dataclasses
import itertools

import numpy as np
import pytest

from oracles.driver import request
from oracles.margins import assert_margin_rule, differences
from oracles.testbeds import build_state, random_prompt, tiny_testbed, wide_margin_oracle

NEW_TOKENS = 24
BATCHES, CHUNKS, RADIX, PREEMPT, CHOICES = (
    (1, 2, 3, 8, 32),
    (None, 1, 7, 16, 64),
    ("on", "off", "warm"),
    (False, True),
    (1, 4),
)
SAMPLING = (
    dict(),
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=8),
    dict(temperature=1.0, top_p=0.8, presence_penalty=0.5),
    dict(prompt_logprobs_from=0),
    dict(temperature=1.3, min_p=0.05),
    dict(logit_bias={5: 3.0}),
    dict(temperature=1.0, repetition_penalty=1.2),
)  # one a prompt, in turn


@dataclasses.dataclass(frozen=True)
class Cell:
    batch: int
    chunk: int | None
    radix: str
    preempt: bool
    n: int

    def __str__(self):
        return f"batch {self.batch}, chunk {self.chunk}, radix {self.radix}, preempt {self.preempt}, n {self.n}"


ALL_CELLS = [Cell(*values) for values in itertools.product(BATCHES, CHUNKS, RADIX, PREEMPT, CHOICES)]
# A request that runs alone is never retracted: with batch 1 a cell and its preempted twin are one run, so 30 of the 300
# are left out.
GRID = [cell for cell in ALL_CELLS if not (cell.batch == 1 and cell.preempt)]
SAMPLE = [GRID[index] for index in np.random.default_rng(3).permutation(len(GRID))[:24]]
FULL = [
    cell for cell in GRID if (cell.batch, cell.chunk) == (32, None)
]  # in chunks of 7 the first have ended before the last begin


@pytest.fixture(scope="module")
def testbed():
    sizes = dict(page_size=8, context_length=64, precompile_bs_paddings=(32,), precompile_token_paddings=(64,))
    return tiny_testbed(deterministic=True, **sizes)


def prompts(lengths, seed):
    """Random ids; two thirds of every other prompt are the beginning that these have in common."""
    rng = np.random.default_rng(seed)
    shared, made = random_prompt(rng, 32), []
    for index, length in enumerate(lengths):
        beginning = shared[: 0 if index % 2 else 2 * length // 3]
        made.append(np.concatenate([beginning, random_prompt(rng, length - beginning.size)]))
    return made


EIGHT = prompts((26, 17, 12, 1, 40, 33, 9, 5), seed=8)
SIXTEEN = prompts((26, 17, 12, 1, 40, 33, 9, 5, 38, 2, 7, 24, 16, 8, 30, 3), seed=16)
THIRTY_TWO = SIXTEEN + prompts(range(2, 34, 2), seed=32)


def choice_request(index, choice, prompts):
    how = SAMPLING[index % len(SAMPLING)]
    return request(
        f"p{index}c{choice}", prompts[index], NEW_TOKENS, choice=choice, group=f"p{index}", seed=index, **how
    )


def exact_outputs(drive):
    """Tokens, logprobs (of prompts too, as exact text) and rows."""
    return {
        rid: (
            output.tokens,
            repr(output.logprobs),
            repr(output.prompt_logprobs),
            output.end.routed_experts.ids.tolist(),
        )
        for rid, output in drive.outputs.items()
    }


def alone(testbed, prompts, *, choices, of):
    """Each of the prompts `of`, every choice on its own: batch 1, one chunk, no cache."""
    outputs = {}
    for index, choice in itertools.product(of, range(choices)):
        drive = testbed.drive(max_running_requests=1, disable_radix_cache=True)
        drive.run(choice_request(index, choice, prompts))
        drive.outputs[f"p{index}c{choice}"].end.routed_experts.validate()
        outputs |= exact_outputs(drive)
    return outputs


@pytest.fixture(scope="module")
def eight_alone(testbed):
    return alone(testbed, EIGHT, choices=1, of=range(8)) | alone(testbed, EIGHT, choices=4, of=range(2))


@pytest.fixture(scope="module")
def sixteen_alone(testbed):
    return alone(testbed, SIXTEEN, choices=1, of=range(16)) | alone(testbed, SIXTEEN, choices=4, of=range(4))


@pytest.fixture(scope="module")
def thirty_two_alone(testbed, sixteen_alone):
    return (
        sixteen_alone
        | alone(testbed, THIRTY_TWO, choices=1, of=range(16, 32))
        | alone(testbed, THIRTY_TWO, choices=4, of=range(4, 8))
    )


def run_cell(testbed, cell, prompts, seed):
    """One cell of `given` prompts, or with n choices of every n-th of them: as many sequences."""
    drive = testbed.drive(
        max_running_requests=cell.batch, chunked_prefill_size=cell.chunk, disable_radix_cache=cell.radix == "off"
    )
    order = np.random.default_rng(seed).permutation(len(prompts) // cell.n)
    if cell.radix == "warm":
        drive.run(*(request(f"warm{index}", prompts[index], 1) for index in order), check=False)
        drive.outputs.clear()
    reqs = [choice_request(index, choice, prompts) for index in order for choice in range(cell.n)]
    drive.run(
        *reqs,
        before_step=(lambda step: step % 3 == 2 and drive.retract_victim()) if cell.preempt else None,
        check=False,
    )
    return drive


def assert_equal_to_alone(testbed, cells, prompts, expected):
    """Gives the runs, for what is to be seen in them beside."""
    drives = [run_cell(testbed, cell, prompts, seed) for seed, cell in enumerate(cells)]
    for cell, drive in zip(cells, drives, strict=True):
        assert len(drive.outputs) == len(prompts)
        for rid, output in exact_outputs(drive).items():
            assert output == expected[rid], f"{rid} in the cell ({cell})"
    return drives


@pytest.mark.parametrize("part", range(4))
def test_sixteen_sequences_in_each_of_twenty_four_cells_equal_bitwise_those_run_alone(testbed, sixteen_alone, part):
    for axis, values in dict(batch=BATCHES, chunk=CHUNKS, radix=RADIX, preempt=PREEMPT, n=CHOICES).items():
        assert {vars(cell)[axis] for cell in SAMPLE} == set(values)
    assert_equal_to_alone(testbed, SAMPLE[part::4], SIXTEEN, sixteen_alone)


def half_of(cell):
    """0 or 1; cells of one half differ in two axes at least."""
    axes = dict(batch=BATCHES, chunk=CHUNKS, radix=RADIX, preempt=PREEMPT, n=CHOICES)
    return sum(values.index(vars(cell)[axis]) for axis, values in axes.items()) % 2


@pytest.mark.parametrize("radix", RADIX)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_cell_of_the_grid_equals_bitwise_each_sequence_run_alone(testbed, eight_alone, half, chunk, radix):
    """Eight sequences are in one batch where it takes 8 and where it takes 32, which is one run: the latter have a test
    of their own. Every run has one half of the grid, in which three axes have each of their values together."""
    cells = [cell for cell in GRID if (cell.chunk, cell.radix) == (chunk, radix) and cell.batch != 32]
    assert len(cells) == 14
    assert_equal_to_alone(testbed, [cell for cell in cells if half_of(cell) == half], EIGHT, eight_alone)


def test_three_axes_have_each_of_their_values_together_in_one_half_of_the_grid():
    axes = ("batch", "chunk", "radix", "preempt", "n")
    for three in itertools.combinations(axes, 3):
        actual = [
            {tuple(vars(cell)[axis] for axis in three) for cell in cells}
            for cells in (GRID, [cell for cell in GRID if half_of(cell) == 0])
        ]
        assert actual[0] == actual[1], three


@pytest.mark.parametrize("radix", RADIX)
def test_a_batch_of_thirty_two_equals_bitwise_each_sequence_run_alone(testbed, thirty_two_alone, radix):
    cells = [cell for cell in FULL if cell.radix == radix]
    assert len(cells) == 4
    for drive in assert_equal_to_alone(testbed, cells, THIRTY_TWO, thirty_two_alone):
        assert max(batch.num_requests for batch, _ in drive.log.forwards) == 32


@pytest.fixture(scope="module")
def default_world():
    return tiny_testbed()


def served_in_company(drive, count, seed):
    """Many short requests, some with a common prefix, some retracted."""
    rng = np.random.default_rng(seed)
    shared, reqs = random_prompt(rng, 24), []
    for index in range(count):
        prompt = np.concatenate([shared[: rng.integers(25)], random_prompt(rng, rng.integers(1, 17))])
        start = 0 if index % 5 == 0 else -1
        reqs.append(
            request(f"r{index}", prompt, 8, temperature=float(index % 2), seed=index, prompt_logprobs_from=start)
        )
    drive.run(*reqs, before_step=lambda step: step % 9 == 8 and drive.retract_victim(), check=False)
    assert sum(output.end.cached_tokens > 0 for output in drive.outputs.values()) > count // 5
    assert drive.core.ranks[0].num_retracted > count // 50
    return reqs


def test_default_mode_differs_from_the_oracle_only_in_near_ties(default_world):
    drive = default_world.drive(chunked_prefill_size=11)
    reqs = served_in_company(drive, 500, seed=50)
    assert_margin_rule(
        default_world.oracle, [(req.tokens, drive.outputs[req.rid].end.routed_experts.ids) for req in reqs]
    )


def test_default_mode_logprobs_are_those_of_the_oracle_with_its_rows(default_world):
    drive = default_world.drive(chunked_prefill_size=11)
    for req in served_in_company(drive, 60, seed=51):
        output = drive.outputs[req.rid]
        _, judged = differences(default_world.oracle, req.tokens[: req.num_known - 1], output.end.routed_experts.ids)
        logprobs = judged.logprobs[np.arange(req.num_known - 1), req.tokens[1:]]
        np.testing.assert_allclose(output.logprobs, logprobs[req.prompt_len - 1 :], atol=1e-4, rtol=0)
        if output.prompt_logprobs is not None:
            np.testing.assert_allclose(output.prompt_logprobs[1:], logprobs[: req.prompt_len - 1], atol=1e-4, rtol=0)
        if req.source.sampling.is_greedy:
            best = judged.logprobs[req.prompt_len - 1 :].max(-1)
            np.testing.assert_allclose(output.logprobs, best, atol=1e-4, rtol=0)


def test_where_the_router_leaves_no_doubt_default_mode_never_differs(default_world):
    oracle, drive = wide_margin_oracle(), default_world.drive(chunked_prefill_size=11)
    drive.update_weights(build_state(oracle.tensors), cache="flush")
    reqs = served_in_company(drive, 100, seed=52)
    for req in reqs:
        judged = oracle.run(req.tokens[: req.num_known - 1])
        ranked = -np.sort(-judged.scores, axis=-1)[..., :5]
        assert (ranked[..., :-1] - ranked[..., 1:]).min() > 1e-2
        np.testing.assert_array_equal(drive.outputs[req.rid].end.routed_experts.ids, judged.ids)
