"""VerifiedDrafts: what verify steps made of drafts, counted while the next step runs. Engine thread only."""

from typing import NamedTuple

from routed_experts.core.speculative_stats import SpeculativeCounter, SpeculativeTotals
from routed_experts.speculation.drafter import DraftSource


class VerifiedDraft(NamedTuple):
    """What a verify step made of the drafts of a request: how many were proposed, how many of them became tokens of the
    request, and how many tokens the step added to it."""

    source: DraftSource
    proposed: int
    accepted: int
    emitted: int


class VerifiedDrafts:
    """Verified drafts that `totals` lack. `num_drafts`: the longest draft of a request."""

    def __init__(self, totals: SpeculativeTotals, num_drafts: int) -> None:
        self._totals, self._num_drafts = totals, num_drafts
        self._counter = SpeculativeCounter()
        self._uncounted = list[VerifiedDraft]()
        self._num_uncounted_steps = 0

    def add(self, draft: VerifiedDraft) -> None:
        """Take what became of the drafts of one request."""
        self._uncounted.append(draft)

    def end_step(self) -> None:
        """Take note that these were all of a step."""
        self._num_uncounted_steps += 1

    def count(self) -> None:
        """Bring the totals up to date."""
        if not self._num_uncounted_steps:
            return
        totals, accepted_at = self._totals, [0] * self._num_drafts
        by_source: dict[DraftSource, list[int]] = {}  # drafts, and those of them that were accepted
        for source, proposed, accepted, emitted in self._uncounted:
            self._counter.add(proposed=proposed, accepted=accepted, emitted=emitted)
            for index in range(accepted):
                accepted_at[index] += 1
            counts = by_source.setdefault(source, [0, 0])
            counts[0] += proposed
            counts[1] += accepted
        totals.steps += self._num_uncounted_steps
        totals.requests = self._counter.counts(self._num_drafts)  # first: the others are parts of it
        totals.accepted_at.update({index: count for index, count in enumerate(accepted_at) if count})
        for source, (proposed, accepted) in by_source.items():
            totals.proposed_by[source.value] += proposed
            totals.accepted_by[source.value] += accepted
        self._uncounted.clear()
        self._num_uncounted_steps = 0
