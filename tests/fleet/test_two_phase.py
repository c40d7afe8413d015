"""The two phases of a weight update with every crash point: no request ever starts with older weights than one before
it, and whatever dies, what is left serves one version. No Ray, no process, no clock."""

import asyncio
import dataclasses

import pytest

from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet import two_phase, weight_member
from support.fleet_simulation import BAD, CoordinatorDied, SimulatedMember, World

OLD, NEW = 0, 1


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch):
    """Threads of the standard library run at once, so that events have numbers."""

    async def inline(function, *arguments, **keywords):
        return function(*arguments, **keywords)

    monkeypatch.setattr(weight_member.asyncio, "to_thread", inline)


def numbered(count, label=None):
    return WeightVersion(label=f"w{count}" if label is None else label, update_count=count)


async def update(world, path="new", version=NEW, **more):
    decided = []
    try:
        await two_phase.update(
            world.living,
            model_path=path,
            version=numbered(version),
            cache="flush",
            prepare_s=1.0,
            evict=world.evict,
            on_decided=lambda: decided.append(version),
            **more,
        )
    finally:
        world.observe()
    return decided


async def heal(world):
    version, path = await two_phase.heal(await world.reports(), world.living, prepare_s=1.0, evict=world.evict)
    world.observe()
    return version.update_count, path


def num_events(**options):
    world = World(**options)
    asyncio.run(update(world))
    return world.num_events


EVENTS = num_events()


def test_an_update_without_faults_moves_all_members_once():
    world = World()
    assert asyncio.run(update(world)) == [NEW]
    assert EVENTS == 3 * 2 * 4, "prepare, hold, commit, release, before and after, of three members"
    world.check_order()
    world.check_whole(NEW)
    assert {version for _, version in world.admissions} == {OLD, NEW} and world.evicted == []
    assert all(timer.is_cancelled for member in world.members for timer in member.timers)


@pytest.mark.parametrize("event", range(EVENTS))
def test_a_member_may_die_at_every_event(event):
    world = World(kill_at=event)
    asyncio.run(update(world))
    assert len(world.living) == 2 and world.evicted == []
    world.check_order()
    world.check_whole(NEW)


@pytest.mark.parametrize("delivers_rest", [False, True])
@pytest.mark.parametrize("event", range(EVENTS))
def test_the_coordinator_may_die_at_every_event(event, delivers_rest):
    """The next one heals what it finds: nothing has moved before the first swap, and everything does after it."""
    world = World(end_coordinator_at=event, delivers_rest=delivers_rest)

    async def run():
        with pytest.raises(CoordinatorDied):
            await update(world)
        world.restart_coordinator()
        served = [member.engine.count for member in world.living]
        version, path = await heal(world)
        assert (version, path) == ((NEW, "new") if NEW in served else (OLD, None))
        return version

    version = asyncio.run(run())
    assert len(world.living) == 3 and world.evicted == []
    world.check_order()
    world.check_whole(version)


@pytest.mark.parametrize("event", range(EVENTS))
def test_a_member_may_die_at_every_event_of_the_healing_after_every_death_of_the_coordinator(event):
    for second in range(EVENTS):
        world = World(end_coordinator_at=event)

        async def run(world=world, second=second):
            with pytest.raises(CoordinatorDied):
                await update(world)
            world.restart_coordinator()
            world.kill_at = world.num_events + second
            await heal(world)

        asyncio.run(run())
        world.check_order()
        world.check_whole()


@pytest.mark.parametrize("event", range(EVENTS))
def test_a_second_coordinator_may_die_while_it_heals(event):
    for second in range(EVENTS):
        world = World(end_coordinator_at=event)

        async def run(world=world, second=second):
            with pytest.raises(CoordinatorDied):
                await update(world)
            world.restart_coordinator(end_at=world.num_events + second)
            try:
                await heal(world)
            except CoordinatorDied:
                world.restart_coordinator()
                await heal(world)

        asyncio.run(run())
        assert len(world.living) == 3
        world.check_order()
        world.check_whole()


def test_the_healing_loads_before_it_holds():
    """A load may take longer than a hold: its time would be over in the middle of it."""
    world = World()

    async def run():
        for number in (0, 1):
            await world.members[number].weights.load("new", numbered(NEW))
        late = world.members[2]
        load = late.engine.prepare_weights

        def observed(path, **more):
            assert not any(member.engine.held for member in world.members)
            load(path, **more)

        late.engine.prepare_weights = observed
        assert await heal(world) == (NEW, "new")

    asyncio.run(run())
    assert world.evicted == [] and len(world.living) == 3
    world.check_whole(NEW)


def test_what_a_member_has_prepared_when_it_opens_by_itself_is_not_loaded_again():
    """The coordinator dies between two swaps, and the next one comes late."""
    world = World(end_coordinator_at=EVENTS // 2 + 3)

    async def run():
        with pytest.raises(CoordinatorDied):
            await update(world)
        for member in world.members:
            await member.silence()
            member.engine.prepare_weights = None
        world.restart_coordinator()
        assert await heal(world) == (NEW, "new")

    asyncio.run(run())
    assert world.evicted == []
    world.check_whole(NEW)


def test_members_with_other_weights_under_one_count_do_not_both_stay():
    world = World()

    async def run():
        for member, path in zip(world.members, ("one", "one", "two"), strict=True):
            await member.weights.load(path, numbered(NEW))
        assert await heal(world) == (NEW, "one")

    asyncio.run(run())
    assert [tag for tag, _ in world.evicted] == ["r2"]
    world.check_whole(NEW)


@pytest.mark.parametrize("refusing", [(0,), (2,), (0, 1, 2)])
def test_one_refusal_leaves_all_with_the_old_weights_and_names_who(refusing):
    world = World()
    for number in refusing:
        world.members[number].engine.refuses = True
    with pytest.raises(two_phase.UpdateRefused) as caught:
        asyncio.run(update(world, BAD))
    assert str(caught.value) == "; ".join(f"r{number}: it does not like these weights" for number in refusing)
    world.check_whole(OLD)
    assert {version for _, version in world.admissions} == {OLD}
    asyncio.run(update(world, "good"))
    world.check_order()
    world.check_whole(NEW)


@pytest.mark.parametrize("phase", ["prepare", "hold"])
def test_a_member_that_is_late_before_the_swap_stops_the_update(phase):
    world = World()
    late = world.members[1]
    call = late.call

    async def slow(operation, **arguments):
        if operation == phase:
            raise TimeoutError
        return await call(operation, **arguments)

    late.call = slow
    with pytest.raises(two_phase.UpdateRefused, match=r"r1 has not (loaded|held)"):
        asyncio.run(update(world))
    world.check_whole(OLD)
    assert {version for _, version in world.admissions} == {OLD} and world.evicted == []


@pytest.mark.parametrize("phase", ["prepare", "hold"])
def test_a_member_that_was_late_is_not_waited_for_again(phase):
    world, asked = World(), []

    async def silent(operation, *, timeout_s, **arguments):
        asked.append(operation)
        if operation == "release":
            await asyncio.Event().wait()
        if operation == phase:
            raise TimeoutError
        return await SimulatedMember.call(world.members[1], operation, timeout_s=timeout_s, **arguments)

    async def run():
        async with asyncio.timeout(5):
            await update(world)

    world.members[1].call = silent
    with pytest.raises(two_phase.UpdateRefused) as caught:
        asyncio.run(run())
    assert caught.value.is_late and asked[-1] == "release"
    assert [(m.engine.prepared, m.engine.held) for m in (world.members[0], world.members[2])] == [(None, False)] * 2
    world = World()
    world.members[0].engine.refuses = True
    with pytest.raises(two_phase.UpdateRefused) as caught:
        asyncio.run(update(world, BAD))
    assert not caught.value.is_late


@pytest.mark.parametrize("fault", ["late", "refuses"])
def test_a_member_that_does_not_swap_is_evicted_before_another_opens(fault):
    """Alone, it would start requests with old weights after others have started some with new ones."""
    world = World()
    stuck = world.members[1]
    call = stuck.call

    async def wrong(operation, **arguments):
        if operation == "commit":
            if fault == "late":
                raise TimeoutError
            await stuck.weights.release()  # its hold was over: it has dropped what was prepared, and serves
            world.observe()
        return await call(operation, **arguments)

    stuck.call = wrong
    asyncio.run(update(world))
    assert [tag for tag, _ in world.evicted] == ["r1"] and not stuck.is_alive
    world.check_order()
    world.check_whole(NEW)


def test_members_that_hear_nothing_open_by_themselves_the_old_before_the_new():
    """The coordinator dies between two swaps and nobody restarts it: requests are held for a bounded time."""
    world = World(end_coordinator_at=EVENTS // 2 + 3)  # the first has swapped

    async def run():
        with pytest.raises(CoordinatorDied):
            await update(world)
        assert sorted(member.engine.count for member in world.members) == [OLD, OLD, NEW]
        assert all(member.engine.held for member in world.members)
        due = {member.engine.count: member.timers[-1].seconds for member in world.members}
        assert due[OLD] < two_phase.COMMIT_S < due[NEW]
        for member in world.members:
            await member.silence()
        assert not any(member.engine.held for member in world.members)
        assert sum(member.engine.prepared is not None for member in world.members) == 2, "the next one may need them"
        world.restart_coordinator()
        assert await heal(world) == (NEW, "new")  # and one that comes later still brings them together

    asyncio.run(run())
    world.check_whole(NEW)


@pytest.mark.parametrize("open_ones", [(0, 1, 2), (1,)])
def test_members_that_open_by_themselves_before_the_swap_hold_again(open_ones):
    """The end of what runs took long: their time was over."""
    world = World()

    async def end_slowly():
        for number in open_ones:
            await world.members[number].silence()
        world.observe()

    assert asyncio.run(update(world, before_commit=end_slowly)) == [NEW]
    assert world.evicted == [] and len(world.living) == 3
    world.check_order()
    world.check_whole(NEW)


def test_a_member_that_does_not_hold_again_stops_the_update():
    """It is frozen: nothing is decided, and no member is ended."""
    world = World()
    frozen, decided = world.members[1], []
    call = frozen.call

    async def end_all():
        async def late(operation, **arguments):
            if operation == "hold":
                raise TimeoutError
            return await call(operation, **arguments)

        frozen.call = late

    async def run():
        with pytest.raises(two_phase.UpdateRefused, match="r1 has not held"):
            decided.extend(await update(world, before_commit=end_all))

    asyncio.run(run())
    assert not decided and world.evicted == []
    world.check_whole(OLD)
    assert two_phase.HOLD_S + two_phase.ABORT_S < two_phase.OPEN_OLD_S


def test_a_member_that_opened_by_itself_during_the_swaps_holds_before_it_swaps():
    """Requests with new weights start nowhere before the last one has swapped."""
    world = World()
    late = world.members[2]
    call = late.call

    async def slow(operation, **arguments):
        if operation == "commit":
            await late.silence()
            world.observe()
        answer = await call(operation, **arguments)
        if operation == "commit":
            assert late.engine.held and late.engine.count == NEW
        return answer

    late.call = slow
    asyncio.run(update(world))
    assert world.evicted == []
    world.check_order()
    world.check_whole(NEW)


def test_an_update_that_no_member_takes_is_refused():
    world = World()

    async def gone(operation, **arguments):
        if operation == "commit":
            raise TimeoutError
        return await SimulatedMember.call(world.members[0], operation, **arguments)

    for member in world.members:
        member.call = gone
    with pytest.raises(two_phase.NoReplicaLeft, match="no replica has swapped to update 1"):
        asyncio.run(update(world))
    assert len(world.evicted) == 3


def test_a_clock_that_is_due_during_the_swap_opens_nothing():
    """It would start requests before all others have swapped."""
    world = World(1)
    (member,) = world.members
    swap = member.engine.commit_weights

    def swap_late(*, cache):
        member.timers[-1].call()
        swap(cache=cache)

    member.engine.commit_weights = swap_late

    async def run():
        await member.weights.prepare("new", numbered(NEW))
        await member.weights.hold()
        await member.weights.commit(NEW, "flush")
        await member.weights._opening
        assert member.engine.held and not member.timers[-1].is_cancelled
        await member.weights.release()

    asyncio.run(run())
    assert all(timer.is_cancelled for timer in member.timers) and not member.engine.held


def test_a_member_that_has_swapped_and_holds_again_keeps_its_longer_time():
    """The next coordinator heals: with the shorter one it would open while others still have old weights."""
    world = World(1)
    (member,) = world.members

    async def run():
        await member.weights.prepare("new", numbered(NEW))
        await member.weights.hold()
        await member.weights.commit(NEW, "flush")
        await member.weights.hold()
        assert member.timers[-1].seconds == two_phase.OPEN_NEW_S

    asyncio.run(run())


def test_a_new_version_of_the_same_weights_takes_the_same_way():
    world = World()
    asyncio.run(update(world))
    asyncio.run(update(world, None, 7))
    world.check_order()
    world.check_whole(7)
    reports = asyncio.run(world.reports())
    assert {(report.version, report.model_path) for report in reports.values()} == {(numbered(7), "new")}


def test_a_label_for_released_memory_is_refused_by_all_and_costs_no_member_and_no_request():
    world, ended = World(), []
    world.members[1].engine.released = ("kv_cache",)

    async def end_all():
        ended.append("all")

    async def run():
        with pytest.raises(two_phase.UpdateRefused, match="kv_cache is released"):
            await update(world, None, 7, before_commit=end_all)

    asyncio.run(run())
    assert not ended and {member.engine.count for member in world.members} == {0}
    assert not any(member.engine.held for member in world.members)
    world.members[1].engine.released = ()
    asyncio.run(update(world, None, 7, before_commit=end_all))
    assert ended == ["all"] and {member.engine.count for member in world.members} == {7}


def test_an_update_under_the_label_that_is_served_is_another_update():
    """Operations are known by their count: a label that repeats is not taken for an operation that does."""
    world = World(1)
    (member,) = world.members

    async def run():
        for count, path in ((1, "one"), (2, "two"), (3, None)):
            await member.weights.prepare(path, numbered(count, "same"))
            await member.weights.commit(count, "flush")
            assert member.engine.weight_version == numbered(count, "same")
        assert str(member.engine.path) == "two"
        answer = await member.call("prepare", timeout_s=1.0, model_path="old", version=numbered(2, "other"))
        assert answer.refusal.message == "update 2 is not after the served one, update 3; restart this replica"

    asyncio.run(run())


def test_operations_may_be_repeated():
    world = World(1)
    (member,) = world.members

    async def run():
        for _ in range(2):
            await member.weights.prepare("new", numbered(NEW))
        for _ in range(2):
            await member.weights.hold()
        for _ in range(2):
            await member.weights.commit(NEW, "flush")
        await member.weights.prepare("new", numbered(NEW))  # it serves them
        for _ in range(2):
            await member.weights.release()
        return await member.weights.report()

    report = asyncio.run(run())
    assert dataclasses.asdict(report) == {
        "version": {"label": "w1", "update_count": NEW},
        "model_path": "new",
        "prepared": None,
        "prepared_path": None,
        "held": False,
        "pause": None,
        "released": (),
        "is_busy": False,
    }
