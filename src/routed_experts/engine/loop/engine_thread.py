"""EngineThread: the thread that steps the core, and its inbox of commands.

Callers submit requests and functions, which run between two steps; outputs go to the queue of each call. The thread
blocks on its inbox when it has no work. An exception in a step ends every live request with its cause. A process that
is forked has no engine thread: there commands fail at once, and `stop` and `kill` do nothing."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from routed_experts.core.errors import PARAM, EngineDeadError, InvalidRequestError
from routed_experts.core.io_struct import FinishReason, Logprobs, TokenIDOut, TokenizedGenerateReqInput
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.loop.core import ABORTED, EngineCore
from routed_experts.engine.loop.request_table import StopDetokenizer
from routed_experts.scheduling.schedule_batch import Req

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_CAUSE_CHARS = 400


def _unexplained(cause: BaseException) -> BaseException:
    return cause


class OutputQueue(Protocol):
    """Receives the outputs of the requests that were submitted with it. Neither method raises."""

    def put(self, out: TokenIDOut) -> bool:
        """Buffer an output until the next flush. False if the reader has disconnected."""
        ...

    def flush(self) -> None:
        """Deliver the outputs of the step and wake the reader."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """The requests of one call, the queue of their outputs, and the detokenizers of those with stop strings."""

    requests: Sequence[TokenizedGenerateReqInput]
    queue: OutputQueue
    detokenizers: Mapping[str, StopDetokenizer]


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """What runs between two steps, and what runs instead once the thread has ended."""

    run: Callable[[], None]
    fail: Callable[[], None]


class EngineThread:
    """Owns the engine thread. All public methods may be called from any thread."""

    def __init__(self, core: EngineCore, *, explain: Callable[[BaseException], BaseException] | None = None) -> None:
        """`explain` names the reason of an exception that ends the thread: where processes share a model, another of
        them may be lost."""
        self._core, self._explain = core, explain or _unexplained
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._queues: dict[str, OutputQueue] = {}  # by request id
        # Held from the last command that is accepted to the end of the thread. Reentrant: the garbage collector may
        # close a stream while it is held.
        self._lock = threading.RLock()
        self._stopping = False
        self._cause: BaseException | None = None
        self._carried_out: concurrent.futures.Future[Any] | None = None  # of the command that runs
        self._pause_waiters: list[concurrent.futures.Future[None]] = []
        self._ended = threading.Event()  # no request and no command waits any more
        self._killed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from that of the engine thread. Locks may then be held for ever."""
        return os.getpid() != self._pid

    def check_not_forked(self) -> None:
        """Raise EngineDeadError in a process that was forked from that of the engine thread: before a lock is taken."""
        if self.is_forked:
            raise _forked_error()

    @property
    def is_idle(self) -> bool:
        """Whether every accepted request has ended. From any thread, so it may already be out of date."""
        return self._core.request_table.num_live == 0

    @property
    def runs_command(self) -> bool:
        """Whether a command that a caller waits for is being carried out. From any thread, as `is_idle`."""
        return self._carried_out is not None

    @property
    def num_pending_commands(self) -> int:
        """Commands that wait for the end of the step; for tests."""
        return self._inbox.qsize()

    def submit(self, submission: Submission) -> concurrent.futures.Future[None]:
        """Submit the requests of one call, all or none; the future is done when they are accepted. It raises
        QueueFullError if they do not fit, InvalidRequestError if an id is in use, EngineDeadError after the end.
        Cancelled in time, they are never accepted."""
        return self._submit_command(lambda: self._admit(submission))

    def submit_all(self, submissions: Sequence[Submission]) -> "concurrent.futures.Future[list[Exception | None]]":
        """`submit` several calls before the next step. The future gives what `submit` would have raised for each, or
        raises EngineDeadError."""

        def outcome(submission: Submission) -> Exception | None:
            try:
                self._admit(submission)
            except Exception as cause:  # the caller's to handle; a fault of the engine ends the thread afterwards
                return cause
            return None

        return self._submit_command(lambda: [outcome(submission) for submission in submissions])

    def run_between_steps(self, function: Callable[[], _T]) -> _T:
        """Run a function on the engine thread between two steps and return its result."""
        return self._submit_command(function).result()

    def run_drained(self, function: Callable[[], _T]) -> _T:
        """Run a function on the engine thread while no step is in flight and return its result."""

        def run() -> _T:
            self._finish_step_in_flight()
            return function()

        return self.run_between_steps(run)

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the engine thread between two steps, and do not wait for it; never, once the engine has
        ended. An exception in it ends the engine."""
        self._send(Command(function, fail=lambda: None))

    def wait_until_paused(self) -> None:
        """Wait until a pause has no started request left, or is over."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._send(
            Command(
                lambda: self._pause_waiters.append(future),
                fail=lambda: future.set_exception(_dead_error(self._cause)),
            )
        )
        future.result()

    def abort(self, rids: Sequence[str], queue: OutputQueue, reason: FinishReason = ABORTED) -> None:
        """End those of these requests that were submitted with `queue`, with what they have. Others (ended, refused, of
        another call) are ignored. Returns at once."""

        def abort() -> None:
            self._abort([rid for rid in rids if self._queues.get(rid) is queue], reason)

        self.post(abort)

    def stop(self) -> None:
        """Abort all live requests and end the thread. Idempotent."""
        if self.is_forked:
            return

        def end() -> None:
            reason = FinishReason(type="abort", message="the engine was shut down")
            self._abort(self._core.request_table.live(), reason)
            self._stopping = True

        self.post(end)
        if threading.current_thread() is not self._thread:
            self.join()

    def join(self) -> BaseException | None:
        """Wait until the thread has ended; returns the exception that ended it, or None after `stop`."""
        if self.is_forked:
            return _forked_error()
        self._ended.wait()
        if not self._killed:
            self._thread.join()
        return self._cause

    def kill(self, cause: BaseException) -> None:
        """End every request and every command with `cause` now, from another thread: this one may be in a program that
        never ends. Idempotent."""
        if self.is_forked:
            return
        with self._lock:
            if self._ended.is_set():
                return
            self._cause, self._killed = self._cause or cause, True
            self._fail_all()

    def deliver(self, outs: Sequence[TokenIDOut]) -> None:
        """Give each output to the queue of its request. Engine thread only."""
        abandoned: list[str] = []
        receivers: list[OutputQueue] = []
        with self._lock:  # not after the final outputs of `kill`
            for out in outs:
                receiver = self._queues.get(out.rid)
                if receiver is None:
                    continue
                receivers.append(receiver)
                if not receiver.put(out):
                    abandoned.append(out.rid)
                if out.finish_reason is not None:
                    del self._queues[out.rid]
            for receiver in receivers:
                receiver.flush()
        self._abort(abandoned, FinishReason(type="abort", message="the caller is gone"))

    def _submit_command(self, function: Callable[[], _T]) -> concurrent.futures.Future[_T]:
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            with self._lock:
                if not future.set_running_or_notify_cancel():
                    return
                self._carried_out, is_late = future, self._ended.is_set()
            if is_late:  # killed since it was taken from the inbox
                future.set_exception(_dead_error(self._cause))
                return
            try:
                result = function()
            except Exception as cause:  # it is raised where the result is read
                self._carried_out = None
                _end_with(future.set_exception, cause)
            else:
                self._carried_out = None
                _end_with(future.set_result, result)

        def fail() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(_dead_error(self._cause))

        self._send(Command(run, fail))
        return future

    def _send(self, command: Command) -> None:
        if self.is_forked:
            self._cause = _forked_error()
            command.fail()
            return
        with self._lock:
            alive = self._cause is None and not self._stopping
            if alive:
                self._inbox.put(command)
        if not alive:
            command.fail()

    def _run(self) -> None:
        core = self._core
        try:
            while not self._stopping or not core.is_idle:
                self._run_commands()
                if self._cause is not None:
                    raise self._cause
                if core.has_work:
                    self.deliver(core.step().outs)
                while self._pause_waiters and (core.pause_mode is None or not core.has_work):
                    self._pause_waiters.pop().set_result(None)
        except Exception as cause:
            logger.exception("the engine thread ends")
            explained = self._explain(cause)
            self._cause = self._cause if self._ended.is_set() else explained
        with self._lock:
            if not self._ended.is_set():
                self._fail_all()

    def _fail_all(self) -> None:
        """End what waits, with the cause. Under the lock, once."""
        self._stopping = True
        queues, self._queues = self._queues, {}
        for rid, receiver in queues.items():
            receiver.put(_final_output(rid, _dead_error(self._cause)))
            receiver.flush()
        for future in self._pause_waiters:
            future.set_exception(_dead_error(self._cause))
        self._pause_waiters = []
        if self._carried_out is not None:  # it may never return
            _end_with(self._carried_out.set_exception, _dead_error(self._cause))
        while not self._inbox.empty():
            self._inbox.get().fail()  # it arrived too late: its caller gets the cause
        self._ended.set()

    def _run_commands(self) -> None:
        """Run the commands that have arrived; block for the first if there is no other work."""
        if not self._core.has_work and not self._stopping:
            self._inbox.get().run()
        while not self._inbox.empty():
            command = self._inbox.get()
            if self._stopping or self._cause is not None:
                command.fail()
            else:
                command.run()

    def _admit(self, submission: Submission) -> None:
        """Add the requests of one call to the core. Raises what `submit` raises."""
        requests, live = submission.requests, self._core.request_table.live_ids()
        duplicate = next((rid for request in requests for rid in (request.rid, request.call_id) if rid in live), None)
        if duplicate is not None:
            text = f"{PARAM}={duplicate!r} is the id of a request that has not ended (Duplicate request ID)"
            text = f"{text}; choose another, or leave it out"
            raise InvalidRequestError(text, param="rid", code="duplicate_request_id")
        if any(request.rid in self._queues for request in requests):  # aborted, but its last output is not delivered
            self._finish_step_in_flight()
        self._core.add([Req(request) for request in requests], submission.detokenizers)
        self._queues.update(dict.fromkeys((request.rid for request in requests), submission.queue))

    def _finish_step_in_flight(self) -> None:
        """Process and deliver the step in flight. What fails in it ends the thread, as in any step, and not only the
        command that waits for it; both have the same reason."""
        try:
            outs = self._core.drain().outs
        except Exception as cause:
            logger.exception("the step in flight has failed")
            explained = self._explain(cause)
            self._cause = self._cause or explained
            raise _dead_error(self._cause) from cause
        self.deliver(outs)

    def _abort(self, rids: Sequence[str], reason: FinishReason) -> None:
        for rid in rids:
            self._core.abort(rid, reason)


def _end_with(end: Callable[[_T], None], value: _T) -> None:
    """End a future, unless `kill` or the command itself has ended it."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        end(value)


def _forked_error() -> EngineDeadError:
    return EngineDeadError("the process was forked after the engine was built; build the Engine in the child")


def _dead_error(cause: BaseException | None) -> EngineDeadError:
    if isinstance(cause, EngineDeadError):
        return type(cause)(str(cause))
    reason = "it was shut down" if cause is None else _one_line(cause)
    error = EngineDeadError(f"the engine has ended: {reason}; build a new Engine")
    error.__cause__ = cause
    return error


def _one_line(cause: BaseException) -> str:
    """An exception in one line, without the traceback that some runtimes put into their text; the log has that."""
    lines = [line.strip() for line in str(cause).splitlines() if not line.lstrip().startswith("File ")]
    text = " ".join(lines).replace("Traceback (most recent call last):", "")
    return f"{type(cause).__name__}: {text[:_MAX_CAUSE_CHARS]}"


def _final_output(rid: str, error: EngineDeadError) -> TokenIDOut:
    """The last output of a request whose engine has ended."""
    return TokenIDOut(
        rid=rid,
        new_token_ids=(),
        output_logprobs=Logprobs(),
        input_logprobs=None,
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        weight_version=WeightVersion(),
        finish_reason=FinishReason(type="error", message=str(error)),
        return_routed_experts=False,
        routed_experts=None,
        error=error,
    )
