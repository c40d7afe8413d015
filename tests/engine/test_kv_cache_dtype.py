"""Engines whose keys and values are e4m3 codes: half of the bytes or less, and what holds with plain ones holds: rows
are those that ran, an answer depends on its request alone, and on no cut of a prompt, cache hit, retraction or draft.
(Families: test_families_batch_invariance.py.) What cannot be is refused by name."""

import numpy as np
import pytest

from engine.test_chunks_in_half_precision import PROMPT
from engine.test_retraction import all_outputs, requests, run_uninterrupted
from oracles.draft_offers import answers
from oracles.driver import assert_all_faithful, request
from oracles.predictors import PredictorOracle
from oracles.testbeds import random_prompt, tiny_testbed
from routed_experts import ConfigError, Engine, SpeculativeConfig
from routed_experts.cli.flags import engine_args
from routed_experts.cli.main import make_parser
from routed_experts.core.server_args import ServerArgs
from routed_experts.demo import demo_model_path
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.layers.kv_format import KV_CODES
from support.family_folders import VOCAB_SIZE, write_family
from support.fast_compile import fast_compilation
from support.lazy_compile import lazy_compilation

CODES = dict(kv_cache_dtype="fp8_e4m3")
SIZES = dict(precompile_bs_paddings=(4,), precompile_token_paddings=(32,), skip_tokenizer_init=True, page_size=8)


@pytest.fixture(scope="module", params=["native", "reference"])
def testbed(request):
    return tiny_testbed(moe_backend="probed", deterministic=True, attention_backend=request.param, **CODES)


def pages(testbed):
    return testbed.bench.assembly.plan.pool


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_cramped_pool_serves_as_if_there_were_room(testbed, chunk):
    assert pages(testbed).stored_dtype == KV_CODES
    drive = testbed.drive(pages=int(2.3 * (40 + 24) / 4), chunked_prefill_size=chunk)
    drive.run(*requests(3))
    assert drive.core.ranks[0].num_retracted > 0
    assert assert_all_faithful(drive) > 16 * 10
    assert all_outputs(drive) == run_uninterrupted(testbed, requests(3))


def test_cached_prefixes_and_cuts_change_no_bit(testbed):
    prompt = random_prompt(np.random.default_rng(4), 30)

    def asked(name):
        return request(name, prompt, 12, prompt_logprobs_from=0)

    cold = testbed.drive(disable_radix_cache=True)
    cold.run(asked("a"))
    for changed in ({}, {"chunked_prefill_size": 7}, {"chunked_prefill_size": 1}):
        drive = testbed.drive(**changed)
        for name in ("a", "b"):
            drive.run(asked(name))
            tokens, logprobs, of_prompt, *_, record = all_outputs(drive)[name]
            expected = all_outputs(cold)["a"]
            assert (tokens, logprobs) == expected[:2], (name, changed)
            assert of_prompt == expected[2] and np.array_equal(record.ids, expected[-1].ids)


def test_rounding_is_felt(testbed):
    """Else the tests above prove nothing."""
    plain = tiny_testbed(moe_backend="probed", deterministic=True, attention_backend="reference")
    outputs = []
    for bed in (plain, testbed):
        drive = bed.drive()
        drive.run(request("a", random_prompt(np.random.default_rng(4), 30), 12))
        outputs.append(np.array(all_outputs(drive)["a"][1]))
    assert not np.array_equal(*outputs)


@pytest.mark.parametrize(("backend", "plain_bytes"), [("native", "1,536"), ("paged", "3,072")])
def test_a_token_takes_a_byte_a_number(backend, plain_bytes):
    sizes = dict(model_path=str(demo_model_path()), dtype="bfloat16", attention_backend=backend)
    plain, codes = (inspect_model(ServerArgs(**sizes, **how)).memory_plan for how in ({}, CODES))
    assert f"tokens of {plain_bytes} bytes" in plain[2] and "e4m3" not in plain[2]
    assert "tokens of 768 bytes, e4m3" in codes[2]


def test_a_prompt_in_chunks_is_the_whole_prompt_in_bfloat16():
    results = []
    for chunk in (160, 33):
        sizes = dict(precompile_bs_paddings=(4,), precompile_token_paddings=(chunk,), chunked_prefill_size=chunk)
        with (
            lazy_compilation(),
            Engine(str(demo_model_path()), dtype="bfloat16", context_length=256, **sizes, **CODES) as engine,
        ):
            output = engine.generate(
                input_ids=PROMPT,
                sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
                return_logprob=True,
            )
            (scored,) = engine.score([PROMPT + output["output_ids"]])
        logprobs = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        assert np.array_equal(np.float32(logprobs), scored.logprobs[len(PROMPT) - 1 :].astype(np.float32))
        results.append((output["output_ids"], logprobs, scored.logprobs.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("family", [pytest.param("Glm4Moe", marks=pytest.mark.thorough), "Qwen3Next"])
def test_drafts_of_a_model_change_no_answer(tmp_path, family):
    """Its own pool has the model's dtype, and so have the states of recurrent layers."""
    PredictorOracle(family, tmp_path, modules=1)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (5, 17, 9, 30)]
    options = dict(**SIZES, **CODES, deterministic=True, enable_return_routed_experts=True)
    with lazy_compilation(), Engine(str(tmp_path), **options) as engine:
        expected, _ = answers(engine, prompts, 1.0)
    drafts = SpeculativeConfig(algorithm="NEXTN", adaptive=False)
    with lazy_compilation(), Engine(str(tmp_path), **options, speculative=drafts) as engine:
        assert engine.components.core.runner.config.pool.codes
        drafted, _ = answers(engine, prompts, 1.0)
        assert engine.stats().speculative.requests.accepted > 0
    assert drafted == expected


@fast_compilation()
def test_states_of_recurrent_layers_stay_as_they_are(tmp_path):
    write_family(tmp_path, "qwen3-next")
    plans = []
    for how in ({}, CODES):
        with lazy_compilation(), Engine(str(tmp_path), **SIZES, **how) as engine:
            plans.append(engine.components.plan.pool)
    plain, codes = plans
    assert codes.bytes_per_token * 4 == plain.bytes_per_token
    assert codes.state_bytes == plain.state_bytes > 0
    assert codes.abstract.pages.dtype == KV_CODES and codes.abstract.states == plain.abstract.states


@pytest.mark.parametrize("value", ["fp8", "fp8_e4m3", None])
def test_the_names_of_other_servers(value):
    with lazy_compilation(), Engine(str(demo_model_path()), kv_cache_dtype=value, context_length=64, **SIZES) as engine:
        assert engine.server_args.kv_cache_dtype == ("auto" if value is None else "fp8_e4m3")


def test_a_flag_has_the_same_names(capsys):
    for words in (("--kv-cache-dtype", "fp8"), ("--kv-cache-dtype=fp8_e4m3",)):
        assert (
            ServerArgs(**engine_args(make_parser().parse_args(["serve", "MODEL", *words]))).kv_cache_dtype == "fp8_e4m3"
        )
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "MODEL", "--kv-cache-dtype", "fp8_e5m2"])
    assert "fp8_e5m2" in capsys.readouterr().err


@pytest.mark.devices(2)
@fast_compilation()
def test_two_devices_hold_the_codes_of_their_heads(tmp_path):
    write_family(tmp_path, "olmoe")
    prompt = np.random.default_rng(2).integers(0, VOCAB_SIZE, 40).tolist()
    options, scores = dict(**SIZES, **CODES, attention_backend="paged", moe_backend="tiled"), []
    for devices in (1, 2):
        with lazy_compilation(), Engine(str(tmp_path), tp_size=devices, **options) as engine:
            scores.append(engine.score([prompt])[0].logprobs)
            assert engine.components.plan.pool.stored_dtype == KV_CODES
    np.testing.assert_allclose(*scores, atol=5e-3)


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", "bfloat16", ""])
def test_what_is_no_form_of_keys_and_values_is_refused(value):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=.* is unknown; choose one of auto, fp8_e4m3"):
        Engine(str(demo_model_path()), kv_cache_dtype=value)


@pytest.mark.parametrize("family", ["deepseek", "bailing-hybrid"])
def test_latent_rows_are_refused(tmp_path, family):
    write_family(tmp_path, family)
    message = r"kv_cache_dtype='fp8_e4m3' with latent attention \(MLA\): the rotary numbers .* leave kv_cache_dtype out"
    with pytest.raises(ConfigError, match=message):
        Engine(str(tmp_path), **SIZES, **CODES)


def test_a_backend_that_cannot_read_codes_is_refused_by_name():
    message = "kv_cache_dtype='fp8_e4m3', but attention_backend='tpu' .* choose attention_backend='paged', or leave"
    for name in ("auto", "tpu"):
        with pytest.raises(ConfigError, match=message):
            DEFAULT_BACKENDS.choose(ServerArgs(attention_backend=name, moe_backend="tiled", **CODES), platform="tpu")
    args = ServerArgs(attention_backend="paged", moe_backend="tiled", **CODES)
    assert DEFAULT_BACKENDS.choose(args, platform="tpu")[1].name == "paged"
