"""Grammars for tests: a compiler over a tokenizer, and walks through a grammar by the tokens that its masks allow."""

import numpy as np
import regex

from routed_experts.engine.requests.tokenizer import Tokenizer
from routed_experts.grammar.compiler import GrammarCompiler
from support.tiny_checkpoint import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer


def tiny_tokenizer(folder):
    """The byte-level tokenizer of the tiny MoE."""
    return Tokenizer.from_directory(write_tiny_tokenizer(folder))


def new_compiler(tokenizer, *, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,)):
    """A compiler without any grammar yet."""
    return GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def allowed_tokens(state, vocab_size, *, keep_end=True):
    """Ids that a state allows, by its mask, whose other bits are poison first."""
    words = np.full(-(-vocab_size // 32), 0xAAAAAAAA, np.uint32)
    state.fill(words, keep_end=keep_end)
    assert state.error is None, state.error
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any(), "a token that the model does not have"
    return np.flatnonzero(bits)


def walk(compiled, rng, vocab_size, eos_ids, *, most=120, end_eagerly=True):
    """Random tokens that a grammar allows; returns them without the end token, and whether the output is complete."""
    state, tokens = compiled.start(), []
    while len(tokens) < most:
        forced = state.forced_tokens()
        if forced:
            token = forced[0]
        else:
            allowed = allowed_tokens(state, vocab_size)
            ends = [token for token in allowed.tolist() if token in eos_ids]
            token = ends[0] if ends and end_eagerly else int(rng.choice(allowed))
        state.accept(token)
        if state.error is not None:
            raise AssertionError(state.error)
        if state.is_complete:
            return tokens, True
        tokens.append(token)
    return tokens, False


def _begins_utf8(data):
    """Whether bytes are UTF-8 up to a character that can be completed."""
    whole = data[: max((end for end in range(len(data) + 1) if _is_utf8(data[:end])), default=0)]
    rest = data[len(whole) :]
    ends = [[byte] * count for byte in (0x80, 0x90, 0xA0, 0xBF) for count in (1, 2, 3)]
    return not rest or any(_is_utf8(rest + bytes([*end])) for end in ends)


def _is_utf8(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class RegexOracle:
    """Which tokens may follow, by matching the text so far and each token's bytes; shares no code with the engine."""

    def __init__(self, pattern, token_bytes, eos_ids):
        self._pattern = regex.compile(pattern.encode())
        self._token_bytes, self._eos_ids = token_bytes, eos_ids

    def allowed(self, tokens):
        text = b"".join(self._token_bytes[token] for token in tokens)
        fits = {
            token
            for token, own in self._token_bytes.items()
            if own and _begins_utf8(text + own) and self._pattern.fullmatch(text + own, partial=True) is not None
        }
        return sorted(fits | (set(self._eos_ids) if self._pattern.fullmatch(text) else set()))
