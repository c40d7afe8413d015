"""Link: a replica's side of the coordinator: it joins, asks for tasks, answers them, and joins again after a loss.

Event loop only."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from routed_experts.core.errors import InvalidRequestError, RoutedExpertsError
from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet.member import POLL_S
from routed_experts.fleet.messages import (
    Answer,
    CoordinatorFailed,
    CoordinatorLost,
    Joined,
    NumberedRows,
    Refusal,
    Report,
    Task,
)
from routed_experts.fleet.stop_clock import StopClock

CALL_S = 10.0
RETRY_S = 0.2
logger = logging.getLogger(__name__)
Operation = Callable[..., Awaitable[Any]]


class Client(Protocol):
    """The coordinator, as another process calls it."""

    async def call(self, method: str, *arguments: Any, timeout_s: float, **more: Any) -> Any:
        """Call a method of Coordinator. Raises CoordinatorLost; CoordinatorFailed where the method has raised."""
        ...


class Link:
    """The connection of a replica to the coordinator: it joins, reports, and carries out operations.

    `handle`: the actor of this replica. `report` gives its weights, `rows` what it keeps for fetching; `operations`
    are what the coordinator may ask for, by name."""

    def __init__(
        self,
        client: Client,
        *,
        handle: Any,
        report: Callable[[], Awaitable[Report]],
        operations: Mapping[str, Operation],
        rows: Callable[[], NumberedRows] = lambda: NumberedRows({}, 0.0),
    ) -> None:
        self._client, self._handle, self._report, self._operations = client, handle, report, operations
        self._rows = rows
        self.tag = ""
        self._instance = ""
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}  # by instance of the coordinator, and task
        self._loop_task: asyncio.Task[None] | None = None
        self._stop_clock: StopClock | None = None
        self._has_warned = False  # of a coordinator that calls wait for

    @property
    def recent_stop_s(self) -> float | None:
        """The seconds for which this process did not run, where that has only just ended."""
        return None if self._stop_clock is None else self._stop_clock.recent_stop_s

    async def join(self, timeout_s: float) -> Joined:
        """Join as a new replica, and wait for an update that is under way. Raises CoordinatorLost, after `timeout_s`
        without one."""
        report = await self._report()
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    joined: Joined = await self._client.call("join", None, report, [self._handle], timeout_s=timeout_s)
                except CoordinatorLost:
                    await asyncio.sleep(RETRY_S)
                    continue
                self.tag, self._instance = joined.tag, joined.instance
                return joined

    async def take_over(self, load: Callable[[str | None, WeightVersion], Awaitable[None]], timeout_s: float) -> Joined:
        """Join as a new replica and take over what the fleet has: its weights, by `load`, its pause and its released
        memory. Raises CoordinatorLost, and what the replica refuses, but for a pause: the replica serves without it."""
        joined = await self.join(timeout_s)
        if joined.version.update_count != (await self._report()).version.update_count:
            await load(joined.model_path, joined.version)
            joined = await self.call("synced", joined.tag)
        if joined.pause is not None:
            try:
                await self._operations["pause"](mode=joined.pause)
            except RoutedExpertsError as error:
                logger.error(
                    "replica %s does not take the pause %r of the fleet over: %s", self.tag, joined.pause, error
                )
        if joined.released:
            await self._operations["release_memory"](tags=list(joined.released), running="retract")
        return joined

    def start(self) -> None:
        """Begin to carry out tasks."""
        self._stop_clock = StopClock.start()
        self._loop_task = asyncio.create_task(self._run())

    async def call(self, method: str, *arguments: Any, timeout_s: float = CALL_S, **more: Any) -> Any:
        """Call the coordinator. Raises CoordinatorLost."""
        return await self._client.call(method, *arguments, timeout_s=timeout_s, **more)

    async def call_when_reached(self, method: str, *arguments: Any) -> Any:
        """Call the coordinator, again and again until it is reached: it is restarted within seconds. The caller sets a
        limit of time. Raises CoordinatorFailed where the method raises: it would again."""
        while True:
            try:
                result = await self.call(method, *arguments)
            except CoordinatorFailed:
                raise
            except CoordinatorLost as error:
                if not self._has_warned:  # once for all calls that wait
                    logger.warning("requests wait for the coordinator of the fleet, which is not reached: %s", error)
                self._has_warned = True
                await asyncio.sleep(RETRY_S)
            else:
                self._has_warned = False
                return result

    async def _run(self) -> None:
        while True:
            try:
                tasks = await self._client.call("poll", self.tag, self._instance, timeout_s=2 * POLL_S)
                if tasks is None:
                    await self._rejoin()
                    continue
            except CoordinatorLost as error:
                logger.debug("the coordinator is not reached: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            for task in tasks:
                key = self._instance, task.task_id
                if key not in self._running:
                    self._running[key] = asyncio.create_task(self._carry_out(task, key))

    async def _rejoin(self) -> None:
        """Join a coordinator that was restarted."""
        joined: Joined = await self._client.call(
            "join", self.tag, await self._report(), [self._handle], self._rows(), timeout_s=CALL_S
        )
        self._instance = joined.instance

    async def _carry_out(self, task: Task, key: tuple[str, int]) -> None:
        answer = await run_operation(self._operations, task)
        del self._running[key]
        if key[0] != self._instance:
            return  # the coordinator that asked is gone, and the present one may have a task of this number
        try:
            await self._client.call("answer", self.tag, task.task_id, answer, timeout_s=CALL_S)
        except CoordinatorLost as error:
            logger.debug("the answer of %s is lost with the coordinator: %s", task.operation, error)


async def run_operation(operations: Mapping[str, Operation], task: Task) -> Answer:
    """Run a task; an error of ours becomes a refusal, any other one too, without its text."""
    operation = operations.get(task.operation)
    if operation is None:
        text = f"this replica has no operation {task.operation}; run one version of the package in all replicas"
        return Answer(refusal=Refusal(status=500, code="internal_error", message=text))
    try:
        return Answer(await operation(**task.arguments))
    except RoutedExpertsError as error:
        return Answer(refusal=to_refusal(error))
    except Exception:
        logger.exception("the operation %s failed", task.operation)
        text = f"{task.operation} failed; the log of the replica has the cause"
        return Answer(refusal=Refusal(status=500, code="internal_error", message=text))


def to_refusal(error: RoutedExpertsError) -> Refusal:
    """An error as a value."""
    param = error.param if isinstance(error, InvalidRequestError) else None
    return Refusal(status=error.status, code=error.code, message=" ".join(str(error).split()), param=param)
