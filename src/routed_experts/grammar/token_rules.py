"""TokenRules: tokens that an output may have (vLLM's allowed_token_ids), and sequences that it may not (bad_words).

A CompiledGrammar of its own: it needs neither llguidance nor a vocabulary's texts. Dims: W words of a mask."""

import json
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import UInt32

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.grammar_spec import GrammarSpec
from routed_experts.core.grammar_state import num_mask_words

_ALL = np.uint32(0xFFFFFFFF)


class TokenRules:
    """A CompiledGrammar. `allowed`: the only tokens that may follow, None for any; `banned`: sequences whose last token
    may not follow the ones before it."""

    def __init__(self, allowed: Sequence[int] | None, banned: Sequence[Sequence[int]], *, num_words: int) -> None:
        self.words = np.full(num_words, 0 if allowed else _ALL, np.uint32)
        for token in allowed or ():
            self.words[token // 32] |= np.uint32(1 << token % 32)
        self.banned: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the token before the last: those before it
        for *before, token in banned:
            if before:
                self.banned.setdefault(before[-1], []).append((tuple(before), token))
            else:
                self.words[token // 32] &= ~np.uint32(1 << token % 32)
        self.longest = max((len(sequence) - 1 for sequence in banned), default=0)

    @staticmethod
    def create(spec: GrammarSpec, encode: Callable[[str], list[int]] | None, *, vocab_size: int) -> "TokenRules":
        """The rules of a request. `encode` turns text into ids as within an output; None without a tokenizer. A word is
        banned at the beginning of a text and after a space. Raises InvalidRequestError."""
        fields = json.loads(spec.text)
        allowed, words = fields["allowed_token_ids"], fields["bad_words"]
        wrong = next((token for token in allowed or () if token >= vocab_size), None)
        if wrong is not None:
            text = f"{PARAM} holds the token id {wrong}, out of vocabulary: this model's ids are 0..{vocab_size - 1}"
            raise InvalidRequestError(f"{text}; give ids of this model's tokenizer", param="allowed_token_ids")
        if words and encode is None:
            text = f"{PARAM} are text, but this engine has no tokenizer; give logit_bias"
            raise InvalidRequestError(text, param="bad_words")
        banned: list[list[int]] = []
        for word in words if encode is not None else ():
            spelled = [ids for prefix in ("", " ") if (ids := encode(prefix + word.lstrip()))] if encode else []
            if word.strip() and not spelled:
                text = f"{PARAM} holds {short_repr(word)}, which has no ids within a text; give logit_bias"
                raise InvalidRequestError(text, param="bad_words")
            banned += spelled
        return TokenRules(allowed, banned, num_words=num_mask_words(vocab_size))

    def start(self) -> "TokenRuleState":
        """The state of a new sequence."""
        return TokenRuleState(self)


class TokenRuleState:
    """A GrammarState: the last tokens of the output. Nothing is forced, and the output is never complete by itself."""

    def __init__(self, rules: TokenRules) -> None:
        self._rules, self._error = rules, None
        self._last: deque[int] = deque(maxlen=rules.longest)

    @property
    def is_complete(self) -> bool:
        """False: stop tokens and the length end the output."""
        return False

    @property
    def error(self) -> str | None:
        """Why nothing may follow; None while something may."""
        return self._error

    def accept(self, token: int) -> None:
        """Move on by one token of the output."""
        self._last.append(token)

    def forced_tokens(self) -> tuple[int, ...]:
        """None."""
        return ()

    def fill(self, words: UInt32[np.ndarray, " W"], *, keep_end: bool) -> None:
        """Write the bits of the tokens that may follow. End tokens are tokens as any other."""
        words[:] = self._rules.words
        last = tuple(self._last)
        for before, token in self._rules.banned.get(last[-1], ()) if last else ():
            if last[-len(before) :] == before:
                words[token // 32] &= ~np.uint32(1 << token % 32)
        if not words.any():
            self._error = "no token of the vocabulary may follow"
