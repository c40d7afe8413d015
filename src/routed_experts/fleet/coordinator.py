"""Coordinator: the members of a fleet, the version of their weights, and calls to one or all of them. A named actor.

It holds no request and no row, but knows which replica keeps the rows of an id that a client gave. Replicas poll it for
tasks, so that calls go one way: from a replica to the coordinator.
Ray restarts it when it dies; the replicas join again and tell what they serve, and a split between them is healed
before anything else. Event loop only."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet import two_phase
from routed_experts.fleet.member import TIMED_OUT, Member, ask_members
from routed_experts.fleet.messages import (
    Answer,
    FleetStatus,
    Joined,
    MemberGone,
    MemberStatus,
    NumberedRows,
    Refusal,
    Report,
    RowLocation,
    Task,
    describe_version,
    describe_weights,
)
from routed_experts.fleet.request_ids import tag_of
from routed_experts.fleet.row_directory import RowDirectory

PROBE_INTERVAL_S = 0.5
REJOIN_S = 10.0  # in which the members of a coordinator that was restarted come back
HEALTH_S = 1.0
DROP_S = 1.0  # in which a replica drops rows, whose id a client has used again
ABANDONED_S = 600.0  # without a replica, after which the coordinator ends
logger = logging.getLogger(__name__)


class Coordinator:
    """`probe` raises MemberGone for the handle of a dead replica, and `kill` ends one by its handle. `on_abandoned` is
    called when there has been no replica for ABANDONED_S."""

    def __init__(
        self,
        *,
        num_replicas: int,
        weight_update_timeout: float,
        probe: Callable[[Any], Awaitable[None]],
        kill: Callable[[Any], None],
        on_abandoned: Callable[[], None] = lambda: None,
        was_restarted: bool = False,
    ) -> None:
        self._num_replicas, self._prepare_s = num_replicas, weight_update_timeout
        self._probe, self._kill, self._on_abandoned = probe, kill, on_abandoned
        self._instance = uuid.uuid4().hex
        self._members: dict[str, Member] = {}
        self._reports: dict[str, Report] = {}  # of members that join again
        self._tasks: set[asyncio.Task[None]] = set()
        self._task_ids = itertools.count()
        # A replica that has died with the coordinator before this one may have had any tag: the clock is beyond all.
        self._next_tag = int(time.time()) if was_restarted else 0
        self._row_directory = RowDirectory(first=time.time_ns() if was_restarted else 0, clock=time.monotonic)
        self._last_count = 0  # of all updates that a replica has met, also of those that were refused
        self._version = WeightVersion()  # until a replica joins, which tells its label
        self._path: str | None = None
        self._pause: str | None = None
        self._released: tuple[str, ...] = ()  # tags of device memory
        self._num_updates = 0  # one at a time, and one that heals a member; also while a flush or a join ends before
        self._deaths = 0
        self._failure: tuple[Refusal, bool] | None = None
        self._lock = asyncio.Lock()  # of an update, a flush and a join: one at a time
        self._syncing: set[str] = set()  # tags of replicas that load the version of the fleet
        self._all_back = asyncio.Event()
        self._recovery: asyncio.Task[None] | None = None
        self._is_recovering = was_restarted

    async def join(
        self, tag: str | None, report: Report, handle: Sequence[Any], rows: NumberedRows | None = None
    ) -> Joined:
        """Take a replica in: a new one (`tag` None), or one that was there before this coordinator started, with the
        rows that it keeps. `handle`: its actor, in a list. A new one waits for an update that is under way."""
        if tag is not None:
            if rows is not None:
                self._row_directory.add(tag, rows.numbers, rows.retention_s)
            self._rejoin(tag, report, handle[0])
            return self._joined(tag)
        if self._is_recovering:
            await asyncio.shield(self._start_recovery())
        async with self._lock:
            tag = f"r{self._next_tag}"
            self._next_tag += 1
            member = self._add(tag, handle[0])
            self._note_counts(report)
            if self._version.update_count == report.version.update_count == 0:
                self._version = report.version  # all replicas start with the same weights, under one label
            if report.version.update_count != self._version.update_count:
                self._syncing.add(tag)
                member.is_starting = True
            return self._joined(tag)

    async def synced(self, tag: str) -> Joined:
        """Note that a new replica has loaded the version of the fleet; it is asked what all are from now on. Returns
        what it takes over: it was not asked meanwhile."""
        self._syncing.discard(tag)
        if (member := self._members.get(tag)) is not None:
            member.is_starting = False
        return self._joined(tag)

    async def poll(self, tag: str, instance: str) -> list[Task] | None:
        """The next tasks of a replica; None asks it to join again."""
        member = self._members.get(tag)
        return None if member is None or instance != self._instance else await member.next_tasks()

    async def answer(self, tag: str, task_id: int, answer: Answer) -> None:
        """Take the answer of a task."""
        if (member := self._members.get(tag)) is not None:
            member.answer(task_id, answer)

    async def failed(self, refusal: Refusal, is_machine: bool) -> None:
        """Note that a replica cannot start; `is_machine`: because of its machine."""
        self._failure = self._failure or (refusal, is_machine)

    async def failure(self) -> tuple[Refusal, bool] | None:
        """Why the first replica that could not start could not, and whether its machine was at fault."""
        return self._failure

    async def version(self) -> WeightVersion | Refusal:
        """The version of the fleet's weights; refused while the replicas, which tell it, join again."""
        return self._unavailable() or self._version

    async def reserve_rows(self, request_id: str, tag: str, retention_s: float) -> int:
        """Note a replica as the one that keeps the rows of an id that a client gave, for `retention_s` at most; the one
        before drops those of an earlier request. Returns the number of the reservation."""
        number, former = self._row_directory.reserve(request_id, tag, retention_s)
        others = {former, tag_of(request_id)} - {tag}  # the latter has made the id
        arguments = {"request_id": request_id, "before": number}
        members = [member for other, member in self._members.items() if other in others]
        await ask_members(members, "drop_rows", DROP_S, arguments)
        return number

    async def locate_rows(self, request_id: str) -> RowLocation | Refusal | None:
        """The replica to which a client gave an id last, else the one that has made it; None where there is neither.
        Refused while some may not have told theirs."""
        if (refusal := self._unavailable()) is not None:
            return refusal
        tag = self._row_directory.get(request_id) or tag_of(request_id)
        return None if tag is None else RowLocation(tag, has_ended=tag not in self._members)

    async def serving(self) -> tuple[str, ...] | None:
        """The members that have the version of the fleet; None while members of the coordinator before this one join
        again, and none of them is missed."""
        if self._is_recovering:
            return None
        return tuple(tag for tag in self._members if tag not in self._syncing)

    async def ask(self, tag: str, operation: str, timeout_s: float, arguments: Mapping[str, Any]) -> Answer | None:
        """Run an operation of one replica; None: it is gone."""
        member = self._members.get(tag)
        return None if member is None else (await ask_members([member], operation, timeout_s, arguments)).get(tag)

    async def ask_all(
        self, operation: str, timeout_s: float, arguments: Mapping[str, Any], leave_out: str | None = None
    ) -> dict[str, Answer] | Refusal:
        """Run an operation of every replica but `leave_out`; those that start or die meanwhile are left out. Refused
        while some may not have joined again."""
        if (refusal := self._unavailable()) is not None:
            return refusal
        members = [member for member in self._started() if member.tag != leave_out]
        return await ask_members(members, operation, timeout_s, arguments)

    async def release_memory(self, tags: Sequence[str], running: str, timeout_s: float) -> dict[str, Answer] | Refusal:
        """Release device memory of all replicas, also of those that start until it is taken back."""
        if (refusal := self._unavailable()) is not None:
            return refusal
        former = self._released
        self._released = tuple(sorted({*former, *tags}))
        answers = await ask_members(self._started(), "release_memory", timeout_s, {"tags": tags, "running": running})
        self._note_released(answers, former)
        return answers

    async def resume_memory(self, tags: Sequence[str] | None, timeout_s: float) -> dict[str, Answer] | Refusal:
        """Take device memory of all replicas back; `tags` None: all."""
        if (refusal := self._unavailable()) is not None:
            return refusal
        former = self._released
        if "weights" not in former and (tags is None or "kv_cache" in tags):
            self._released = ()  # for a replica that joins meanwhile; with weights released all refuse
        answers = await ask_members(self._started(), "resume_memory", timeout_s, {"tags": tags})
        self._note_released(answers, former)
        return answers

    def _note_released(self, answers: Mapping[str, Answer], former: tuple[str, ...]) -> None:
        """Note what is released now on any replica; where all refuse, that is what was before."""
        values = [answer.value for answer in answers.values() if answer.refusal is None]
        self._released = tuple(sorted({tag for value in values for tag in value})) if values else former

    async def pause(self, mode: str, timeout_s: float) -> dict[str, Answer] | Refusal:
        """Pause all replicas, also those that start until the pause ends. Where all refuse, the pause is what it was
        before; a replica that does not answer in time may pause yet."""
        former = self._pause
        if (refusal := await self.set_pause(mode)) is not None:  # before: a replica that joins meanwhile is not asked
            return refusal
        answers = await ask_members(self._started(), "pause", timeout_s, {"mode": mode})
        refusals = [answer.refusal for answer in answers.values() if answer.refusal is not None]
        has_refused = len(refusals) == len(answers) > 0 and all(refusal.code != TIMED_OUT for refusal in refusals)
        if has_refused and self._pause == mode:
            self._pause = former
        return answers

    async def set_pause(self, pause: str | None) -> Refusal | None:
        """Note the pause of the fleet, which replicas that start later take over. Refused while the replicas, which
        tell the present one, join again."""
        if (refusal := self._unavailable()) is not None:
            return refusal
        self._pause = pause
        return None

    async def update(
        self, model_path: str | None, label: str | None, cache: str, *, abort_first: bool = False
    ) -> WeightVersion | Refusal:
        """Bring every replica to other weights, in two phases; `model_path` None: to another label of the same ones.
        Returns their version, of the next count; `label` None keeps the present one."""
        if (refusal := self._unavailable()) is not None:
            return refusal
        if self._num_updates:
            text = "another update of the fleet's weights is under way; try again when it has ended"
            return Refusal(status=409, code="update_in_progress", message=text)
        async with self._updating():
            return await self._update(model_path, label, cache, abort_first=abort_first)

    @contextlib.asynccontextmanager
    async def _updating(self) -> AsyncGenerator[None]:
        """An update, which a flush or a join that is under way ends before."""
        self._num_updates += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_updates -= 1

    async def _update(
        self, model_path: str | None, label: str | None, cache: str, *, abort_first: bool
    ) -> WeightVersion | Refusal:
        served = self._version
        before = self._path, self._released
        version = WeightVersion(label=served.label if label is None else label, update_count=self._last_count + 1)
        self._last_count += 1
        members = list(self._members.values())
        if not members:
            return Refusal(status=503, code="fleet_unavailable", message="no replica serves; try again soon")

        async def end_all() -> None:
            await ask_members(members, "abort", two_phase.ABORT_S, {"rid": None})

        path = self._path if model_path is None else model_path

        def decide() -> None:
            self._version, self._path = version, path
            if model_path is not None:  # the update brings them back
                self._released = tuple(tag for tag in self._released if tag != "weights")

        try:
            await two_phase.update(
                members,
                model_path=model_path,
                version=version,
                cache=cache,
                prepare_s=self._prepare_s,
                evict=self._evict,
                on_decided=decide,
                before_commit=end_all if abort_first else None,
                spawn=self._spawn,
            )
        except two_phase.NoReplicaLeft as error:
            self._version, (self._path, self._released) = served, before
            text = f"{error}; replicas that start next have the old weights"
            return Refusal(status=503, code="fleet_unavailable", message=text)
        except two_phase.UpdateRefused as error:
            if error.is_late:
                text = f"{error}; the old weights serve on in all replicas; try again when every replica answers"
                return Refusal(status=504, code="update_timeout", message=text)
            text = f"refused by {error}; the old weights serve on in all replicas"
            return Refusal(status=400, code="weights_mismatch", message=text, param="model_path")
        return version

    async def flush(self, *, drafts: bool) -> dict[str, Answer] | Refusal:
        """Drop the cached prefixes of all replicas, or, while a request runs anywhere, of none."""
        if (refusal := self._unavailable()) is not None:
            return refusal
        if self._num_updates:
            text = "an update of the fleet's weights is under way; try again when it has ended"
            return Refusal(status=409, code="update_in_progress", message=text)
        async with self._lock:
            members = self._started()
            try:
                held = await ask_members(members, "hold", two_phase.HOLD_S, {})
                idle = await ask_members(members, "is_idle", two_phase.HOLD_S, {})
                failed = {
                    tag: answer.refusal for tag, answer in (*held.items(), *idle.items()) if answer.refusal is not None
                }
                if failed:
                    lines = "; ".join(f"{tag}: {refusal.message}" for tag, refusal in failed.items())
                    text = f"nothing is flushed, for replicas do not answer: {lines}; try again soon"
                    return Refusal(status=503, code="fleet_unavailable", message=text)
                busy = [tag for tag, answer in idle.items() if answer.value is not True]
                if busy:
                    text = f"requests run on {', '.join(busy)}; try again when they have ended"
                    return Refusal(status=400, code="requests_running", message=text)
                return await ask_members(members, "flush", two_phase.COMMIT_S, {"drafts": drafts})
            finally:
                await ask_members(members, "release", two_phase.COMMIT_S, {})

    async def status(self) -> FleetStatus:
        """The members with their health, and whether their versions are one."""
        members = [member for tag, member in self._members.items() if tag not in self._syncing]
        answers = await ask_members(members, "health", HEALTH_S, {})
        statuses = [
            MemberStatus(tag, "loading") if tag in self._syncing else MemberStatus.of(tag, answers.get(tag))
            for tag in self._members
        ]
        return FleetStatus(
            members=tuple(statuses),
            num_replicas=self._num_replicas,
            version=self._version,
            problem=self._problem(statuses),
            deaths=self._deaths,
        )

    async def drain(self, timeout_s: float) -> None:
        """Let every replica finish what runs, take nothing new, and end the rest after `timeout_s`."""
        for member in self._members.values():
            member.is_leaving = True
        await ask_members(self._started(), "drain", timeout_s + two_phase.COMMIT_S, {"grace_s": timeout_s})

    def _started(self) -> list[Member]:
        return [member for member in self._members.values() if not member.is_starting]

    def _unavailable(self) -> Refusal | None:
        """Why nothing can be asked of all replicas: some have not joined again."""
        if not self._is_recovering:
            return None
        return Refusal(status=503, code="fleet_unavailable", message=f"{self._problem()}; try again soon")

    def _joined(self, tag: str) -> Joined:
        return Joined(
            tag=tag,
            instance=self._instance,
            version=self._version,
            model_path=self._path,
            pause=self._pause,
            released=self._released,
        )

    def _add(self, tag: str, handle: Any) -> Member:
        self._members[tag] = member = Member(tag, handle, self._task_ids)
        self._spawn(self._watch(member))
        return member

    def _rejoin(self, tag: str, report: Report, handle: Any) -> None:
        if tag in self._members:
            self._members[tag].rejoin(handle)
            return
        self._add(tag, handle)
        self._next_tag = max(self._next_tag, int(tag.removeprefix("r")) + 1)
        self._note_counts(report)
        if self._is_recovering:
            self._reports[tag] = report
            if len(self._reports) >= self._num_replicas:
                self._all_back.set()
            self._start_recovery()
        else:  # it comes back later than the others: it is healed by itself
            self._syncing.add(tag)
            self._spawn(self._heal({tag: report}))

    def _note_counts(self, report: Report) -> None:
        self._last_count = max(self._last_count, report.version.update_count, report.prepared or 0)

    def _start_recovery(self) -> "asyncio.Task[None]":
        if self._recovery is None:
            self._recovery = self._spawn(self._recover())
        return self._recovery

    async def _recover(self) -> None:
        """Wait for the members of the coordinator before this one, and bring them to one version."""
        async with self._lock:
            try:
                await asyncio.wait_for(self._all_back.wait(), REJOIN_S)
            except TimeoutError:
                logger.warning("%d of %d replicas have joined again", len(self._reports), self._num_replicas)
            joined, self._reports = self._reports, {}
            reports = await self._settle(joined)
            members = [self._members[tag] for tag in reports]
            self._version, self._path = await two_phase.heal(
                reports, members, prepare_s=self._prepare_s, evict=self._evict
            )
            self._pause = next((report.pause for report in reports.values() if report.pause is not None), None)
            self._released = tuple(sorted({tag for report in reports.values() for tag in report.released}))
            late, self._reports = self._reports, {}
            self._syncing |= late.keys() & self._members.keys()
            self._is_recovering = False
            if late:  # they came while the others were healed
                self._spawn(self._heal(late))
            served = describe_version(self._version)
            logger.info("the coordinator is back: %d replicas serve version %s", len(members), served)

    async def _settle(self, reports: Mapping[str, Report]) -> dict[str, Report]:
        """The reports of these members after the operations that run there, of a coordinator that is gone. A member
        that does not answer is evicted."""

        async def settle(member: Member, is_busy: bool) -> Report | None:
            timeout_s = self._prepare_s if is_busy else two_phase.COMMIT_S
            answer = (await ask_members([member], "report", timeout_s, {})).get(member.tag)
            if answer is None:
                return None
            if answer.refusal is not None:
                await self._evict(member, f"it does not say what it serves: {answer.refusal.message}")
                return None
            report: Report = answer.value
            self._note_counts(report)
            return report

        members = [(self._members[tag], report.is_busy) for tag, report in reports.items() if tag in self._members]
        settled = await asyncio.gather(*(settle(member, is_busy) for member, is_busy in members))
        answers = zip(members, settled, strict=True)
        return {
            member.tag: report for (member, _), report in answers if report is not None and member.tag in self._members
        }

    async def _heal(self, late: Mapping[str, Report]) -> None:
        """Bring members that came late to the version of the fleet, and to its pause and released memory."""
        async with self._updating():
            for tag, report in (await self._settle(late)).items():
                if (member := self._members.get(tag)) is not None:
                    await self._heal_late(member, report)

    async def _heal_late(self, member: Member, report: Report) -> None:
        is_older = report.version.update_count < self._version.update_count
        if self._members.keys() <= self._syncing and not is_older:  # no other member has a version
            self._version, self._path = report.version, report.model_path
        served, reported = (self._version, self._path), (report.version, report.model_path)
        if reported != served and not is_older:
            text = f"it serves {describe_weights(*reported)}, and the fleet {describe_weights(*served)}"
            await self._evict(member, text)
            return
        fleet = dataclasses.replace(report, version=self._version, model_path=self._path)
        await two_phase.heal({member.tag: report, "": fleet}, [member], prepare_s=self._prepare_s, evict=self._evict)
        if self._pause != report.pause:
            operation, arguments = ("resume", {}) if self._pause is None else ("pause", {"mode": self._pause})
            await ask_members([member], operation, two_phase.COMMIT_S, arguments)
        missing = [name for name in self._released if name not in report.released]
        if missing:
            arguments = {"tags": missing, "running": "retract"}
            await ask_members([member], "release_memory", two_phase.COMMIT_S, arguments)
        elif report.released and not self._released:
            await ask_members([member], "resume_memory", two_phase.COMMIT_S, {"tags": None})
        self._syncing.discard(member.tag)

    def _problem(self, statuses: Sequence[MemberStatus] = ()) -> str | None:
        if self._is_recovering:
            return "the coordinator was restarted and waits for the replicas"
        # A new replica gets no request before it has loaded; one that joins again serves meanwhile what it had.
        if serving := sorted(member.tag for member in self._started() if member.tag in self._syncing):
            return f"{', '.join(serving)} loads version {describe_version(self._version)}"
        weights = {(status.version, status.model_path) for status in statuses if status.version is not None}
        if len({version for version, _ in weights}) < len(weights):
            return f"replicas serve {', '.join(sorted(describe_weights(*served) for served in weights))}"
        if len(weights) > 1:
            versions = sorted((version for version, _ in weights), key=lambda version: version.update_count)
            return f"replicas serve versions {', '.join(map(describe_version, versions))}"
        return None

    async def _watch(self, member: Member) -> None:
        """Notice the death of a replica."""
        pause = asyncio.Event()
        while True:
            try:
                await self._probe(member.handle)
            except MemberGone as error:
                self._remove(member, str(error))
                return
            try:
                await asyncio.wait_for(pause.wait(), PROBE_INTERVAL_S)
            except TimeoutError:
                continue

    def _remove(self, member: Member, reason: str) -> None:
        if self._members.get(member.tag) is member:
            del self._members[member.tag]
            self._syncing.discard(member.tag)
            if not member.is_leaving:
                self._deaths += 1
                logger.error("replica %s has died: %s", member.tag, reason)
            if not self._members:
                self._spawn(self._end_if_abandoned())
        member.end(reason)

    async def _end_if_abandoned(self) -> None:
        await asyncio.sleep(ABANDONED_S)
        if not self._members:
            self._on_abandoned()

    async def _evict(self, member: two_phase.Member, reason: str) -> None:
        """End a replica that is not of the fleet's version; Ray starts another one, which loads it."""
        assert isinstance(member, Member)
        logger.error("replica %s is ended: %s", member.tag, reason)
        self._kill(member.handle)
        self._remove(member, reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the coordinator failed", exc_info=error)
