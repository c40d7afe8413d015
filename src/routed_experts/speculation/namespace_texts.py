"""NamespaceTexts: the newest answers of each namespace, whatever their prompts were, as texts to search.

    newest block (texts that are not in it yet: at most half as many tokens) | full block | full block | full block
Dims: S tokens of a prompt, G generated tokens."""

import collections

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.sorted_contexts import ContextHash
from routed_experts.speculation.text_index import TextIndex

BLOCK_TOKENS = 32_768  # a full block; its index is built in 5 to 20 ms
MOST_FULL = 3  # full blocks of a namespace


class _Namespace:
    """The blocks of one namespace."""

    def __init__(self) -> None:
        self.full: tuple[TextIndex, ...] = ()
        self.blocks: tuple[TextIndex, ...] = ()  # the newest first: another tuple when one is built
        self.texts: list[tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " G"]]] = []  # of the newest block
        self.num_tokens = self.num_indexed = 0  # of these texts, and of those that the block has

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return 4 * self.num_tokens + sum(block.nbytes for block in self.blocks)

    def add(self, contexts: ContextHash, before: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"]) -> None:
        """Add a text. The newest block is built again when its texts have grown by half."""
        self.texts.append((before, output))
        self.num_tokens += before.size + output.size
        if 2 * self.num_tokens < 3 * self.num_indexed:
            return
        self.blocks, self.num_indexed = (TextIndex(contexts, self.texts), *self.full), self.num_tokens
        if self.num_tokens >= BLOCK_TOKENS:
            self.full = self.blocks = self.blocks[:MOST_FULL]
            self.texts, self.num_tokens, self.num_indexed = [], 0, 0


class NamespaceTexts:
    """Blocks by namespace, at most `max_bytes` in all: those of the namespaces that were used least recently are
    dropped first."""

    def __init__(self, contexts: ContextHash, *, max_bytes: int) -> None:
        self._hash, self._max_bytes = contexts, max_bytes
        self._namespaces: collections.OrderedDict[str | None, _Namespace] = collections.OrderedDict()
        self.nbytes = 0

    def add(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], namespace: str | None) -> None:
        """Add an answer."""
        texts = self._namespaces.pop(namespace, None)
        if texts is None:
            texts = _Namespace()
        else:
            self.nbytes -= texts.nbytes
        texts.add(self._hash, prompt[-self._hash.max_window :].copy(), output.copy())
        self._namespaces[namespace] = texts
        self.nbytes += texts.nbytes
        while self._namespaces and self.nbytes > self._max_bytes:
            _, oldest = self._namespaces.popitem(last=False)
            self.nbytes -= oldest.nbytes

    def indices(self, namespace: str | None) -> tuple[TextIndex, ...]:
        """Return the blocks of a namespace, the newest first: the same tuple as long as they are the same."""
        texts = self._namespaces.get(namespace)
        if texts is None:
            return ()
        self._namespaces.move_to_end(namespace)
        return texts.blocks

    def clear(self) -> None:
        """Drop everything."""
        self._namespaces.clear()
        self.nbytes = 0
