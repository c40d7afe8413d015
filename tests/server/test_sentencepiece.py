"""Texts of a tokenizer whose decoder strips the first space: an answer continues its prompt, on every surface."""

import pytest

from support.engines import open_engine
from support.http_server import running, stream
from support.tiny_checkpoint import write_sentencepiece_tokenizer, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("lazy_compilation")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("sentencepiece"), tokenizer=False)
    with open_engine(write_sentencepiece_tokenizer(folder)) as engine:
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
