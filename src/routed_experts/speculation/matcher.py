"""Matcher: where the end of one growing sequence occurs in a text, carried on from step to step.

    the end before   .. a b c | x y        x, y: tokens that the sequence has got since
    an occurrence    .. a b c | x y ..     it has grown by them, too: nothing is searched
Dims: m tokens, W tokens of the longest context."""

from typing import Generic, TypeVar

from routed_experts.speculation.context_index import ContextIndex
from routed_experts.speculation.sorted_contexts import NO_OCCURRENCES, Occurrences
from routed_experts.speculation.text_index import TextIndex

T = TypeVar("T", ContextIndex, TextIndex)


class Matcher(Generic[T]):
    """The occurrences of the end of `sequence` in `text`, the latest `most`."""

    def __init__(self, sequence: ContextIndex, text: T, *, most: int) -> None:
        self.text = text
        self._sequence, self._most = sequence, most
        self._size, self._last = 0, NO_OCCURRENCES

    def match(self) -> Occurrences:
        """Return the occurrences of the longest suffix that has one. The sequence is not empty."""
        sequence, last = self._sequence, self._last
        added = sequence.size - self._size
        if not added:
            return last
        window = sequence.max_window
        near, longest, occurrences = last.length + added, window, None
        if added <= window:
            tokens = sequence.latest(added)
            if self.text.first_tokens.isdisjoint(tokens):  # else what ends there may have grown from no occurrence
                longest = min(max(last.length, sequence.min_window - 1) + added, window)
                if last.positions and last.known + added <= window:
                    occurrences = self._carry_on(tokens)
                    if occurrences is None and last.is_complete:
                        longest = min(longest, last.known + added - 1)
        if occurrences is None:
            occurrences = self.text.search(sequence.query(), self._most, min(near, longest), longest)
        self._size, self._last = sequence.size, occurrences
        return occurrences

    @property
    def longest_possible(self) -> int:
        """How long the match may be at most, by that of an earlier call."""
        sequence = self._sequence
        added = sequence.size - self._size
        if added > sequence.max_window or not self.text.first_tokens.isdisjoint(sequence.latest(added)):
            return sequence.max_window
        before = max(self._last.length, sequence.min_window - 1)  # shorter ones are not searched
        return min(before + added, sequence.max_window)

    def _carry_on(self, tokens: list[int]) -> Occurrences | None:
        """Return the last occurrences where they have grown by the tokens that the sequence has; None where others may
        be as long."""
        positions, following, length, known, is_complete = self._last
        for token in tokens:
            if following.count(token) < len(following):
                if not is_complete:
                    return None
                positions = [position for position, behind in zip(positions, following, strict=True) if behind == token]
                if not positions:
                    return None
            positions = [position + 1 for position in positions]
            following = self.text.behind(positions)
        if min(following) < 0:
            if not is_complete:
                return None
            positions = [position for position, behind in zip(positions, following, strict=True) if behind >= 0]
            following = [behind for behind in following if behind >= 0]
            if not positions:
                return None
        added = len(tokens)
        return Occurrences(
            positions, following, min(length + added, self._sequence.max_window), known + added, is_complete
        )
