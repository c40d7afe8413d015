"""Masks of the grammar room, judged by matching every token's bytes: for byte-level tokenizers, for those with a byte
fallback, and for those that are read token by token."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.engine.requests import tokenizer as own
from support.grammars import RegexOracle, allowed_tokens, new_compiler, tiny_tokenizer, walk
from support.tiny_checkpoint import EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE

PATTERNS = (
    "[a-e]{2,12}",
    "(yes|no|perhaps)( [0-9]+)?",
    "[ -~]{0,20}",
    '"([^"\\\\\\x00-\\x1f]|\\\\[nt"])*"',
    "-?(0|[1-9][0-9]{0,8})(\\.[0-9]{1,4})?",
)
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *'abcdefghij0123456789{}:,"[]']
WORDS += ["▁a", "▁ab", "ab", "abc", "tr", "▁true", '":', '","', '{"', "12", "▁b"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("byte_level"))


def sentencepiece(folder, *, strange=False):
    """A tokenizer as Llama's are: words begin with ▁, other characters are their bytes. `strange`: with a decoder that
    llguidance does not read."""
    vocab = {word: index for index, word in enumerate(WORDS)}
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b"), ("ab", "c"), ("1", "2"), ("▁", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if strange:
        backend.normalizer, backend.pre_tokenizer = None, pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return own.Tokenizer.from_directory(folder)


def texts_of(tokenizer, vocab_size):
    """The bytes of every token that is text."""
    known = range(min(tokenizer.vocab_size, vocab_size))
    return {token: tokenizer.token_bytes(token) for token in known if not tokenizer.is_special(token)}


def compare_walks(tokenizer, compiler, vocab_size, eos_ids, pattern, seed):
    """Along random walks the mask is what the oracle says; returns how many masks with a choice were compared. Where
    one text alone may follow, one of the tokens that it can be split into is enough."""
    oracle = RegexOracle(pattern, texts_of(tokenizer, vocab_size), eos_ids)
    compiled, rng, compared = compiler.compile(GrammarSpec.regex(pattern)), np.random.default_rng(seed), 0
    state, tokens = compiled.start(), []
    while not state.is_complete and len(tokens) < 20:
        allowed = allowed_tokens(state, vocab_size).tolist()
        expected = oracle.allowed(tokens)
        if len({tokenizer.token_bytes(token)[:1] for token in expected}) > 1:
            assert allowed == expected, tokens
            compared += 1
        else:
            assert set(allowed) <= set(expected), tokens
            assert (state.forced_tokens() or allowed)[0] in allowed
        token = int(rng.choice(allowed))
        state.accept(token)
        tokens.append(token)
    return compared


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 384, 300])  # padded, and with fewer ids than the tokenizer has
def test_masks_of_a_byte_level_tokenizer_are_those_of_the_oracle(byte_level, pattern, vocab_size):
    compiler = new_compiler(byte_level, vocab_size=vocab_size)
    counts = [compare_walks(byte_level, compiler, vocab_size, (EOS_ID,), pattern, seed) for seed in range(4)]
    assert sum(counts) > 8


@pytest.mark.parametrize(
    ("pattern", "strange"), [*((pattern, False) for pattern in PATTERNS), ("( ?[a-j]){3,9}", True), (PATTERNS[2], True)]
)
def test_masks_of_a_tokenizer_with_byte_fallback_are_those_of_the_oracle(tmp_path, pattern, strange):
    tokenizer = sentencepiece(tmp_path / "sp", strange=strange)
    vocab_size = tokenizer.vocab_size + 7
    compiler = new_compiler(tokenizer, vocab_size=vocab_size, eos_token_ids=(2,))
    counts = [compare_walks(tokenizer, compiler, vocab_size, (2,), pattern, seed) for seed in range(4)]
    assert sum(counts) > 8


def test_text_that_spells_a_special_token_is_never_that_token(byte_level):
    compiler = new_compiler(byte_level)
    for name in SPECIAL_TOKENS:
        compiled = compiler.compile(GrammarSpec.choice([f"a{name}b"]))
        tokens, is_complete = walk(compiled, np.random.default_rng(0), VOCAB_SIZE, (EOS_ID,))
        assert is_complete and not any(map(byte_level.is_special, tokens))
        assert byte_level.decode(tokens, skip_special_tokens=False) == f"a{name}b"


def test_text_that_the_vocabulary_cannot_spell_is_refused(tmp_path):
    tokenizer = sentencepiece(tmp_path / "sp", strange=True)
    with pytest.raises(InvalidRequestError, match="cannot be followed"):
        new_compiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(2,)).compile(GrammarSpec.regex("yes"))


def test_several_end_tokens_end_an_output_and_none_is_text(byte_level):
    ends = (0, EOS_ID)
    compiler = new_compiler(byte_level, eos_token_ids=ends)
    state = compiler.compile(GrammarSpec.regex("ab?")).start()
    state.accept(byte_level.encode("a")[0])
    allowed = allowed_tokens(state, VOCAB_SIZE).tolist()
    assert allowed == sorted([*ends, byte_level.encode("b")[0]])
    assert allowed_tokens(state, VOCAB_SIZE, keep_end=False).tolist() == byte_level.encode("b")
    state.accept(byte_level.encode("b")[0])
    assert allowed_tokens(state, VOCAB_SIZE, keep_end=False).tolist() == list(ends), "nothing else may follow"
    state.accept(0)
    assert state.is_complete


def test_a_model_without_an_end_token_is_refused(byte_level):
    for ends in ((), (VOCAB_SIZE + 3,)):
        with pytest.raises(InvalidRequestError, match="needs a model with an end token"):
            new_compiler(byte_level, eos_token_ids=ends).compile(GrammarSpec.regex("a"))


FORCING = {
    "type": "object",
    "properties": {"the name": {"const": "naïve “quoted” text"}, "is it": {"type": "boolean"}},
    "required": ["the name", "is it"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_forced_tokens_are_what_the_tokenizer_makes_of_the_text(byte_level):
    compiled = new_compiler(byte_level).compile(GrammarSpec.json_schema(FORCING))
    state, tokens = compiled.start(), []
    forced = state.forced_tokens()
    assert len(forced) > 8
    tokens += forced
    for token in forced:
        state.accept(token)
    text = byte_level.decode(tokens)
    assert tokens == byte_level.encode(text)[: len(tokens)]
    rest, is_complete = [], False
    rng = np.random.default_rng(1)
    while not is_complete:
        token = (state.forced_tokens() or (int(rng.choice(allowed_tokens(state, VOCAB_SIZE))),))[0]
        state.accept(token)
        is_complete = state.is_complete
        rest += [] if is_complete else [token]
    answer = json.loads(byte_level.decode(tokens + rest))
    assert answer["the name"] == "naïve “quoted” text" and isinstance(answer["is it"], bool)


def test_sequences_of_one_grammar_do_not_share_their_place(byte_level):
    compiled = new_compiler(byte_level).compile(GrammarSpec.regex("(ab){3}"))
    first, second = compiled.start(), compiled.start()
    for token in byte_level.encode("ab"):
        first.accept(token)
    assert second.forced_tokens() == compiled.start().forced_tokens() != first.forced_tokens()


def test_a_token_that_was_not_allowed_is_an_error_and_nothing_more(byte_level):
    state = new_compiler(byte_level).compile(GrammarSpec.regex("a+")).start()
    state.accept(byte_level.encode("b")[0])
    assert state.error and not state.forced_tokens()
    words = np.zeros(10, np.uint32)
    state.fill(words, keep_end=True)
    state.accept(EOS_ID)
    assert not words.any() and not state.is_complete
