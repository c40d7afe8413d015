"""DraftPolicy: how many drafts of each request a step verifies, and when steps draft at all. It only changes speed.

A step of B requests that verifies drafts of survival s_1, s_2, .. emits B + s_1 + s_2 + .. tokens on average. The
policy takes the drafts with the most tokens per second. Whether drafting pays is found out step by step:

    on             every step drafts, but one in 256, which is timed without
    on -> off      32 steps in a row had no draft to verify, or the balance has fallen too low
    off            no step drafts, but probes: every 64 steps; every 512 after 4 useless probes in a row or a loss; at
                   once where `expect` estimates a gain of a twentieth twice in a row, unless a probe of the last 64
                   steps was useless
    off -> trial   a probe was faster than a step without drafts
    trial -> on    8 more probes in a row, from which the estimates learn

The balance is what drafting has gained since it was last switched on, in steps without drafts."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from routed_experts.speculation.cost_table import CostTable

PATIENCE = 32  # steps in a row without a draft that end drafting
LOWEST_BALANCE, HIGHEST_BALANCE = -4.0, 8.0  # steps; below the first drafting ends, above the second it counts no more
PROBE_EVERY, RARE_PROBE_EVERY = 64, 512  # steps
FRUITLESS_PROBES = 4  # after so many in a row probes are rare
MEASURE_EVERY = 256  # steps; one of these verifies no draft, so that the cost of such steps stays known
PROMISING = 2  # reports in a row of drafts that promise LEAST_GAIN, before a probe
LEAST_GAIN = 1.05  # in tokens per second, of drafts that promise enough for a probe: costs are known to a few percent
TRIAL = 8  # probes after a useful one


class DraftPolicy:
    """The choice of drafts, over a table of costs that the engine keeps up to date. Without `adaptive` every step
    verifies all drafts that its largest shape holds.

    The engine asks `should_try` before a step. If True, it drafts, and passes to `choose` the estimated survivals, or
    in a probe (`is_off`) those of the drafters themselves, as low estimates would never be corrected. Before that,
    while a step with drafts is in flight, `choose_ahead` may have chosen for a step that the device does not wait for.
    So drafting begins with a joined step, which has to pay with its wait. After the step the engine reports with
    `tried`, whether or not there was a draft."""

    def __init__(self, costs: CostTable, *, adaptive: bool = True) -> None:
        self._costs, self._adaptive = costs, adaptive
        self._on = True
        self._step = self._last_probe = self._next_probe = 0
        self._num_useless = self._num_fruitless = self._num_promising = self._trial = 0
        self._balance = 0.0

    def choose(self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int) -> list[int]:
        """Return for each request how many of its drafts to verify: those with the most expected tokens per second, and
        none where no number of drafts is faster than none. `survivals`: by request, non-increasing, empty for one that
        cannot draft; `num_requests`: tokens of the step without drafts, at least the requests in `survivals`."""
        return self._choose(survivals, num_requests, None)

    def choose_ahead(
        self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int, *, joined_gain: float
    ) -> list[int]:
        """Choose as `choose` does, for a step that is scheduled while the one before it is in flight: the device does
        not wait for it. No draft of any request where a joined step is expected to be faster, whose drafts gain
        `joined_gain` times as many tokens."""
        return self._choose(survivals, num_requests, joined_gain)

    def _choose(
        self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int, joined_gain: float | None
    ) -> list[int]:
        """The choice for a joined step (None), or for one that is ahead."""
        lengths = [survival.size for survival in survivals]
        sizes = self._verify_sizes(num_requests)
        if not sizes or not any(lengths) or self._measures:
            return [0] * len(lengths)
        flat = np.fmin(np.fmax(np.concatenate(survivals), 0.0), 1.0)  # not a number: 0
        order = np.argsort(-flat, kind="stable")  # a request's drafts keep their order
        if self._adaptive:
            wait = self._costs.wait(num_requests)
            gained = flat[order].cumsum()
            count = self._best_count(gained, num_requests, sizes, 0.0 if joined_gain is not None else wait)
            if count and joined_gain is not None and wait > 0:
                _, seconds = self._costs.seconds(num_requests, num_requests + count)
                ahead = float(gained[count - 1])
                joined = min(joined_gain * ahead, count)
                if (num_requests + joined) / (seconds + wait) > (num_requests + ahead) / seconds:
                    count = 0
        else:
            count = sizes[-1] - num_requests
        owners = np.repeat(np.arange(len(lengths)), lengths)
        return np.bincount(owners[order[:count]], minlength=len(lengths)).tolist()

    @property
    def is_off(self) -> bool:
        """Whether drafting is off: a step that `should_try` allows is then a probe."""
        return self._adaptive and not self._on

    @property
    def _measures(self) -> bool:
        """Whether this step goes without drafts to be timed."""
        return self._adaptive and self._on and self._step % MEASURE_EVERY == MEASURE_EVERY - 1

    def should_try(self, step: int) -> bool:
        """Return whether this step may draft; `step` counts the engine's steps."""
        self._step = step
        return not self._adaptive or self._on or self._trial > 0 or step >= self._next_probe

    def tried(self, *, num_requests: int, num_drafts: int, num_emitted: int, is_joined: bool = True) -> None:
        """Report on the step that should_try allowed: its requests, the drafts that it verified, the tokens that it
        emitted, and whether the device waited for it."""
        wait = self._costs.wait(num_requests) if is_joined else 0.0
        gain = self._gain(num_requests, num_drafts, num_emitted, wait)
        if not self._on:
            self._last_probe = self._step
            if self._trial == 0:
                self._probed(useful=gain > 0)
                return
            self._trial -= 1
            self._on = self._trial == 0
        self._num_useless = 0 if num_drafts else self._num_useless + 1
        self._balance = min(self._balance + gain, HIGHEST_BALANCE)
        if self._balance < LOWEST_BALANCE:
            self._end(num_fruitless=FRUITLESS_PROBES)
        elif self._num_useless >= PATIENCE:
            self._end(num_fruitless=0)

    def expect(self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int) -> bool:
        """Take the survivals of drafts that no step verifies, while nothing is drafted. Where they promise more than
        LEAST_GAIN times the tokens per second twice in a row, the next step may probe. Return whether they do."""
        if not self.is_off or self._trial > 0:
            return False
        sizes, known = self._verify_sizes(num_requests), [survival for survival in survivals if survival.size]
        pays = False
        if sizes and known:
            gained = np.sort(np.concatenate(known))[::-1].cumsum()
            wait = self._costs.wait(num_requests)
            pays = self._best_count(gained, num_requests, sizes, wait, least_gain=LEAST_GAIN) > 0
        self._num_promising = self._num_promising + 1 if pays else 0
        rests = self._num_fruitless > 0 and self._step < self._last_probe + PROBE_EVERY
        if self._num_promising >= PROMISING and not rests:
            self._num_promising, self._next_probe = 0, self._step
        return pays

    def renew(self) -> None:
        """Take note of a new request: the next probe comes 64 steps after the last one, or now."""
        self._next_probe = min(self._next_probe, self._last_probe + PROBE_EVERY)

    def _gain(self, num_requests: int, num_drafts: int, num_emitted: int, wait: float) -> float:
        """Steps without drafts that would emit as many tokens, less those that would take as long; 0 without drafts or
        without such a shape. Seconds are those of the table: a step that stalls is no loss of drafting. `wait`: of the
        device, in seconds."""
        _, plain = self._costs.seconds(num_requests, num_requests)
        _, verify = self._costs.seconds(num_requests, num_requests + num_drafts)
        return num_emitted / num_requests - (verify + wait) / plain if num_drafts and math.isfinite(verify) else 0.0

    def _probed(self, *, useful: bool) -> None:
        """Take the outcome of a probe that is not of a trial."""
        if useful:
            self._trial, self._num_useless, self._num_fruitless, self._balance = TRIAL, 0, 0, 0.0
        else:
            self._end(num_fruitless=self._num_fruitless + 1)

    def _end(self, *, num_fruitless: int) -> None:
        """Draft no more, until the next probe."""
        self._on, self._trial, self._num_fruitless = False, 0, num_fruitless
        self._last_probe = self._step
        self._next_probe = self._step + (RARE_PROBE_EVERY if num_fruitless >= FRUITLESS_PROBES else PROBE_EVERY)

    def _verify_sizes(self, num_requests: int) -> list[int]:
        """The padded sizes, increasing, that hold num_requests tokens and a draft; empty without a decode shape."""
        sizes = self._costs.padded_sizes(num_requests)
        bucket = self._costs.bucket(num_requests)
        return [size for size in sizes if size > max(bucket, num_requests)] if bucket in sizes else []

    def _best_count(
        self,
        gained: Float64[np.ndarray, " s"],
        num_requests: int,
        sizes: Sequence[int],
        wait: float,
        *,
        least_gain: float = 1.0,
    ) -> int:
        """Return how many of the drafts, by falling survival, give the most tokens per second; the fewer of equals, and
        none where these are not more than `least_gain` times those of a step without drafts. `gained[s]`: expected
        accepted drafts among the first s + 1; `wait`: seconds that the device waits for them."""
        _, seconds = self._costs.seconds(num_requests, num_requests)
        best, best_rate, start = 0, num_requests / seconds * least_gain, 0
        for size in sizes:  # a step runs in the smallest that holds it
            emitted = num_requests + gained[start : size - num_requests]
            if emitted.size == 0:
                break
            num_tokens = np.arange(num_requests + start + 1, num_requests + start + 1 + emitted.size)
            rates = emitted / (self._costs.estimate_seconds(num_requests, size, num_tokens) + wait)
            fastest = int(rates.argmax())
            if rates[fastest] > best_rate:
                best, best_rate = start + fastest + 1, float(rates[fastest])
            start = size - num_requests
        return best
