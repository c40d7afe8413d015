"""TextAhead: drafts of the host for verify steps that are scheduled while the one before them is in flight.

The host knows the tokens before the step in flight. It proposes a continuation of them that is long enough for the
tokens that the step in flight may add, and for the drafts of the step after it; the device takes these drafts from
where the request stands then (execution/slot_state.py). The device does not wait for them, but they are right only
where the whole continuation before them is, or where the text agrees again. Drafts of a joined step follow tokens that
the host knows. Both kinds are compared with the tokens that come, whichever is verified, and the policy chooses by what
is accepted of each. Engine thread only. Dims: C tokens of a continuation, Q tokens that a step adds to a request, k
drafts."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int32

from routed_experts.speculation.acceptance_estimates import AcceptanceEstimates
from routed_experts.speculation.drafter import Draft

HALF_LIFE = 32  # verify steps
PRIOR = 4.0  # accepted drafts, of as many observed, added at each index


@dataclasses.dataclass(frozen=True, slots=True)
class _Continuation:
    """What was proposed behind the first `num_known` tokens of a request. `drafts_start`: index in it of the first
    draft of the step that is ahead, if the step in flight adds all tokens that it may."""

    num_known: int
    draft: Draft
    drafts_start: int


class _AcceptedDrafts:
    """Drafts by their index: how many were right, of those before which all were. The last steps count most."""

    def __init__(self, num_drafts: int) -> None:
        self._accepted, self._reached = [0.0] * num_drafts, [0.0] * num_drafts

    def observe(self, *, accepted: int, reached: int) -> None:
        """Add the first `reached` drafts of a request, of which the first `accepted` were right."""
        for index in range(reached):
            self._accepted[index] += index < accepted
            self._reached[index] += 1

    def fade(self) -> None:
        """Let what was observed count less: called once a verify step."""
        decay = 0.5 ** (1 / HALF_LIFE)
        self._accepted = [count * decay for count in self._accepted]
        self._reached = [count * decay for count in self._reached]

    @property
    def expected(self) -> float:
        """How many drafts of a request are accepted on average. Drafts that no token was compared with count by what is
        known of their index (the estimator of Kaplan and Meier)."""
        total, survival = 0.0, 1.0
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            survival *= (accepted + PRIOR) / (reached + PRIOR)
            total += survival
        return total


class TextAhead:
    """Continuations of the running requests, and what became of those before. `num_drafts`: of a request, at most."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._estimates = AcceptanceEstimates()
        self._joined, self._ahead = _AcceptedDrafts(num_drafts), _AcceptedDrafts(num_drafts)
        self._proposed: dict[str, list[_Continuation]] = {}  # by request: the last two, the newest last

    @property
    def joined_gain(self) -> float:
        """How many drafts of a joined step are accepted for one of a step that is ahead."""
        return self._joined.expected / max(self._ahead.expected, 1e-3)

    def propose(self, rid: str, num_known: int, draft: Draft, in_flight: int) -> Float64[np.ndarray, " k"]:
        """Take a continuation of the first `num_known` tokens of a request, of which the step in flight feeds
        `in_flight`. Returns the estimated survival of the drafts behind that step."""
        self._proposed[rid] = [*self._proposed.get(rid, ())[-1:], _Continuation(num_known, draft, in_flight)]
        return self._estimates.foresee(rid, self._drafts_behind(draft, in_flight))

    def observe(self, rid: str, num_known: int, following: Int32[np.ndarray, " Q"]) -> None:
        """Compare what was proposed with the tokens that a step has added behind the first `num_known` of a request,
        whether it had drafts or not: where a text ends, the next step has none."""
        proposed = self._proposed.get(rid)
        if not proposed:
            return
        emitted = following.tolist()
        self._proposed[rid] = [text for text in proposed if text.num_known >= num_known]  # the others had their step
        for text in proposed:
            skipped = num_known - text.num_known
            if skipped < 0:
                continue
            drafted = text.draft.tokens[skipped : skipped + min(self._num_drafts, len(emitted))].tolist()
            if not drafted:
                continue
            accepted = _count_equal(drafted, emitted)
            reached = min(accepted + 1, len(drafted))
            if skipped == 0:
                self._joined.observe(accepted=accepted, reached=reached)
                continue
            self._ahead.observe(accepted=accepted, reached=reached)
            behind = self._drafts_behind(text.draft, text.drafts_start)
            self._estimates.survival(rid, behind)
            self._estimates.observe(rid, min(len(drafted), behind.tokens.size), min(accepted, behind.tokens.size))

    def end_step(self) -> None:
        """Let the counts fade: all requests of a verify step have been observed."""
        self._joined.fade()
        self._ahead.fade()

    def close(self, rid: str) -> None:
        """Forget a request; an unknown one is ignored."""
        self._proposed.pop(rid, None)
        self._estimates.forget(rid)

    def _drafts_behind(self, draft: Draft, start: int) -> Draft:
        end = start + self._num_drafts
        return Draft(draft.tokens[start:end], draft.survival[start:end], draft.source)


def _count_equal(drafted: Sequence[int], emitted: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    for index, (drafted_id, emitted_id) in enumerate(zip(drafted, emitted, strict=False)):
        if drafted_id != emitted_id:
            return index
    return min(len(drafted), len(emitted))
