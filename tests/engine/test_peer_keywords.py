"""Scripts of sgl-jax, SGLang and vLLM in process: their keywords, and the names of their engines' methods."""

import asyncio
import inspect
import logging

import pytest

from routed_experts import LLM, ConfigError, Engine, InvalidRequestError, PromptTooLongError, SamplingParams
from support.engines import PausedRequests
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

GREEDY = {"temperature": 0, "max_new_tokens": 6}
# Methods of sgl-jax's Engine, and those of SGLang's that are not of its adapters, sessions and processes.
SGL_JAX_METHODS = """
    generate async_generate shutdown __enter__ __exit__ async_flush_cache async_pause_generation
    async_continue_generation async_get_server_info flush_cache pause_generation continue_generation abort_request
    get_server_info release_memory_occupation resume_memory_occupation score get_default_sampling_params encode
    async_encode rerank apply_dummy_lora_ab_buffer start_profile stop_profile async_score"""
SGLANG_METHODS = "get_model_info update_weights_from_disk"
NOT_HERE = {
    "encode": "embeddings are not served",
    "async_encode": "embeddings are not served",
    "rerank": "embeddings are not served",
    "apply_dummy_lora_ab_buffer": "adapters are not served",
    "start_profile": "jax.profiler traces this process",
    "stop_profile": "jax.profiler traces this process",
    "async_score": "score has another form: token ids of whole sequences",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def engine(folder):
    """An engine as a script of sgl-jax builds it, with the keywords of its own tests."""
    with Engine(
        model_path=folder,
        trust_remote_code=True,
        device="cpu",
        dist_init_addr="0.0.0.0:10011",
        nnodes=1,
        node_rank=0,
        tp_size=1,
        random_seed=3,
        mem_fraction_static=None,
        chunked_prefill_size=-1,
        download_dir="",
        dtype="float",
        attention_backend="fa",
        precompile_bs_paddings=[2, 4],
        max_running_requests=6,
        precompile_token_paddings=[32],
        skip_server_warmup=True,
        log_requests=False,
        log_level="info",
        enable_single_process=True,
        schedule_policy="lpm",
        kv_cache_dtype="auto",
        quantization=None,
        enable_lora=False,
        page_size=4,
    ) as engine:
        yield engine
        assert engine.check_integrity() == []


def test_a_script_of_sgl_jax_builds_its_engine(engine):
    args = engine.server_args
    assert (args.dtype, args.device, args.random_seed, args.mem_fraction_static) == ("float32", "cpu", 3, 0.8)
    assert args.chunked_prefill_size is None and args.attention_backend == "auto"
    assert args.batch_paddings == (2, 4, 6) and args.running_limit == 6
    assert engine.components.group is None, "one process: an address alone makes no group"
    assert len(engine.generate(["a", "b"], GREEDY)) == 2


def test_what_has_no_effect_is_told_in_one_line(folder, caplog):
    with pytest.raises(ConfigError, match="context_length=100000 is above the model's"):
        Engine(folder, enforce_eager=True, trust_remote_code=False, quantization="none", port=1, context_length=100_000)
    (record,) = [record for record in caplog.records if "without effect" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("Engine: accepted without effect: enforce_eager, trust_remote_code, port (")


def test_an_engine_of_our_names_tells_nothing(folder, caplog):
    with pytest.raises(ConfigError):
        Engine(folder, tp_size=1, context_length=100_000)
    assert not caplog.records


@pytest.mark.parametrize(
    ("keywords", "match"),
    [
        ({"quantization": "awq"}, "quantization='awq' is unknown; choose one of auto, none, fp8_block"),
        ({"enable_lora": True}, "enable_lora=True is refused: .*merge the adapter"),
        ({"lora_paths": ["a"]}, "lora_paths=.* is refused"),
        ({"enable_expert_parallel": True}, "give ep_size=tp_size"),
        ({"kt_num_gpu_experts": 4}, r"experts=ExpertOffloadConfig\(...\)"),
        ({"speculative_config": {"method": "ngram"}}, r"SpeculativeConfig.from_vllm"),
        ({"tensor_parallel_size": 2, "tp_size": 2}, "tensor_parallel_size and tp_size are one parameter"),
        ({"nnodes": 2}, "nnodes=2 needs dist_init_addr"),
        ({"server_args": object()}, r"Engine\(\*\*dataclasses.asdict\(server_args\)\)"),
        ({"trust_remote_cod": True}, r"no parameter of Engine; did you mean trust_remote_code\?"),
        ({"max_num_seq": 4}, r"did you mean max_num_seqs\?"),
        ({"of_nobody": 4}, "of_nobody is no parameter of Engine; known are model_path, model, "),
        ({"page_sise": 4}, r"page_sise is no parameter of Engine; did you mean page_size\?"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(keywords, match):
    with pytest.raises(ConfigError, match=match):
        Engine("nowhere", **keywords)


def test_methods_have_sgl_jax_names():
    for name in f"{SGL_JAX_METHODS} {SGLANG_METHODS}".split():
        assert (name in NOT_HERE) != callable(vars(Engine).get(name)), name
        assert inspect.iscoroutinefunction(vars(Engine).get(name)) == (
            name.startswith("async_") and name not in NOT_HERE
        )


def test_default_sampling_params_are_set_field_by_field(engine, llm):
    """As scripts of sgl-jax and vLLM do."""
    params = engine.get_default_sampling_params()
    assert params == {} and params.temperature is None
    params.max_new_tokens, params.n, params.temperature = 6, 2, 0
    params.skip_special_tokens, params.sampling_seed = True, 7
    assert (params.max_tokens, params.seed) == (6, 7) and type(params.convert_to_dict()) is dict
    expected = engine.generate("The router", {**GREEDY, "n": 2})
    for given in (params, params.convert_to_dict(), SamplingParams.from_dict(params)):
        assert [one["output_ids"] for one in engine.generate("The router", given)] == [
            one["output_ids"] for one in expected
        ]
    with pytest.raises(InvalidRequestError, match=r"'temperatur' is no sampling parameter; did you mean temperature\?"):
        params.temperatur = 1
    params = llm.get_default_sampling_params()
    assert params.max_tokens == 16
    params.max_tokens, params.temperature, params.ignore_eos = 3, 0, True
    (first,), (second,) = (output.outputs for output in llm.generate(["a", "a"], [params, params]))
    assert len(first.token_ids) == 3 and first.token_ids == second.token_ids


def test_the_event_loop_of_a_script_without_one(folder):
    """As sgl-jax's own tests call its engine."""
    with Engine(folder, max_total_tokens=64, page_size=4, precompile_token_paddings=[32]) as engine:
        loop = engine.loop
        assert loop is engine.loop and not loop.is_running()
        answer = loop.run_until_complete(engine.async_generate("The router", GREEDY))
        assert answer["output_ids"] == engine.generate("The router", GREEDY)["output_ids"]
        assert loop.run_until_complete(engine.async_flush_cache()) > 0
    assert loop.is_closed()
    engine.shutdown()


def test_the_state_of_a_moment_in_sgl_jax_words(engine):
    engine.flush_cache()
    (idle,) = engine.get_server_info()["internal_states"]
    total = engine.stats().total_pages * 4
    assert (idle["running_batch_rids"], idle["available_kv_tokens"], idle["tree_cache_size"]) == ([], total, 0)
    held = PausedRequests(engine, [5, 6, 7], [8, 9], sampling_params={"max_new_tokens": 20, "ignore_eos": True})
    (state,) = engine.get_server_info()["internal_states"]
    assert (state["running_batch_size"], state["waiting_queue_size"], state["engine_paused"]) == (2, 0, True)
    assert len(set(state["running_batch_rids"])) == state["req_to_token_pool_used"] == 2
    assert state["available_kv_tokens"] < total
    engine.resume()
    rids = {answer["meta_info"]["id"] for answer in held.results()}
    assert set(state["running_batch_rids"]) == rids
    (after,) = engine.get_server_info()["internal_states"]
    assert after["running_batch_rids"] == [] and after["tree_cache_size"] > 0 and not after["engine_paused"]
    assert after["forward_ct_decode"] > 0 and after["chunked_req_is_none"]
    engine.flush_cache()
    (flushed,) = engine.get_server_info()["internal_states"]
    assert flushed["forward_ct_decode"] == flushed["tree_cache_size"] == 0 and flushed["cur_batch_is_none"]
    assert flushed["available_kv_tokens"] == total and flushed["new_token_ratio"] == flushed["init_new_token_ratio"]


def test_programs_compiled_meanwhile_are_counted(engine):
    """sgl-jax's `cache_miss_count`."""
    import jax
    import jax.numpy as jnp

    engine.generate("The router", GREEDY)  # lazy compilation: the programs of these tests are made when first used
    assert engine.generate("The router", GREEDY)["meta_info"]["cache_miss_count"] == 0
    stream = engine.generate("The router", GREEDY, stream=True)
    first = next(stream)["meta_info"]["cache_miss_count"]
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))  # a program of this process
    assert [output["meta_info"]["cache_miss_count"] for output in stream][-1] > first


def test_pause_and_continue_by_these_names(engine):
    async def run():
        await engine.async_pause_generation()
        assert engine.paused == "retract", "sgl-jax's default"
        answer = asyncio.create_task(engine.async_generate("The router", GREEDY, rid="held"))
        info = await engine.async_get_server_info()
        assert info["dtype"] == "float32" and not answer.done()
        await engine.async_continue_generation()
        assert engine.paused is None
        return await answer

    expected = engine.generate("The router", GREEDY)
    assert asyncio.run(run())["output_ids"] == expected["output_ids"]
    engine.pause_generation(mode="in_place")
    assert engine.paused == "in_place"
    engine.continue_generation()
    assert engine.paused is None
    with pytest.raises(InvalidRequestError, match="mode='later' is unknown"):
        engine.pause_generation("later")


def test_flush_abort_and_information_by_these_names(engine):
    engine.flush_cache()
    engine.generate("A prefix that is long enough to fill several pages of the cache", GREEDY)
    assert asyncio.run(engine.async_flush_cache()) > 0 == engine.flush_cache()
    assert engine.abort_request("nobody") == engine.abort_request(abort_all=True) == 0
    info = engine.get_model_info()
    version = engine.get_weight_version()
    assert (info["weight_version"], info["update_count"]) == (version.label, version.update_count)
    assert info["model_path"] == info["tokenizer_path"] == engine.server_args.model_path and info["is_generation"]
    engine.release_memory_occupation(tags=None)
    assert engine.released == ("kv_cache", "weights")
    with pytest.raises(InvalidRequestError, match="weights were released"):
        engine.resume_memory_occupation()
    engine.update_weights(engine_weights(engine), version=1)
    engine.resume_memory_occupation()
    assert engine.released == ()


def engine_weights(engine):
    """Zeros in the shapes of the served weights."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), engine.components.served.arrays)


def test_keywords_of_a_request(engine):
    prompt = "A prefix that is long enough to fill several pages of the cache"

    def cached(**keywords):
        return engine.generate(prompt, GREEDY, **keywords)["meta_info"]["cached_tokens"]

    engine.flush_cache()
    assert cached(cache_salt="a", priority=3) == 0 < cached(extra_key="a")
    assert cached(cache_salt="b", routed_dp_rank=0, lora_path=None, image_data=None) == 0
    with pytest.raises(InvalidRequestError, match="image_data='x' is refused: models take text") as caught:
        engine.generate("a", image_data="x")
    assert caught.value.param == "image_data"
    with pytest.raises(InvalidRequestError, match="cache_salt and extra_key are one parameter"):
        engine.generate("a", cache_salt="a", extra_key="a")
    with pytest.raises(InvalidRequestError, match=r"did you mean prompt\?"):
        engine.generate(text="a")


@pytest.mark.parametrize("rid", ["trajectory:3@step=12", "x" * 256, "a+b,c~d", "00000000-0000-0000-0000-000000000000"])
def test_ids_of_trainers_are_ids(engine, rid):
    assert engine.generate("a", GREEDY, rid=rid)["meta_info"]["id"] == rid


@pytest.mark.parametrize(
    "rid", ["", "x" * 257, "a b", "a/b", "a?b", "a#b", "a%2f", 'a"b', "a\nb", "a\x00", "é", "a;b", 7]
)
def test_ids_that_break_a_line_a_header_or_a_path_are_refused(engine, rid):
    with pytest.raises(InvalidRequestError, match=r"rid=.* must be 1 to 256 of A-Z a-z"):
        engine.generate("a", GREEDY, rid=rid)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        model=folder,
        trust_remote_code=True,
        enforce_eager=True,
        tensor_parallel_size=1,
        data_parallel_size=1,
        disable_log_stats=True,
        distributed_executor_backend="mp",
        gpu_memory_utilization=0.5,
        max_model_len=32,
        max_num_seqs=64,
        block_size=4,
        swap_space=4,
        dtype="float",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        quantization=None,
        enable_chunked_prefill=True,
        load_format="safetensors",
    ) as llm:
        yield llm


def test_a_script_of_vllm_builds_its_llm(llm):
    args = llm.engine.server_args
    assert (args.dtype, args.page_size, args.running_limit, args.context_length) == ("float32", 4, 64, 32)
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False, priority=[0])
    assert output.finished
    assert llm.get_default_sampling_params().max_tokens == 16 and llm.reset_prefix_cache()


def test_an_answer_beyond_the_context_ends_as_with_vllm(llm):
    prompt = list(range(1, 21))
    for params in (
        SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=100, min_tokens=100, temperature=0, ignore_eos=True),
    ):
        (choice,) = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs
        assert len(choice.token_ids) == 32 - len(prompt) and choice.finish_reason == "length"
    with pytest.raises(PromptTooLongError, match="This model's maximum context length is 32 tokens"):
        llm.generate({"prompt_token_ids": list(range(1, 33))})
    with pytest.raises(PromptTooLongError, match=r"max_new_tokens=1000: max_completion_tokens is too large"):
        llm.engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1000})


def test_a_keyword_of_generate_that_has_an_effect_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="lora_request='x' is refused: adapters are not served"):
        llm.generate("a", lora_request="x")
    with pytest.raises(InvalidRequestError, match=r"sampling_param is no parameter of LLM.generate; did you mean"):
        llm.generate("a", sampling_param=None)


@pytest.mark.devices(2)
def test_data_parallel_ranks_of_an_llm_have_devices_of_their_own(folder):
    """With vLLM each of two ranks has `tensor_parallel_size` devices."""
    sizes = dict(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=32, seed=1)
    with LLM(folder, data_parallel_size=2, enable_expert_parallel=True, **sizes) as llm:
        args = llm.engine.server_args
        assert (args.tp_size, args.dp_size, args.ep_size) == (2, 2, 2)
        (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=4))
        assert len(output.outputs[0].token_ids) == 4
