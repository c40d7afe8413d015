"""Bad input: one typed error in one line each, raised before any state changes; running requests are unaffected."""

import dataclasses
import itertools
import json
import math
import random
import shutil

import numpy as np
import pytest

from routed_experts import (
    CaptureDisabledError,
    CaptureUnsupportedError,
    CheckpointError,
    ConfigError,
    Engine,
    InvalidRequestError,
    MemoryPlanError,
    PromptTooLongError,
    QueueFullError,
    RoutedExpertsError,
    SamplingParams,
)
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.engine.build.backends import BackendRegistry
from routed_experts.engine.requests.input_processor import InputProcessor, RequestLimits
from routed_experts.layers.moe import MoeBackend, reference_experts
from routed_experts.models.loading.checkpoint import save
from routed_experts.scheduling.schedule_batch import Req
from support.backends import with_moe
from support.engines import SMALL, assert_idle, on_engine_thread, open_engine
from support.tiny_checkpoint import VOCAB_SIZE, tiny_config, tiny_tensors, write_tiny_checkpoint, write_tiny_tokenizer

GREEDY = {"temperature": 0.0, "ignore_eos": True}
MAGIC = [-1, -2, 2**31, 2**63, -(2**63), 10**30, True, "5", 1.5, math.nan, math.inf, -math.inf, [], {}, b"x", object()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def assert_readable(error, param=None):
    """One line of at most 1 kB, no traceback or address in it, and the field by name."""
    text = str(error)
    assert text and "\n" not in text and len(text.encode()) <= 1024, (len(text), text[:2000])
    assert "Traceback" not in text and " at 0x" not in text
    if param is not None:
        assert error.param == param, (error.param, text)


def refused(engine, kind=InvalidRequestError, *, param=None, code=None, **kwargs):
    with pytest.raises(kind) as excinfo:
        engine.generate(**kwargs)
    assert type(excinfo.value) is kind, excinfo.value
    assert_readable(excinfo.value, param)
    if code is not None:
        assert excinfo.value.code == code
    return str(excinfo.value)


# --- each field


PROMPTS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": b"abc"}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5]}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": "\ud800"}, None),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({}, "prompt"),
    ({"prompt": "a", "input_ids": [1]}, "prompt"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [[1], []]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [[[1]]]}, "input_ids"),
    ({"input_ids": 5}, "input_ids"),
    ({"input_ids": "abc"}, "input_ids"),
    ({"input_ids": b"abc"}, "input_ids"),
    ({"input_ids": {1: 2}}, "input_ids"),
    ({"input_ids": [[1]] * 1025}, "input_ids"),
    ({"input_ids": np.array(5)}, "input_ids"),
    ({"input_ids": np.array([1.5])}, "input_ids"),
    ({"input_ids": np.zeros((1, 2, 2), int)}, "input_ids"),
    ({"input_ids": np.array([True])}, "input_ids"),
    ({"input_ids": np.array([2**63], np.uint64)}, "input_ids"),
    ({"input_ids": np.zeros((0, 3), int)}, "input_ids"),
]


@pytest.mark.parametrize(("kwargs", "param"), PROMPTS, ids=str)
def test_a_prompt_that_is_none_is_refused(engine, kwargs, param):
    refused(engine, param=param, **kwargs)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**31, 2**63, -(2**63), 10**30, 1.0, "1", True, None, math.nan])
def test_a_token_id_that_is_none_is_refused(engine, token):
    for ids in ([token], [1, token, 2], [[1], [token]]):
        refused(engine, input_ids=ids, param="input_ids")


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([1, 10**30], "an integer of 100 bits"),
        ([-(10**5000)], "an integer of 16610 bits"),
        ([2**63, -1], str(2**63)),
        (np.array([2**63], np.uint64), str(2**63)),
        ([VOCAB_SIZE], str(VOCAB_SIZE)),
    ],
    ids=["100 bits", "16610 bits", "2**63", "uint64", "vocabulary"],
)
@pytest.mark.parametrize("param", ["input_ids", "prediction"])
def test_an_integer_of_any_size_is_out_of_the_vocabulary(engine, param, ids, wrong):
    text = refused(engine, **({"input_ids": [1]} | {param: ids}), param=param)
    assert f"{param} holds the token id {wrong}, out of vocabulary" in text


@pytest.mark.parametrize("text", [" ", "\n\n", "\t", "\ufeff", "\0", "\u200b", "e\u0301", "<|im_end|>"])
def test_text_that_only_looks_empty_is_a_prompt(engine, text):
    assert len(engine.generate(text, GREEDY, max_new_tokens=2)["output_ids"]) == 2


def test_an_item_that_is_no_token_id_is_named(engine):
    assert "item 1 is 1.5: give an integer" in refused(engine, input_ids=[2, 1.5], param="input_ids")


def test_a_prompt_too_long_for_the_context_names_what_fits(engine):
    text = refused(engine, PromptTooLongError, prompt="word " * 1000, param="prompt")
    assert "longer than the model's context length. This model's maximum context length is 512 tokens" in text
    text = refused(engine, PromptTooLongError, input_ids=[1] * 512, param="input_ids")
    assert text.endswith("with one new token; shorten it to at most 511")
    text = refused(engine, PromptTooLongError, input_ids=[1, 2, 3], max_new_tokens=510, param="max_new_tokens")
    assert text.startswith("max_new_tokens=510: max_completion_tokens is too large. Requested token count exceeds the")
    assert "This model's maximum context length is 512 tokens" in text
    assert text.endswith("ask for at most 509")
    assert "at most 509" in refused(engine, PromptTooLongError, input_ids=[1, 2, 3], max_new_tokens=2**31 - 1)


def test_a_prompt_too_long_names_the_context_that_the_model_allows():
    limits = RequestLimits(context_length=16, longest_context=512, pool_tokens=64, vocab_size=100, capture=None)
    processor = InputProcessor(limits, None, random_seed=0)
    with pytest.raises(PromptTooLongError, match="at most 15, or raise context_length, up to 512"):
        processor.process(GenerateReqInput(input_ids=[1] * 16))
    limits = dataclasses.replace(limits, context_length=512)
    with pytest.raises(PromptTooLongError, match="shorten it to at most 63 or raise max_total_tokens"):
        InputProcessor(limits, None, random_seed=0).process(GenerateReqInput(input_ids=[1] * 64))


def test_a_fix_names_the_parameter_that_is_meant(engine):
    assert "token ids go to input_ids=" in refused(engine, prompt=[1, 2, 3], param="prompt")
    assert "token ids go to input_ids=" in refused(engine, prompt=[[1, 2], [3]], param="prompt")
    assert "engine.score" in refused(engine, prompt="a", max_new_tokens=0)


@pytest.mark.parametrize("value", [0, *MAGIC])
def test_max_new_tokens_is_a_positive_integer(engine, value):
    refused(engine, prompt="a", max_new_tokens=value)
    refused(engine, prompt="a", sampling_params={"max_tokens": value})
    refused(engine, prompt="a", sampling_params={"max_new_tokens": value})


FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("n", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")
SWITCHES = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3, 1e300, 10**30, True, "0.5", [], b"x"], ids=str)
def test_a_number_must_be_finite_and_within_its_range(engine, field, value):
    refused(engine, prompt="a", sampling_params={field: value}, param=field)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", MAGIC, ids=lambda value: "object" if type(value) is object else str(value))
def test_an_integer_must_be_one_and_within_its_range(engine, field, value):
    if field == "top_k" and value == -1:  # off, as everywhere
        assert engine.generate("a", {"top_k": -1, "max_tokens": 1})["output_ids"]
    elif field == "seed" and value == 2**31:
        assert engine.generate("a", {"seed": 2**31, "max_tokens": 1})["output_ids"]
    else:
        refused(engine, prompt="a", sampling_params={field: value}, param=field)


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("value", [0, 1, "true", [], math.nan], ids=str)
def test_a_switch_is_true_or_false(engine, field, value):
    refused(engine, prompt="a", sampling_params={field: value}, param=field)


LISTS = [
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["x" * 257]),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stop", [5]),
    ("stop", {"x": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [2**63]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1] * 1025),
    ("logit_bias", {-1: 1}),
    ("logit_bias", {VOCAB_SIZE: 1}),
    ("logit_bias", {2**63: 1}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: -math.inf}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {1: None}),
    ("logit_bias", {1: True}),
    ("logit_bias", [1]),
    ("logit_bias", dict.fromkeys(range(1025), 1)),
    ("logit_bias", {"1": 1, 1: 2}),
]


@pytest.mark.parametrize(("field", "value"), LISTS, ids=lambda value: str(value)[:40])
def test_stops_and_biases_are_of_this_model_and_few(engine, field, value):
    refused(engine, prompt="a", sampling_params={field: value}, param=field)


def test_min_tokens_fits_below_max_tokens_from_any_source(engine):
    refused(engine, prompt="a", sampling_params={"min_tokens": 9, "max_tokens": 8}, param="min_tokens")
    assert "128" in refused(engine, prompt="a", sampling_params={"min_tokens": 129}, param="min_tokens")
    refused(engine, input_ids=[1] * 500, sampling_params={"min_tokens": 13}, param="min_tokens")


CALLS = [
    ("rid", 5),
    ("rid", ""),
    ("rid", "a b"),
    ("rid", "x" * 257),
    ("rid", "ä"),
    ("rid", b"x"),
    ("rid", ["x"]),
    ("rid", "a\n"),
    ("extra_key", 5),
    ("extra_key", [1]),
    ("extra_key", {}),
    ("stream", "yes"),
    ("stream", 1),
    ("return_logprob", "yes"),
    ("return_logprob", 1),
    ("top_logprobs_num", 21),
    ("top_logprobs_num", -1),
    ("top_logprobs_num", "5"),
    ("top_logprobs_num", True),
    ("top_logprobs_num", 2**63),
    ("logprob_start_len", -2),
    ("logprob_start_len", 7),
    ("logprob_start_len", 2**63),
    ("logprob_start_len", "0"),
    ("logprob_start_len", True),
    ("sampling_params", 5),
    ("sampling_params", "x"),
    ("sampling_params", [1]),
]


@pytest.mark.parametrize(("field", "value"), CALLS, ids=str)
def test_call_arguments_beside_sampling_parameters_are_checked(engine, field, value):
    refused(engine, **({"input_ids": [1, 2, 3, 4, 5, 6, 7], field: value}), param=field)


def test_integers_of_numpy_are_those_of_python_in_every_field(engine):
    def run(integer):
        kwargs = dict(data_parallel_rank=integer(0), top_logprobs_num=integer(2), logprob_start_len=integer(0))
        rows = dict(return_routed_experts=True, routed_experts_start_len=integer(1))
        params = GREEDY | {"max_tokens": integer(2), "seed": integer(3)}
        return engine.generate(input_ids=[1, 2, 3], sampling_params=params, return_logprob=True, **kwargs, **rows)

    numpy, python = run(np.int64), run(int)
    for key in ("output_top_logprobs", "input_token_logprobs", "routed_experts"):
        assert numpy["meta_info"][key] == python["meta_info"][key]
    json.dumps(numpy["meta_info"])


def test_an_extra_key_has_so_many_characters_at_most(engine):
    for prompts, key in (("a", "x" * 4097), (["a", "b"], ["x", "x" * 4097])):
        text = refused(engine, prompt=prompts, extra_key=key, param="extra_key")
        assert "extra_key has 4097 characters, above the limit of 4096; give a shorter one" in text
    assert "give text, or leave it out" in refused(engine, prompt="a", extra_key=5, param="extra_key")
    engine.generate("a", {"max_tokens": 1}, extra_key="x" * 4096)


def test_an_unknown_name_is_refused_with_the_nearest(engine):
    assert "did you mean temperature?" in refused(engine, prompt="a", sampling_params={"temprature": 1})
    assert "did you mean routed_experts_format?" in refused(
        engine, prompt="a", routed_expert_format="npy", code="unknown_field"
    )
    assert "did you mean max_new_tokens?" in refused(engine, prompt="a", max_new_token=3, param="max_new_token")
    assert "did you mean prompt?" in refused(engine, text="a", param="text", code="unknown_field")
    refused(engine, prompt="a", sampling_params={5: 1})
    refused(engine, prompt="a", sampling_params={"x" * 5000: 1})
    refused(engine, prompt="a", zzz=1)


def test_fan_out_is_bounded(engine):
    refused(engine, prompt="a", sampling_params={"n": 129}, param="n")
    text = refused(engine, prompt=["a"] * 256, sampling_params={"n": 128}, param="n")
    assert "256 prompts with n=128 are 32768 requests, above max_queued_requests=1024" in text


# --- rows


ROWS = [
    ({"routed_experts_start_len": -1}, "invalid_start"),
    ({"routed_experts_start_len": 4}, "invalid_start"),
    ({"routed_experts_start_len": 2**63}, "invalid_start"),
    ({"routed_experts_start_len": True}, "invalid_start"),
    ({"routed_experts_start_len": "1"}, "invalid_start"),
    ({"routed_experts_start_len": 1.0}, "invalid_start"),
    ({"routed_experts_prompt_start": -1}, "invalid_start"),
    ({"routed_experts_format": "xml"}, "unknown_format"),
    ({"routed_experts_format": 5}, "unknown_format"),
    ({"routed_experts_format": "List"}, "unknown_format"),
    ({"routed_experts_format": ["npy"]}, "unknown_format"),
    ({"routed_experts_format": "ref"}, "ref_unavailable"),
    ({"routed_experts_layers": "none"}, "unknown_layers"),
    ({"routed_experts_layers": True}, "unknown_layers"),
    ({"routed_experts_start_len": 1, "sampling_params": {"routed_experts_start_len": 2}}, "conflicting_parameters"),
    ({"routed_experts_start_len": 1, "routed_experts_prompt_start": 2}, "conflicting_parameters"),
    ({"routed_experts_format": "npy", "sampling_params": {"routed_experts_format": "int32"}}, "conflicting_parameters"),
    ({"sampling_params": {"return_routed_experts": False}}, "conflicting_parameters"),
]


@pytest.mark.parametrize(("kwargs", "code"), ROWS, ids=str)
def test_routing_options_that_cannot_be_met_are_refused(engine, kwargs, code):
    refused(engine, input_ids=[1, 2, 3], return_routed_experts=True, **kwargs, code=code)


def test_start_at_the_end_of_the_prompt_gives_the_generated_rows_alone(engine):
    kwargs = {
        "input_ids": [1, 2, 3],
        "sampling_params": GREEDY,
        "return_routed_experts": True,
        "routed_experts_start_len": 3,
    }
    meta = engine.generate(**kwargs, max_new_tokens=5)["meta_info"]
    assert meta["routed_experts_info"]["shape"] == [4, 4, 4]
    meta = engine.generate(**kwargs, max_new_tokens=1)["meta_info"]
    assert meta["routed_experts_info"]["shape"] == [0, 4, 4] and meta["routed_experts"] == "", "no row is not null"


@pytest.mark.parametrize("value", ["yes", 1, 0, [True], b"x"], ids=str)
def test_rows_are_requested_with_true_or_false(engine, value):
    refused(engine, prompt="a", return_routed_experts=value, param="return_routed_experts")
    refused(engine, prompt="a", sampling_params={"return_routed_experts": value}, param="return_routed_experts")


def test_words_about_rows_mean_nothing_without_asking_for_them(engine):
    for field, value in (
        ("start_len", 1),
        ("start_len", True),
        ("format", "npy"),
        ("layers", "moe"),
        ("format", "xml"),
    ):
        refused(
            engine,
            prompt="abc",
            **{f"routed_experts_{field}": value},
            code="routing_not_requested",
            param=f"routed_experts_{field}",
        )
    for field, default in (("start_len", 0), ("format", "int32"), ("layers", "all")):
        result = engine.generate("abc", max_new_tokens=1, **{f"routed_experts_{field}": default})
        assert "routed_experts" not in result["meta_info"]


# --- beside others


def test_a_hundred_refused_requests_do_not_change_a_running_one(engine):
    expected = engine.generate("once upon a time", GREEDY, max_new_tokens=150)["output_ids"]
    stream = engine.generate("once upon a time", GREEDY, max_new_tokens=150, stream=True)
    accepted = engine.get_server_info()["requests_accepted"]
    bad = [kwargs for kwargs, _ in PROMPTS] + [{"input_ids": [1], field: value} for field, value in CALLS]
    bad += [{"prompt": "a", "sampling_params": {field: value}} for field, value in LISTS]
    bad += [{"input_ids": [1, 2, 3], "return_routed_experts": True, **kwargs} for kwargs, _ in ROWS]
    for kwargs in bad:
        next(stream)
        with pytest.raises(RoutedExpertsError):
            engine.generate(**kwargs)
    assert engine.check_integrity() == []
    assert engine.get_server_info()["requests_accepted"] == accepted + 1, "a refused request was taken in"
    assert list(stream)[-1]["output_ids"] == expected
    assert_idle(engine)


FIELDS = {
    "temperature": [None, 0.0, 0.7, -1.0],
    "top_p": [None, 0.5, 0.0],
    "top_k": [None, 5, -2],
    "min_p": [None, 0.2, 2.0],
    "seed": [None, 3, 2**63],
    "stop": [None, "the", [""]],
    "stop_token_ids": [None, [7, 8], [VOCAB_SIZE]],
    "min_tokens": [None, 2, 9],
    "logprobs": [None, 2, 21],
    "prompt_logprobs": [None, 1, -1],
    "presence_penalty": [None, 1.0, math.nan],
    "frequency_penalty": [None, -1.0, "1"],
    "repetition_penalty": [None, 1.3, 0.0],
    "logit_bias": [None, {"5": 3.0}, {5: 1e9}],
}
GOOD = {field: values[:2] for field, values in FIELDS.items()} | {"temperature": FIELDS["temperature"][:3]}


def covering(fields, seed):
    """Rows in which every pair of values of two fields stands together at least once; greedy, not minimal."""
    rng = random.Random(seed)
    names = sorted(fields)
    left = {
        ((a, repr(x)), (b, repr(y))) for a, b in itertools.combinations(names, 2) for x in fields[a] for y in fields[b]
    }

    def pairs(row):
        return {((a, repr(row[a])), (b, repr(row[b]))) for a, b in itertools.combinations(names, 2)}

    while left:
        candidates = [{name: rng.choice(fields[name]) for name in names} for _ in range(40)]
        best = max(candidates, key=lambda row: len(pairs(row) & left))
        if pairs(best) & left:
            left -= pairs(best)
            yield best


def run_pair(engine, params, *, capture, n, stream):
    """A result, or InvalidRequestError."""
    kwargs = {"sampling_params": params | {"n": n, "max_tokens": 6}, "stream": stream, "return_routed_experts": capture}
    try:
        result = engine.generate("the cat", **kwargs)
    except InvalidRequestError as error:
        assert_readable(error)
        return None
    if not stream:
        return result if n > 1 else [result]
    events = list(result)
    return [[event for event in events if event.get("index", 0) == index][-1] for index in range(n)]


def test_all_pairs_of_good_values_give_answers(engine):
    for params, capture, n, stream in itertools.product(covering(GOOD, 1), (False, True), (1, 2), (False, True)):
        results = run_pair(engine, params, capture=capture, n=n, stream=stream)
        assert results is not None and len(results) == n, params
        for result in results:
            meta = result["meta_info"]
            num_rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1
            assert meta["finish_reason"]["type"] in ("stop", "length") and meta["completion_tokens"] == len(
                result["output_ids"]
            )
            assert (meta["routed_experts_info"]["shape"][0] == num_rows) if capture else "routed_experts" not in meta


def test_all_pairs_with_bad_values_give_answers_or_refusals(engine):
    answered = 0
    for params in covering(FIELDS, 2):
        bad = [field for field, value in params.items() if repr(value) not in map(repr, GOOD[field])]
        for capture, n, stream in itertools.product((False, True), (1, 2), (False, True)):
            results = run_pair(engine, params, capture=capture, n=n, stream=stream)
            assert (results is None) == bool(bad), (params, bad)
            answered += results is not None
    assert engine.check_integrity() == []


# --- engines that cannot be built


def build_refused(kind, *, match=None, **kwargs):
    with pytest.raises(kind, match=match) as excinfo:
        Engine(**(SMALL | kwargs))
    assert type(excinfo.value) is kind
    assert len(str(excinfo.value).encode()) <= 1024 and "\n" not in str(excinfo.value)
    return str(excinfo.value)


def test_a_checkpoint_that_is_none_is_refused_by_name(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    build_refused(CheckpointError, model_path=str(tmp_path / "missing"), match="no checkpoint folder .*missing")
    build_refused(CheckpointError, model_path=str(folder / "config.json"), match="no checkpoint folder")
    build_refused(CheckpointError, model_path="x" * 5000, match="no checkpoint folder")
    build_refused(CheckpointError, model_path=empty, match=r"config\.json does not exist")
    build_refused(ConfigError, match="no model was given")
    build_refused(ConfigError, model_path=5, match="model_path=5")


@pytest.mark.parametrize("cut", [100, 10**6])
def test_a_truncated_checkpoint_is_refused(tmp_path, folder, cut):
    broken = shutil.copytree(folder, tmp_path / "broken")
    file = next(broken.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-cut])
    build_refused(CheckpointError, model_path=str(broken), match="damaged or cut short")


def test_a_missing_tokenizer_is_refused_where_text_is_served(tmp_path, folder):
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    build_refused(CheckpointError, model_path=str(bare), match=r"tokenizer\.json does not exist")
    build_refused(CheckpointError, model_path=str(folder), tokenizer_path=str(tmp_path / "nowhere"), match="nowhere")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM.* is not known here; expected one of .*Qwen3MoeForCausalLM",
        ),
        ({"architectures": None}, "architectures"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": 32}, "does not fit its config.json"),
    ],
)
def test_a_config_that_cannot_be_is_refused(tmp_path, folder, change, match):
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    build_refused(CheckpointError, model_path=str(other), match=match)


def test_weights_that_are_integers_are_refused(tmp_path):
    config = tiny_config() | {"torch_dtype": "int32"}
    folder = save(
        tmp_path / "integers",
        config,
        {name: tensor.astype(np.int32) for name, tensor in tiny_tensors(tiny_config()).items()},
    )
    write_tiny_tokenizer(folder)
    build_refused(CheckpointError, model_path=str(folder), match="of a dtype other than bfloat16, float16, float32")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"dtype": "float8"}, "dtype='float8' is unknown; choose one of auto, float32"),
        ({"moe_backend": "nope"}, "moe_backend='nope' is unknown; choose auto or one of"),
        ({"attention_backend": "nope"}, "attention_backend='nope' is unknown; choose auto or one of"),
        ({"context_length": 513}, "context_length=513 is above the model's 512"),
        ({"precompile_bs_paddings": [4, 2]}, "precompile_bs_paddings"),
        ({"precompile_bs_paddings": []}, "precompile_bs_paddings"),
        ({"precompile_token_paddings": [0, 32]}, "precompile_token_paddings"),
        ({"max_running_requests": 0}, "max_running_requests=0 must be an integer of at least 1"),
        ({"page_sise": 4}, "page_sise is no parameter of Engine; did you mean page_size?"),
        ({"torchao_config": "int8wo"}, "torchao_config='int8wo' is refused: quantised checkpoints are recognised by"),
        ({"quantization": "awq"}, "quantization='awq' is unknown; choose one of auto, none, fp8_block"),
        ({"max_num_seqs": 4, "max_running_requests": 4}, "max_num_seqs and max_running_requests are one parameter"),
        (
            {"nnodes": 2, "node_rank": 1, "dist_init_addr": "h:1"},
            "with dist=DistConfig",
        ),
        ({"device": "cuda"}, "device='cuda', but the default devices of JAX here are of the platform 'cpu'"),
        ({"device": "npu"}, "device='npu' is unknown; choose one of auto, cpu, cuda, rocm, tpu"),
        ({"random_seed": -1}, "random_seed=-1"),
        ({"enable_return_routed_experts": "yes"}, "enable_return_routed_experts='yes' must be True or False"),
    ],
)
def test_arguments_that_cannot_work_are_refused(folder, kwargs, match):
    build_refused(ConfigError, model_path=str(folder), match=match.replace("?", r"\?"), **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_total_tokens": 10**15}, "max_total_tokens=1000000000000000 .*it fits with max_total_tokens="),
        ({"mem_fraction_static": 1e-12}, "does not fit: weights .*it fits with mem_fraction_static=0.0"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_what_would(folder, kwargs, match):
    build_refused(MemoryPlanError, model_path=str(folder), match=match, **kwargs)


def test_a_backend_that_hides_its_ids_is_refused_at_build(folder):
    hides = MoeBackend(name="hides", run=reference_experts, reveals_ids=False)
    registry = with_moe(BackendRegistry(), hides)
    kwargs = {"model_path": str(folder), "moe_backend": "hides", "registry": registry}
    build_refused(
        CaptureUnsupportedError, **kwargs, enable_return_routed_experts=True, match="moe_backend='hides' hides the ids"
    )
    build_refused(ConfigError, model_path=str(folder), moe_backend="hides", match="moe_backend='hides' is unknown")


def test_a_dense_model_is_served_and_its_capture_refused(tmp_path):
    dense = write_tiny_checkpoint(tmp_path / "dense", mlp_only_layers=[0, 1, 2, 3])
    build_refused(
        CaptureUnsupportedError, model_path=str(dense), enable_return_routed_experts=True, match="has no MoE layer"
    )
    with open_engine(dense, max_total_tokens=64, max_queued_requests=3) as engine:
        assert len(engine.generate("the cat", GREEDY, max_new_tokens=4)["output_ids"]) == 4
        assert_capture_is_off(engine)
        assert_the_pool_is_the_limit(engine)
        assert_a_full_queue_takes_nothing(engine)


def assert_capture_is_off(engine):
    for kwargs in ({"return_routed_experts": True}, {"sampling_params": {"return_routed_experts": True}}):
        for stream in (False, True):
            text = refused(engine, CaptureDisabledError, prompt="a", stream=stream, **kwargs, code="capture_disabled")
            assert "enable_return_routed_experts=True" in text
    assert engine.generate("a", return_routed_experts=False, max_new_tokens=1)["output_ids"]


def assert_the_pool_is_the_limit(engine):
    assert "KV pool of 64 tokens" in refused(engine, PromptTooLongError, input_ids=[1] * 64, param="input_ids")
    assert "at most 4" in refused(
        engine, PromptTooLongError, input_ids=[1] * 60, max_new_tokens=5, param="max_new_tokens"
    )
    assert (
        len(engine.generate(input_ids=[1] * 60, sampling_params=GREEDY)["output_ids"]) == 4
    )  # a default is cut to what fits


def assert_a_full_queue_takes_nothing(engine):
    """Between two steps, so that nothing leaves the queue: three places, and calls of 4, 3 and 1 requests."""
    stream = engine.generate("the cat", GREEDY, max_new_tokens=8, stream=True)
    next(stream)

    def crowd(core):
        before, errors, queued = core.request_table.num_live, [], []
        for count in (4, 3, 1):
            reqs = [Req(engine.input_processor.process(GenerateReqInput(text="a"))[0]) for _ in range(count)]
            try:
                core.add(reqs)
                queued += reqs
            except QueueFullError as error:
                assert_readable(error)
                errors.append(
                    (
                        count,
                        core.request_table.num_live - before,
                        len(core.ranks[0].waiting),
                        core.request_table.finished["rejected"],
                    )
                )
        for req in queued:
            core.abort(req.rid)
        return errors

    assert on_engine_thread(engine, crowd) == [(4, 0, 0, 4), (1, 3, 3, 5)], "a call is taken whole or not at all"
    refused(engine, prompt=["a"] * 4, param="prompt")
    refused(engine, prompt="a", sampling_params={"n": 4}, param="n")
    assert len(list(stream)[-1]["output_ids"]) == 8


def test_a_refused_prompt_of_a_list_is_named_by_its_index(engine):
    for kwargs, words, param in (
        ({"prompt": ["a", "", "b"]}, "prompt[1]='' must be text", "prompt"),
        ({"input_ids": [[1], [2], [3], [10**6]]}, "input_ids[3] holds the token id 1000000", "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1] is empty", "input_ids"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            engine.generate(**kwargs)
        assert str(caught.value).startswith(words) and caught.value.param == param
    with pytest.raises(PromptTooLongError) as caught:
        engine.generate(input_ids=[[1], [1] * 20], max_new_tokens=engine.components.context_length - 10)
    assert str(caught.value).startswith("input_ids[1]: max_new_tokens=") and caught.value.index == 1
    with pytest.raises(InvalidRequestError, match=r"^prompt='' must be text") as caught:
        engine.generate([""])
    assert caught.value.index is None and str(caught.value.renamed("text")).startswith("text=''")


SENT = [
    (
        {"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 2}},
        "min_new_tokens is 9, but must be at most max_new_tokens, 2; lower min_new_tokens or raise max_new_tokens",
    ),
    (
        {"sampling_params": {"min_new_tokens": 9, "max_tokens": 2}},
        "min_new_tokens is 9, but must be at most max_tokens, 2; lower min_new_tokens or raise max_tokens",
    ),
    (
        {"sampling_params": {"min_tokens": 9}, "max_new_tokens": 2},
        "min_tokens is 9, but must be at most max_new_tokens, 2; lower min_tokens or raise max_new_tokens",
    ),
    (
        {"sampling_params": SamplingParams(min_tokens=9), "max_new_tokens": 2},
        "min_tokens is 9, but must be at most max_new_tokens, 2; lower min_tokens or raise max_new_tokens",
    ),
    (
        {"sampling_params": {"min_new_tokens": 1000}},
        "min_new_tokens=1000 is above the 128 tokens that may be generated; lower it or raise max_tokens",
    ),
    ({"sampling_params": {"max_tokens": 600}}, "max_tokens=600: max_completion_tokens is too large"),
    ({"sampling_params": {"max_new_tokens": 600}}, "max_new_tokens=600: max_completion_tokens is too large"),
    ({"sampling_params": SamplingParams(max_tokens=600)}, "max_tokens=600: max_completion_tokens is too large"),
    ({"max_new_tokens": 600}, "max_new_tokens=600: max_completion_tokens is too large"),
    (
        {"sampling_params": {"routed_experts_prompt_start": 99}, "return_routed_experts": True},
        "routed_experts_prompt_start=99 is higher",
    ),
    (
        {"sampling_params": {"routed_experts_prompt_start": 99}, "routed_experts_start_len": 98},
        "routed_experts_start_len=98, but sampling_params have 99",
    ),
    (
        {"sampling_params": {"routed_experts_prompt_start": 3}},
        "routed_experts_prompt_start=3 without return_routed_experts=True",
    ),
    ({"sampling_params": {"guided_regex": "("}}, "guided_regex"),
    (
        {"sampling_params": {"guided_json": {}, "guided_regex": "a"}},
        "guided_regex and guided_json both ask for a form of the output",
    ),
]


@pytest.mark.parametrize(("kwargs", "words"), SENT, ids=[words[:60] for _, words in SENT])
def test_every_field_of_a_message_has_the_name_that_was_sent(engine, kwargs, words):
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(input_ids=[1, 2, 3], **kwargs)
    assert str(caught.value).startswith(words) and words.startswith(caught.value.param)


OF_ONE = [  # a value for each prompt; the second one is refused
    ("sampling_params", [{}, {"min_new_tokens": 1000}], "min_new_tokens"),
    ("sampling_params", [{}, {"temperature": -1}], "temperature"),
    ("sampling_params", [{}, {"temprature": 1}], "temprature"),
    ("sampling_params", [{}, 5], "sampling_params"),
    ("sampling_params", [{}, {"stop_token_ids": [VOCAB_SIZE]}], "stop_token_ids"),
    ("sampling_params", [{}, {"guided_regex": "("}], "guided_regex"),
    ("sampling_params", [{}, {"routed_experts_prompt_start": 99}], "routed_experts_prompt_start"),
    ("sampling_params", [SamplingParams(), SamplingParams(routed_experts_format="ref")], "routed_experts_format"),
    ("routed_experts_start_len", [0, 99], "routed_experts_start_len"),
    ("logprob_start_len", [0, 99], "logprob_start_len"),
    ("top_logprobs_num", [0, 99], "top_logprobs_num"),
    ("token_ids_logprob", [[1], [VOCAB_SIZE]], "token_ids_logprob"),
    ("return_logprob", [True, 5], "return_logprob"),
    ("extra_key", ["a", 5], "extra_key"),
    ("rid", ["a", "b c"], "rid"),
]


@pytest.mark.parametrize(("field", "values", "param"), OF_ONE, ids=[f"{case[0]}-{case[2]}" for case in OF_ONE])
@pytest.mark.parametrize("prompts", [{"prompt": ["ab cd", "ef gh"]}, {"input_ids": [[1, 2, 3], [4, 5, 6]]}])
def test_a_refused_value_of_a_list_is_named_by_the_index_of_its_prompt(engine, prompts, field, values, param):
    """One value for all prompts is refused without an index: it is not of one of them."""
    (prompt_field,) = prompts
    kwargs = {**prompts, "return_logprob": True, "return_routed_experts": True}
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(**{**kwargs, field: values})
    assert str(caught.value).startswith(f"{prompt_field}[1]: ") and caught.value.index == 1
    assert caught.value.param == param and param in str(caught.value)
    depends_on_prompt = "start" in param
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(**{**kwargs, field: values[1]})
    assert caught.value.index == (0 if depends_on_prompt else None) and caught.value.param == param
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(**{**kwargs, prompt_field: prompts[prompt_field][:1], field: values[1:]})
    assert caught.value.index is None and caught.value.param == param


def test_a_shared_value_that_another_prompt_would_take_is_refused_with_the_index(engine):
    prompts = [[1] * 9, [1, 2, 3]]
    for kwargs in (
        {"return_routed_experts": True, "routed_experts_start_len": 5},
        {"return_logprob": True, "logprob_start_len": 5},
        {"sampling_params": [{}, {}], "return_routed_experts": True, "routed_experts_start_len": 5},
    ):
        text = refused(engine, input_ids=prompts, **kwargs)
        assert text.startswith("input_ids[1]: ")
    text = refused(engine, input_ids=[[1], [1] * 500], sampling_params={"min_tokens": 13}, param="min_tokens")
    assert text.startswith("input_ids[1]: min_tokens=13 is above the 12 tokens")


def test_a_shared_field_beside_a_list_has_no_index(engine):
    kwargs = {"input_ids": [[1], [2]], "sampling_params": [{}, {"temperature": 0.5}], "return_logprob": True}
    assert "[0]" not in refused(engine, **kwargs, top_logprobs_num=99, param="top_logprobs_num")
    kwargs["return_routed_experts"] = True
    assert "[0]" not in refused(engine, **kwargs, routed_experts_format="zip", param="routed_experts_format")
