"""The vocabulary of a model as llguidance needs it: the bytes of every token, the end tokens, a tokeniser of text.

llguidance could read a tokenizer.json itself, but then takes text that spells a special token for that token, and a
schema with the text "<|im_end|>" cannot be followed. So it gets each token's bytes, as streams decode them, and text
is split by the checkpoint's own tokenizer without its special tokens: forced text is fed as a prompt with this text
would be. Text that the tokenizer changes (normalises) is split into the longest tokens instead. Ids that only the
padding of the model's vocabulary has, or that the model lacks, may never follow. Dims: V vocabulary of the model."""

from collections.abc import Sequence
from typing import Any, Protocol

from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.installation import import_optional

PURPOSE = "structured output"


class VocabularySource(Protocol):
    """What a tokenizer tells of its vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Ids of running text, in which special tokens that are spelled out stay text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is no text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to running text."""
        ...


def import_llguidance() -> Any:
    """The library, at first use. Raises ConfigError with the command that installs it."""
    return import_optional("llguidance", purpose=PURPOSE, extra="structured", otherwise="ask for text in any form")


def build_vocabulary(source: VocabularySource, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """An LLTokenizer of a model with logits of `vocab_size` V tokens. Raises ConfigError without llguidance, and
    InvalidRequestError for a model without an end token."""
    llguidance = import_llguidance()
    ends = sorted(token for token in eos_token_ids if token < vocab_size)
    if not ends:
        text = f"{PARAM} needs a model with an end token, and this one names none; set eos_token_id in its config.json"
        raise InvalidRequestError(text, param="structured_outputs", code="grammar_unsupported")
    tokens = llguidance.TokenizerWrapper(_TokenList(source, vocab_size, ends))
    return llguidance.LLTokenizer(tokens, n_vocab=vocab_size, eos_token=ends)


class _TokenList:
    """The tokens of a vocabulary in the form that llguidance's wrapper reads."""

    def __init__(self, source: VocabularySource, vocab_size: int, ends: Sequence[int]) -> None:
        known = min(source.vocab_size, vocab_size)
        self.eos_token_id, self.bos_token_id = ends[0], None
        special = {*filter(source.is_special, range(known)), *ends}
        self.special_token_ids = sorted(special)
        texts = [source.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
        self.tokens = texts
        self._source = source
        self._ids = {text: token for token, text in enumerate(texts) if text and token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Ids of running text."""
        if not isinstance(text, str):
            raise TypeError("text, not bytes: so the wrapper is told which of them it may send")
        encoded = text.encode()
        ids = self._source.encode_plain(text)
        if all(token < len(self.tokens) for token in ids) and b"".join(self.tokens[token] for token in ids) == encoded:
            return ids
        return self._split(encoded)

    def _split(self, encoded: bytes) -> list[int]:
        """Split text into the longest tokens, up to a byte that no token has."""
        ids: list[int] = []
        at = 0
        while at < len(encoded):
            longest = min(self._longest, len(encoded) - at)
            size = next((size for size in range(longest, 0, -1) if encoded[at : at + size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[encoded[at : at + size]])
            at += size
        return ids
