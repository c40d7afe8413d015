"""EngineThread: the thread that steps the core, and the only door to it. Knows nothing of prompts or text.

Callers hand over functions that run between two steps; news goes to the sink of each request. An exception in a step
ends every live request with its cause. The thread waits on its inbox when there is nothing to do; nobody polls."""

import concurrent.futures
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from routed_experts.core.errors import PARAM, EngineDeadError, InvalidRequestError
from routed_experts.core.io_struct import FinishReason, Logprobs, TokenIDOut
from routed_experts.engine.loop.core import ABORTED, EngineCore, has_work
from routed_experts.engine.loop.request_table import StopCheck
from routed_experts.engine.requests.output_queues import OutputQueue
from routed_experts.scheduling.schedule_batch import Req

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_TOLD_CHARS = 400


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """What a caller wants done between two steps, and what is done instead when the thread has ended."""

    run: Callable[[], None]
    fail: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """The requests of one call, the stop checks of those that have any, and where their news goes."""

    reqs: Sequence[Req]
    stops: Mapping[str, StopCheck]
    sink: OutputQueue


class EngineThread:
    """Owns the engine thread. All public methods may be called from any thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._sinks: dict[str, OutputQueue] = {}
        # Between the last command that is taken in and the end of the thread. Reentrant: the collector may close a
        # stream in here.
        self._lock = threading.RLock()
        self._stopping = False
        self._cause: BaseException | None = None
        self._settling: list[concurrent.futures.Future[None]] = []  # callers that wait until a pause has come to rest
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, call: Submission) -> concurrent.futures.Future[None]:
        """Hand over the requests of one call, all or none; the future tells when they are in. QueueFullError if they do
        not fit, InvalidRequestError if an id is in use, EngineDeadError after the end. Cancelled in time, they never
        come in."""
        return self._promise(lambda: _accept(self, call))

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a function on the engine thread between two steps and give its result."""
        return self._promise(function).result()

    def _promise(self, function: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as cause:  # the caller's to handle: it is raised there
                future.set_exception(cause)

        def fail() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(_death(self._cause))

        self._send(Command(run, fail))
        return future

    def settle(self) -> None:
        """Wait until there is nothing to do, or nothing is held back any more; requests that a pause holds back do not
        count."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._send(
            Command(lambda: self._settling.append(future), fail=lambda: future.set_exception(_death(self._cause)))
        )
        future.result()

    def abort(self, rids: Sequence[str], sink: OutputQueue, reason: FinishReason = ABORTED) -> None:
        """End those of these requests whose news goes to `sink`, with what they have; the others (ended, refused, of
        another call) are left alone. Returns at once."""
        self._send(
            Command(
                lambda: self._abort([rid for rid in rids if self._sinks.get(rid) is sink], reason), fail=lambda: None
            )
        )

    def drained(self, function: Callable[[], _T]) -> _T:
        """Run a function on the engine thread while no step is in flight."""

        def run() -> _T:
            _finish_step_in_flight(self)
            return function()

        return self.call(run)

    def stop(self) -> None:
        """Abort what runs, tell its callers, and end the thread. Idempotent."""

        def end() -> None:
            self._abort(self._core.ledger.live(), FinishReason(type="abort", message="the engine was shut down"))
            self._stopping = True

        self._send(Command(end, fail=lambda: None))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, command: Command) -> None:
        with self._lock:
            alive = self._cause is None and not self._stopping
            if alive:
                self._inbox.put(command)
        if not alive:
            command.fail()

    def _run(self) -> None:
        try:
            while not self._stopping or not self._core.is_idle:
                self._take_commands()
                if self._cause is not None:
                    raise self._cause
                if has_work(self._core):
                    self._deliver(self._core.step().outs)
                while self._settling and (self._core.hold is None or not has_work(self._core)):
                    self._settling.pop().set_result(None)
        except Exception as cause:
            logger.exception("the engine thread ends")
            self._cause = cause
        with self._lock:
            self._stopping = True
        for rid, sink in tuple(self._sinks.items()):
            sink.take(_dead(rid, _death(self._cause)))
            sink.ring()
        for future in self._settling:
            future.set_exception(_death(self._cause))
        while not self._inbox.empty():
            self._inbox.get().fail()  # it came too late: its caller gets the cause

    def _take_commands(self) -> None:
        """Run what has come in; wait for the first if there is nothing else to do."""
        if not has_work(self._core) and not self._stopping:
            self._inbox.get().run()
        while not self._inbox.empty():
            command = self._inbox.get()
            if self._stopping or self._cause is not None:
                command.fail()
            else:
                command.run()

    def _deliver(self, outs: Sequence[TokenIDOut]) -> None:
        gone: list[str] = []
        told: list[OutputQueue] = []
        for out in outs:
            sink = self._sinks.get(out.rid)
            if sink is None:
                continue
            told.append(sink)
            if not sink.take(out):
                gone.append(out.rid)
            if out.finish_reason is not None:
                del self._sinks[out.rid]
        for sink in told:
            sink.ring()
        self._abort(gone, FinishReason(type="abort", message="the caller is gone"))

    def _abort(self, rids: Sequence[str], reason: FinishReason) -> None:
        for rid in rids:
            self._core.abort(rid, reason)


def submit_all(loop: EngineThread, calls: Sequence[Submission]) -> "concurrent.futures.Future[list[Exception | None]]":
    """`submit` several at once, before the next step; the future gives what `submit` would have raised for each, or
    raises EngineDeadError."""

    def outcome(call: Submission) -> Exception | None:
        try:
            _accept(loop, call)
        except Exception as cause:  # this caller's to handle; what is wrong with the engine ends it after this
            return cause
        return None

    return loop._promise(lambda: [outcome(call) for call in calls])


def is_idle(loop: EngineThread) -> bool:
    """Has every request that was taken in ended. From any thread, and perhaps no longer so."""
    return loop._core.ledger.num_live == 0


def _accept(loop: EngineThread, call: Submission) -> None:
    """Engine thread: take in the requests of one call. Raises what `EngineThread.submit` raises."""
    ledger, reqs = loop._core.ledger, call.reqs
    taken = next(
        (req.rid for req in reqs if ledger.find(req.rid) is not None or ledger.has_group(req.source.group)), None
    )
    if taken is not None:
        text = f"{PARAM}={taken!r} is the id of a request that has not ended; choose another, or leave it out"
        raise InvalidRequestError(text, param="rid", code="duplicate_request_id")
    if any(req.rid in loop._sinks for req in reqs):  # aborted, but its caller has not been told: that comes first
        _finish_step_in_flight(loop)
    loop._core.add(reqs, call.stops)
    loop._sinks.update(dict.fromkeys((req.rid for req in reqs), call.sink))


def _finish_step_in_flight(loop: EngineThread) -> None:
    """Tell the news of the step in flight. What fails in it is not the fault of who waits for it: it ends the thread,
    as any step's."""
    try:
        outs = loop._core.drain().outs
    except Exception as cause:
        loop._cause = cause
        raise
    loop._deliver(outs)


def _death(cause: BaseException | None) -> EngineDeadError:
    said = "it was shut down" if cause is None else _told(cause)
    error = EngineDeadError(f"the engine has ended: {said}; build a new Engine")
    error.__cause__ = cause
    return error


def _told(cause: BaseException) -> str:
    """An exception in one line, without the traceback that some runtimes put into their text; the log has that."""
    lines = [line.strip() for line in str(cause).splitlines() if not line.lstrip().startswith("File ")]
    text = " ".join(lines).replace("Traceback (most recent call last):", "")
    return f"{type(cause).__name__}: {text[:_TOLD_CHARS]}"


def _dead(rid: str, error: EngineDeadError) -> TokenIDOut:
    """The last word to a request whose engine has died."""
    return TokenIDOut(
        rid=rid,
        new_token_ids=(),
        output_logprobs=Logprobs(),
        input_logprobs=None,
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        weight_version=0,
        finish_reason=FinishReason(type="error", message=str(error)),
        return_routed_experts=False,
        routed_experts=None,
        error=error,
    )
