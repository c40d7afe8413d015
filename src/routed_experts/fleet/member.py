"""Member: a replica as the coordinator sees it, with the tasks that wait for it. Event loop only."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from routed_experts.fleet.messages import Answer, MemberGone, Refusal, Task

POLL_S = 10.0  # a poll without a task ends after it
TIMED_OUT = "replica_timeout"  # the code of an answer that has not come


class Member:
    """One replica: its tasks, and whether it lives."""

    def __init__(self, tag: str, handle: Any, task_ids: "itertools.count[int]") -> None:
        self.tag, self.handle = tag, handle
        self.is_leaving = False
        self.is_starting = False  # loads the weights of the fleet before it carries out a task
        self._task_ids = task_ids
        self._waiting: dict[int, tuple[Task, asyncio.Future[Answer]]] = {}
        self._undelivered: list[int] = []
        self._has_tasks = asyncio.Event()
        self._gone: str | None = None

    async def call(self, operation: str, *, timeout_s: float, **arguments: Any) -> Answer:
        """Run an operation. Raises MemberGone, TimeoutError."""
        if self._gone is not None:
            raise MemberGone(self._gone)
        task = Task(next(self._task_ids), operation, arguments)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[task.task_id] = task, future
        self._undelivered.append(task.task_id)
        self._has_tasks.set()
        try:
            return await asyncio.wait_for(future, timeout_s)
        finally:
            self._waiting.pop(task.task_id, None)

    async def next_tasks(self) -> list[Task]:
        """The tasks that were not delivered yet; empty after POLL_S without one."""
        try:
            await asyncio.wait_for(self._has_tasks.wait(), POLL_S)
        except TimeoutError:
            return []
        tasks = [self._waiting[number][0] for number in self._undelivered if number in self._waiting]
        self._undelivered.clear()
        self._has_tasks.clear()
        return tasks

    def answer(self, task_id: int, answer: Answer) -> None:
        """Take the answer of a task; one that comes too late, or twice, is dropped."""
        entry = self._waiting.get(task_id)
        if entry is not None and not entry[1].done():
            entry[1].set_result(answer)

    def rejoin(self, handle: Any) -> None:
        """Deliver again what may have been lost with a poll."""
        self.handle = handle
        self._undelivered = list(self._waiting)
        if self._undelivered:
            self._has_tasks.set()

    def end(self, reason: str) -> None:
        """End every call: the replica has died."""
        self._gone = reason
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(MemberGone(reason))


async def ask_members(
    members: Sequence[Member], operation: str, timeout_s: float, arguments: Mapping[str, Any]
) -> dict[str, Answer]:
    """Run an operation of these members, all at once; returns the answers by tag. Members that die meanwhile are left
    out, and one that is late has a refusal with the code TIMED_OUT."""

    async def ask(member: Member) -> Answer | None:
        try:
            return await member.call(operation, timeout_s=timeout_s, **arguments)
        except MemberGone:
            return None
        except TimeoutError:
            text = f"it has not done {operation} within {timeout_s:g} s"
            return Answer(refusal=Refusal(status=504, code=TIMED_OUT, message=text))

    answers = await asyncio.gather(*map(ask, members))
    return {member.tag: answer for member, answer in zip(members, answers, strict=True) if answer is not None}
