"""Measures the cost of steps on this machine by padded size and by content; core/bucket_tuning.py chooses from it.
Uses schedulers of its own, over the runner of an idle engine."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from routed_experts.core.bucket_tuning import StepCosts
from routed_experts.core.buckets import Buckets
from routed_experts.core.errors import ConfigError
from routed_experts.core.io_struct import RoutingOptions, TokenizedGenerateReqInput
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.loop.core import EngineCore
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.schedule_batch import Req, ReqState
from routed_experts.scheduling.scheduler import Scheduler

_STEPS = 12  # decode steps of one sample
_CONTEXT = 64  # tokens of a prompt before its decode steps, where they fit one step
_LEAST_CONTEXT = 3  # a prompt of one token, and two more, between which is a step


def candidates(current: Sequence[int], *, least: int) -> tuple[int, ...]:
    """Sizes worth measuring: the current ones, and the powers of two from `least` to the largest of them."""
    doublings = itertools.takewhile(lambda size: size < current[-1], (least << power for power in itertools.count()))
    return tuple(sorted({*current, *doublings}))


def measure_step_costs(components: EngineComponents, args: ServerArgs, *, rounds: int) -> tuple[StepCosts, StepCosts]:
    """Costs of decode steps (sizes are requests) and of extend steps (sizes are tokens), for every bucket that
    `components` was built with and every size that is one of them, in seconds; medians over `rounds` interleaved
    samples of each pair. A decode step is the time between two of them, the next in flight; an extend step goes from
    its scheduling to its tokens on the host. `args` built the components, with no limit below their sizes. Raises
    ConfigError in deterministic mode, which has one size, and for a context that has no decode step."""
    if args.deterministic:
        raise ConfigError("deterministic=True runs every step in one size, so there is none to choose; leave it out")
    if components.context_length < _LEAST_CONTEXT:
        text = f"context_length={components.context_length} has no decode step between two tokens"
        raise ConfigError(f"{text}; give at least {_LEAST_CONTEXT}")
    measured = (
        (components.buckets.decode, _DecodeSteps(components, args)),
        (tuple(size for size in components.buckets.extend if size > 1), _ExtendSteps(components, args)),
    )
    decode, extend = (_measure(sizes, steps, rounds) for sizes, steps in measured)
    return decode, extend


def _measure(buckets: Sequence[int], steps: "Callable[[int, int], float]", rounds: int) -> StepCosts:
    pairs = [(bucket, size) for bucket in buckets for size in (*buckets, max(2, buckets[0] // 4)) if size <= bucket]
    samples: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    for round_index in range(rounds + 1):
        for bucket, size in samples:
            seconds = steps(bucket, size)
            if round_index:  # the first round warms up
                samples[bucket, size].append(seconds)
    return StepCosts({b: {size: statistics.median(samples[b, size]) for c, size in samples if c == b} for b in buckets})


class _Steps:
    """Cores over one runner, and requests with new random prompts."""

    def __init__(self, components: EngineComponents, args: ServerArgs) -> None:
        self._components, self._noise, self._count = components, np.random.default_rng(0), itertools.count()
        self._args = dataclasses.replace(
            args, disable_radix_cache=True, max_queued_requests=sum(components.buckets.extend)
        )

    def core(self, **changes: tuple[int, ...]) -> EngineCore:
        """Create an idle core with the buckets of the components, except `changes`."""
        buckets: Buckets = dataclasses.replace(self._components.buckets, **changes)
        runner = self._components.core.runner
        pages, vocab = runner.config.pool.num_pages, runner.config.vocab_size
        capturers = self._components.core.capturers
        schedulers = [Scheduler(self._args, buckets, num_pages=pages, vocab_size=vocab) for _ in capturers]
        return EngineCore(DataRanks(schedulers, self._args), runner, capturers)

    def request(self, length: int, new: int) -> Req:
        """A greedy request of `length` random tokens that generates `new`; its rows are requested where they are
        recorded."""
        rid, capture = str(next(self._count)), self._components.core.capturers[0].enabled
        source = TokenizedGenerateReqInput(
            rid=rid,
            group=rid,
            choice=0,
            input_ids=self._noise.integers(0, self._components.vocab_size, size=length).astype(np.int32),
            sampling=SamplingParams(temperature=0.0, max_tokens=new).resolve(),
            stop_token_ids=frozenset(),
            extra_key=None,
            stream=False,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            routed_experts=RoutingOptions(enabled=capture),
        )
        return Req(source)


class _DecodeSteps(_Steps):
    """Seconds of a decode step of `size` requests in `bucket`."""

    def __call__(self, bucket: int, size: int) -> float:
        core, widest = self.core(decode=(bucket,)), self._components.buckets.extend[-1]
        new = min(_STEPS, self._components.context_length - 1)
        length = max(1, min(_CONTEXT, widest // size, self._components.context_length - new))
        reqs = [self.request(length, new) for _ in range(size)]
        core.add(reqs)
        while not all(req.is_prefilled for req in reqs):
            core.step()
        seconds, since = list[float](), time.perf_counter()
        while all(req.state is not ReqState.FINISHED for req in reqs):
            core.step()
            now = time.perf_counter()
            seconds.append(now - since)
            since = now
        while not core.is_idle:
            core.step()
        return statistics.median(seconds)


class _ExtendSteps(_Steps):
    """Seconds of a step that takes in `size` tokens of prompts, in `bucket`."""

    def __call__(self, bucket: int, size: int) -> float:
        core, longest = self.core(extend=(bucket,)), self._components.context_length - 1
        core.add([self.request(min(longest, size - first), 1) for first in range(0, size, longest)])
        start_time = time.perf_counter()
        core.step()
        core.drain()
        seconds = time.perf_counter() - start_time
        while not core.is_idle:
            core.step()
        return seconds
