"""Data ranks: several schedulers of one engine, each with a queue, pages, a prefix cache and rows of its own.

    rank 0   queue | running | pages 1.. | rows by slot  \\
    rank 1   queue | running | pages 1.. | rows by slot  /   one step: a batch of each rank, all of one padded shape
A request is assigned to a rank when it is queued, and stays there: its pages and its rows are there, and slot numbers
of one rank mean nothing in another. A rank that has nothing to run takes part in a step with a batch of padding, so
that no device misses a collective. An engine without data ranks has one of them. Engine thread only."""

import dataclasses
from collections.abc import Iterator, Sequence

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.errors import QueueFullError
from routed_experts.core.integrity import Violation
from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.server_args import ServerArgs
from routed_experts.scheduling.batch_builder import StepForm
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.scheduling.scheduler import ChosenStep, Scheduler


@dataclasses.dataclass(frozen=True, slots=True)
class DataRank:
    """The requests and the rows of one rank."""

    scheduler: Scheduler
    capturer: RoutedExpertsCapturer

    def invalidate_recycled_rows(self) -> None:
        """Invalidate the rows of pages that were reallocated or freed."""
        pages = self.scheduler.pages.drain_changed_pages()
        if pages.size:
            self.capturer.on_pages_allocated(pages)

    def check_integrity(self) -> list[Violation]:
        """Check pages, prefix cache and rows."""
        slots = self.scheduler.pages.owned_slots(self.scheduler.running)
        return [*self.scheduler.check_integrity(), *self.capturer.check_integrity(slots)]


class DataRanks:
    """The ranks of an engine, in order."""

    def __init__(self, ranks: Sequence[DataRank], args: ServerArgs) -> None:
        assert ranks, "an engine has at least one rank"
        self._ranks = tuple(ranks)
        self._max_queued, self._prefill_limit = args.max_queued_requests, args.prefill_limit

    def __iter__(self) -> Iterator[DataRank]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, index: int) -> DataRank:
        return self._ranks[index]

    def rank_of(self, req: Req) -> DataRank:
        """The rank that a queued request belongs to."""
        return self._ranks[req.dp_rank]

    @property
    def running(self) -> list[Req]:
        """The running requests of all ranks."""
        if len(self._ranks) == 1:
            return self._ranks[0].scheduler.running
        return [req for rank in self._ranks for req in rank.scheduler.running]

    @property
    def num_waiting(self) -> int:
        """Waiting requests of all ranks."""
        return sum(len(rank.scheduler.waiting) for rank in self._ranks)

    @property
    def has_started(self) -> bool:
        """Whether a request runs, or has generated tokens and was returned to its queue."""
        return any(rank.scheduler.has_started for rank in self._ranks)

    @property
    def captures(self) -> bool:
        """Whether rows are recorded."""
        return self._ranks[0].capturer.enabled

    def add(self, reqs: Sequence[Req]) -> None:
        """Queue the requests of one call, all or none, each in its rank. Raises QueueFullError if they do not fit."""
        limit, num_waiting = self._max_queued, self.num_waiting
        if len(reqs) > limit:
            raise QueueFullError(
                f"{len(reqs)} requests in one call exceed max_queued_requests={limit}; send at most {limit} at once"
            )
        if num_waiting + len(reqs) > limit:
            raise QueueFullError(
                f"{num_waiting} requests wait and {len(reqs)} more exceed max_queued_requests={limit}; try again later"
            )
        if len(self._ranks) > 1:
            self._assign(reqs)
        for number, rank in enumerate(self._ranks):
            rank.scheduler.add(req for req in reqs if req.dp_rank == number)

    def build(self, chosen: Sequence[ChosenStep | None], *, drafts_ahead: bool) -> tuple[ModelWorkerBatch, ...] | None:
        """Build the batch of each rank from what it has chosen, all of the smallest shape that holds every one of them;
        None where none has chosen anything."""
        schedulers = [rank.scheduler for rank in self._ranks]
        forms = [scheduler.form(step) for scheduler, step in zip(schedulers, chosen, strict=True) if step is not None]
        if not forms:
            return None
        form = forms[0] if len(schedulers) == 1 else StepForm.merge(forms)
        return tuple(
            [
                scheduler.build(step, form, drafts_ahead=drafts_ahead)
                for scheduler, step in zip(schedulers, chosen, strict=True)
            ]
        )

    def routing_stats(self, *, reset: bool = False, wait: bool = True) -> RoutingStats:
        """How often each expert was chosen, in all ranks; as the capturer's."""
        return RoutingStats.merge([rank.capturer.routing_stats(reset=reset, wait=wait) for rank in self._ranks])

    def _assign(self, reqs: Sequence[Req]) -> None:
        """Choose the rank of each request: the one that it names; else, with choices of the same prompt, theirs; else
        the one whose cache holds most of its prompt, if that is more than half of it and the rank has at most one
        prefill more to do than the least loaded one; else the least loaded. Load is known tokens of live requests."""
        loads = [rank.scheduler.num_live_tokens for rank in self._ranks]
        groups: dict[str, int] = {}
        for req in reqs:
            number = req.source.data_parallel_rank
            if number is None:
                number = groups.get(req.source.group)
            if number is None:
                number = self._best_rank(req, loads)
            groups[req.source.group] = req.dp_rank = number
            loads[number] += req.num_known

    def _best_rank(self, req: Req, loads: Sequence[int]) -> int:
        least = min(loads)
        cached = [rank.scheduler.num_cached(req) for rank in self._ranks]
        longest = max(cached)
        if 2 * longest > req.prompt_len and loads[cached.index(longest)] - least <= self._prefill_limit:
            return cached.index(longest)
        return loads.index(least)
