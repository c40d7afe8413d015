"""Retraction: a request that is retracted and restarted gives the output of an uninterrupted run, with the rows of its
first pass. Deterministic mode makes this exact: an uninterrupted run in an unlimited pool is the oracle, and the MoE
probe judges the rows."""

import itertools

import numpy as np
import pytest

from oracles.driver import assert_all_faithful, request
from oracles.testbeds import other_oracle, other_weights, random_prompt, tiny_testbed

SAMPLING = (
    dict(),
    dict(temperature=1.0),
    dict(temperature=1.0, frequency_penalty=0.8, repetition_penalty=1.3),
    dict(temperature=0.8, top_k=12, min_p=0.02),
    dict(presence_penalty=1.5),
    dict(min_tokens=10, stop_token_ids=range(0, 313, 5)),
    dict(stop_token_ids=range(0, 313, 25)),
    dict(prompt_logprobs_from=0),
)  # one a request, in turn


@pytest.fixture(scope="module")
def testbed():
    return tiny_testbed(moe_backend="probed", deterministic=True)


def requests(seed, count=16, max_tokens=24, **options):
    """Prompts of 1 to 40 tokens, half of them with a beginning in common."""
    rng = np.random.default_rng(seed)
    shared = random_prompt(rng, 20)
    made = []
    for index in range(count):
        own = random_prompt(rng, rng.integers(1, 20))
        prompt = np.concatenate([shared, own]) if index % 2 else own
        how = {"max_tokens": max_tokens, "seed": seed, **SAMPLING[index % len(SAMPLING)], **options}
        made.append(request(f"r{index}", prompt, **how))
    return made


def all_outputs(drive):
    """Outputs of each request, in comparable form."""
    return {
        rid: (
            output.tokens,
            output.logprobs,
            output.prompt_logprobs,
            output.end.finish_reason,
            output.end.routed_experts,
        )
        for rid, output in drive.outputs.items()
    }


def run_uninterrupted(testbed, reqs):
    drive = testbed.drive(disable_radix_cache=True)
    drive.run(*reqs)
    assert drive.core.ranks[0].num_retracted == 0
    return all_outputs(drive)


IN_EVERY_RUN = [(seed, (None, 5)[seed % 2]) for seed in range(6)]


@pytest.mark.parametrize(
    ("seed", "chunk"),
    [
        pytest.param(*case, marks=[] if case in IN_EVERY_RUN else pytest.mark.thorough)
        for case in itertools.product(range(20), (None, 5))
    ],
)
def test_a_pool_for_two_sequences_and_a_bit_serves_sixteen_as_if_there_were_room(testbed, seed, chunk):
    pages = int(2.3 * (40 + 24) / 4)
    drive = testbed.drive(pages=pages, chunked_prefill_size=chunk)
    drive.run(*requests(seed))
    assert drive.core.ranks[0].num_retracted > 0
    assert assert_all_faithful(drive) > 16 * 10
    assert all_outputs(drive) == run_uninterrupted(testbed, requests(seed))


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_retracted_every_third_step_gives_the_same_output_once(testbed, radix, stream):
    drive = testbed.drive(disable_radix_cache=not radix, chunked_prefill_size=16)
    drive.run(*requests(20, stream=stream), before_step=lambda step: step % 3 == 2 and drive.retract_victim())
    assert drive.core.ranks[0].num_retracted > 10
    assert_all_faithful(drive)
    assert all_outputs(drive) == run_uninterrupted(testbed, requests(20))


def test_a_pool_for_one_sequence_serves_all_in_turn(testbed):
    drive = testbed.drive(pages=16)
    drive.run(*requests(30, count=8))
    assert_all_faithful(drive)
    assert all_outputs(drive) == run_uninterrupted(testbed, requests(30, count=8))


def test_choices_that_are_retracted_give_the_same_output(testbed):
    def choices():
        prompt = random_prompt(np.random.default_rng(31), 33)
        return [request(f"c{j}", prompt, 20, choice=j, group="one", temperature=1.0, seed=3) for j in range(8)]

    drive = testbed.drive(pages=24)
    drive.run(*choices())
    assert drive.core.ranks[0].num_retracted > 0
    assert_all_faithful(drive)
    assert all_outputs(drive) == run_uninterrupted(testbed, choices())


@pytest.mark.parametrize("cache", ["flush", "keep"])
def test_weights_that_change_between_retractions_change_no_row_that_was_written(testbed, cache):
    drive = testbed.drive(chunked_prefill_size=16)

    def interfere(step):
        if step % 3 == 2:
            drive.retract_victim()
        if step % 7 == 6:
            drive.update_weights(other_weights(1 + step % 2), cache=cache)

    drive.run(*requests(40, count=10), before_step=interfere)
    assert assert_all_faithful(drive) > 100
    assert max(len(output.end.routed_experts.version_spans) for output in drive.outputs.values()) > 2


def test_a_prompt_logprob_is_that_of_the_pass_that_computed_it_first(testbed):
    drive = testbed.drive(chunked_prefill_size=16)
    prompt = random_prompt(np.random.default_rng(6), 40)
    drive.add(request("r", prompt, 2, prompt_logprobs_from=0))
    drive.steps(2)
    drive.update_weights(other_weights(1), cache="flush")  # the first two chunks have been read; the prompt is fed anew
    logprobs = drive.run()["r"].prompt_logprobs
    old, new = (oracle.run(prompt).logprobs[np.arange(39), prompt[1:]] for oracle in (testbed.oracle, other_oracle(1)))
    assert np.abs(old - new).min() > 1e-3
    np.testing.assert_allclose(logprobs[1:], np.concatenate([old[:32], new[32:]]), atol=1e-4, rtol=0)


def test_a_request_aborted_while_retracted_keeps_its_output(testbed):
    drive, reqs = testbed.drive(pages=24), requests(50, count=8)
    aborted = []

    def interfere(_):
        for req in tuple(drive.core.ranks[0].waiting):
            if req.num_output > 2 and len(aborted) < 2:
                assert drive.core.abort(req.rid)
                aborted.append((req.rid, req.output_ids.tolist()))

    drive.run(*reqs, before_step=interfere)
    assert len(aborted) == 2
    assert_all_faithful(drive)
    whole = run_uninterrupted(testbed, requests(50, count=8))
    for rid, tokens in aborted:
        output, (all_tokens, _, _, _, record) = drive.outputs[rid], whole[rid]
        assert output.end.finish_reason.type == "abort"
        assert output.tokens == tokens == all_tokens[: len(tokens)]
        np.testing.assert_array_equal(output.end.routed_experts.ids, record.ids[: output.end.routed_experts.num_rows])
