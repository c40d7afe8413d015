"""Counts of speculative decoding: of one request, and of an engine since its start.

A verify step feeds a request's last known token and its drafts; a draft is accepted where the model samples the same
token, and kept where the request has not ended before it."""

import dataclasses
from collections import Counter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeCounts:
    """Counts of one request (one choice of n).

    `verify_steps`: steps that fed at least one of its drafts; `proposed`: drafts fed; `accepted`: drafts that were kept
    as tokens; `emitted`: tokens that these steps added, the sampled ones included; `histogram`: verify steps by number
    of accepted drafts, index 0 to the longest draft of the engine; `predicted`, `predicted_accepted`: drafts that were
    copied from the request's prediction, and those of them that were kept."""

    verify_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    histogram: tuple[int, ...] = ()
    predicted: int = 0
    predicted_accepted: int = 0

    @property
    def accept_rate(self) -> float:
        """Accepted drafts over proposed ones; 0.0 where none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a verify step; 1.0 where there was none."""
        return self.emitted / self.verify_steps if self.verify_steps else 1.0


class SpeculativeCounter:
    """The counts of one request, or of all, while they grow; the engine thread alone uses it."""

    __slots__ = ("_accepted", "_emitted", "_histogram", "_predicted", "_predicted_accepted", "_proposed", "_steps")

    def __init__(self) -> None:
        self._steps = self._proposed = self._accepted = self._emitted = 0
        self._predicted = self._predicted_accepted = 0
        self._histogram: list[int] = []

    def add(self, *, proposed: int, accepted: int, emitted: int) -> None:
        """Count one more verify step."""
        self._steps += 1
        self._proposed += proposed
        self._accepted += accepted
        self._emitted += emitted
        histogram = self._histogram
        if accepted >= len(histogram):
            histogram += [0] * (accepted + 1 - len(histogram))
        histogram[accepted] += 1

    def add_predicted(self, *, proposed: int, accepted: int) -> None:
        """Count a verify step's drafts from the prediction; `add` counts them, too."""
        self._predicted += proposed
        self._predicted_accepted += accepted

    def counts(self, most: int) -> SpeculativeCounts:
        """The counts so far, with a histogram for drafts of at most `most` tokens."""
        return SpeculativeCounts(
            verify_steps=self._steps,
            proposed=self._proposed,
            accepted=self._accepted,
            emitted=self._emitted,
            histogram=tuple(self._histogram + [0] * (most + 1 - len(self._histogram))),
            predicted=self._predicted,
            predicted_accepted=self._predicted_accepted,
        )


@dataclasses.dataclass(slots=True)
class SpeculativeTotals:
    """Sums over all requests of an engine; the engine thread writes, any thread reads.

    `requests`: the sums of SpeculativeCounts, a request's verify step counted once for each request; `steps`: verify
    steps of the engine; `accepted_at`: accepted drafts by index in their draft; `proposed_by`, `accepted_by`: drafts by
    DraftSource; `skipped`: proposals that were not made or not fed, by reason; `draft_s`: seconds spent in drafters;
    `store_bytes`: host memory of their indices and of remembered answers."""

    requests: SpeculativeCounts = SpeculativeCounts()
    steps: int = 0
    accepted_at: Counter[int] = dataclasses.field(default_factory=Counter[int])
    proposed_by: Counter[str] = dataclasses.field(default_factory=Counter[str])
    accepted_by: Counter[str] = dataclasses.field(default_factory=Counter[str])
    skipped: Counter[str] = dataclasses.field(default_factory=Counter[str])
    draft_s: float = 0.0
    store_bytes: int = 0

    def copy(self) -> "SpeculativeTotals":
        """These sums, which no longer change."""
        return dataclasses.replace(
            self,
            accepted_at=Counter(self.accepted_at),
            proposed_by=Counter(self.proposed_by),
            accepted_by=Counter(self.accepted_by),
            skipped=Counter(self.skipped),
        )
