"""Texts of a tokenizer whose decoder strips the first space: an answer continues its prompt, on every surface."""

import pytest

from routed_experts.core.speculative_config import SpeculativeConfig
from support.engines import open_engine
from support.http_server import running, stream
from support.tiny_checkpoint import write_sentencepiece_tokenizer, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("sentencepiece"), tokenizer=False)
    return write_sentencepiece_tokenizer(folder)


@pytest.fixture(scope="module")
def engine(folder):
    with open_engine(folder, enable_return_routed_experts=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as server:
        yield server


def always(engine, word):
    """Sampling parameters with which every token is `word`."""
    (token_id,) = [i for i in range(engine.tokenizer.vocab_size) if engine.tokenizer.token_string(i) == word]
    return {"temperature": 0, "logit_bias": {str(token_id): 100}}


def completion(server, **fields):
    response = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def test_a_completion_begins_with_its_space(engine, server):
    bias = always(engine, "▁pas")
    assert [choice["text"] for choice in completion(server, **bias, n=2)] == [" pas pas"] * 2
    assert engine.generate("ab", {**bias, "max_new_tokens": 2})["text"] == " pas pas"
    for prompt in ("ab", engine.tokenizer.encode("ab", add_special_tokens=False)):
        assert completion(server, **bias, prompt=prompt, echo=True)[0]["text"] == "ab pas pas"
    chunks = stream(server, "/v1/completions", {"prompt": "ab", "max_tokens": 2, **bias})
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["text"]]
    assert texts == [" pas", " pas"]


def test_a_stop_string_may_be_the_first_space_and_none_is_of_the_prompt(engine, server):
    bias = always(engine, "▁pas")
    (choice,) = completion(server, **bias, stop=" ")
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    (choice,) = completion(server, **bias, stop="b pas")
    assert (choice["text"], choice["finish_reason"]) == (" pas pas", "length")


def test_a_grammar_that_begins_with_a_space_is_the_text(server):
    (choice,) = completion(server, max_tokens=8, temperature=0, structured_outputs={"regex": " the router"})
    assert (choice["text"], choice["finish_reason"]) == (" the router", "stop")


def test_texts_of_tokens_join_to_the_text_at_their_offsets(engine, server):
    ids = engine.tokenizer.encode("ab pas", add_special_tokens=False)
    (choice,) = completion(server, **always(engine, "▁pas"), prompt=ids, echo=True, logprobs=1)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["ab", " pas", " pas", " pas"] and choice["text"] == "".join(logprobs["tokens"])
    assert logprobs["text_offset"] == [0, 2, 6, 10]


def test_texts_of_tokens_join_to_the_echo_of_a_prompt_that_special_tokens_begin(engine, server):
    bias = always(engine, "▁pas")
    (choice,) = completion(server, **bias, prompt="ab pas", echo=True, logprobs=1, add_special_tokens=True)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["", "ab", " pas", " pas", " pas"]
    assert choice["text"] == "ab pas pas pas" == "".join(logprobs["tokens"])
    assert logprobs["text_offset"] == [0, 0, 2, 6, 10]
    ids = engine.tokenizer.encode("ab pas")
    (choice,) = completion(server, **bias, prompt=ids, echo=True, logprobs=1)
    assert choice["text"] == "<s> ab pas pas pas" == "".join(choice["logprobs"]["tokens"])


def test_a_token_of_the_echo_has_one_text_among_its_alternatives(engine, server):
    """Of "u" the tokenizer makes two tokens, the first of which is the space that the echo has not."""
    body = {"prompt": "u", "echo": True, "logprobs": 20, "add_special_tokens": True, "max_tokens": 0}
    logprobs = completion(server, **body)[0]["logprobs"]
    assert logprobs["tokens"] == ["", "", "u"]
    ids = engine.tokenizer.encode("u")
    meta = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=20,
    )["meta_info"]
    best = [(value, text) for value, token_id, text in meta["input_top_logprobs"][1] if token_id != ids[1]]
    assert len(best) == 19, "the space is among the alternatives"
    assert logprobs["top_logprobs"][1].keys() == {"", *(text for _, text in best)}


def test_an_answer_of_a_chat_follows_the_last_shown_token(engine, server):
    bias = always(engine, "▁pas")
    for message, text in (("ab", " pas"), ("ab</s>", " pas")):
        body = {"messages": [{"role": "user", "content": message}], "max_tokens": 1, **bias}
        answer = server.post("/v1/chat/completions", body)
        assert answer.json()["choices"][0]["message"]["content"] == text, answer.text
        chunks = stream(server, "/v1/chat/completions", body)
        contents = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
        assert "".join(contents) == text


NEWLINE = 13  # the raw byte
STOP = {"type": "stop", "matched": "\n"}


def meta_of(engine, params, **options):
    answer = engine.generate("route ab", {"temperature": 0, "max_new_tokens": 12, **params}, **options)
    return answer["text"], answer["output_ids"], answer["meta_info"]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("params", "text", "count"),
    [
        ({"regex": "ab\\n the router"}, "ab", 3),  # a word follows
        ({"regex": "ab\\n"}, "ab", 3),  # the end token follows
        ({"regex": "ab\\n the router", "max_new_tokens": 3}, "ab", 3),  # no token follows
        ({"regex": "ab\\n\\n the"}, "ab", 3),
        ({"allowed_token_ids": [NEWLINE], "ignore_eos": True}, "", 1),
        ({"allowed_token_ids": [NEWLINE], "ignore_eos": True, "min_tokens": 4}, "\n\n\n", 4),
    ],
)
def test_an_answer_ends_at_the_raw_byte_that_completes_a_stop_string(engine, params, text, count, include):
    params = {**params, "stop": ["\n"], "include_stop_str_in_output": include}
    shown, ids, meta = meta_of(engine, params, return_routed_experts=True)
    assert (shown, len(ids), ids[-1], meta["finish_reason"]) == (text + "\n" * include, count, NEWLINE, STOP)
    assert meta["completion_tokens"] == count
    assert meta["routed_experts_info"]["shape"][0] == meta["prompt_tokens"] + count - 1
    last = [*engine.generate("route ab", {"temperature": 0, "max_new_tokens": 12, **params}, stream=True)][-1]
    assert (last["text"], last["output_ids"], last["meta_info"]["finish_reason"]) == (shown, ids, STOP)


def test_a_completion_counts_the_tokens_up_to_a_raw_byte_that_stops_it(server):
    for regex in ("ab\\n the router", "ab\\n"):
        for max_tokens in (30, 3):
            body = {"prompt": "route ab", "max_tokens": max_tokens, "temperature": 0, "regex": regex, "stop": ["\n"]}
            answer = server.post("/v1/completions", body | {"return_token_ids": True}).json()
            (choice,) = answer["choices"]
            assert (choice["text"], len(choice["token_ids"])) == ("ab", 3)
            assert (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == ("stop", "\n", "\n")
            assert answer["usage"]["completion_tokens"] == 3
            chunks = stream(server, "/v1/completions", body)
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert "".join(choice["text"] for choice in choices) == "ab"
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "\n")


def test_a_stop_string_in_what_was_held_back_is_the_reason(engine):
    """The first byte of an unfinished character is no stop string before the end, and is one at it."""
    first, second = 3 + 0xC3, 3 + 0xA9
    assert engine.tokenizer.decode([first, second]) == "é"
    params = {"ignore_eos": True, "stop": ["\ufffd"]}
    for allowed, count, finish in (
        ({"allowed_token_ids": [first], "max_new_tokens": 1}, 1, {"type": "stop", "matched": "\ufffd"}),
        ({"allowed_token_ids": [first], "max_new_tokens": 9}, 2, {"type": "stop", "matched": "\ufffd"}),  # invalid
        ({"regex": "éé", "max_new_tokens": 3}, 3, {"type": "stop", "matched": "\ufffd"}),
        ({"regex": "éé", "max_new_tokens": 4}, 4, {"type": "length", "length": 4}),
    ):
        before = dict(engine.get_server_info()["requests_finished"])
        text, ids, meta = meta_of(engine, params | allowed)
        assert (len(ids), meta["finish_reason"]) == (count, finish), allowed
        assert ("\ufffd" in text) is False
        after = engine.get_server_info()["requests_finished"]
        assert after[finish["type"]] == before.get(finish["type"], 0) + 1


def test_a_raw_byte_among_accepted_drafts_ends_an_answer(folder):
    drafts = SpeculativeConfig(adaptive=False)
    with open_engine(folder, speculative=drafts) as drafting:
        num_multiple = 0
        prompt = [5, *[NEWLINE] * 24]
        for size in range(1, 12):
            answer = drafting.generate(
                input_ids=prompt,
                sampling_params={
                    "temperature": 0,
                    "max_new_tokens": 20,
                    "ignore_eos": True,
                    "stop": ["\n" * size],
                    "logit_bias": {str(NEWLINE): 100},
                },
            )
            meta = answer["meta_info"]
            assert (answer["text"], answer["output_ids"]) == ("", [NEWLINE] * size)
            assert meta["finish_reason"] == {"type": "stop", "matched": "\n" * size}
            num_multiple += meta["spec_num_correct_drafts"] > 0
        assert num_multiple > 5
