"""The lines of `serve --num-replicas` about its replicas."""

import asyncio

import pytest

from routed_experts.fleet import coordinator as module
from routed_experts.fleet.messages import CoordinatorLost
from routed_experts.fleet.replica_watch import ReplicaWatch
from support.fleet_simulation import SimulatedMember, join, local_fleet, until


def test_a_replica_that_is_lost_and_its_successor_have_one_line_each():
    watch = ReplicaWatch(2)
    assert watch.changes(["r0", "r1"], 5.0) == watch.changes(("r1", "r0"), 6.0) == []
    assert watch.changes(["r0"], 10.0) == ["replica r1 is lost, and Ray starts another one; 1 of 2 replicas serve"]
    assert watch.changes(["r0"], 11.0) == []
    expected = "replica r2 serves, 41.5 s after r1 was lost; 2 of 2 replicas serve"
    assert watch.changes(["r0", "r2"], 51.5) == [expected]
    assert watch.changes(["r3", "r2"], 60.0) == [
        "replica r0 is lost, and Ray starts another one; 2 of 2 replicas serve",
        "replica r3 serves, 0.0 s after r0 was lost; 2 of 2 replicas serve",
    ]


def test_each_of_several_losses_has_its_own_time():
    watch = ReplicaWatch(3)
    watch.changes(["r0", "r1", "r2"], 0.0)
    watch.changes(["r0", "r2"], 1.0)
    assert len(watch.changes([], 2.0)) == 2
    assert watch.changes(["r3", "r4"], 11.0) == [
        "replica r3 serves, 10.0 s after r1 was lost; 2 of 3 replicas serve",
        "replica r4 serves, 9.0 s after r0 was lost; 2 of 3 replicas serve",
    ]
    assert watch.changes(["r3", "r4", "r5", "r6"], 12.0)[1] == "replica r6 serves; 4 of 3 replicas serve"


def test_a_coordinator_names_those_that_serve_and_misses_nobody_while_members_join_again(monkeypatch):
    monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr("routed_experts.fleet.link.RETRY_S", 0.01)

    async def run():
        async with asyncio.timeout(30), local_fleet(2) as (world, client, links):
            watch = ReplicaWatch(2)

            async def changes(now_s):
                tags = await client.call("serving", timeout_s=5)
                return None if tags is None else watch.changes(tags, now_s)

            assert await changes(0.0) == []
            client.die()
            with pytest.raises(CoordinatorLost):
                await changes(1.0)
            client.start(was_restarted=True)
            assert await changes(2.0) is None
            await until(lambda: not client.coordinator._is_recovering)
            assert await changes(3.0) == []
            links["r1"]._loop_task.cancel()
            world.members[1].is_alive = False
            await until(lambda: "r1" not in client.coordinator._members)
            assert [line.split(" is lost")[0] for line in await changes(4.0)] == ["replica r1"]
            late = SimulatedMember(world, "")
            links["late"] = await join(client, late)
            expected = f"replica {late.tag} serves, 3.5 s after r1 was lost; 2 of 2 replicas serve"
            assert await changes(7.5) == [expected]

    asyncio.run(run())
