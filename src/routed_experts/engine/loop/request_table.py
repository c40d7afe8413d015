"""Ledger: the live requests, what each has been told, and how the others ended. Knows nothing of steps.

Every accepted request has exactly one outcome: accepted == finished + live, at any time between steps."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from routed_experts.core.integrity import Violation
from routed_experts.core.io_struct import Logprobs, ReroutingCounts, TokenIDOut
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.scheduling.schedule_batch import Req, ReqState

STREAMS_PER_INTERVAL, MAX_BACKOFF = (
    16,
    4,
)  # more streams are told less often, in all at most as often as so many, down to a quarter
StopCheck = Callable[[int], str | None]  # the next token id -> the stop string that it completed


@dataclasses.dataclass(slots=True, kw_only=True)
class _Entry:
    req: Req
    stop: StopCheck | None
    num_emitted: int = 0  # generated tokens that the caller has been told of
    since: float = dataclasses.field(default_factory=time.monotonic)
    queue_s: float | None = None  # until its first step
    next_news: float = 0.0  # on the clock, not before: of a stream
    rows_emitted: int | None = None  # token after the last row that the caller has been told; None: none yet


class RequestTable:
    """Engine thread only; the counts may be read from any."""

    def __init__(self) -> None:
        self.accepted = 0
        self._finished: dict[str, int] = {}
        self._live: dict[str, _Entry] = {}
        self._num_told = 0  # streams that have begun

    @property
    def finished(self) -> Mapping[str, int]:
        """Ended requests by outcome: stop, length, abort, timeout, error, and rejected: those that found the queue
        full."""
        return MappingProxyType(self._finished)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def enter(self, req: Req, stop: StopCheck | None) -> None:
        """Note a request that has been accepted."""
        assert req.rid not in self._live, req.rid
        self._live[req.rid] = _Entry(req=req, stop=stop)
        self.accepted += 1

    def reject(self, count: int) -> None:
        """Note requests that found the queue full: taken in and ended at once."""
        self.accepted += count
        _count(self._finished, "rejected", count)

    def begin(self, reqs: Iterable[Req]) -> None:
        """Note that these are in a step; the first one ends their time in the queue."""
        for entry in (self._live[req.rid] for req in reqs):
            if entry.queue_s is None:
                entry.queue_s = time.monotonic() - entry.since
                self._num_told += entry.req.source.stream

    def is_due(self, req: Req, now: float) -> bool:
        """Is it time to tell what a stream has. `now` on the monotonic clock."""
        return now >= self._live[req.rid].next_news

    def find(self, rid: str) -> Req | None:
        """The live request of this id."""
        entry = self._live.get(rid)
        return None if entry is None else entry.req

    def has_group(self, group: str) -> bool:
        """Is a request of this group live: another choice of its prompt, or a call of the same id."""
        return any(entry.req.source.group == group for entry in self._live.values())

    def live(self) -> tuple[str, ...]:
        """Ids of all live requests, in order of arrival."""
        return tuple(self._live)

    def stop_string(self, req: Req) -> str | None:
        """Show the newest token to the request's stop check; the string that it completed, if any."""
        check = self._live[req.rid].stop
        return None if check is None else check(int(req.tokens[req.num_known - 1]))

    def next_row(self, req: Req) -> int:
        """The token whose row comes next: where the request's rows start, or after those that it has been told."""
        told = self._live[req.rid].rows_emitted
        return req.source.routed_experts.start if told is None else told

    def news(
        self,
        req: Req,
        *,
        record: RoutedExperts | None,
        error: Exception | None,
        weight_version: int,
        exact: bool = True,
        rerouting: ReroutingCounts | None = None,
    ) -> TokenIDOut:
        """What a request has to tell since it was last asked; an ended one leaves the ledger."""
        entry = self._live[req.rid]
        told, entry.num_emitted = entry.num_emitted, req.num_output
        interval = req.source.stream_interval_s * min(
            MAX_BACKOFF, 1 + max(self._num_told - 1, 0) // STREAMS_PER_INTERVAL
        )
        # At multiples of the interval on the clock, for all streams the same: one wake-up of those who wait for them,
        # not one for each.
        entry.next_news = (time.monotonic() // interval + 1) * interval if interval else 0.0
        if record is not None:
            entry.rows_emitted = record.start + record.num_rows
        ended = req.state is ReqState.FINISHED
        if ended:
            assert req.finish_reason is not None, req.rid
            _count(self._finished, "error" if error is not None else req.finish_reason.type)
            del self._live[req.rid]
            self._num_told -= entry.queue_s is not None and req.source.stream
        return TokenIDOut(
            rid=req.rid,
            new_token_ids=tuple(req.output_ids[told:].tolist()),
            output_logprobs=Logprobs(values=tuple(req.output_logprobs[told:]), top=tuple(req.output_top[told:])),
            input_logprobs=_input_logprobs(req) if ended or told == 0 else None,
            prompt_tokens=req.prompt_len,
            completion_tokens=req.num_output,
            cached_tokens=req.cached_tokens,
            weight_version=weight_version,
            finish_reason=req.finish_reason,
            return_routed_experts=req.source.return_routed_experts,
            routed_experts=record,
            error=error,
            exact=exact and rerouting in (None, ReroutingCounts(rerouted_slots=0, dropped_slots=0)),
            rerouting=rerouting,
            queue_s=entry.queue_s,
        )


def check_outcomes(ledger: RequestTable) -> list[Violation]:
    """I1: every accepted request is live or has ended once."""
    ended = sum(ledger.finished.values())
    if ledger.accepted == ended + ledger.num_live:
        return []
    detail = f"accepted {ledger.accepted}, ended {ended}, live {ledger.num_live}; wanted accepted == ended + live"
    return [Violation(name="outcomes", detail=detail)]


def _count(finished: dict[str, int], outcome: str, count: int = 1) -> None:
    finished[outcome] = finished.get(outcome, 0) + count


def _input_logprobs(req: Req) -> Logprobs | None:
    """Logprobs of the prompt tokens from logprob_start_len on; the first token of a prompt has none."""
    span = range(req.source.logprob_start_len, req.prompt_len)
    if not req.wants_prompt_logprobs or any(place > 0 and place not in req.input_logprobs for place in span):
        return None  # not asked for, or ended before the prompt was through
    told = [(None, None) if place == 0 else req.input_logprobs[place] for place in span]
    return Logprobs(values=tuple(value for value, _ in told), top=tuple(top for _, top in told))
