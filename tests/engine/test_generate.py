"""`generate` without a stream: arguments, results, stop conditions. Greedy by default, so that answers can be
compared."""

import re

import jax
import numpy as np
import pytest

from oracles.families import CASES, Oracle
from routed_experts import (
    InvalidRequestError,
    PromptTooLongError,
    SamplingParams,
    extract_routed_experts_from_meta_info,
)
from routed_experts.engine.requests.detokenizer import IncrementalDetokenizer
from routed_experts.formats.meta_info import record_from_meta_info
from support.engines import letter_bias, open_engine
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import EOS_ID, VOCAB_SIZE, write_tiny_checkpoint

GREEDY = {"temperature": 0.0, "ignore_eos": True}
META_KEYS = {
    "cache_miss_count",
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "e2e_latency",
    "weight_version",
    "weight_versions",
    "prefill_weight_versions",
    "update_count",
    "version_spans",
    "version_labels",
    "logprobs_mode",
}


def text_and_ids(result):
    return result["text"], result["output_ids"]


# --- how it is called


def test_one_prompt_gives_a_dict_and_a_list_gives_a_list_in_order(engine):
    prompts = ["once upon a time", "the cat", "experts:"]
    separate = [engine.generate(prompt, GREEDY, max_new_tokens=8) for prompt in prompts]
    together = engine.generate(prompts, GREEDY, max_new_tokens=8)
    assert isinstance(separate[0], dict) and isinstance(together, list)
    assert [text_and_ids(result) for result in together] == [text_and_ids(result) for result in separate]
    assert len({tuple(result["output_ids"]) for result in separate}) == 3
    assert isinstance(engine.generate(["the cat"], GREEDY, max_new_tokens=2), list)


def test_text_and_its_token_ids_are_the_same_request(engine):
    ids = engine.tokenizer.encode("once upon a time")
    expected = engine.generate("once upon a time", GREEDY, max_new_tokens=8)
    for input_ids in (ids, tuple(ids), np.array(ids), np.array(ids, np.uint16)):
        assert text_and_ids(
            engine.generate(input_ids=input_ids, sampling_params=GREEDY, max_new_tokens=8)
        ) == text_and_ids(expected)
    nested = engine.generate(input_ids=[ids, ids[:3]], sampling_params=GREEDY, max_new_tokens=8)
    assert text_and_ids(nested[0]) == text_and_ids(expected) and nested[1]["meta_info"]["prompt_tokens"] == 3
    assert isinstance(engine.generate(input_ids=[ids], sampling_params=GREEDY, max_new_tokens=1), list)
    assert isinstance(engine.generate(input_ids=np.array([ids]), sampling_params=GREEDY, max_new_tokens=1), list)


def test_n_gives_n_answers_a_prompt_in_order(engine):
    results = engine.generate(["the cat", "experts:"], {"n": 3, "seed": 1, "max_tokens": 6}, rid="job")
    assert [result["meta_info"]["id"] for result in results] == [f"job-{i}" for i in range(6)]
    assert [result["meta_info"]["prompt_tokens"] for result in results] == [
        len(engine.tokenizer.encode("the cat"))
    ] * 3 + [len(engine.tokenizer.encode("experts:"))] * 3
    assert isinstance(engine.generate("the cat", {"n": 2, "max_tokens": 1}), list)
    assert engine.generate("the cat", {"max_tokens": 1}, rid="one")["meta_info"]["id"] == "one"


def test_parameters_may_be_an_object_a_dict_or_either_spelling(engine):
    expected = engine.generate(
        "a", SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5, min_tokens=2, seed=3)
    )
    for params in (
        {"temperature": 0, "ignore_eos": True, "max_tokens": 5, "min_tokens": 2, "seed": 3},
        {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 5, "min_new_tokens": 2, "sampling_seed": 3},
        {"temperature": 0.0, "ignore_eos": True, "max_tokens": 5, "max_new_tokens": 5, "top_p": None},
    ):
        assert text_and_ids(engine.generate("a", params)) == text_and_ids(expected)


def test_max_new_tokens_stands_beside_the_parameters_and_agrees_with_them(engine):
    assert len(engine.generate("a", GREEDY | {"max_tokens": 3}, max_new_tokens=3)["output_ids"]) == 3
    with pytest.raises(InvalidRequestError, match="max_new_tokens=4, but sampling_params have 3") as excinfo:
        engine.generate("a", GREEDY | {"max_tokens": 3}, max_new_tokens=4)
    assert (excinfo.value.param, excinfo.value.code) == ("max_new_tokens", "conflicting_parameters")


def test_rows_may_be_requested_by_argument_or_parameter(engine):
    beside = engine.generate(
        "the cat", GREEDY, max_new_tokens=4, return_routed_experts=True, routed_experts_start_len=2
    )
    among = engine.generate(
        "the cat", GREEDY | {"return_routed_experts": True, "routed_experts_prompt_start": 2}, max_new_tokens=4
    )
    both = engine.generate(
        "the cat",
        GREEDY | {"return_routed_experts": True},
        max_new_tokens=4,
        return_routed_experts=True,
        routed_experts_prompt_start=2,
    )
    payloads = {result["meta_info"]["routed_experts"] for result in (beside, among, both)}
    assert len(payloads) == 1 and None not in payloads


def test_none_is_absent(engine):
    nothing = dict.fromkeys(
        (
            "input_ids",
            "rid",
            "extra_key",
            "max_new_tokens",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "return_routed_experts",
            "routed_experts_start_len",
            "routed_experts_format",
            "routed_experts_layers",
            "stream",
        )
    )
    assert text_and_ids(engine.generate("a", GREEDY | {"max_tokens": 3}, **nothing)) == text_and_ids(
        engine.generate("a", GREEDY, max_new_tokens=3)
    )


def test_128_tokens_are_the_default_and_the_context_the_limit(engine):
    assert engine.generate("a", GREEDY)["meta_info"]["completion_tokens"] == 128
    near_the_end = [5] * 500
    result = engine.generate(input_ids=near_the_end, sampling_params=GREEDY)
    assert result["meta_info"]["completion_tokens"] == 12  # what is left of 512
    full = engine.generate(input_ids=[5] * 511, sampling_params=GREEDY, max_new_tokens=1, return_routed_experts=True)
    assert extract_routed_experts_from_meta_info(full).reshape(-1, 4, 4).shape[0] == 511
    with pytest.raises(PromptTooLongError, match="at most 12"):
        engine.generate(input_ids=near_the_end, sampling_params=GREEDY, max_new_tokens=13)


def test_temperature_1_is_the_default_and_calls_without_a_seed_differ(engine):
    unset = engine.generate("a", {"seed": 7, "max_tokens": 12})
    assert text_and_ids(unset) == text_and_ids(engine.generate("a", {"seed": 7, "max_tokens": 12, "temperature": 1.0}))
    assert text_and_ids(unset) != text_and_ids(engine.generate("a", GREEDY, max_new_tokens=12))
    calls = [engine.generate("a", {"max_tokens": 12, "ignore_eos": True}) for _ in range(3)]
    assert len({tuple(call["output_ids"]) for call in calls}) == 3


# --- results


def test_the_answer_has_exactly_its_keys(engine):
    result = engine.generate("the cat", GREEDY, max_new_tokens=4)
    assert set(result) == {"text", "output_ids", "meta_info"}
    meta = result["meta_info"]
    assert set(meta) == META_KEYS
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(engine.tokenizer.encode("the cat")), 4)
    assert meta["weight_version"] == "default" and meta["logprobs_mode"] == "processed" and meta["e2e_latency"] > 0
    assert result["text"] == engine.tokenizer.decode(result["output_ids"])


def test_only_requested_fields_are_added(engine):
    kwargs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_routed_experts": True}
    meta = engine.generate("the cat", GREEDY, max_new_tokens=4, **kwargs)["meta_info"]
    assert set(meta) - META_KEYS == {
        "output_token_logprobs",
        "output_top_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
        "routed_experts",
        "routed_experts_info",
        "routed_experts_start_len",
    }
    meta = engine.generate("the cat", GREEDY, max_new_tokens=4, return_logprob=True)["meta_info"]
    assert set(meta) - META_KEYS == {"output_token_logprobs"}


def test_logprobs_give_value_id_and_text_of_every_token(engine):
    result = engine.generate(
        "the cat", GREEDY, max_new_tokens=6, return_logprob=True, logprob_start_len=0, top_logprobs_num=3
    )
    meta, ids = result["meta_info"], engine.tokenizer.encode("the cat")
    assert [token for _, token, _ in meta["output_token_logprobs"]] == result["output_ids"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    for value, token, text in meta["output_token_logprobs"] + meta["input_token_logprobs"][1:]:
        assert value < 0 and text == engine.tokenizer.decode([token], skip_special_tokens=False)
    for (value, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0][:2] == [value, token]  # greedy: the chosen one is the best
        assert [entry[0] for entry in top] == sorted((entry[0] for entry in top), reverse=True) and len(top) == 3


@pytest.mark.parametrize("start", [0, 1, 3, 6])
def test_prompt_logprobs_begin_at_logprob_start_len(engine, start):
    ids = [9, 30, 61, 90, 12, 7, 200]
    whole = engine.generate(
        input_ids=ids, sampling_params=GREEDY, max_new_tokens=2, return_logprob=True, logprob_start_len=0
    )
    part = engine.generate(
        input_ids=ids, sampling_params=GREEDY, max_new_tokens=2, return_logprob=True, logprob_start_len=start
    )
    expected = whole["meta_info"]["input_token_logprobs"][start:]
    got = part["meta_info"]["input_token_logprobs"]
    assert [entry[1:] for entry in got] == [entry[1:] for entry in expected]
    for (value, *_), (other, *_) in zip(got, expected, strict=True):
        assert value is other is None or value == pytest.approx(other, abs=1e-4)


def test_logprobs_among_the_parameters_mean_the_same(engine):
    beside = engine.generate(
        "the cat", GREEDY, max_new_tokens=3, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )
    among = engine.generate("the cat", GREEDY | {"logprobs": 2, "prompt_logprobs": 2}, max_new_tokens=3)
    keys = ("output_token_logprobs", "output_top_logprobs", "input_token_logprobs", "input_top_logprobs")
    for key in keys:
        tokens = [[entry and entry[1] for entry in result["meta_info"][key]] for result in (beside, among)]
        assert tokens[0] == tokens[1]


# --- rows


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_every_token_but_the_last_has_a_row(engine, max_new_tokens):
    prompt_len = len(engine.tokenizer.encode("once upon a time"))
    whole = record_from_meta_info(
        engine.generate("once upon a time", GREEDY, max_new_tokens=max_new_tokens, return_routed_experts=True)
    )
    assert whole.num_rows == prompt_len + max_new_tokens - 1 and whole.valid is None
    whole.validate()
    for start in (0, 1, prompt_len - 1, prompt_len):
        result = engine.generate(
            "once upon a time",
            GREEDY,
            max_new_tokens=max_new_tokens,
            return_routed_experts=True,
            routed_experts_start_len=start,
        )
        part = record_from_meta_info(result)
        assert result["meta_info"]["routed_experts_start_len"] == part.start == start
        assert part.num_rows == prompt_len - start + max_new_tokens - 1
        assert np.array_equal(part.ids, whole.ids[start:])


def test_every_format_gives_the_same_rows(engine):
    def rows(**kwargs):
        result = engine.generate("the cat", GREEDY, max_new_tokens=5, return_routed_experts=True, **kwargs)
        return extract_routed_experts_from_meta_info(result).reshape(-1, 4, 4)

    expected = rows()
    assert (expected[:, 0] == -1).all() and expected[:, 1:].min() >= 0 and expected.max() < 16
    for form in ("int32", "npy"):
        for layers in ("all", "moe"):
            assert np.array_equal(rows(routed_experts_format=form, routed_experts_layers=layers), expected)


def test_every_choice_has_its_own_rows(engine):
    results = engine.generate(
        "once upon a time", {"n": 4, "seed": 5, "max_tokens": 12, "ignore_eos": True}, return_routed_experts=True
    )
    records = [record_from_meta_info(result) for result in results]
    assert len({record.generated.ids.tobytes() for record in records}) == 4
    assert len({record.prompt.ids.tobytes() for record in records}) == 1


# --- where it stops


@pytest.fixture(scope="module")
def spelled(engine):
    """A greedy answer in ASCII letters: parameters, tokens and their texts."""
    params = GREEDY | {"logit_bias": letter_bias(engine), "frequency_penalty": 1.5}
    result = engine.generate("the cat", params, max_new_tokens=24)
    pieces = [engine.tokenizer.decode([token]) for token in result["output_ids"]]
    assert result["text"] == "".join(pieces) and result["text"].isalpha() and result["text"].isascii()
    return params, result["output_ids"], pieces


def stop_across(pieces, first):
    """A text that begins inside piece `first`, ends inside the next, and stands nowhere before."""
    joined, begin = "".join(pieces), sum(map(len, pieces[:first]))
    for length in range(2, len(pieces[first]) + len(pieces[first + 1]) + 1):
        start = begin + len(pieces[first]) - 1
        text = joined[start : start + length]
        if joined.index(text) == start:
            return text, start
    raise AssertionError(pieces)


@pytest.mark.parametrize("first", [5, 9, 14])
def test_a_stop_string_across_tokens_cuts_the_text_and_keeps_the_ids(engine, spelled, first):
    params, ids, pieces = spelled
    stop, begin = stop_across(pieces, first)
    joined, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
    num_tokens = int(np.searchsorted(ends, begin + len(stop))) + 1
    for keep in (False, True):
        stopping = params | {"stop": ["never this", stop], "include_stop_str_in_output": keep}
        result = engine.generate("the cat", stopping, max_new_tokens=24, return_routed_experts=True)
        assert result["text"] == joined[: begin + len(stop) * keep]
        assert result["output_ids"] == ids[:num_tokens]
        assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert record_from_meta_info(result).num_rows == result["meta_info"]["prompt_tokens"] + num_tokens - 1


def test_a_stop_string_outranks_the_length_that_the_same_token_reached(engine, spelled):
    params, _, pieces = spelled
    stop, begin = stop_across(pieces, 5)
    num_tokens = int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), begin + len(stop))) + 1
    result = engine.generate("the cat", params | {"stop": stop}, max_new_tokens=num_tokens)
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    result = engine.generate("the cat", params | {"stop": stop}, max_new_tokens=num_tokens - 1)
    assert result["meta_info"]["finish_reason"]["type"] == "length"
    assert result["text"] == "".join(pieces[: num_tokens - 1]), "text that was held back is told at the end"


@pytest.mark.parametrize(("stop", "count"), [((), 1), (("###",), 1), (("never", "##"), 3)])
def test_each_sequence_is_decoded_once(engine, monkeypatch, stop, count):
    """By one detokenizer: the caller's, or the engine thread's where a stop string may end the sequence."""
    pushed = []
    push = IncrementalDetokenizer.push

    def counted(self, token_ids):
        pushed.append((id(self), len(token_ids)))
        return push(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "push", counted)
    params = GREEDY | {"max_tokens": 9, "n": count, "temperature": 1.0, "seed": 3, "stop": list(stop)}
    results = engine.generate("the cat", params)
    results = results if isinstance(results, list) else [results]
    assert len({detokenizer for detokenizer, _ in pushed}) == count
    assert sum(tokens for _, tokens in pushed) == sum(len(result["output_ids"]) for result in results) == 9 * count


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_beside_stop_strings_is_hidden_unless_its_text_completes_one(engine, spelled, stream):
    params, ids, pieces = spelled
    first = next(
        position
        for position in range(4, 20)
        if ids.index(ids[position]) == position
        and pieces[position - 1][-1] + pieces[position] not in "".join(pieces[:position])
    )
    before, spanning = "".join(pieces[:first]), pieces[first - 1][-1] + pieces[first]

    def ask(stop):
        stopping = params | {"stop": [stop], "stop_token_ids": [ids[first]]}
        result = engine.generate("the cat", stopping, max_new_tokens=24, stream=stream)
        result = list(result)[-1] if stream else result
        assert result["output_ids"] == ids[: first + 1]
        return result["text"], result["meta_info"]["finish_reason"]["matched"]

    assert ask("#") == (before, ids[first])
    assert ask(before[-2:] + "#") == (before, ids[first]), "text that was held back is told, the token is not"
    assert ask(spanning) == (before[:-1], spanning)


def test_a_stop_token_stays_in_the_ids_and_has_no_text(engine, spelled):
    params, ids, pieces = spelled
    stop = ids[6]
    num_tokens = ids.index(stop) + 1
    result = engine.generate("the cat", params | {"stop_token_ids": [stop]}, max_new_tokens=24)
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert result["output_ids"] == ids[:num_tokens] and result["text"] == "".join(pieces[: num_tokens - 1])
    untrimmed = engine.generate("the cat", params | {"stop_token_ids": [stop], "no_stop_trim": True}, max_new_tokens=24)
    assert untrimmed["text"] == "".join(pieces[:num_tokens])


def test_the_end_of_text_token_stops_unless_it_is_ignored(engine):
    forced = {"temperature": 0.0, "logit_bias": {EOS_ID: 100.0}}
    result = engine.generate("the cat", forced, max_new_tokens=8)
    assert result["output_ids"] == [EOS_ID] and result["text"] == ""
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
    result = engine.generate("the cat", forced | {"ignore_eos": True}, max_new_tokens=8)
    assert result["output_ids"] == [EOS_ID] * 8 and result["meta_info"]["finish_reason"]["type"] == "length"
    assert result["text"] == ""
    result = engine.generate("the cat", forced | {"ignore_eos": True, "skip_special_tokens": False}, max_new_tokens=2)
    assert result["text"] == "<|im_end|><|im_end|>"


def test_min_tokens_keeps_stop_tokens_away(engine):
    forced = {"temperature": 0.0, "logit_bias": {EOS_ID: 100.0}}
    for least in (1, 5):
        result = engine.generate("the cat", forced | {"min_tokens": least}, max_new_tokens=8)
        assert len(result["output_ids"]) == least + 1 and result["output_ids"][-1] == EOS_ID
        assert EOS_ID not in result["output_ids"][:-1]
    result = engine.generate("the cat", forced | {"min_new_tokens": 8}, max_new_tokens=8)
    assert EOS_ID not in result["output_ids"] and len(result["output_ids"]) == 8


def test_without_detokenising_there_is_no_text(engine):
    result = engine.generate("the cat", GREEDY | {"detokenize": False}, max_new_tokens=4)
    assert (
        result["text"] == ""
        and result["output_ids"] == engine.generate("the cat", GREEDY, max_new_tokens=4)["output_ids"]
    )


def test_an_engine_without_tokenizer_takes_and_gives_ids(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("bare"), tokenizer=False)
    with lazy_compilation(), open_engine(folder, skip_tokenizer_init=True) as engine:
        result = engine.generate(input_ids=[3, 4, 5], sampling_params=GREEDY, max_new_tokens=4, return_logprob=True)
        assert result["text"] == "" and len(result["output_ids"]) == 4 and max(result["output_ids"]) < VOCAB_SIZE
        assert [text for _, _, text in result["meta_info"]["output_token_logprobs"]] == [None] * 4
        assert (
            engine.generate(input_ids=[3], sampling_params=GREEDY | {"stop_token_ids": list(range(VOCAB_SIZE))})[
                "output_ids"
            ]
            != []
        )
        for kwargs in ({"prompt": "text"}, {"input_ids": [3], "sampling_params": {"stop": "x"}}):
            with pytest.raises(InvalidRequestError, match="no tokenizer"):
                engine.generate(**kwargs)


def test_an_engine_without_tokenizer_stops_at_the_ids_that_the_checkpoint_names(tmp_path):
    folder = write_tiny_checkpoint(tmp_path)
    with lazy_compilation(), open_engine(folder, skip_tokenizer_init=True) as engine:
        bias = {"temperature": 0.0, "logit_bias": {EOS_ID: 100.0}}
        out = engine.generate(input_ids=[1, 2, 3], sampling_params=bias, max_new_tokens=5)
        assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS_ID}
        assert (
            len(
                engine.generate(input_ids=[1, 2, 3], sampling_params=bias | {"ignore_eos": True}, max_new_tokens=5)[
                    "output_ids"
                ]
            )
            == 5
        )


@pytest.mark.parametrize(
    ("family", "backend", "dtypes"),
    [
        ("Qwen3Moe", "native", {"bfloat16"}),
        pytest.param("Qwen3Moe", "paged", {"float32"}, marks=pytest.mark.thorough),
        ("DeepseekV3", "native", {"bfloat16"}),
        ("Qwen3Next", "native", {"bfloat16", "float32"}),  # of keys and values, and of states
        pytest.param("Lfm2Moe", "native", {"bfloat16", "float32"}, marks=pytest.mark.thorough),
    ],
)
def test_no_step_of_a_bfloat16_model_converts_the_whole_pool_on_cpu(family, backend, dtypes, tmp_path):
    Oracle(CASES[family], tmp_path)
    options = dict(dtype="bfloat16", attention_backend=backend, skip_tokenizer_init=True)
    with lazy_compilation(), open_engine(tmp_path, **options) as engine:
        runner = engine.components.core.runner
        arrays = jax.tree.leaves(runner.config.pool.abstract)
        assert {str(array.dtype) for array in arrays} == dtypes
        texts = [runner._programs[key].as_text() for key in runner._programs.jobs if key[0] == "forward"]
        for array in arrays:
            dims = ",".join(map(str, array.shape))
            assert texts and all(f"[{dims}]" in text for text in texts)
            assert not any(re.search(rf"\[{dims}\]\S* convert\(", text) for text in texts)
        out = engine.generate(input_ids=[3, 4, 5], sampling_params=GREEDY, max_new_tokens=4)
        assert len(out["output_ids"]) == 4
