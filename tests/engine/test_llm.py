"""The LLM façade: vLLM's shapes over the same engine, and the same answers."""

import dataclasses

import numpy as np
import pytest

from routed_experts import LLM, ConfigError, InvalidRequestError, SamplingParams
from routed_experts.core.errors import RoutingFormatError
from routed_experts.formats import record_from_meta_info
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")

PROMPTS = ["The router scores every expert", "The cat sat"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=32, enable_return_routed_experts=True) as llm:
        yield llm
        assert llm.engine.check_integrity() == []


def test_rows_are_split_at_the_prompt_and_have_one_less_than_the_tokens(llm):
    for output, prompt in zip(llm.generate(PROMPTS, GREEDY), PROMPTS, strict=True):
        (choice,) = output.outputs
        expected = llm.engine.generate(prompt, {"temperature": 0, "max_new_tokens": 8}, return_routed_experts=True)
        assert (
            output.prompt == prompt
            and choice.text == expected["text"]
            and list(choice.token_ids) == expected["output_ids"]
        )
        assert choice.record == record_from_meta_info(expected)
        rows, generated = output.prompt_routed_experts, choice.routed_experts
        assert rows.dtype == generated.dtype == np.int16
        assert rows.shape == (len(output.prompt_token_ids), 3, 4) and generated.shape == (
            len(choice.token_ids) - 1,
            3,
            4,
        )
        assert np.array_equal(np.concatenate([rows, generated]), choice.record.ids)
        assert choice.routed_experts is generated, "made once"


def test_choices_parameters_and_prompts_of_every_kind(llm):
    ids = llm.engine.tokenizer.encode(PROMPTS[0])
    params = [SamplingParams(n=2, seed=5, max_tokens=4), SamplingParams(temperature=0, max_tokens=6)]
    both = llm.generate([PROMPTS[0], {"prompt_token_ids": ids}], params)
    assert [len(output.outputs) for output in both] == [2, 1]
    assert [choice.index for choice in both[0].outputs] == [0, 1]
    expected = llm.engine.generate(PROMPTS[0], {"n": 2, "seed": 5, "max_new_tokens": 4})
    assert [choice.text for choice in both[0].outputs] == [result["text"] for result in expected]
    assert both[1].outputs[0].text == llm.generate(ids, params[1])[0].outputs[0].text
    assert both[1].prompt is None and both[1].prompt_token_ids == tuple(ids)
    (of_numpy,) = llm.generate(list(np.array(ids)), params[1])
    assert of_numpy.prompt_token_ids == tuple(ids), "one prompt, not one of each id"
    assert len(llm.generate("a", SamplingParams(ignore_eos=True))[0].outputs[0].token_ids) == 16, "the default length"


def test_logprobs_are_by_token_id(llm):
    (output,) = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1))
    (choice,) = output.outputs
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, by_id in zip(choice.token_ids, choice.logprobs, strict=True):
        assert by_id[token].rank == 1 and by_id[token].logprob == max(entry.logprob for entry in by_id.values())
    chosen = [by_id[token].logprob for token, by_id in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))
    assert llm.generate("a", GREEDY)[0].outputs[0].logprobs is None


def test_chat_is_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    text = llm.engine.tokenizer.apply_chat_template(messages)
    ids = llm.engine.tokenizer.encode(text, add_special_tokens=False)
    first, second = llm.chat([messages, messages], GREEDY)
    assert first.outputs[0].text == second.outputs[0].text == llm.generate(ids, GREEDY)[0].outputs[0].text
    assert llm.chat(messages, GREEDY)[0].prompt == text


def test_rows_can_be_left_out_and_begin_later(llm):
    (quiet,) = llm.generate("a b c", SamplingParams(max_tokens=3, return_routed_experts=False))
    assert quiet.prompt_routed_experts is None and quiet.outputs[0].record is None
    (later,) = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, routed_experts_start_len=3))
    assert later.prompt_routed_experts.shape[0] == len(later.prompt_token_ids) - 3
    with pytest.raises(InvalidRequestError) as excinfo:
        llm.generate("a", SamplingParams(routed_experts_format="ref"))
    assert excinfo.value.code == "ref_unavailable"
    with pytest.raises(InvalidRequestError, match="is for the wire; here rows are arrays") as excinfo:
        llm.generate("a", SamplingParams(routed_experts_format="npy"))
    assert excinfo.value.code == "unsupported_parameter"


def test_versions_of_weights_cover_the_output(llm):
    (choice,) = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, ignore_eos=True))[0].outputs
    assert [dataclasses.astuple(span) for span in choice.weight_versions] == [("default", 0, 8, 0)]


def test_more_experts_than_int16_raises_where_it_is_read(llm):
    (output,) = llm.generate("a b", GREEDY)
    record = dataclasses.replace(
        output.outputs[0].record, num_experts=32_769, ids=output.outputs[0].record.ids.astype(np.uint16)
    )
    wide = dataclasses.replace(output.outputs[0], record=record)
    with pytest.raises(RoutingFormatError, match="record"):
        _ = wide.routed_experts


def test_more_prompts_than_the_queue_holds_come_in_bunches(llm):
    limit = llm.engine.server_args.max_queued_requests
    outputs = llm.generate(["a"] * (limit + 3), SamplingParams(max_tokens=1, return_routed_experts=False))
    assert len(outputs) == limit + 3


def test_scores_are_the_engines(llm):
    (output,) = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, temperature=1.0, logprobs=0, seed=2))
    (choice,) = output.outputs
    ids = [*output.prompt_token_ids, *choice.token_ids]
    (scored,) = llm.score([ids], routed=[choice.record])
    sampled = [logprob[token].logprob for logprob, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert scored.logprobs[len(output.prompt_token_ids) - 1 :] == pytest.approx(sampled, abs=1e-4)
    assert np.array_equal(scored.routed_experts.ids[: choice.record.num_rows], choice.record.ids)
    with pytest.raises(InvalidRequestError):
        llm.score(ids)


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization": "awq"},
        {"enable_lora": True},
        {"tensor_parallel_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": True},
        {"dtype": "int4"},
    ],
)
def test_what_cannot_work_is_refused(wrong, tmp_path):
    with pytest.raises(ConfigError):
        LLM(str(tmp_path), **wrong)


@pytest.mark.parametrize("prompts", [[], [""], [[]], {"prompt": ""}, {}])
def test_an_empty_prompt_is_refused(llm, prompts):
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts)


def test_one_parameter_set_for_all_or_one_each(llm):
    with pytest.raises(InvalidRequestError, match="one each"):
        llm.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize("params", [5, "greedy", {GREEDY}])
def test_what_are_no_parameters_is_named(llm, params):
    with pytest.raises(InvalidRequestError, match="must be SamplingParams") as caught:
        llm.generate(["a"], params)
    assert caught.value.param == "sampling_params"


def test_a_prompt_of_several_that_is_refused_is_named(llm):
    for prompts, index, words in (
        (["a", "", "b"], 1, r"prompt\[1\]='' must be text"),
        ([[1], [2], [10**6]], 2, r"prompt\[2\] holds the token id"),
        (["a", "word " * 2000], 1, r"prompt\[1\] of \d+ tokens is longer"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{words}") as caught:
            llm.generate(prompts, GREEDY)
        assert (caught.value.param, caught.value.index) == ("prompt", index)
    with pytest.raises(InvalidRequestError, match=r"^prompt='' must be text"):
        llm.generate([""], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[10**6]], "prompt holds the token id"),
        ([[]], "prompt is empty|prompt holds no token"),
        ([5] * 2000, r"prompt of 2000 tokens"),
        ({}, "prompt has neither prompt nor prompt_token_ids"),
        ([None], "prompt=None must be text, token ids"),
        (["a", {"prompt": None}], r"prompt\[1\] has neither"),
        (["a", {"prompt": "b", "cache_salt": 5}], r"prompt\[1\]: cache_salt=5 must be text"),
        ({"prompt": "b", "cache_salt": 5}, "cache_salt=5 must be text"),
        ({"prompt": "b", "multi_modal_data": {"image": 1}}, "prompt has 'multi_modal_data', .*: models take text"),
        (["a", {"prompt": "b", "prompt_embeds": [1, 2]}], r"prompt\[1\] has 'prompt_embeds', .* text or token ids"),
        ({"prompt": "b", "promt_token_ids": [5]}, "prompt has the key 'promt_token_ids', .* mean prompt_token_ids"),
        ({"prompt": "b", 5: 5}, "prompt has the key 5, which is not known"),
        (None, "prompts=None must be text, token ids"),
        (5, "prompts=5 must be text, token ids"),
        (np.array(5), "prompts=.* must be text, token ids"),
        ([{1, 2}], "prompt=a set of 2 must be text, token ids"),
        ({"a", "b"}, "prompts=a set of 2 must be text, token ids"),
        ({"prompt_token_ids": [[1, 2], [3]]}, "prompt has .prompt_token_ids.: a list of 2, which is no row"),
        (["a", {"prompt_token_ids": "abc"}], r"prompt\[1\] has .prompt_token_ids.: 'abc', which is no row"),
        ([[[1, 2], [3, 4]]], "prompt=a list of 1 must be text, token ids|prompt=a list of 2 must be text, token ids"),
        (["a", [[1, 2], [3, 4]]], r"prompt\[1\]=a list of 2 must be text, token ids"),
        ({"prompt": ["a", "b"]}, "prompt has .prompt.: a list of 2, which is no text"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "prompt has .prompt.: 5, which is no text"),
        (b"abc", "prompt=a bytes of 3 must be text, token ids"),
    ],
)
def test_a_prompt_that_is_none_is_refused_by_the_name_of_the_argument(llm, prompts, words):
    with pytest.raises(InvalidRequestError, match=f"^({words})") as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param in ("prompt", "prompts", "cache_salt")


def test_keys_of_a_prompt_without_a_value_or_an_effect_pass(llm):
    prompt = {"prompt": PROMPTS[1], "multi_modal_data": None, "mm_processor_kwargs": {}, "priority": 3}
    (output,) = llm.generate(prompt, GREEDY)
    assert output.outputs[0].token_ids == llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids


def test_prompts_of_other_salts_share_no_prefix(tmp_path):
    text = PROMPTS[0] * 2
    first = SamplingParams(temperature=0, max_tokens=1)
    with LLM(str(write_tiny_checkpoint(tmp_path)), block_size=8, max_num_seqs=2) as own:
        salts = (None, "a", "b", "a", "b")
        cached = [own.generate({"prompt": text, "cache_salt": salt}, first)[0].num_cached_tokens for salt in salts]
        by_engine = own.engine.generate(text, {"max_new_tokens": 1}, extra_key="a")["meta_info"]["cached_tokens"]
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4] == by_engine > 0


@pytest.mark.parametrize(
    ("method", "keyword", "words"),
    [
        ("generate", "cache_salt", "cache_salt is no parameter of LLM.generate; give .*cache_salt"),
        ("chat", "extra_key", "extra_key is no parameter of LLM.chat; give .*cache_salt"),
        ("chat", "routed_dp_rank", "routed_dp_rank is no parameter of LLM.chat; known are messages"),
        ("chat", "sampling_prams", "sampling_prams is no parameter of LLM.chat; did you mean sampling_params"),
    ],
)
def test_an_unknown_keyword_names_its_method(llm, method, keyword, words):
    with pytest.raises(InvalidRequestError, match=f"^{words}") as caught:
        getattr(llm, method)([{"role": "user", "content": "hi"}], GREEDY, **{keyword: "a"})
    assert caught.value.param == keyword


def test_a_chat_that_is_too_long_names_the_messages(llm):
    long, short = ([{"role": "user", "content": "word " * count}] for count in (2000, 1))
    with pytest.raises(InvalidRequestError, match=r"^messages of \d+ tokens is longer") as caught:
        llm.chat(long, GREEDY)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\] of \d+ tokens is longer"):
        llm.chat([short, long], GREEDY)


def test_parameters_of_a_prompt_that_are_refused_are_named(llm):
    """Those of a list. Parameters for all prompts are refused without an index."""
    for wrong, words in (
        ({"temperature": -1}, "temperature is -1"),
        ({"min_new_tokens": 1000}, "min_new_tokens=1000 is above the 16 tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 2}, "min_new_tokens is 9, but must be at most max_new_tokens, 2"),
        (SamplingParams(routed_experts_format="npy"), "routed_experts_format='npy' is for the wire"),
    ):
        for params, prompts, prefix in (
            ([GREEDY, wrong], ["a", "b"], "prompt[1]: "),
            (wrong, ["a", "b"], ""),
            ([wrong], ["a"], ""),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                llm.generate(prompts, params)
            assert str(caught.value).startswith(prefix + words)
            assert caught.value.index == (1 if prefix else None) and words.startswith(caught.value.param)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs of LLM is refused: max_queued_requests=0"),
        ({"block_size": 0}, "block_size of LLM is refused: page_size=0"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 2}, "max_num_batched_tokens=2 is below max_num_seqs=4"),
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens=2 is below max_num_seqs=32"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization of LLM is refused: mem_fraction_static=2"),
        ({"max_model_len": 1}, "max_model_len of LLM is refused: context_length=1"),
        ({"seed": -1}, "seed of LLM is refused: random_seed=-1"),
    ],
)
def test_a_wrong_keyword_is_refused_by_the_name_it_was_given(wrong, words, tmp_path):
    with pytest.raises(ConfigError, match=f"^{words}"):
        LLM(str(tmp_path), **wrong)


def test_a_length_above_the_models_is_refused_by_the_name_it_was_given(tmp_path):
    with pytest.raises(ConfigError, match=r"^max_model_len of LLM is refused: context_length=99999 is above"):
        LLM(str(write_tiny_checkpoint(tmp_path)), max_model_len=99_999)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([[]], r"messages is a list of 0; expected a list of at least one message"),
        ([[{"role": "user", "content": "hi"}], []], r"messages\[1\] is a list of 0; expected"),
        ([{"role": "user"}], r"messages\[0\]=.* has no role or no content"),
        ([{"content": "hi"}], r"messages\[0\]=.* has no role or no content"),
        ([[{"role": "user", "content": None}]], r"messages\[0\]=.* has no role or no content"),
        ("hi", r"messages is text, 'hi'; give a list"),
        ({"role": "user", "content": "hi"}, r"messages is a dict of 2; expected a list of at least one message"),
        (5, r"messages=5 must be a list of messages"),
    ],
)
def test_a_conversation_without_a_message_is_refused(llm, messages, words):
    with pytest.raises(InvalidRequestError, match=f"^{words}") as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.param == "messages"
