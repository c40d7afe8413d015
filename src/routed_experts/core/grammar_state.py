"""GrammarState and CompiledGrammar: what the scheduler and the sampler need of a grammar, for any library."""

from typing import Protocol

import numpy as np
from jaxtyping import UInt32


def num_mask_words(vocab_size: int) -> int:
    """How many words of a mask, of 32 bits, the tokens of a vocabulary take."""
    return -(-vocab_size // 32)


class GrammarState(Protocol):
    """Where one sequence stands in its grammar. Engine thread only. Ids are those of the model's vocabulary."""

    @property
    def is_complete(self) -> bool:
        """Whether the output has ended with an end token that the grammar allowed."""
        ...

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further (a limit was met); None while it can."""
        ...

    def accept(self, token: int) -> None:
        """Move on by one token of the output."""
        ...

    def forced_tokens(self) -> tuple[int, ...]:
        """The tokens that follow whatever is sampled; empty where there is a choice."""
        ...

    def fill(self, words: UInt32[np.ndarray, " W"], *, keep_end: bool) -> None:
        """Write the bits of the tokens that may follow: bit i % 32 of word i // 32 is token i. At least one bit is set
        where `error` is None afterwards. `keep_end` False: without end tokens, unless nothing else may follow."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that was compiled for a tokenizer. Any thread."""

    def start(self) -> GrammarState:
        """The state of a new sequence."""
        ...
