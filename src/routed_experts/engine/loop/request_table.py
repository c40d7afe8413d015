"""RequestTable: the live requests, what has been emitted for each, and the outcome counts of those that ended.

Every accepted request has exactly one outcome: accepted == finished + live, at any time between steps. Outputs of a
stream are emitted at multiples of its interval on the clock; the first token and the end are emitted at once."""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from routed_experts.core.integrity import Violation
from routed_experts.core.io_struct import FinishReason, Logprobs, ReroutingCounts, TokenIDOut
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.speculative_stats import SpeculativeCounts
from routed_experts.core.weight_version import WeightVersion
from routed_experts.scheduling.schedule_batch import Req, ReqState

# Above 16 streams the interval of each grows, so that all together emit at most as often as 16; up to 4 times.
STREAMS_PER_INTERVAL, MAX_BACKOFF = 16, 4


class StopDetokenizer(Protocol):
    """The detokenizer of a request with stop strings: its text is decoded here, where the strings must be found."""

    @property
    def stopped(self) -> str | None:
        """The stop string that was met."""
        ...

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that they make final."""
        ...

    def finish(self, *, search: bool = True) -> str:
        """Return the text that was held back. With `search` it may still complete a stop string."""
        ...

    def fork(self) -> "StopDetokenizer":
        """Return an independent copy."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class _Entry:
    req: Req
    detokenizer: StopDetokenizer | None  # None: the caller decodes the text
    text: list[str] = dataclasses.field(default_factory=list[str])  # decoded since the last output
    num_emitted: int = 0  # generated tokens
    since: float = dataclasses.field(default_factory=time.monotonic)
    queue_s: float | None = None  # until its first step
    next_output: float = 0.0  # of a stream, on the monotonic clock: not before
    rows_emitted: int | None = None  # token after the last emitted row; None: none yet


class RequestTable:
    """Engine thread only; the counts may be read from any."""

    def __init__(self) -> None:
        self.accepted = 0
        self._finished: dict[str, int] = {}
        self._live: dict[str, _Entry] = {}
        self._num_streams = 0  # that have begun

    @property
    def finished(self) -> Mapping[str, int]:
        """Ended requests by outcome: stop, length, abort, timeout, error, and rejected: those that found the queue
        full."""
        return MappingProxyType(self._finished)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def add(self, req: Req, detokenizer: StopDetokenizer | None) -> None:
        """Add a request that has been accepted."""
        assert req.rid not in self._live, req.rid
        self._live[req.rid] = _Entry(req=req, detokenizer=detokenizer)
        self.accepted += 1

    def reject(self, count: int) -> None:
        """Count requests that found the queue full: accepted and ended at once."""
        self.accepted += count
        self._count("rejected", count)

    def mark_scheduled(self, reqs: Iterable[Req]) -> None:
        """Note that these are in a step; the first one ends their time in the queue."""
        for entry in (self._live[req.rid] for req in reqs):
            if entry.queue_s is None:
                entry.queue_s = time.monotonic() - entry.since
                self._num_streams += entry.req.source.stream

    def should_emit(self, req: Req, now: float) -> bool:
        """Whether a stream may emit its output. `now` on the monotonic clock."""
        return now >= self._live[req.rid].next_output

    def find(self, rid: str) -> Req | None:
        """The live request of this id."""
        entry = self._live.get(rid)
        return None if entry is None else entry.req

    def live_ids(self) -> set[str]:
        """Ids of live requests, and of their calls or prompts."""
        return {*self._live, *(entry.req.source.call_id for entry in self._live.values())} - {""}

    def live(self) -> tuple[str, ...]:
        """Ids of all live requests, in order of arrival."""
        return tuple(self._live)

    def note_update(self, version: WeightVersion) -> None:
        """Note for all live requests that other weights replace `version`."""
        for entry in self._live.values():
            entry.req.note_update(version)

    def match_stop_string(self, req: Req) -> str | None:
        """Decode the newest token of a request; returns the stop string that it completed, if any."""
        entry = self._live[req.rid]
        detokenizer = entry.detokenizer
        if detokenizer is None:
            return None
        if req.met_stop_token and not req.source.sampling.include_stop_str_in_output:
            detokenizer = detokenizer.fork()  # the token is not shown, unless its text completes a stop string
        text = detokenizer.push([int(req.tokens[req.num_known - 1])])
        if detokenizer is entry.detokenizer or detokenizer.stopped is not None:
            entry.detokenizer = detokenizer
            entry.text.append(text)
        return detokenizer.stopped

    def next_row(self, req: Req) -> int:
        """The token whose row is emitted next: where the rows of the request start, or after the last one emitted."""
        emitted = self._live[req.rid].rows_emitted
        return req.source.routed_experts.start if emitted is None else emitted

    def make_output(
        self,
        req: Req,
        *,
        record: RoutedExperts | None,
        error: Exception | None,
        weight_version: WeightVersion,
        exact: bool = True,
        defers_experts: bool = False,
        rerouting: ReroutingCounts | None = None,
        speculative: SpeculativeCounts | None = None,
        dp_rank: int | None = None,
    ) -> TokenIDOut:
        """What a request has gained since its last output; a finished one leaves the table."""
        entry = self._live[req.rid]
        start, entry.num_emitted = entry.num_emitted, req.num_output
        backoff = min(MAX_BACKOFF, 1 + max(self._num_streams - 1, 0) // STREAMS_PER_INTERVAL)
        interval = req.source.stream_interval_s * backoff
        # Multiples of the interval on the clock are the same for all streams: their readers share one wake-up.
        entry.next_output = (time.monotonic() // interval + 1) * interval if interval else 0.0
        if record is not None:
            entry.rows_emitted = record.start + record.num_rows
        is_finished, reason = req.state is ReqState.FINISHED, req.finish_reason
        text: str | None = None
        if entry.detokenizer is not None:
            text = "".join(entry.text)
            entry.text.clear()
            if is_finished:
                assert reason is not None, req.rid
                ends_itself = reason.type in ("stop", "length")
                text += entry.detokenizer.finish(search=ends_itself)
                if ends_itself and entry.detokenizer.stopped is not None:  # perhaps in what was held back
                    reason = FinishReason(type="stop", matched=entry.detokenizer.stopped)
        if is_finished:
            assert reason is not None, req.rid
            self._count("error" if error is not None else reason.type)
            del self._live[req.rid]
            self._num_streams -= entry.queue_s is not None and req.source.stream
        return TokenIDOut(
            rid=req.rid,
            new_token_ids=tuple(req.output_ids[start:].tolist()),
            text=text,
            output_logprobs=Logprobs(values=tuple(req.output_logprobs[start:]), top=tuple(req.output_top[start:])),
            input_logprobs=_input_logprobs(req) if is_finished or start == 0 else None,
            prompt_tokens=req.prompt_len,
            completion_tokens=req.num_output,
            cached_tokens=req.cached_tokens,
            weight_version=weight_version,
            finish_reason=reason,
            return_routed_experts=req.source.return_routed_experts,
            routed_experts=record,
            error=error,
            exact=exact and rerouting in (None, ReroutingCounts(rerouted_slots=0, dropped_slots=0)),
            rerouting=rerouting,
            defers_experts=defers_experts,
            placement_epoch=req.placement_epoch,
            queue_s=entry.queue_s,
            speculative=speculative,
            dp_rank=dp_rank,
            weight_changes=req.weight_changes,
            num_fed=req.num_fed,
        )

    def check_integrity(self) -> list[Violation]:
        """Check that every accepted request is live or has ended once."""
        finished = sum(self._finished.values())
        if self.accepted == finished + self.num_live:
            return []
        detail = f"accepted {self.accepted}, ended {finished}, live {self.num_live}; expected accepted == ended + live"
        return [Violation(name="outcomes", detail=detail)]

    def _count(self, outcome: str, count: int = 1) -> None:
        self._finished[outcome] = self._finished.get(outcome, 0) + count


def _input_logprobs(req: Req) -> Logprobs | None:
    """Logprobs of the prompt tokens from logprob_start_len on; the first token of a prompt has none."""
    span = range(req.source.logprob_start_len, req.prompt_len)
    if not req.wants_prompt_logprobs or any(index > 0 and index not in req.input_logprobs for index in span):
        return None  # not requested, or the request ended before its prompt was prefilled
    entries = [(None, None) if index == 0 else req.input_logprobs[index] for index in span]
    return Logprobs(values=tuple(value for value, _ in entries), top=tuple(top for _, top in entries))
