"""AcceptanceEstimates: the probability that drafts are accepted, learned from those that were.

A drafter claims a probability for each draft, given that the drafts before it are accepted. Two ratios of accepted over
expected drafts correct the claim: one of all requests, by the size of the claim; one of the request, by index:

    estimate = claim * shared_ratio[claim] * own_ratio[index],  each at most 1

Both ratios begin at 1, so that a new request begins with the drafter's claim, as the other requests have corrected it.
Sums are exponential: an observation counts half as much after a half-life. Dims: k drafts."""

from collections.abc import Hashable

import numpy as np
from jaxtyping import Float64

from routed_experts.speculation.drafter import Draft

HALF_LIFE = 16  # of a request's observations, in its verify steps
IDLE_HALF_LIFE = 64  # of the same, in steps that verified no draft of it: the request is tried again in time
SHARED_HALF_LIFE = 256  # of all requests' observations of claims of one size, in such observations
OWN_PRIOR, SHARED_PRIOR = 4.0, 8.0  # accepted drafts, of as many expected, that a ratio begins with
NUM_CLAIMS = 8  # sizes of a claim, equally wide

Claim = tuple[int, float, float]
"""What was claimed of a draft: the index of the claim's size, the claim, and the claim as corrected by all. A plain
tuple, because each draft of each step has one."""

_DECAY, _IDLE_DECAY, _SHARED_DECAY = (0.5 ** (1 / steps) for steps in (HALF_LIFE, IDLE_HALF_LIFE, SHARED_HALF_LIFE))


class _RequestEstimates:
    """Accepted and expected drafts of one request by index in its draft, and the claims of its last draft."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self._accepted: list[float] = []
        self._expected: list[float] = []

    def begin(self, num_drafts: int) -> None:
        """Take a new draft; where no draft was verified since the last one, what was observed fades."""
        if self.claims:
            self._accepted = [count * _IDLE_DECAY for count in self._accepted]
            self._expected = [count * _IDLE_DECAY for count in self._expected]
        self.claims = []
        missing = [0.0] * (num_drafts - len(self._accepted))
        self._accepted += missing
        self._expected += missing

    def ratio(self, index: int) -> float:
        """Accepted over expected drafts at this index; 1 where no draft was so long."""
        if index >= len(self._accepted):
            return 1.0
        return (self._accepted[index] + OWN_PRIOR) / (self._expected[index] + OWN_PRIOR)

    def observe(self, num_reached: int, num_accepted: int) -> list[Claim]:
        """Count the first drafts of the last draft; return their claims."""
        reached, self.claims = self.claims[:num_reached], []
        for index, (_, _, expected) in enumerate(reached):
            self._accepted[index] = self._accepted[index] * _DECAY + (index < num_accepted)
            self._expected[index] = self._expected[index] * _DECAY + expected
        return reached


_UNKNOWN = _RequestEstimates()  # of a request without a draft; never changed


class AcceptanceEstimates:
    """Estimates by request; any number of drafts a request."""

    def __init__(self) -> None:
        self._requests: dict[Hashable, _RequestEstimates] = {}
        self._accepted, self._expected = [0.0] * NUM_CLAIMS, [0.0] * NUM_CLAIMS

    def survival(self, key: Hashable, draft: Draft) -> Float64[np.ndarray, " k"]:
        """Estimate the survival of a draft as Draft.survival defines it. `observe` refers to the last one of a key."""
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = _RequestEstimates()
        request.begin(draft.survival.size)
        request.claims, estimates = self._estimate(request, draft)
        return estimates

    def foresee(self, key: Hashable, draft: Draft) -> Float64[np.ndarray, " k"]:
        """Estimate as `survival` does, of a draft like this one that is not known yet; `observe` does not refer to
        it."""
        return self._estimate(self._requests.get(key, _UNKNOWN), draft)[1]

    def _estimate(self, request: _RequestEstimates, draft: Draft) -> tuple[list[Claim], Float64[np.ndarray, " k"]]:
        """The claims of a draft, and its estimated survival."""
        claims, estimates = list[Claim](), list[float]()
        survival = before = 1.0
        all_accepted, all_expected = self._accepted, self._expected
        for index, claimed in enumerate(draft.survival.tolist()):
            claim = claimed / before if before > 0 else 0.0
            claim = min(claim, 1.0) if claim > 0 else 0.0  # not a number: 0
            before = claimed
            size = min(int(claim * NUM_CLAIMS), NUM_CLAIMS - 1)
            shared = (all_accepted[size] + SHARED_PRIOR) / (all_expected[size] + SHARED_PRIOR)
            expected = min(claim * shared, 1.0)
            claims.append((size, claim, expected))
            survival *= min(expected * request.ratio(index), 1.0)
            estimates.append(survival)
        return claims, np.array(estimates, np.float64)

    def observe(self, key: Hashable, proposed: int, accepted: int) -> None:
        """Record that of the last draft of a request the first `proposed` were verified and the first `accepted` of
        them accepted. Without a draft, and for an unknown key, nothing is recorded."""
        request = self._requests.get(key)
        if request is None or proposed < 1:
            return
        reached = request.observe(min(accepted + 1, proposed), accepted)  # behind the first rejected one: unknown
        for index, (size, claim, _) in enumerate(reached):
            self._accepted[size] = self._accepted[size] * _SHARED_DECAY + (index < accepted)
            self._expected[size] = self._expected[size] * _SHARED_DECAY + claim

    def forget(self, key: Hashable) -> None:
        """Drop a request; an unknown key is ignored."""
        self._requests.pop(key, None)
