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
        added = self._sequence.size - self._size
        if added:
            found = self._carry_on(added)
            if found is None:
                found = self.text.search(self._sequence.query(), self._most, self._last.row + added)
            self._size, self._last = self._size + added, found
        return self._last

    @property
    def longest_possible(self) -> int:
        """How long the match may be at most, by that of an earlier call."""
        added = self._sequence.size - self._size
        if added > self._sequence.max_window or not self.text.first_tokens.isdisjoint(self._added(added)):
            return self._sequence.max_window
        before = max(self._last.length, self._sequence.min_window - 1)  # shorter ones are not searched
        return min(before + added, self._sequence.max_window)

    def _added(self, added: int) -> list[int]:
        return self._sequence.tokens_from(self._size, added).tolist()

    def _carry_on(self, added: int) -> Occurrences | None:
        """Return the last occurrences where they have grown as the sequence has; None where others may be as long."""
        last, window, known = self._last, self._sequence.max_window, self._last.known + added
        if not last.positions or known > window:
            return None
        padded, behind, first = self.text.padded, window + 1, self._sequence.padded.item(window + self._size)
        if not last.is_complete and padded.item(behind + last.positions[-1]) != first:
            return None
        tokens = self._added(added)
        if not self.text.first_tokens.isdisjoint(tokens):  # what ends there has grown from no occurrence
            return None
        starts = [behind + position for position in last.positions if padded.item(behind + position) == first]
        if added > 1:
            starts = [start for start in starts if padded[start : start + added].tolist() == tokens]
        positions = [start + added - behind for start in starts if padded.item(start + added) >= 0]
        if not positions or not (last.is_complete or len(positions) == self._most):
            return None
        return Occurrences(positions, min(last.length + added, window), known, last.is_complete, last.row + added)
