"""CostTable: seconds of a step by shape and real tokens, measured at start and followed while steps run.

A shape is (bucket of requests b, padded tokens N). N = b is the decode step of b requests, without drafts; larger N
are verify steps, which feed at most N tokens: one a request, and its drafts."""

import bisect
import dataclasses
import math

import numpy as np
from jaxtyping import Float64, Int

HALF_LIFE = 16  # observed steps after which half of an error of the table is gone
MOST_CHANGE = 4.0  # a step that took more than this times its estimate, or less than that part of it, counts as this
MOST_SHARED = 1.1  # the same for the change of all shapes: load changes slowly, larger errors are those of one shape


@dataclasses.dataclass(slots=True)
class _Curve:
    """Seconds by real tokens of one shape, before the table's scale: lists, as each step looks up one point of a few.
    `followed_at`: the last step that it followed."""

    tokens: list[float]
    seconds: list[float]
    followed_at: int

    def at(self, num_tokens: float) -> float:
        """Interpolate as `np.interp` does."""
        above = bisect.bisect_right(self.tokens, num_tokens)
        if above == 0 or above == len(self.tokens):
            return self.seconds[min(above, len(self.tokens) - 1)]
        (x0, x1), (y0, y1) = self.tokens[above - 1 : above + 1], self.seconds[above - 1 : above + 1]
        return y0 + (y1 - y0) / (x1 - x0) * (num_tokens - x0)

    def multiply(self, num_tokens: int, factor: float) -> None:
        """Multiply the two points around num_tokens by up to `factor`, the nearer one by more."""
        above = bisect.bisect_left(self.tokens, num_tokens)
        if above == 0 or above == len(self.tokens):
            self.seconds[min(above, len(self.tokens) - 1)] *= factor
            return
        below = above - 1
        share = (num_tokens - self.tokens[below]) / (self.tokens[above] - self.tokens[below])
        self.seconds[below] *= factor ** (1 - share)
        self.seconds[above] *= factor**share


class CostTable:
    """Seconds from one step to the next, where the device does not wait for the host; and the seconds that it waits
    before a joined step, in which the host reads, drafts and schedules. Between measured token counts seconds are
    interpolated; beyond them they are those of the nearest."""

    def __init__(self) -> None:
        self._curves: dict[int, dict[int, _Curve]] = {}  # by bucket and padded tokens, both increasing
        self._waits: dict[int, float] = {}  # seconds by bucket
        self._num_followed = 0
        self._scale = 1.0  # of all shapes: longer contexts and a busy machine slow all of them

    def set(self, bucket: int, padded_tokens: int, num_tokens: int, seconds: float) -> None:
        """Enter a measurement; one of the same shape and tokens is replaced. Raises ValueError for counts that cannot
        be, and for seconds that are not positive."""
        if not 1 <= bucket <= padded_tokens or not 1 <= num_tokens <= padded_tokens:
            raise ValueError(f"{num_tokens} of {padded_tokens} tokens for {bucket} requests are no step")
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a step of {num_tokens} tokens took {seconds} s; expected positive seconds")
        curves = self._curves.get(bucket, {})
        curve = curves.get(padded_tokens)
        points = {} if curve is None else dict(zip(curve.tokens, curve.seconds, strict=True))
        points = dict(sorted({**points, float(num_tokens): seconds / self._scale}.items()))
        curve = _Curve(list(points), list(points.values()), self._num_followed)
        self._curves[bucket] = dict(sorted({**curves, padded_tokens: curve}.items()))
        self._curves = dict(sorted(self._curves.items()))

    def follow(self, num_requests: int, padded_tokens: int, num_tokens: int, seconds: float, *, steps: int = 1) -> None:
        """Move the table towards what a step took, without the time in which the device waited for the host. `steps`:
        this one, and those just before it that were not reported, of whatever shape; the report counts once.

        A part of the change is that of all shapes, so that shapes which do not run follow too. A shape that did not run
        for long moves faster. A shape that was never measured, and seconds that are not positive, are ignored."""
        curve = self._curves.get(self.bucket(num_requests), {}).get(padded_tokens)
        if curve is None or not (math.isfinite(seconds) and seconds > 0):
            return
        self._num_followed += steps
        absence = min(self._num_followed - curve.followed_at - (steps - 1), HALF_LIFE)
        curve.followed_at = self._num_followed
        estimate = curve.at(num_tokens) * self._scale
        error = math.log(seconds) - math.log(estimate)
        shared = _clip(error, math.log(MOST_SHARED)) * (1 - 0.5 ** (1 / HALF_LIFE)) / 2
        own = _clip(error, math.log(MOST_CHANGE)) * (1 - 0.5 ** (absence / HALF_LIFE)) - shared
        self._scale *= math.exp(shared)
        curve.multiply(num_tokens, math.exp(own))

    def follow_wait(self, num_requests: int, seconds: float) -> None:
        """Move the wait before joined steps of so many requests towards what one took. Without a measured bucket, and
        for seconds that are not positive, nothing changes."""
        bucket = self.bucket(num_requests)
        if not (bucket and math.isfinite(seconds) and seconds > 0):
            return
        known = self._waits.get(bucket)
        if known is None:
            self._waits[bucket] = seconds
        else:
            self._waits[bucket] += (min(seconds, MOST_CHANGE * known) - known) * (1 - 0.5 ** (1 / HALF_LIFE))

    def wait(self, num_requests: int) -> float:
        """Return the seconds that the device waits before a joined step of so many requests; 0 before one was
        measured."""
        return self._waits.get(self.bucket(num_requests), 0.0)

    def bucket(self, num_requests: int) -> int:
        """Return the smallest measured bucket of at least num_requests; 0 if there is none."""
        buckets = list(self._curves)
        index = bisect.bisect_left(buckets, num_requests)
        return buckets[index] if index < len(buckets) else 0

    def padded_sizes(self, num_requests: int) -> tuple[int, ...]:
        """Return the padded tokens of the measured shapes of so many requests, increasing."""
        return tuple(self._curves.get(self.bucket(num_requests), ()))

    def estimate_seconds(
        self, num_requests: int, padded_tokens: int, num_tokens: Int[np.ndarray, " X"]
    ) -> Float64[np.ndarray, " X"]:
        """Return the seconds of steps of a measured shape by their real tokens."""
        curve = self._curves[self.bucket(num_requests)][padded_tokens]
        return np.interp(num_tokens, curve.tokens, curve.seconds) * self._scale

    def seconds(self, num_requests: int, num_tokens: int) -> tuple[int, float]:
        """Return the padded tokens and the seconds of a step in the smallest measured shape that holds it; (0, inf) if
        none does."""
        sizes = self.padded_sizes(num_requests)
        index = bisect.bisect_left(sizes, num_tokens)
        if index == len(sizes):
            return 0, math.inf
        return sizes[index], self._curves[self.bucket(num_requests)][sizes[index]].at(num_tokens) * self._scale


def _clip(value: float, most: float) -> float:
    """Return the value within -most..most."""
    return min(max(value, -most), most)
