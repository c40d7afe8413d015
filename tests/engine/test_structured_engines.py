"""Structured output in engines of other kinds: with drafts, with data ranks, on several devices."""

import contextlib
import json

import numpy as np
import pytest

from routed_experts import Engine, SamplingParams, extract_routed_experts_from_meta_info
from routed_experts.core.speculative_config import SpeculativeConfig
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = dict(
    page_size=4,
    context_length=128,
    precompile_bs_paddings=(8,),
    precompile_token_paddings=(64,),
    max_total_tokens=1024,
    enable_return_routed_experts=True,
    dtype="float32",
)
SCHEMA = {
    "type": "object",
    "properties": {"the first": {"type": "string", "maxLength": 6}, "second": {"enum": ["yes", "no"]}},
    "required": ["the first", "second"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
STRUCTURED = {"json_schema": SCHEMA, "max_new_tokens": 60}
REPEATED = "one two one two one two one two one two one two"
PROMPTS = ["Who?", REPEATED, "What?", REPEATED + " one", "Where is it?", "a b c a b c a b c"]
PARAMS = [
    {**STRUCTURED, "temperature": 1.0, "seed": 1},
    {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True},
    {**STRUCTURED, "temperature": 0.0},
    {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True},
    {"regex": "[a-e]{3,7}!", "temperature": 1.0, "seed": 4, "max_new_tokens": 20},
    {"temperature": 1.0, "seed": 9, "max_new_tokens": 24, "ignore_eos": True, "presence_penalty": 0.4},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@contextlib.contextmanager
def build(folder, **changed):
    with lazy_compilation(), Engine(folder, **SIZES | changed) as engine:
        yield engine
        assert engine.check_integrity() == []


def answers(engine):
    """Ids, logprobs, rows and ends of a mixed batch."""
    results = engine.generate(PROMPTS, PARAMS, return_logprob=True, return_routed_experts=True)
    for result, params in zip(results, PARAMS, strict=True):
        if "json_schema" in params:
            assert result["meta_info"]["finish_reason"]["type"] == "stop" and list(json.loads(result["text"]))
    return [
        (
            result["output_ids"],
            [entry[0] for entry in result["meta_info"]["output_token_logprobs"]],
            extract_routed_experts_from_meta_info(result),
            result["meta_info"]["finish_reason"],
        )
        for result in results
    ]


def assert_alike(one, other):
    for number, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        assert ours[0] == theirs[0] and ours[3] == theirs[3], number
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-4)
        assert np.array_equal(ours[2], theirs[2]), number


@pytest.fixture(scope="module")
def plain(folder):
    """The answers of an engine without drafts on one device."""
    with build(folder) as engine:
        return answers(engine)


@pytest.mark.parametrize("draft_model", [False, True])
def test_drafts_are_off_for_structured_requests_and_on_for_the_others(folder, plain, draft_model):
    if draft_model:
        config = SpeculativeConfig(algorithm="STANDALONE", draft_model_path=folder, num_steps=3, adaptive=False)
    else:
        config = SpeculativeConfig(adaptive=False)
    with build(folder, speculative=config) as engine:
        assert_alike(answers(engine), plain)
        totals = engine.stats().speculative
        assert totals.requests.accepted > 5 and totals.skipped["structured"] > 10
        own = engine.generate("Who?", PARAMS[0])["meta_info"]
        assert own.get("spec_accept_token_num", 0) == 0


def test_in_deterministic_mode_a_structured_request_is_the_same_alone(folder):
    with build(folder, deterministic=True) as engine:
        together = answers(engine)
        for prompt, params, expected in zip(PROMPTS, PARAMS, together, strict=True):
            alone = engine.generate(prompt, params, return_logprob=True)
            assert alone["output_ids"] == expected[0]
            assert [entry[0] for entry in alone["meta_info"]["output_token_logprobs"]] == expected[1]


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(tp_size=2), id="2 devices", marks=pytest.mark.thorough),
        pytest.param(dict(dp_size=2, tp_size=2), id="2 devices, 2 ranks"),
    ],
)
def test_several_devices_and_data_ranks_give_the_same_answers(folder, plain, sizes):
    with build(folder, **sizes) as engine:
        assert_alike(answers(engine), plain)
        assert_alike(answers(engine), plain)  # prompts from the cache


def test_the_first_request_compiles_the_samplers_and_later_ones_compile_nothing(folder):
    with Engine(folder, **SIZES) as engine:
        runner = engine.components.core.runner
        table = set(runner._programs)
        assert not any(key[0] == "masked" for key in table), "an engine without the feature has its programs alone"
        engine.generate("Who?", SamplingParams(temperature=0.0, max_tokens=2))
        assert set(runner._programs) == table
        engine.generate("Who?", PARAMS[0])
        assert {key[1:] for key in set(runner._programs) - table} == {key for key in table if key[0] == "sample"}
        compiled = engine.compiles.serving
        answers(engine)
        assert engine.compiles.serving == compiled
