"""The vocabulary of a model as llguidance needs it: the bytes of every token, the end tokens, a tokeniser of text.

llguidance reads the tokenizer's own JSON where it can: byte-level ones, and those with a byte fallback. Then it also
knows which tokens the text would be split into, and forced text is fed as these. Of any other tokenizer it gets the
bytes of each token, and nothing is forced. Special tokens are never text: a schema that names "<|end|>" means its
characters. Ids that only the padding of the model's vocabulary has, or that the model lacks, may never follow. Dims: V
vocabulary of the model."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.core.installation import import_optional

logger = logging.getLogger(__name__)
PURPOSE = "structured output"


class VocabularySource(Protocol):
    """What a tokenizer tells of its vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json has it."""
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
    if source.vocab_size <= vocab_size:
        try:
            return llguidance.LLTokenizer(source.to_json(), n_vocab=vocab_size, eos_token=ends)
        except Exception as error:  # the library raises ValueError, and may panic, for a tokenizer that it cannot read
            logger.info("llguidance takes this tokenizer by its tokens; nothing is forced: %s", error)
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_TokenList(source, vocab_size, ends)), n_vocab=vocab_size, eos_token=ends
    )


class _TokenList:
    """The tokens of a vocabulary in the form that llguidance's wrapper reads."""

    def __init__(self, source: VocabularySource, vocab_size: int, ends: Sequence[int]) -> None:
        known = min(source.vocab_size, vocab_size)
        self.eos_token_id, self.bos_token_id = ends[0], None
        self.special_token_ids = sorted({*filter(source.is_special, range(known)), *ends})
        special = set(self.special_token_ids)
        texts = [b"" if token in special else source.token_bytes(token) for token in range(known)]
        texts += [b""] * (vocab_size - known)
        for token in special:
            texts[token] = b"\xff<%d>" % token  # no UTF-8: no text has it
        self.tokens = texts
        self._longest = max(map(len, texts))
        self._ids = {text: token for token, text in enumerate(texts) if text and token not in special}

    def __call__(self, text: bytes | str) -> list[int]:
        """Split text into the longest tokens. Tokenizers differ from this; so nothing is forced."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        at = 0
        while at < len(data):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + size])
                if token is not None:
                    ids.append(token)
                    at += size
                    break
            else:
                at += 1  # no token has this byte
        return ids
