"""Tokens that an output may have, and texts that it may not (vLLM's allowed_token_ids and bad_words)."""

import sys

import pytest

from routed_experts import InvalidRequestError
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.grammar.token_rules import TokenRules
from support.engines import open_engine

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, lazy_compilation):
    with open_engine(tiny_checkpoint) as engine:
        yield engine
        assert engine.check_integrity() == []


def tokens(engine, *, num_tokens=12, **params):
    params = {"temperature": 1.0, "seed": 3, "max_new_tokens": num_tokens, "ignore_eos": True, **params}
    return engine.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]


def test_only_allowed_tokens_follow(engine):
    for seed in range(4):
        assert set(tokens(engine, seed=seed, allowed_token_ids=[11, 40, 63])) <= {11, 40, 63}
    assert tokens(engine, allowed_token_ids=[42], num_tokens=3) == [42] * 3
    greedy = tokens(engine, temperature=0)
    everything = list(range(engine.components.vocab_size))
    assert (
        tokens(engine, temperature=0, allowed_token_ids=everything)
        == greedy
        == tokens(engine, temperature=0, bad_words=[])
    )


def test_a_stop_token_ends_an_output_only_where_it_is_allowed(engine):
    params = {"stop_token_ids": [40], "ignore_eos": False}
    assert tokens(engine, allowed_token_ids=[11, 40], **params)[-1] == 40
    assert tokens(engine, allowed_token_ids=[11], **params) == [11] * 12


def test_bad_words_do_not_follow(engine):
    """The words of an output are banned one after another: what comes instead has none of the earlier ones."""
    words, tokenizer = [], engine.tokenizer
    for _ in range(4):
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "bad_words": words}
        out = engine.generate(input_ids=PROMPT, sampling_params=params)
        assert not any(word in out["text"] for word in words), (words, out["text"])
        texts = [tokenizer.decode([token]) for token in out["output_ids"]]
        words = [*words, next(text for text in texts if text.strip() and text.isascii() and text.isprintable())]


def test_llguidance_is_not_needed(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert tokens(engine, allowed_token_ids=[9], num_tokens=2) == [9, 9]


def test_a_sequence_is_banned_after_its_beginning_alone():
    import numpy as np

    from routed_experts.grammar.token_rules import TokenRules

    state = TokenRules(None, [[3, 4, 70], [9]], num_words=3).start()

    def banned():
        words = np.zeros(3, np.uint32)
        state.fill(words, keep_end=True)
        return [token for token in range(96) if not words[token // 32] >> token % 32 & 1]

    for token, expected in ((3, [9]), (4, [9, 70]), (3, [9]), (3, [9]), (4, [9, 70]), (70, [9])):
        state.accept(token)
        assert banned() == expected
    state = TokenRules([9], [[9]], num_words=3).start()
    state.fill(np.zeros(3, np.uint32), keep_end=True)
    assert state.error == "no token of the vocabulary may follow"


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": "5"}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"allowed_token_ids": [5], "regex": "a"}, "regex"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(engine, params, param):
    with pytest.raises(InvalidRequestError) as caught:
        tokens(engine, **params)
    assert caught.value.param == param


def test_a_word_that_has_no_ids_is_refused_and_not_dropped():
    spec = GrammarSpec.tokens(None, ["word"])
    with pytest.raises(InvalidRequestError, match="has no ids within a text") as caught:
        TokenRules.create(spec, lambda text: [], vocab_size=100)
    assert caught.value.param == "bad_words"
