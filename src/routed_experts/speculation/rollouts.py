"""Rollouts: earlier answers to a prompt, as drafts of its next ones.

An answer that was sampled with the same noise (seed and choice) is followed from its start: with unchanged weights it
is the next answer, and after an update most of it (DraftSequence.noise). Where it differs, the end of the sequence is
searched in all answers to the prompt. Dims: S tokens of a prompt, G generated tokens."""

import collections
import dataclasses
import hashlib
from collections.abc import Hashable

import numpy as np
from jaxtyping import Int32

from routed_experts.speculation.drafter import DraftSample, namespace_digest
from routed_experts.speculation.sorted_contexts import ContextHash
from routed_experts.speculation.text_index import TextIndex

MOST_ROLLOUTS = 64  # of a prompt, the newest
MOST_INDEXED = 8  # of these are searched, the newest
OVERHEAD = 512  # bytes of a prompt or a rollout beside its tokens; 480 and 280 were measured


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """One answer, and what its noise was."""

    noise: Hashable
    tokens: Int32[np.ndarray, " G"]


class PromptRollouts:
    """The answers to one prompt, the newest first. `prompt_end`: its last tokens."""

    def __init__(self, prompt_end: Int32[np.ndarray, " S"]) -> None:
        self.prompt_end = prompt_end
        self.rollouts: list[Rollout] = []
        self.num_users = 0  # sequences that may search them
        self._index: TextIndex | None = None

    @property
    def nbytes(self) -> int:
        """Host memory of the answers, in bytes."""
        return self.prompt_end.nbytes + OVERHEAD + sum(rollout.tokens.nbytes + OVERHEAD for rollout in self.rollouts)

    @property
    def index_nbytes(self) -> int:
        """Host memory of the index, in bytes; it goes with the last user."""
        return 0 if self._index is None else self._index.nbytes

    def add(self, rollout: Rollout) -> None:
        """Add an answer; an older one of the same noise is replaced."""
        others = [other for other in self.rollouts if other.noise != rollout.noise]
        self.rollouts = [rollout, *others[: MOST_ROLLOUTS - 1]]
        self._index = None

    def drop_oldest(self) -> None:
        """Drop the answer that was added first."""
        self.rollouts, self._index = self.rollouts[:-1], None

    def clear(self) -> None:
        """Drop all answers."""
        self.rollouts, self._index = [], None

    def find(self, noise: Hashable) -> Rollout | None:
        """Return the answer of this noise."""
        return next((rollout for rollout in self.rollouts if rollout.noise == noise), None)

    @property
    def is_indexed(self) -> bool:
        """Whether the index has been built since the last answer was added."""
        return self._index is not None

    def index(self, contexts: ContextHash) -> TextIndex | None:
        """Return the index of the newest answers, None without one. Text i is that of rollouts[-1 - i] among them."""
        if self._index is None and self.rollouts:
            newest = self.rollouts[:MOST_INDEXED]
            self._index = TextIndex(contexts, [(self.prompt_end, rollout.tokens) for rollout in reversed(newest)])
        return self._index

    def text(self, number: int) -> Int32[np.ndarray, " G"]:
        """Return text `number` of the index."""
        return self.rollouts[min(len(self.rollouts), MOST_INDEXED) - 1 - number].tokens

    def use(self) -> None:
        """Add a user."""
        self.num_users += 1

    def leave(self) -> None:
        """Remove a user."""
        self.num_users -= 1
        if self.num_users == 0:
            self._index = None


class RolloutStore:
    """Answers by namespace and prompt, at most `max_bytes` and `max_rollouts` in all: those of the prompts that were
    used least recently are dropped first, and the oldest of the prompt that is left. The newest is kept where it
    fits."""

    def __init__(self, *, max_bytes: int, max_rollouts: int | None = None) -> None:
        self._max_bytes, self._max_rollouts = max_bytes, max_rollouts
        self._prompts: collections.OrderedDict[bytes, PromptRollouts] = collections.OrderedDict()
        self._nbytes = self._num_rollouts = 0

    @property
    def nbytes(self) -> int:
        """Host memory of the answers, in bytes; that of their indices is counted by those who use them."""
        return self._nbytes

    def find(self, prompt: Int32[np.ndarray, " S"], namespace: str | None) -> PromptRollouts | None:
        """Return the answers to a prompt, which are used by that."""
        key = _key(prompt, namespace)
        entry = self._prompts.get(key)
        if entry is not None:
            self._prompts.move_to_end(key)
        return entry

    def add(
        self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], sample: DraftSample, *, window: int
    ) -> None:
        """Add an answer; one that does not fit alone is ignored. `window`: tokens of the prompt's end that are
        searched."""
        end = prompt[-window:]
        if end.nbytes + output.nbytes + 2 * OVERHEAD > self._max_bytes or self._max_rollouts == 0:
            return
        key = _key(prompt, sample.namespace)
        entry = self._prompts.pop(key, None)
        if entry is None:
            entry = PromptRollouts(end.copy())
        else:
            self._count(entry, -1)
        entry.add(Rollout(sample.noise, output.copy()))
        self._prompts[key] = entry
        self._count(entry, 1)
        while len(self._prompts) > 1 and self._is_full:
            _, oldest = self._prompts.popitem(last=False)
            self._count(oldest, -1)
        while self._is_full:
            self._count(entry, -1)
            entry.drop_oldest()
            self._count(entry, 1)

    def clear(self) -> None:
        """Drop all answers, also those in use."""
        for entry in self._prompts.values():
            entry.clear()
        self._prompts.clear()
        self._nbytes = self._num_rollouts = 0

    @property
    def _is_full(self) -> bool:
        return self._nbytes > self._max_bytes or (
            self._max_rollouts is not None and self._num_rollouts > self._max_rollouts
        )

    def _count(self, entry: PromptRollouts, sign: int) -> None:
        self._nbytes += sign * entry.nbytes
        self._num_rollouts += sign * len(entry.rollouts)


def _key(prompt: Int32[np.ndarray, " S"], namespace: str | None) -> bytes:
    """A digest of a prompt and its namespace."""
    tokens, space = np.ascontiguousarray(prompt).tobytes(), namespace_digest(namespace)
    return hashlib.blake2b(tokens, digest_size=16, key=space).digest()
