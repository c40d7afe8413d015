"""routed_experts_include_last: the last token is fed too, for its row. Its row is what the experts ran, and nothing
else changes.

Judged by the MoE probe, as test_fidelity is; the stores are poisoned before every run and after every step."""

import numpy as np
import pytest

from oracles.driver import assert_all_faithful, request
from oracles.testbeds import random_prompt, tiny_testbed
from routed_experts import InvalidRequestError, SamplingParams
from routed_experts.formats import record_from_response

LENGTHS = (1, 4, 9, 30, 45, 61)


@pytest.fixture(scope="module")
def testbed():
    return tiny_testbed(moe_backend="probed")


def requests(seed=0, max_tokens=12, **options):
    kwargs = {"include_last": True, **options}
    rng = np.random.default_rng(seed)
    return [
        request(
            f"r{index}",
            random_prompt(rng, length),
            max_tokens,
            temperature=float(index % 2),
            seed=seed + index,
            **kwargs,
        )
        for index, length in enumerate(LENGTHS)
    ]


def num_rows(reqs):
    return sum(req.num_known for req in reqs)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_a_row_and_the_tokens_are_the_same(testbed, chunk, stream):
    plain = testbed.drive()
    plain.run(*requests(include_last=False))
    tokens = {rid: output.tokens for rid, output in plain.outputs.items()}
    drive = testbed.drive(chunked_prefill_size=chunk)
    reqs = requests(stream=stream)
    drive.run(*reqs)
    assert assert_all_faithful(drive) == num_rows(reqs)
    assert {rid: output.tokens for rid, output in drive.outputs.items()} == tokens
    assert all(
        output.end.queue_s is not None and output.end.completion_tokens == 12 for output in drive.outputs.values()
    )


def test_a_stop_token_has_its_row(testbed):
    first = testbed.drive()
    first.run(*requests(1, include_last=False))
    stops = {rid: output.tokens[5] for rid, output in first.outputs.items()}
    drive, rng = testbed.drive(), np.random.default_rng(1)
    reqs = [
        request(
            f"r{index}",
            random_prompt(rng, length),
            12,
            include_last=True,
            temperature=float(index % 2),
            seed=1 + index,
            stop_token_ids=[stops[f"r{index}"]],
            stream=index % 3 == 0,
        )
        for index, length in enumerate(LENGTHS)
    ]
    drive.run(*reqs)
    assert assert_all_faithful(drive) == num_rows(reqs)
    assert all(
        output.end.finish_reason.matched == output.tokens[-1] == stops[rid] for rid, output in drive.outputs.items()
    )


def test_retraction_every_third_step_changes_no_row(testbed):
    drive, reqs = testbed.drive(), requests(2)
    drive.run(*reqs, before_step=lambda step: step % 3 == 2 and drive.retract_victim())
    assert drive.core.ranks[0].num_retracted >= 5
    assert assert_all_faithful(drive) == num_rows(reqs)


def test_retraction_while_the_last_token_is_fed_changes_no_row(testbed):
    """Before each step in which a request waits only for the row of its last token."""
    drive, reqs = testbed.drive(), requests(3, stop_token_ids=range(0, 313, 5))
    retracted = []

    def interfere(step):
        ending = [req for req in drive.core.ranks[0].running if req.pending_finish is not None]
        if ending and len(retracted) < 4:
            retracted.append(drive.retract_victim())

    drive.run(*reqs, before_step=interfere)
    assert any(retracted)
    assert assert_all_faithful(drive) == num_rows(reqs)


def test_an_abort_gives_the_rows_of_what_was_fed(testbed):
    drive, reqs = testbed.drive(), requests(4, max_tokens=20)
    drive.run(*reqs, before_step=lambda step: step == 11 and [drive.core.abort(rid) for rid in ("r1", "r5")])
    assert drive.outputs["r1"].end.finish_reason.type == "abort" and 0 < len(drive.outputs["r5"].tokens) < 20
    assert assert_all_faithful(drive) == num_rows(reqs) - sum(
        output.end.finish_reason.type == "abort" for output in drive.outputs.values()
    )


def test_choices_and_others_beside_them(testbed):
    drive, prompt = testbed.drive(), random_prompt(np.random.default_rng(5), 30)
    reqs = [
        request(f"c{j}", prompt, 12, choice=j, group="one", temperature=1.0, seed=5, include_last=j % 2 == 0)
        for j in range(4)
    ]
    drive.run(*reqs)
    assert assert_all_faithful(drive) == sum(req.num_known - index % 2 for index, req in enumerate(reqs))


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_row_at_the_end_of_the_context_over_every_interface(engine, stream):
    prompt = [7, 8, 9] * 100
    kwargs = {"return_routed_experts": True, "routed_experts_include_last": True, "routed_experts_format": "npy"}
    result = engine.generate(
        input_ids=prompt, sampling_params={"ignore_eos": True}, max_new_tokens=212, stream=stream, **kwargs
    )
    result = list(result)[-1] if stream else result
    assert len(result["output_ids"]) == 212, "S is the whole context of 512 tokens"
    record = record_from_response(result)
    scored = engine.score(prompt + result["output_ids"]).routed_experts
    assert record.num_rows == record.num_tokens == 512
    assert result["meta_info"]["routed_experts_info"]["include_last"] is True
    assert np.mean(record.ids == scored.ids) > 0.99, "another pass over the same tokens, up to ties"


def test_a_stop_string_ends_the_text_and_has_its_row(engine):
    params = SamplingParams(
        temperature=0.0, max_tokens=40, return_routed_experts=True, routed_experts_include_last=True
    )
    whole = engine.generate("the router", params)
    stop = whole["text"][10:12]
    plain = engine.generate(
        "the router", {"temperature": 0.0, "stop": stop}, max_new_tokens=40, return_routed_experts=True
    )
    for stream in (False, True):
        result = engine.generate(
            "the router",
            {"temperature": 0.0, "stop": stop, "routed_experts_include_last": True},
            max_new_tokens=40,
            stream=stream,
            return_routed_experts=True,
            routed_experts_stream=stream,
        )
        events = list(result) if stream else [result]
        assert (events[-1]["text"], events[-1]["output_ids"]) == (plain["text"], plain["output_ids"])
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        records = [record_from_response(event) for event in events]
        ids = np.concatenate([record.ids for record in records if record is not None])
        expected = record_from_response(plain)
        assert ids.shape[0] == expected.num_rows + 1 == records[-1].num_tokens
        assert np.array_equal(ids[:-1], expected.ids)


def test_include_last_without_rows_is_refused(engine):
    wrong = {"return_routed_experts": True, "routed_experts_include_last": 1}
    for kwargs, code in (({}, "routing_not_requested"), (wrong, "invalid_request")):
        with pytest.raises(InvalidRequestError) as excinfo:
            engine.generate("a", **{"routed_experts_include_last": True, **kwargs})
        assert (excinfo.value.code, excinfo.value.param) == (code, "routed_experts_include_last")
