"""NamespaceTexts: the newest answers of each namespace, whatever their prompts were, as texts to search.

    newest block (texts that are not in it yet: at most half as many tokens) | full block | full block | full block
Dims: S tokens of a prompt, G generated tokens."""

import collections

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.drafter import namespace_digest
from routed_experts.speculation.sorted_contexts import ContextHash
from routed_experts.speculation.text_index import TextIndex

BLOCK_TOKENS = 32_768  # a full block; its index is built in 5 to 20 ms
MOST_FULL = 3  # full blocks of a namespace
OVERHEAD = 512  # bytes of a namespace beside its blocks; 320 to 430 were measured
TEXT_OVERHEAD = 320  # bytes of a text of the newest block beside its tokens; 300 were measured


class _Namespace:
    """The blocks of one namespace. A block is full with BLOCK_TOKENS tokens or an index of `block_bytes`."""

    def __init__(self, contexts: ContextHash, *, block_bytes: int) -> None:
        self._hash, self._block_bytes = contexts, block_bytes
        self._num_full = 0
        self.blocks: tuple[TextIndex, ...] = ()  # the newest first: another tuple when one is built
        self._texts: list[tuple[Int32[np.ndarray, " S"], Int32[np.ndarray, " G"]]] = []  # of the newest block
        self._num_tokens = self._num_indexed = 0  # of these texts, and of those that the block has

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        texts = 4 * self._num_tokens + TEXT_OVERHEAD * len(self._texts)
        return OVERHEAD + texts + sum(block.nbytes for block in self.blocks)

    def add(self, before: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"]) -> None:
        """Add a text. The newest block is built again when its texts have grown by half."""
        if self._is_block_full:
            self.blocks = self.blocks[:MOST_FULL]
            self._num_full = len(self.blocks)
            self._texts, self._num_tokens, self._num_indexed = [], 0, 0
        self._texts.append((before, output))
        self._num_tokens += before.size + output.size
        if 2 * self._num_tokens >= 3 * self._num_indexed:
            self._index()

    def cut(self, max_bytes: int) -> None:
        """Drop the oldest full blocks, then the older halves of the texts of the newest one, until the rest has at most
        `max_bytes`, or is the newest text."""
        while self._num_full and self.nbytes > max_bytes:
            self._num_full -= 1
            self.blocks = self.blocks[:-1]
        while len(self._texts) > 1 and self.nbytes > max_bytes:
            self._texts = self._texts[-(len(self._texts) // 2) :]
            self._num_tokens = sum(before.size + output.size for before, output in self._texts)
            self._index()

    @property
    def _is_block_full(self) -> bool:
        """Whether the newest block has all of its texts, and takes no further one."""
        is_large = self._num_tokens >= BLOCK_TOKENS or (
            self._num_indexed > 0 and self.blocks[0].nbytes >= self._block_bytes
        )
        return is_large and self._num_indexed == self._num_tokens

    def _index(self) -> None:
        """Build the newest block."""
        full = self.blocks[len(self.blocks) - self._num_full :]
        self.blocks, self._num_indexed = (TextIndex(self._hash, self._texts), *full), self._num_tokens


class NamespaceTexts:
    """Blocks by namespace, at most `max_bytes` in all: those of the namespaces that were used least recently are
    dropped first, and the oldest blocks and texts of the one that is left. The newest answer is kept where it fits."""

    def __init__(self, contexts: ContextHash, *, max_bytes: int) -> None:
        self._hash, self._max_bytes = contexts, max_bytes
        self._namespaces: collections.OrderedDict[bytes, _Namespace] = collections.OrderedDict()  # by digest
        self.nbytes = 0

    def add(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], namespace: str | None) -> None:
        """Add an answer."""
        key = namespace_digest(namespace)
        texts = self._namespaces.pop(key, None)
        if texts is None:
            texts = _Namespace(self._hash, block_bytes=self._max_bytes // (MOST_FULL + 1))
        else:
            self.nbytes -= texts.nbytes
        texts.add(prompt[-self._hash.max_window :].copy(), output.copy())
        while self._namespaces and self.nbytes + texts.nbytes > self._max_bytes:
            _, oldest = self._namespaces.popitem(last=False)
            self.nbytes -= oldest.nbytes
        texts.cut(self._max_bytes - self.nbytes)
        if self.nbytes + texts.nbytes <= self._max_bytes:
            self._namespaces[key] = texts
            self.nbytes += texts.nbytes

    def indices(self, namespace: str | None) -> tuple[TextIndex, ...]:
        """Return the blocks of a namespace, the newest first: the same tuple as long as they are the same."""
        key = namespace_digest(namespace)
        texts = self._namespaces.get(key)
        if texts is None:
            return ()
        self._namespaces.move_to_end(key)
        return texts.blocks

    def clear(self) -> None:
        """Drop everything."""
        self._namespaces.clear()
        self.nbytes = 0
