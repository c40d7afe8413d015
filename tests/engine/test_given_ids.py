"""Logprobs of ids that a request names, beside each token's own (SGLang's token_ids_logprob)."""

import dataclasses

import numpy as np
import pytest

from routed_experts import InvalidRequestError
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.engine.requests.input_processor import InputProcessor

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def answer(engine, ids, *, temperature=0.0, prompt=PROMPT, num_tokens=4, **options):
    params = {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True, "seed": 5}
    options = {"return_logprob": True, "logprob_start_len": 0, **options}
    return engine.generate(input_ids=prompt, sampling_params=params, token_ids_logprob=ids, **options)


def test_they_are_those_of_the_model(engine):
    """The oracle is `score`: the logprobs of the sequence itself, of which the ids are parts."""
    for temperature in (0.0, 0.7):
        out = answer(engine, [5, 12, 20], temperature=temperature)
        sequence = [*PROMPT, *out["output_ids"]]
        whole = answer(engine, sorted(set(sequence)), temperature=temperature)
        assert whole["output_ids"] == out["output_ids"]
        expected = engine.score(sequence).logprobs
        meta = whole["meta_info"]
        rows = [*meta["input_token_ids_logprobs"][1:], *meta["output_token_ids_logprobs"]]
        assert meta["input_token_ids_logprobs"][0] is None and len(rows) == len(expected)
        actual = [{token: logprob for logprob, token, _ in row}[sequence[i + 1]] for i, row in enumerate(rows)]
        np.testing.assert_allclose(actual, expected, atol=2e-5)
        few = out["meta_info"]["output_token_ids_logprobs"]
        for row, all_ids in zip(few, meta["output_token_ids_logprobs"], strict=True):
            assert [token for _, token, _ in row] == [5, 12, 20]
            assert [entry for entry in all_ids if entry[1] in (5, 12, 20)] == row


def test_they_leave_everything_else_as_it_is(engine):
    plain, given = answer(engine, None, top_logprobs_num=3), answer(engine, [3, 4], top_logprobs_num=3)
    for name, value in plain["meta_info"].items():
        if "logprobs" in name:
            assert given["meta_info"][name] == value, name
    assert not any("ids_logprobs" in name for name in plain["meta_info"])
    alone = answer(engine, [3, 4])
    assert "output_top_logprobs" not in alone["meta_info"]
    assert alone["meta_info"]["output_token_ids_logprobs"] == given["meta_info"]["output_token_ids_logprobs"]
    assert "input_token_ids_logprobs" not in answer(engine, [3], logprob_start_len=-1)["meta_info"]
    assert not any(
        "logprobs" in name and "mode" not in name for name in answer(engine, [3], return_logprob=False)["meta_info"]
    )


def test_prompts_in_chunks_and_neighbours_have_their_own(engine):
    """A prompt of several chunks beside others with other ids, and none."""
    long = [5 + i % 40 for i in range(engine.server_args.chunked_prefill_size or 64)] * 2
    prompts, ids = [long[:90], PROMPT, [9, 9, 9]], [[7, 8, 9], [11], []]
    together = answer(engine, ids, prompt=prompts)
    for prompt, own, out in zip(prompts, ids, together, strict=True):
        engine.flush_cache()
        alone = answer(engine, own or None, prompt=prompt)["meta_info"]
        for name in ("input_token_ids_logprobs", "output_token_ids_logprobs"):
            assert (name in out["meta_info"]) is bool(own)
            for row, other in zip(out["meta_info"].get(name, ()), alone.get(name, ()), strict=True):
                assert (row is None) == (other is None)
                if row is not None:
                    assert [entry[1] for entry in row] == [entry[1] for entry in other] == own
                    np.testing.assert_allclose([e[0] for e in row], [e[0] for e in other], atol=2e-4)


def test_a_stream_has_them(engine):
    whole = answer(engine, [3, 4])["meta_info"]["output_token_ids_logprobs"]
    *_, last = answer(engine, [3, 4], stream=True)
    assert last["meta_info"]["output_token_ids_logprobs"] == whole


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([-1], "out-of-vocabulary id -1"),
        ([2_000_000_000], "out-of-vocabulary"),
        ([[0]], "flat list of integers"),
        ([[0], [1, 2]], "flat list of integers"),
        ([0, [1]], "flat list of integers"),
        ("5", "flat list of integers"),
        ([True], "flat list of integers"),
        (list(range(33)), "at most 32"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(engine, ids, match):
    with pytest.raises(InvalidRequestError, match=match) as caught:
        answer(engine, ids)
    assert caught.value.param == "token_ids_logprob"


def test_one_wrong_list_of_several_refuses_the_call(engine):
    for ids, match in (([[0], [2_000_000_000]], "out-of-vocabulary"), ([[0]], "flat list"), ([[0], 5], "flat list")):
        with pytest.raises(InvalidRequestError, match=match):
            answer(engine, ids, prompt=[[5, 6], [7, 8]])


def test_an_engine_that_cannot_give_them_says_why(engine):
    limits = dataclasses.replace(engine.input_processor.limits, no_given_ids="it speculates")
    processor = InputProcessor(limits, None, random_seed=0)
    request = GenerateReqInput(input_ids=[5, 6], return_logprob=True, token_ids_logprob=[3])
    with pytest.raises(InvalidRequestError, match="not served by this engine: it speculates"):
        processor.process(request)
    (plain,) = processor.process(dataclasses.replace(request, token_ids_logprob=[]))
    assert plain.token_ids_logprob == ()
