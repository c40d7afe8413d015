"""DataRanks: the schedulers of an engine, each with a queue, pages and a prefix cache of its own.

    rank 0 | queue, running requests, pages 1.. |
    rank 1 | queue, running requests, pages 1.. |  one step: a batch of each rank, all of one padded shape
A request is assigned to a rank when it is queued, and stays there: its pages and its rows are there, and page and slot
numbers of one rank mean nothing in another. A rank that has nothing to run takes part in a step with a batch of
padding, so that no device misses a collective. An engine without data ranks has one of them. Engine thread only."""

from collections.abc import Iterator, Sequence

from routed_experts.core.errors import QueueFullError
from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.core.server_args import ServerArgs
from routed_experts.scheduling.batch_builder import StepForm
from routed_experts.scheduling.schedule_batch import Req
from routed_experts.scheduling.scheduler import ChosenStep, Scheduler


class DataRanks:
    """The ranks of an engine, in order."""

    def __init__(self, schedulers: Sequence[Scheduler], args: ServerArgs) -> None:
        assert schedulers, "an engine has at least one rank"
        self._schedulers = tuple(schedulers)
        self._max_queued, self._prefill_limit = args.max_queued_requests, args.prefill_limit

    def __iter__(self) -> Iterator[Scheduler]:
        return iter(self._schedulers)

    def __len__(self) -> int:
        return len(self._schedulers)

    def __getitem__(self, index: int) -> Scheduler:
        return self._schedulers[index]

    def scheduler_of(self, req: Req) -> Scheduler:
        """The scheduler of the rank that a queued request belongs to."""
        return self._schedulers[req.dp_rank]

    @property
    def running(self) -> list[Req]:
        """The running requests of all ranks."""
        if len(self._schedulers) == 1:
            return self._schedulers[0].running
        return [req for scheduler in self._schedulers for req in scheduler.running]

    @property
    def num_waiting(self) -> int:
        """Waiting requests of all ranks."""
        return sum(len(scheduler.waiting) for scheduler in self._schedulers)

    @property
    def has_started(self) -> bool:
        """Whether a request runs, or has generated tokens and was returned to its queue."""
        return any(scheduler.has_started for scheduler in self._schedulers)

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
        if len(self._schedulers) > 1:
            self._assign(reqs)
        for number, scheduler in enumerate(self._schedulers):
            scheduler.add(req for req in reqs if req.dp_rank == number)

    def build(self, chosen: Sequence[ChosenStep | None], *, drafts_ahead: bool) -> tuple[ModelWorkerBatch, ...] | None:
        """Build the batch of each rank from what it has chosen, all of the smallest shape that holds every one of them;
        None where none has chosen anything."""
        schedulers = self._schedulers
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

    def _assign(self, reqs: Sequence[Req]) -> None:
        """Choose the rank of each request: the one that it names; else, with choices of the same prompt, theirs; else
        the one whose cache holds most of its prompt, of several the least loaded, if that is more than half of it and
        the rank has at most one prefill more to do than the least loaded one; else the least loaded. Load is known
        tokens of live requests."""
        loads = [scheduler.num_live_tokens for scheduler in self._schedulers]
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
        cached = [scheduler.num_cached(req) for scheduler in self._schedulers]
        number = min(range(len(loads)), key=lambda rank: (-cached[rank], loads[rank]))
        if 2 * cached[number] > req.prompt_len and loads[number] - min(loads) <= self._prefill_limit:
            return number
        return loads.index(min(loads))
