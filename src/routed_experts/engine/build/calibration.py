"""Measure what steps cost without drafts and with them, for the draft policy.

Each padded size is timed on synthetic requests, through the core that serves: steps without drafts overlap, steps with
drafts are joined, and the device waits for them. The drafts are random tokens, which read as many experts as any."""

import itertools
import logging
import statistics
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jaxtyping import Float64, Int32

from routed_experts.core.buckets import Buckets
from routed_experts.core.io_struct import TokenizedGenerateReqInput
from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.loop.speculation import DraftLimits, Policy, Speculation
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.speculation.cost_table import CostTable
from routed_experts.speculation.drafter import Draft, Drafter, DraftSample, DraftSequence

logger = logging.getLogger(__name__)
STEPS, WARM_UP = 4, 2  # that are timed, and before them
PROMPT = 8  # tokens of a request

NewCore = Callable[[Speculation | None], EngineCore]


def measure_costs(new_core: NewCore, buckets: Buckets, limits: DraftLimits, *, request: int, total: int) -> CostTable:
    """Seconds of a step of each padded size: without drafts, and with the fewest and the most tokens of each verify
    size. `request`, `total`: KV tokens that one request and all together may have; a size whose requests need more is
    left out, and never has drafts, which the log says."""
    costs, bench = CostTable(), _Bench(new_core, limits)
    for size in sorted({size for size, _ in buckets.verify}):
        capacities = {tokens: tokens - tokens % size for requests, tokens in buckets.verify if requests == size}
        points = [(size, size)]
        for (_, below), (padded, most) in itertools.pairwise([(size, size), *capacities.items()]):
            points += [(padded, below + 1), (padded, most)]
        length = PROMPT + len(points) * (STEPS + WARM_UP) + buckets.num_drafts + 1
        if length > request or size * length > total:
            room = f"context_length={request} and max_total_tokens={total}"
            text = "%s do not hold %d requests of %d tokens, which are timed: steps of so many or more have no drafts"
            logger.warning(text, room, size, length)
            break
        requests = bench.begin(size, length)
        for padded, num_tokens in points:
            seconds, waited_s = bench.time_step(num_tokens - size)
            costs.set(size, padded, num_tokens, seconds)
            if waited_s is not None:
                costs.follow_wait(size, waited_s)
        bench.end(requests)
    return costs


class _Bench:
    """A core whose requests decode with any number of drafts."""

    def __init__(self, new_core: NewCore, limits: DraftLimits) -> None:
        self._policy, self._vocab_size = _FixedPolicy(), limits.vocab_size
        self._speculation = _TimedSpeculation(_RandomDrafter(limits), self._policy, limits, costs=CostTable())
        self._core = new_core(self._speculation)

    def begin(self, size: int, length: int) -> list[Req]:
        """Feed the prompts of so many requests of `length` tokens."""
        self._policy.num_drafts = 0
        prompts = np.random.default_rng(size).integers(0, self._vocab_size, (size, PROMPT)).astype(np.int32)
        requests = [_request(str(index), prompt, length - PROMPT) for index, prompt in enumerate(prompts)]
        self._core.add(requests)
        while not all(req.is_prefilled for req in requests):
            self._core.step()
        return requests

    def time_step(self, num_drafts: int) -> tuple[float, float | None]:
        """The median seconds of a step with so many drafts, of all requests together, and those that the device waits
        before it; None without drafts: it does not."""
        self._policy.num_drafts = num_drafts
        self._speculation.timed.clear()
        for _ in range(STEPS + WARM_UP):
            self._core.step()
        seconds, waits = zip(*self._speculation.timed[WARM_UP:], strict=True)
        known = [wait for wait in waits if wait is not None]
        return statistics.median(seconds), statistics.median(known) if num_drafts and known else None

    def end(self, requests: Sequence[Req]) -> None:
        """Abort the requests."""
        for req in requests:
            self._core.abort(req.rid)
        while not self._core.is_idle:
            self._core.step()


class _TimedSpeculation(Speculation):
    """Notes what steps take, by step, and how long the device waited before."""

    timed: list[tuple[float, float | None]]

    def __init__(self, drafter: Drafter, policy: Policy, limits: DraftLimits, *, costs: CostTable) -> None:
        super().__init__(drafter, policy, limits, costs=costs)
        self.timed = []

    def time_step(self, batch: ModelWorkerBatch, seconds: float, *, waited_s: float | None = None) -> None:
        """Note it."""
        self.timed.append((seconds, waited_s))


class _RandomDrafter:
    """Drafts random tokens."""

    nbytes = 0

    def __init__(self, limits: DraftLimits) -> None:
        self._vocab_size, self._noise = limits.vocab_size, np.random.default_rng(1)

    def open(self, key: Hashable, tokens: Int32[np.ndarray, " S"], info: DraftSequence) -> None:
        """Nothing is indexed."""

    def extend(self, key: Hashable, tokens: Int32[np.ndarray, " S"]) -> None:
        """Nothing is indexed."""

    def propose(self, key: Hashable, most: int) -> Draft:
        """`most` random tokens."""
        return Draft(self._noise.integers(0, self._vocab_size, most).astype(np.int32), np.ones(most))

    def close(self, key: Hashable) -> None:
        """Nothing is indexed."""

    def remember(self, prompt: Int32[np.ndarray, " S"], output: Int32[np.ndarray, " G"], sample: DraftSample) -> None:
        """Nothing is remembered."""

    def forget(self) -> None:
        """Nothing is remembered."""


class _FixedPolicy:
    """So many drafts a step, divided evenly."""

    is_off = False

    def __init__(self) -> None:
        self.num_drafts = 0

    def should_try(self, step: int) -> bool:
        """Whether there are any; `step` is not looked at."""
        return self.num_drafts > 0

    def choose(self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int) -> list[int]:
        """An equal share for each request, one more for the first ones."""
        share, rest = divmod(self.num_drafts, num_requests)
        return [min(survival.size, share + (index < rest)) for index, survival in enumerate(survivals)]

    def choose_ahead(
        self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int, *, joined_gain: float
    ) -> list[int]:
        """None: steps are joined."""
        return [0] * len(survivals)

    def tried(self, *, num_requests: int, num_drafts: int, num_emitted: int, is_joined: bool = True) -> None:
        """Nothing is learned."""

    def expect(self, survivals: Sequence[Float64[np.ndarray, " k"]], num_requests: int) -> bool:
        """Nothing is learned."""
        return False

    def renew(self) -> None:
        """Nothing is learned."""


def _request(rid: str, ids: Int32[np.ndarray, " S"], max_tokens: int) -> Req:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens).resolve()
    source = TokenizedGenerateReqInput(
        rid=rid, group=rid, choice=0, input_ids=ids, sampling=sampling, stop_token_ids=frozenset()
    )
    return Req(source)
