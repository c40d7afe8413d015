"""Replicas of a fleet without Ray, processes or engines: members with the real WeightMember and Link, engines that only
count versions, and a world that can kill each of them, or the coordinator, at every event.

An event is the moment before or after a member carries out an operation. After every event the world writes down with
which version each living member would start a request now: these are the admissions."""

import asyncio
import contextlib
import itertools
from pathlib import Path

from routed_experts.core.errors import WeightsMismatchError
from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet.coordinator import Coordinator
from routed_experts.fleet.link import Link, run_operation
from routed_experts.fleet.messages import CoordinatorLost, MemberGone, Task
from routed_experts.fleet.weight_member import WeightMember

BAD = "bad"  # a path that the members in `refusing` do not take


class CoordinatorDied(BaseException):
    """Ends the coordinator's code where it is."""


class Timer:
    """A call that a test runs when it wants."""

    def __init__(self, seconds, call):
        self.seconds, self.call, self.is_cancelled = seconds, call, False

    def cancel(self):
        self.is_cancelled = True


class VersionEngine:
    """An engine that is only a version."""

    def __init__(self):
        self.weight_version, self.prepared, self.held, self.paused = WeightVersion(label="first"), None, False, None
        self.path = None
        self.refuses, self.released = False, ()

    @property
    def count(self):
        return self.weight_version.update_count

    def prepare_weights(self, path, *, version, update_count):
        if self.refuses and path == Path(BAD):
            raise WeightsMismatchError("it does not like these weights", param="model_path")
        assert self.prepared is None, "an engine has one pair of weights beside the served ones"
        self.prepared = WeightVersion(label=version, update_count=update_count), path

    def commit_weights(self, *, cache):
        assert self.prepared is not None and self.prepared[0].update_count > self.count
        (self.weight_version, self.path), self.prepared = self.prepared, None

    def drop_weights(self):
        self.prepared = None

    def update_weight_version(self, version, *, update_count):
        assert update_count > self.count and self.prepared is None
        self.weight_version = WeightVersion(label=version, update_count=update_count)

    def hold_admission(self):
        self.held = True

    def open_admission(self):
        self.held = False


class World:
    """All members and what happens to them. `kill_at`, `end_coordinator_at`: numbers of events. `delivers_rest`: what
    the coordinator has sent by its death still arrives."""

    def __init__(self, num_members=3, *, kill_at=None, end_coordinator_at=None, delivers_rest=False):
        self.kill_at, self.delivers_rest = kill_at, delivers_rest
        self._end_coordinator_at, self.is_cut = end_coordinator_at, False
        self.num_events, self.admissions, self.evicted = 0, [], []
        self.members = [SimulatedMember(self, f"r{number}") for number in range(num_members)]

    def restart_coordinator(self, *, end_at=None):
        """Another coordinator, which ends at the event of this number."""
        self._end_coordinator_at, self.is_cut = end_at, False

    @property
    def living(self):
        return [member for member in self.members if member.is_alive]

    def event(self, member):
        """One event at `member`."""
        number, self.num_events = self.num_events, self.num_events + 1
        if number == self.kill_at:
            member.is_alive = False
        self.observe()
        if number == self._end_coordinator_at:
            self.is_cut = not self.delivers_rest
            raise CoordinatorDied

    def observe(self):
        self.admissions += [(member.tag, member.engine.count) for member in self.living if not member.engine.held]

    async def evict(self, member, reason):
        self.evicted.append((member.tag, reason))
        self.members[[m.tag for m in self.members].index(member.tag)].is_alive = False

    async def reports(self):
        """What a coordinator that was restarted hears."""
        return {member.tag: await member.weights.report() for member in self.living}

    def check_order(self):
        """K8: no request starts with older weights than one that started before it."""
        versions = [version for _, version in self.admissions]
        assert versions == sorted(versions), self.admissions

    def check_whole(self, version=None):
        """At the end: one version, nothing held, nothing left over."""
        states = {(m.engine.count, m.engine.held, m.engine.prepared) for m in self.living}
        assert states <= {(v, False, None) for _, v in self.admissions[-1:]} or not self.living, states
        if version is not None:
            assert {m.engine.count for m in self.living} <= {version}
            assert len({m.engine.weight_version for m in self.living}) <= 1, "one label a count"


class SimulatedMember:
    """A member as two_phase calls it."""

    def __init__(self, world, tag):
        self.world, self.tag, self.is_alive = world, tag, True
        self.engine, self.timers = VersionEngine(), []
        self.weights = WeightMember(self.engine, find_folder=Path, call_later=self._call_later)

    def operations(self):
        weights = self.weights
        return {
            "report": weights.settled_report,
            "prepare": weights.prepare,
            "hold": weights.hold,
            "commit": weights.commit,
            "release": weights.release,
            "pause": self._pause,
            "resume": self._resume,
            "release_memory": self._release_memory,
            "resume_memory": self._resume_memory,
            "abort": self._none,
            "health": self._health,
            "is_idle": self._is_idle,
            "flush": self._none,
        }

    async def call(self, operation, *, timeout_s, **arguments):
        if not self.is_alive:
            raise MemberGone(self.tag)
        self.world.event(self)
        await asyncio.sleep(0)  # the others' calls are on their way
        if self.world.is_cut:
            raise CoordinatorDied
        if not self.is_alive:
            raise MemberGone(self.tag)
        answer = await run_operation(self.operations(), Task(0, operation, arguments))
        self.world.event(self)
        if not self.is_alive:
            raise MemberGone(self.tag)
        return answer

    async def silence(self):
        """The coordinator was silent until every timer of this member was due."""
        for timer in self.timers:
            if not timer.is_cancelled:
                timer.call()
        if self.weights._opening is not None:
            await self.weights._opening

    def _call_later(self, seconds, call):
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]

    async def _pause(self, mode):
        self.engine.paused = mode

    async def _resume(self):
        self.engine.paused = None

    async def _release_memory(self, tags, running):
        released = {*self.engine.released, *(("kv_cache", "weights") if tags is None else tags)}
        self.engine.released = tuple(sorted(released))
        return self.engine.released

    async def _resume_memory(self, tags):
        self.engine.released = ()
        return ()

    async def _none(self, **arguments):
        return 0

    async def _is_idle(self):
        return True

    async def _health(self):
        return {"state": "serving", "version": self.engine.weight_version, "model_path": self.weights.model_path}


class LocalClient:
    """A coordinator of the same event loop, which can die."""

    def __init__(self, world, num_replicas, **options):
        self.world, self.num_replicas, self.options = world, num_replicas, options
        self.coordinator = None
        self.start(was_restarted=False)

    def start(self, *, was_restarted):
        async def probe(member):
            if not member.is_alive:
                raise MemberGone("it was killed")

        def kill(member):
            self.world.evicted.append((member.tag, ""))
            member.is_alive = False

        self.coordinator = Coordinator(
            num_replicas=self.num_replicas,
            weight_update_timeout=5.0,
            probe=probe,
            kill=kill,
            was_restarted=was_restarted,
        )
        self.is_alive, self._death = True, asyncio.Event()

    def die(self):
        """End the coordinator: what it was doing stops, and what it knew is lost."""
        self.is_alive = False
        self._death.set()
        for task in self.coordinator._tasks:
            task.cancel()

    async def call(self, method, *arguments, timeout_s, **more):
        if not self.is_alive:
            raise CoordinatorLost(method)
        result = asyncio.ensure_future(getattr(self.coordinator, method)(*arguments, **more))
        death = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({result, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if death.done() or not result.done():
                raise CoordinatorLost(method)
            return result.result()
        finally:
            result.cancel()
            death.cancel()


@contextlib.asynccontextmanager
async def local_fleet(num_members=2):
    """A coordinator and members that have joined it, in this event loop. Yields the world, the client and the links."""
    world = World(num_members)
    client = LocalClient(world, num_members)
    links = {}
    for member in world.members:
        links[member.tag] = await join(client, member)
    try:
        yield world, client, links
    finally:
        client.die()
        for link in links.values():
            link._loop_task.cancel()


async def join(client, member):
    """Join as a new replica does."""
    link = Link(client, handle=member, report=member.weights.report, operations=member.operations())
    joined = await link.take_over(member.weights.load, 5.0)
    member.tag = joined.tag
    link.start()
    return link


async def until(condition, seconds=5.0):
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(seconds):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0)
