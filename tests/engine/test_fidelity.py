"""Fidelity: every row returned is what the experts were given in the pass that first fed its token, bit for bit: ids,
and combine weights.

The MoE probe, which shares no code with capture, is the oracle, in deterministic and in default mode. The stores are
poisoned before every run and after every step. Replay is the second oracle: the rows returned must reproduce the
logprobs returned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracles.driver import assert_all_faithful, request
from oracles.testbeds import build_model, other_weights, random_prompt, tiny_testbed
from routed_experts.replay.forward import RoutedBatch, forward

MODES = {
    "deterministic": {"deterministic": True, "enable_return_routed_experts_weights": True},
    "default": {"enable_return_routed_experts_weights": True, "routed_experts_weights_dtype": "bfloat16"},
}
LENGTHS = (1, 4, 9, 30, 45, 61)


@pytest.fixture(scope="module", params=MODES)
def testbed(request):
    return tiny_testbed(moe_backend="probed", **MODES[request.param])


def requests(seed=0, lengths=LENGTHS, max_tokens=12, **options):
    """Greedy and sampled requests in turn."""
    rng = np.random.default_rng(seed)
    return [
        request(
            f"r{index}",
            random_prompt(rng, length),
            max_tokens,
            temperature=float(index % 2),
            seed=seed + index,
            **options,
        )
        for index, length in enumerate(lengths)
    ]


def num_rows(reqs):
    return sum(req.num_known - 1 for req in reqs)


def test_a_cold_request_gets_the_rows_of_its_own_passes(testbed):
    drive, reqs = testbed.drive(), requests()
    drive.run(*reqs)
    assert assert_all_faithful(drive) == num_rows(reqs)
    assert {output.end.finish_reason.type for output in drive.outputs.values()} == {"length"}


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunked_prefill_gets_the_rows_of_every_chunk(testbed, chunk):
    drive, reqs = testbed.drive(chunked_prefill_size=chunk), requests(1)
    drive.run(*reqs)
    assert assert_all_faithful(drive) == num_rows(reqs)


def test_a_prefix_hit_gets_the_rows_of_the_pass_that_wrote_the_page(testbed):
    drive, rng = testbed.drive(), np.random.default_rng(2)
    shared = random_prompt(rng, 40)
    drive.run(request("writer", shared, 12))
    whole = np.concatenate([shared, drive.outputs["writer"].tokens])
    readers = [
        request(f"reader{cut}", np.concatenate([whole[:cut], random_prompt(rng, 3)]), 8) for cut in (3, 17, 40, 51)
    ]
    drive.run(*readers)
    assert [drive.outputs[req.rid].end.cached_tokens for req in readers] == [
        0,
        16,
        40,
        48,
    ]  # pages of 4, generated ones among them
    assert_all_faithful(drive)


def test_a_prefix_hit_in_a_batch_gets_the_rows_of_the_pass_that_wrote_the_page(testbed):
    drive, rng = testbed.drive(chunked_prefill_size=8), np.random.default_rng(3)
    shared = random_prompt(rng, 24)
    reqs = [
        request(f"r{i}", np.concatenate([shared, random_prompt(rng, i)]), 6 + i, temperature=1.0, seed=i)
        for i in range(1, 9)
    ]
    drive.add(*reqs[:4])
    drive.steps(9)
    drive.run(*reqs[4:])
    assert max(output.end.cached_tokens for output in drive.outputs.values()) == 24
    assert assert_all_faithful(drive) == num_rows(reqs)


@pytest.mark.parametrize("radix", [True, False])
def test_every_choice_has_the_rows_of_its_own_tokens(testbed, radix):
    drive, prompt = testbed.drive(disable_radix_cache=not radix), random_prompt(np.random.default_rng(4), 30)
    drive.run(*(request(f"c{j}", prompt, 12, choice=j, group="one", temperature=1.0, seed=5) for j in range(4)))
    assert_all_faithful(drive)
    assert len({tuple(output.tokens) for output in drive.outputs.values()}) == 4
    assert [output.end.cached_tokens for output in drive.outputs.values()] == ([0, 28, 28, 28] if radix else [0] * 4)


@pytest.mark.parametrize("chunk", [None, 7])
def test_retraction_every_third_step_changes_no_row(testbed, chunk):
    drive, reqs = testbed.drive(chunked_prefill_size=chunk), requests(5, lengths=(*LENGTHS, 20, 33))
    drive.run(*reqs, before_step=lambda step: step % 3 == 2 and drive.retract_victim())
    assert drive.core.ranks[0].num_retracted > 5
    assert assert_all_faithful(drive) == num_rows(reqs)


def test_an_abort_in_prefill_returns_no_rows_and_harms_none(testbed):
    drive, reqs = testbed.drive(chunked_prefill_size=8), requests(6)
    drive.run(*reqs, before_step=lambda step: step == 2 and drive.core.abort("r3"))
    assert drive.outputs["r3"].end.finish_reason.type == "abort"
    assert drive.outputs["r3"].tokens == []
    assert_all_faithful(drive)


def test_an_abort_in_decode_returns_the_rows_of_the_tokens_returned(testbed):
    drive, reqs = testbed.drive(), requests(7, max_tokens=20)
    drive.run(*reqs, before_step=lambda step: step == 11 and [drive.core.abort(rid) for rid in ("r1", "r5")])
    assert drive.outputs["r1"].end.finish_reason.type == "abort"
    assert 0 < len(drive.outputs["r5"].tokens) < 20
    assert assert_all_faithful(drive) == num_rows(reqs)


@pytest.mark.parametrize("steps_later", [0, 1, 3])
def test_an_abort_after_retraction_returns_the_rows_taken_along(testbed, steps_later):
    """At once it waits and holds no page; later it is reading its prompt anew."""
    drive, reqs = (
        testbed.drive(chunked_prefill_size=6, disable_radix_cache=True),
        requests(8, lengths=(5, 40), max_tokens=30),
    )
    drive.add(*reqs)
    while drive.reqs["r1"].num_output < 5:
        drive.step()
    assert drive.retract_victim()
    drive.steps(steps_later)
    assert drive.reqs["r1"].num_dispatched < 40
    assert drive.core.abort("r1")
    drive.run()
    assert 5 <= len(drive.outputs["r1"].tokens) < 30
    assert assert_all_faithful(drive) == num_rows(reqs)


def test_deltas_of_a_stream_join_to_the_full_output(testbed):
    at_once, streamed = testbed.drive(), testbed.drive()
    at_once.run(*requests(9))
    expected = {
        rid: (output.tokens, output.logprobs, output.end.routed_experts) for rid, output in at_once.outputs.items()
    }
    streamed.run(*requests(9, stream=True))
    assert_all_faithful(streamed)
    for rid, output in streamed.outputs.items():
        assert output.num_outputs == len(output.tokens)
        assert expected[rid] == (output.tokens, output.logprobs, output.end.routed_experts)


@pytest.mark.parametrize("first", [2, 6])
def test_a_flush_mid_run_costs_running_requests_no_row(testbed, first):
    drive, rng = testbed.drive(chunked_prefill_size=8), np.random.default_rng(10)
    shared = random_prompt(rng, 20)
    reqs = [request(f"r{i}", np.concatenate([shared, random_prompt(rng, 4)]), 10) for i in range(6)]
    drive.run(*reqs, before_step=lambda step: step % 4 == first % 4 and step >= first and drive.core.flush_cache())
    assert assert_all_faithful(drive) == num_rows(reqs)


@pytest.mark.parametrize("cache", ["flush", "keep"])
def test_rows_of_a_request_that_lived_through_an_update_name_their_versions(testbed, cache):
    drive, reqs = testbed.drive(chunked_prefill_size=8), requests(11, max_tokens=16)
    drive.run(
        *reqs, before_step=lambda step: step in (5, 15) and drive.update_weights(other_weights(1 + step), cache=cache)
    )
    assert assert_all_faithful(drive) == num_rows(reqs)
    assert max(len(output.end.routed_experts.version_spans) for output in drive.outputs.values()) == 3


@pytest.mark.parametrize("start", [1, 29, 30])
def test_rows_from_a_start_are_the_tail_of_all_rows(testbed, start):
    drive, prompt = testbed.drive(), random_prompt(np.random.default_rng(12), 30)
    drive.run(request("whole", prompt), request("tail", prompt, start=start))
    drive.run(request("cached tail", prompt, start=start))
    assert_all_faithful(drive)
    whole = drive.outputs["whole"].end.routed_experts.ids
    for rid in ("tail", "cached tail"):
        np.testing.assert_array_equal(drive.outputs[rid].end.routed_experts.ids, whole[start:])


def test_rows_are_returned_only_to_requests_that_ask_for_them(testbed):
    drive, prompt = testbed.drive(), random_prompt(np.random.default_rng(13), 20)
    drive.run(request("quiet", prompt, asks=False), request("asking", prompt))
    assert_all_faithful(drive)
    assert drive.outputs["quiet"].end.routed_experts is None
    assert drive.outputs["quiet"].tokens == drive.outputs["asking"].tokens


def test_another_extra_key_shares_no_page_and_no_row(testbed):
    drive, prompt = testbed.drive(), random_prompt(np.random.default_rng(15), 20)
    drive.run(request("a", prompt, extra_key="a"))
    drive.run(request("b", prompt, extra_key="b"), request("a again", prompt, extra_key="a"))
    assert_all_faithful(drive)
    assert [output.end.cached_tokens for output in drive.outputs.values()] == [0, 0, 16]
    pages = [{forward for forward, _ in drive.log.rows[rid].values()} for rid in ("a", "b")]
    assert not pages[0] & pages[1]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (3, 4)), 5])
def test_any_mixture_of_events_keeps_every_row(testbed, seed):
    """Arrivals, aborts, retractions, flushes and weight updates at random, in a pool that is too small."""
    rng = np.random.default_rng(100 + seed)
    chunk = (None, 3, 9)[seed % 3]
    drive = testbed.drive(pages=60, chunked_prefill_size=chunk, disable_radix_cache=seed == 5)
    shared = random_prompt(rng, 40)
    arrived = 0

    def arrive():
        nonlocal arrived
        prompt = np.concatenate([shared[: rng.integers(0, 41)], random_prompt(rng, rng.integers(1, 30))])
        options = dict(
            max_tokens=int(rng.integers(1, 20)), temperature=float(rng.integers(2)), seed=int(rng.integers(9))
        )
        for choice in range(rng.integers(1, 4)):
            more = dict(
                choice=choice,
                group=f"g{arrived}",
                stream=bool(rng.integers(2)),
                start=int(rng.integers(prompt.size + 1)),
            )
            if rng.random() < 0.3:
                more |= dict(frequency_penalty=0.5, stop_token_ids=[*range(0, 313, 9)])
            drive.add(request(f"r{arrived}-{choice}", prompt, **options, **more))
        arrived += 1

    def interfere(step):
        if arrived < 14 and rng.random() < 0.4:
            arrive()
        event = rng.random()
        if event < 0.12:
            drive.retract_victim()
        elif event < 0.18 and drive.core.request_table.num_live:
            drive.core.abort(str(rng.choice(drive.core.request_table.live())))
        elif event < 0.21:
            drive.core.flush_cache()
        elif event < 0.24:
            drive.update_weights(other_weights(int(rng.integers(1, 3))), cache=("flush", "keep")[rng.integers(2)])

    arrive()
    drive.run(before_step=interfere)
    while arrived < 14:
        arrive()
        drive.run(before_step=interfere)
    assert assert_all_faithful(drive) > 300
    assert drive.core.request_table.accepted == sum(drive.core.request_table.finished.values())


def test_rows_that_are_returned_reproduce_the_logprobs_that_are_returned(testbed):
    drive, reqs = testbed.drive(chunked_prefill_size=11), requests(14, lengths=(3, 20, 33, 47), prompt_logprobs_from=0)
    drive.run(*reqs, before_step=lambda step: step % 5 == 4 and drive.retract_victim())
    size = (len(reqs), 64)
    tokens, ids, valid = np.zeros(size, np.int32), np.zeros((*size, 3, 4), np.uint8), np.zeros(size, bool)
    for index, req in enumerate(reqs):
        rows = drive.outputs[req.rid].end.routed_experts.ids
        tokens[index, : req.num_known], ids[index, : len(rows)], valid[index, : len(rows)] = (
            req.tokens[: req.num_known],
            rows,
            True,
        )
    routed = RoutedBatch(jnp.asarray(ids), jnp.asarray(valid), jnp.zeros(size, bool))
    logits = forward(build_model(testbed.config, testbed.oracle.tensors), jnp.asarray(tokens), routed=routed).logits
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    for index, req in enumerate(reqs):
        output, length = drive.outputs[req.rid], req.num_known
        scored = logprobs[index, np.arange(length - 1), tokens[index, 1:length]]
        returned = [*output.prompt_logprobs[1:], *output.logprobs]
        np.testing.assert_allclose(returned, scored, atol=2e-5, rtol=0)
