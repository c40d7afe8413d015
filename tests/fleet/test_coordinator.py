"""The coordinator with replicas of the same event loop: who joins when, who is asked what, and what a coordinator that
was restarted finds. No Ray, no process."""

import asyncio
import contextlib
import json
import threading
import types

import pytest
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import InvalidRequestError, WeightsMismatchError
from routed_experts.core.extra_key import combine_keys
from routed_experts.core.weight_version import WeightVersion
from routed_experts.fleet import coordinator as module
from routed_experts.fleet.fleet_client import FleetClient
from routed_experts.fleet.fleet_routes import FleetRoutes
from routed_experts.fleet.messages import CoordinatorLost, Refusal
from routed_experts.server.errors import ApiError, ClientGone
from routed_experts.server.limits import ServerSettings
from routed_experts.server.state import ServerState
from support.fleet_simulation import BAD, SimulatedMember, join, local_fleet, until


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "REJOIN_S", 1.0)
    monkeypatch.setattr("routed_experts.fleet.link.RETRY_S", 0.01)


def version(count, label):
    return WeightVersion(label=label, update_count=count)


def in_fleet(test, num_members=2):
    async def run():
        async with asyncio.timeout(30), local_fleet(num_members) as (world, client, links):
            await test(world, client, links)

    asyncio.run(run())


def test_members_get_tags_and_the_status_lists_them():
    async def test(world, client, links):
        assert list(links) == ["r0", "r1"]
        status = await links["r0"].call("status")
        assert [(m.tag, m.state, m.version) for m in status.members] == [
            ("r0", "serving", version(0, "first")),
            ("r1", "serving", version(0, "first")),
        ]
        assert (status.version, status.problem, status.deaths, status.num_replicas) == (version(0, "first"), None, 0, 2)

    in_fleet(test)


def test_every_update_has_the_next_count_under_any_label():
    """Labels repeat, come back and stay; with weights and without. All replicas have the same count."""

    async def test(world, client, links):
        labels = (("a", None), ("b", "step-5"), ("c", "step-5"), (None, "step-5"), ("a", "first"), (None, "0"))
        expected = ("first", "step-5", "step-5", "step-5", "first", "0")
        for count, ((path, label), told) in enumerate(zip(labels, expected, strict=True), start=1):
            assert await links[f"r{count % 2}"].call("update", path, label, "flush") == version(count, told)
            assert {m.engine.weight_version for m in world.members} == {version(count, told)}
        assert {str(m.engine.path) for m in world.members} == {"a"}
        status = await links["r0"].call("status")
        assert status.version == version(6, "0") and status.problem is None

    in_fleet(test)


def test_a_refused_update_names_the_replica_and_changes_nothing():
    async def test(world, client, links):
        world.members[1].engine.refuses = True
        refusal = await links["r0"].call("update", BAD, None, "flush")
        assert (refusal.status, refusal.code) == (400, "weights_mismatch")
        assert refusal.message == (
            "refused by r1: it does not like these weights; the old weights serve on in all replicas"
        )
        status = await links["r0"].call("status")
        assert {status.version, *(m.version for m in status.members)} == {version(0, "first")}

    in_fleet(test)


def test_an_update_beside_a_stopped_replica_ends_in_its_time_and_is_a_timeout():
    async def test(world, client, links):
        client.coordinator._prepare_s = 0.05
        held = await hold_prepare(world.members[1])  # its lock is taken: it answers nothing
        async with asyncio.timeout(5):
            refusal = await links["r0"].call("update", "a", "one", "flush")
        assert (refusal.status, refusal.code, refusal.param) == (504, "update_timeout", None)
        assert refusal.message == (
            "r1 has not loaded the weights within weight_update_timeout=0.05 s; the old weights serve on in all "
            "replicas; try again when every replica answers"
        )
        held.go.set()
        await until(lambda: not links["r1"]._running)
        assert [(m.engine.prepared, m.engine.held, m.engine.count) for m in world.members] == [(None, False, 0)] * 2
        client.coordinator._prepare_s = 5.0
        assert await links["r1"].call("update", "a", "one", "flush") == version(2, "one")

    in_fleet(test)


def test_an_update_whose_client_has_left_is_not_begun(tmp_path):
    async def test(world, client, links):
        bodies = {
            "update_weights_from_disk": {"model_path": "a"},
            "update_weights": {"weight_dir": "a"},
            "update_weight_version": {"new_version": "one"},
        }
        (tmp_path / "a").mkdir()
        server = types.SimpleNamespace(
            settings=ServerSettings(weights_root=str(tmp_path)),
            accepting_engine=types.SimpleNamespace(engine=types.SimpleNamespace(released=())),
        )
        routes = FleetRoutes(links["r0"], 5.0)
        for count, (name, body) in enumerate(bodies.items(), 1):
            with pytest.raises(ClientGone):
                await getattr(routes, name)(posted(body, is_gone=True), server)
            assert {m.engine.count for m in world.members} == {count - 1}
            await getattr(routes, name)(posted(body, is_gone=False), server)
            assert {m.engine.count for m in world.members} == {count}

    in_fleet(test)


def test_an_update_that_a_replica_finds_after_a_stop_is_not_begun():
    async def test(world, client, links):
        routes, stopped = FleetRoutes(links["r0"], 5.0), types.SimpleNamespace(recent_stop_s=12.4)
        clock, links["r0"]._stop_clock = links["r0"]._stop_clock, stopped
        with pytest.raises(ApiError, match=r"did not run for 12 s.*send it again") as caught:
            await routes._update(posted({}, is_gone=False), "a", None, "flush")
        assert (caught.value.status, caught.value.code) == (503, "fleet_unavailable")
        assert {m.engine.count for m in world.members} == {0}
        links["r0"]._stop_clock = clock
        assert await routes._update(posted({}, is_gone=False), "a", None, "flush") == version(1, "first")

    in_fleet(test)


def posted(body, *, is_gone):
    """A request with this body, of a client that has left, or waits."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    messages += [{"type": "http.disconnect"}] if is_gone else []

    async def receive():
        return messages.pop(0) if messages else await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers, "state": {}}
    return Request(scope, receive)


def test_a_replica_that_does_not_end_its_requests_costs_no_replica(monkeypatch):
    monkeypatch.setattr(module.two_phase, "ABORT_S", 0.05)

    async def test(world, client, links):
        async def frozen(rid):
            await asyncio.Event().wait()

        links["r1"]._operations = {**links["r1"]._operations, "abort": frozen}
        updated = client.call("update", "a", "one", "flush", abort_first=True, timeout_s=10.0)
        assert await updated == version(1, "one")
        assert [m.engine.count for m in world.living] == [1, 1] and world.evicted == []

    in_fleet(test)


def test_an_update_that_ends_every_replica_is_none():
    async def test(world, client, links):
        async def refuse(update_count, cache):
            raise WeightsMismatchError("it does not swap", param="weight_version")

        for link in links.values():
            link._operations = {**link._operations, "commit": refuse}
        refusal = await client.call("update", "a", "one", "flush", timeout_s=10.0)
        assert (refusal.status, refusal.code) == (503, "fleet_unavailable")
        assert refusal.message.endswith("replicas that start next have the old weights")
        assert client.coordinator._version == version(0, "first") and not world.living

    in_fleet(test)


def test_a_second_update_meanwhile_is_refused_and_the_first_one_ends():
    async def test(world, client, links):
        held = await hold_prepare(world.members[0])
        first = asyncio.create_task(links["r0"].call("update", "a", None, "flush"))
        await until(lambda: held.waits)
        refusal = await links["r1"].call("update", "b", None, "flush")
        assert isinstance(refusal, Refusal) and (refusal.status, refusal.code) == (409, "update_in_progress")
        held.go.set()
        assert (await first).update_count == 1
        assert (await links["r1"].call("update", "b", None, "flush")).update_count == 2

    in_fleet(test)


def test_a_replica_that_starts_later_has_the_weights_of_the_fleet_before_it_serves():
    async def test(world, client, links):
        for label in ("x", "y", "step-3"):
            await links["r0"].call("update", "a", label, "flush")
        late = SimulatedMember(world, "")
        links["late"] = await join(client, late)
        assert (late.tag, str(late.engine.path)) == ("r2", "a")
        assert late.engine.weight_version == version(3, "step-3"), "of the fleet, not its own first update"
        assert await links["r0"].call("update", "b", None, "flush") == version(4, "step-3")
        assert late.engine.weight_version == version(4, "step-3")

    in_fleet(test)


def test_a_replica_that_starts_during_an_update_waits_for_it():
    async def test(world, client, links):
        held = await hold_prepare(world.members[0])
        update = asyncio.create_task(links["r0"].call("update", "a", None, "flush"))
        await until(lambda: held.waits)
        late = SimulatedMember(world, "")
        joining = asyncio.create_task(join(client, late))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not joining.done() and late.engine.count == 0
        held.go.set()
        assert (await update).update_count == 1
        links["late"] = await joining
        assert late.engine.count == 1

    in_fleet(test)


async def die(client, link, member):
    """End a replica, as the coordinator notices it."""
    link._loop_task.cancel()
    member.is_alive = False
    await until(lambda: member.tag not in client.coordinator._members)


async def ready(link):
    """The status and the body of /ready, as this replica answers it."""
    response = await FleetRoutes(link, 5.0).ready(posted({}, is_gone=False), types.SimpleNamespace())
    return response.status_code, json.loads(response.body)


def test_while_a_new_replica_loads_the_others_are_ready_and_the_body_counts_them():
    """Ray sends it no request before it has loaded, so all that serve have one version."""

    async def test(world, client, links):
        await links["r0"].call("update", "a", None, "flush")
        await die(client, links["r1"], world.members[1])
        late = SimulatedMember(world, "")
        held = await hold_prepare(late)
        joining = asyncio.create_task(join(client, late))
        await until(lambda: held.waits)
        status, body = await ready(links["r0"])
        states = {entry["replica"]: entry["state"] for entry in body["replicas"]}
        assert status == 200 and "problem" not in body and states == {"r0": "serving", "r2": "loading"}
        assert (body["num_ready"], body["num_replicas"]) == (1, 2)
        held.go.set()
        links["late"] = await joining
        status, body = await ready(links["r0"])
        assert (status, body["num_ready"], body["num_replicas"]) == (200, 2, 2)

    in_fleet(test)


def test_a_fleet_whose_only_replica_loads_is_not_ready():
    async def test(world, client, links):
        await links["r0"].call("update", "a", None, "flush")
        late = SimulatedMember(world, "")
        held = await hold_prepare(late)
        joining = asyncio.create_task(join(client, late))
        await until(lambda: held.waits)
        for member in world.members[:2]:
            await die(client, links[member.tag], member)
        status, body = await ready(links["r0"])
        assert (status, body["num_ready"], body["replicas"][0]["state"]) == (503, 0, "loading")
        held.go.set()
        links["late"] = await joining
        assert (await ready(links["late"]))[0] == 200

    in_fleet(test)


def test_a_replica_that_loads_is_asked_nothing_and_takes_over_what_was_changed_meanwhile():
    async def test(world, client, links):
        await links["r0"].call("update", "a", None, "flush")
        late = SimulatedMember(world, "")
        held, fleet = await hold_prepare(late), FleetClient(links["r0"], 5.0)
        joining = asyncio.create_task(join(client, late))
        await until(lambda: held.waits)
        assert set(await fleet.ask_all("abort", timeout_s=1.0, rid=None)) == {"r0", "r1"}
        assert set(await links["r0"].call("flush", drafts=False)) == {"r0", "r1"}
        await fleet.pause("retract", wait_s=1.0)
        assert await fleet.release_memory(None, "retract", 1.0) == ["kv_cache", "weights"]
        held.go.set()
        links["late"] = await joining
        assert (late.engine.paused, late.engine.released) == ("retract", ("kv_cache", "weights"))
        assert set(await fleet.ask_all("abort", timeout_s=1.0, rid=None)) == {"r0", "r1", late.tag}

    in_fleet(test)


def test_a_replica_that_joins_during_a_pause_is_paused():
    async def test(world, client, links):
        go = asyncio.Event()

        async def wait(mode):  # for what runs
            await go.wait()

        for link in links.values():
            link._operations = {**link._operations, "pause": wait}
        pausing = asyncio.create_task(FleetClient(links["r0"], 5.0).pause("retract", wait_s=1.0))
        await until(lambda: all(len(link._running) == 1 for link in links.values()))
        late = SimulatedMember(world, "")
        links["late"] = await join(client, late)
        go.set()
        await pausing
        assert late.engine.paused == "retract"

    in_fleet(test)


def test_a_pause_that_is_refused_is_not_taken_over():
    async def test(world, client, links):
        async def refuse(mode):
            raise InvalidRequestError("no", param="mode")

        async def late_pause():
            late = SimulatedMember(world, "")
            links[len(links)] = await join(client, late)
            return late.engine.paused

        fleet = FleetClient(links["r0"], 5.0)
        with pytest.raises(InvalidRequestError, match="mode='nap' is unknown; choose one of wait, retract"):
            await fleet.pause("nap", wait_s=1.0)
        assert await late_pause() is None
        await fleet.pause("in_place", wait_s=1.0)
        for link in links.values():
            link._operations = {**link._operations, "pause": refuse}
        with pytest.raises(ApiError, match="no"):
            await fleet.pause("retract", wait_s=1.0)
        assert await late_pause() == "in_place", "what was before"
        with pytest.raises(ApiError) as caught:
            await fleet.pause("retract", wait_s=1.0)
        assert caught.value.code == "replicas_disagree" and await late_pause() == "retract", "one has paused"

    in_fleet(test)


def test_a_pause_that_is_late_on_all_replicas_is_taken_over():
    async def test(world, client, links):
        async def silent(mode):
            await asyncio.Event().wait()

        for link in links.values():
            link._operations = {**link._operations, "pause": silent}
        assert {answer.refusal.code for answer in (await client.call("pause", "wait", 0.02, timeout_s=5)).values()} == {
            "replica_timeout"
        }
        late = SimulatedMember(world, "")
        links["late"] = await join(client, late)
        assert late.engine.paused == "wait"

    in_fleet(test)


def test_a_replica_that_refuses_the_pause_of_the_fleet_starts_nevertheless(caplog):
    async def test(world, client, links):
        async def refuse(mode):
            raise InvalidRequestError("mode='nap' is unknown", param="mode")

        await client.call("set_pause", "nap", timeout_s=5)
        late = SimulatedMember(world, "")
        late.operations = lambda: {**SimulatedMember.operations(late), "pause": refuse}
        links["late"] = await join(client, late)
        assert late.tag == "r2" and "replica r2 does not take the pause 'nap' of the fleet over" in caplog.text

    in_fleet(test)


def test_a_rollout_is_remembered_under_the_key_that_its_requests_have():
    """As a single server has it: fields that no one knows are refused."""

    async def test(world, client, links):
        keys = []

        async def remember(extra_key, **rollout):
            keys.append(extra_key)

        for link in links.values():
            link._operations = {**link._operations, "remember": remember}
        server = types.SimpleNamespace(settings=ServerSettings())
        rollout = {"prompt_ids": [1, 2], "output_ids": [3], "extra_key": "c", "cache_salt": "ab"}
        await FleetRoutes(links["r0"], 5.0).remember_rollouts(posted(rollout, is_gone=False), server)
        assert keys == [combine_keys("c", "ab")] * len(links)
        with pytest.raises(ApiError, match="'salt' is no parameter"):
            await FleetRoutes(links["r0"], 5.0).remember_rollouts(
                posted({**rollout, "salt": "ab"}, is_gone=False), server
            )

    in_fleet(test)


def test_released_memory_is_taken_over_by_those_that_come_later_and_by_the_next_coordinator():
    async def test(world, client, links):
        fleet = FleetClient(links["r0"], 5.0)

        async def released_by_a_new_one():
            late = SimulatedMember(world, "")
            links[len(links)] = await join(client, late)
            return late.engine.released

        assert await fleet.release_memory(["kv_cache"], "retract", 1.0) == ["kv_cache"]
        assert await released_by_a_new_one() == ("kv_cache",)
        client.die()
        client.start(was_restarted=True)
        await until(lambda: not client.coordinator._is_recovering)
        assert await released_by_a_new_one() == ("kv_cache",)
        assert await fleet.resume_memory(None) == []
        assert await released_by_a_new_one() == ()

    in_fleet(test)


def test_a_release_that_all_refuse_is_not_taken_over():
    async def test(world, client, links):
        async def refuse(tags, running):
            raise WeightsMismatchError("no", param="tags")

        fleet = FleetClient(links["r0"], 5.0)
        assert await fleet.release_memory(["kv_cache"], "retract", 1.0) == ["kv_cache"]
        for link in links.values():
            link._operations = {**link._operations, "release_memory": refuse}
        with pytest.raises(ApiError):
            await fleet.release_memory(["weights"], "retract", 1.0)
        assert client.coordinator._released == ("kv_cache",)

    in_fleet(test)


def test_an_update_brings_released_weights_back_for_those_that_come_later():
    async def test(world, client, links):
        await FleetClient(links["r0"], 5.0).release_memory(None, "retract", 1.0)
        assert (await links["r0"].call("update", "a", None, "flush")).update_count == 1
        assert client.coordinator._released == ("kv_cache",)

    in_fleet(test)


def test_a_dead_replica_is_counted_and_waited_for_no_longer():
    async def test(world, client, links):
        held = await hold_prepare(world.members[1])
        update = asyncio.create_task(links["r0"].call("update", "a", None, "flush"))
        await until(lambda: held.waits)
        world.members[1].is_alive = False
        assert (await update).update_count == 1
        status = await links["r0"].call("status")
        assert [m.tag for m in status.members] == ["r0"] and status.deaths == 1
        assert await links["r0"].call("ask", "r1", "health", 1.0, {}) is None

    in_fleet(test)


def test_a_replica_that_leaves_is_no_death():
    async def test(world, client, links):
        for member in world.members:
            member.operations = None  # not asked again
        client.coordinator._members["r1"].is_leaving = True
        world.members[1].is_alive = False
        await until(lambda: list(client.coordinator._members) == ["r0"])
        assert client.coordinator._deaths == 0

    in_fleet(test)


def test_a_coordinator_without_replicas_ends_after_a_time(monkeypatch):
    monkeypatch.setattr(module, "ABANDONED_S", 0.05)

    async def test(world, client, links):
        ended = []
        client.coordinator._on_abandoned = lambda: ended.append(True)
        world.members[0].is_alive = False
        await until(lambda: list(client.coordinator._members) == ["r1"])
        await asyncio.sleep(0.1)
        assert not ended
        world.members[1].is_alive = False
        await until(lambda: ended)

    in_fleet(test)


def test_a_flush_holds_all_replicas_and_needs_all_of_them_idle():
    async def test(world, client, links):
        assert set(await links["r0"].call("flush", drafts=False)) == {"r0", "r1"}
        flushed = []
        for member, link in zip(world.members, links.values(), strict=True):
            operations = dict(link._operations)
            operations["is_idle"] = lambda member=member: idle(member.tag == "r0")

            async def flush(drafts, member=member):
                flushed.append(member.tag)

            operations["flush"] = flush
            link._operations = operations
        refusal = await links["r0"].call("flush", drafts=False)
        assert (refusal.code, refusal.message) == (
            "requests_running",
            "requests run on r1; try again when they have ended",
        )
        assert flushed == [] and not any(member.engine.held for member in world.members)

    async def idle(value):
        return value

    in_fleet(test)


def test_a_flush_during_an_update_is_refused_at_once():
    async def test(world, client, links):
        held = await hold_prepare(world.members[0])
        update = asyncio.create_task(links["r0"].call("update", "a", None, "flush"))
        await until(lambda: held.waits)
        with pytest.raises(ApiError, match="is under way") as caught:
            await asyncio.wait_for(FleetRoutes(links["r1"], 5.0).flush_cache(request(), None), 5.0)
        assert (caught.value.status, caught.value.code) == (409, "update_in_progress")
        held.go.set()
        assert (await update).update_count == 1
        assert set(await links["r0"].call("flush", drafts=False)) == {"r0", "r1"}

    in_fleet(test)


def test_an_update_waits_for_a_flush_and_a_second_one_is_refused():
    async def test(world, client, links):
        go, asked = asyncio.Event(), asyncio.Event()

        async def flush(drafts):
            asked.set()
            await go.wait()
            return 0

        for link in links.values():
            link._operations = {**link._operations, "flush": flush}
        flushing = asyncio.create_task(links["r0"].call("flush", drafts=False))
        await asked.wait()
        update = asyncio.create_task(links["r1"].call("update", "a", "one", "flush"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not update.done()
        refusals = [await links["r1"].call("update", "b", None, "flush"), await links["r1"].call("flush", drafts=False)]
        assert [refusal.code for refusal in refusals] == ["update_in_progress"] * 2, "updates are not queued"
        go.set()
        assert set(await flushing) == {"r0", "r1"} and await update == version(1, "one")

    in_fleet(test)


def test_a_replica_that_does_not_answer_a_flush_is_not_called_busy(monkeypatch):
    monkeypatch.setattr(module.two_phase, "HOLD_S", 0.05)

    async def test(world, client, links):
        async def frozen():
            await asyncio.Event().wait()

        links["r1"]._operations = {**links["r1"]._operations, "is_idle": frozen}
        refusal = await links["r0"].call("flush", drafts=False)
        assert (refusal.status, refusal.code) == (503, "fleet_unavailable")
        assert "r1: it has not done is_idle within 0.05 s" in refusal.message and "r0" not in refusal.message
        assert not any(member.engine.held for member in world.members)

    in_fleet(test)


def test_a_scrape_leaves_a_replica_out_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("routed_experts.fleet.fleet_routes.METRICS_S", 0.05)

    async def test(world, client, links):
        async def frozen(call):
            await asyncio.Event().wait()

        async def own(request, server):
            return Response("# HELP x An x\n# TYPE x gauge\nx 1.0\n")

        monkeypatch.setattr("routed_experts.fleet.fleet_routes.info_routes.metrics", own)
        links["r1"]._operations = {**links["r1"]._operations, "route": frozen}
        answer = await asyncio.wait_for(FleetRoutes(links["r0"], 5.0).metrics(request(path_params={}), None), 5.0)
        assert b'x{replica="r0"} 1.0' in answer.body and b"fleet_replicas" in answer.body

    in_fleet(test)


def test_without_a_coordinator_calls_fail_and_the_next_one_learns_everything():
    async def test(world, client, links):
        await links["r0"].call("update", "a", "four", "flush")
        client.die()
        with pytest.raises(CoordinatorLost):
            await links["r0"].call("status")
        client.start(was_restarted=True)
        await until(lambda: not client.coordinator._is_recovering)
        status = await links["r0"].call("status")
        assert ([m.tag for m in status.members], status.problem) == (["r0", "r1"], None)
        assert status.version == version(1, "four")
        assert await links["r0"].call("update", "b", None, "flush") == version(2, "four")
        late = SimulatedMember(world, "")
        links["late"] = await join(client, late)
        assert str(late.engine.path) == "b"
        assert int(late.tag.removeprefix("r")) > 1000, "r2 may have been one that died with the coordinator"

    in_fleet(test)


def test_a_coordinator_that_dies_during_the_load_leaves_the_old_weights_and_nothing_prepared():
    async def test(world, client, links):
        held = await hold_prepare(world.members[0])
        update = asyncio.create_task(links["r0"].call("update", "a", None, "flush"))
        await until(lambda: held.waits and world.members[1].engine.prepared is not None)
        client.die()
        update.cancel()
        client.start(was_restarted=True)
        for _ in range(50):
            await asyncio.sleep(0)
        assert client.coordinator._is_recovering, "r0 still loads, and is a member"
        await until(lambda: set(client.coordinator._members) == {"r0", "r1"})
        refusal = await links["r1"].call("update", "b", None, "flush")
        assert (refusal.status, refusal.code) == (503, "fleet_unavailable")
        assert "waits for the replicas" in (await links["r1"].call("status")).problem
        held.go.set()
        await until(lambda: not client.coordinator._is_recovering)
        assert all((m.engine.count, m.engine.prepared) == (0, None) for m in world.members)
        assert (await links["r1"].call("update", "b", None, "flush")).update_count == 2, "1 was prepared, as a"

    in_fleet(test)


def test_a_replica_that_loads_or_swaps_when_the_coordinator_dies_is_waited_for(monkeypatch):
    """No update passes it by, and none takes its count."""
    monkeypatch.setattr(module, "REJOIN_S", 0.2)

    async def test(world, client, links):
        began, go, swap = threading.Event(), threading.Event(), world.members[1].engine.commit_weights

        def slow(*, cache):
            began.set()
            go.wait(20)
            swap(cache=cache)

        async def lost(**arguments):
            await asyncio.Event().wait()

        world.members[1].engine.commit_weights = slow
        links["r0"]._operations = {**links["r0"]._operations, "commit": lost}
        first = asyncio.create_task(client.call("update", "a", "one", "flush", timeout_s=20.0))
        await until(began.is_set)
        client.die()
        with pytest.raises(CoordinatorLost):
            await first
        links["r0"]._operations = world.members[0].operations()
        client.start(was_restarted=True)
        await until(lambda: set(client.coordinator._members) == {"r0", "r1"})
        with contextlib.suppress(TimeoutError):  # longer than REJOIN_S
            await asyncio.wait_for(asyncio.shield(client.coordinator._recovery), 0.5)
        assert (await links["r0"].call("update", "b", "two", "flush")).code == "fleet_unavailable"
        go.set()
        await until(lambda: not client.coordinator._is_recovering)
        assert {(m.engine.weight_version, str(m.engine.path)) for m in world.members} == {(version(1, "one"), "a")}
        assert await links["r0"].call("update", "b", "two", "flush") == version(2, "two")
        assert {m.engine.count for m in world.living} == {2} and world.evicted == []

    in_fleet(test)


def test_while_members_join_again_nothing_is_asked_of_all():
    """An answer of those that are back would pass for one of all."""

    async def test(world, client, links):
        links["r1"]._loop_task.cancel()
        client.die()
        client.start(was_restarted=True)
        routes, fleet = FleetRoutes(links["r0"], 5.0), FleetClient(links["r0"], 5.0)
        server = ServerState(ServerSettings(port=0), model_path="tiny")

        async def check():
            assert client.coordinator._is_recovering
            for call in (
                fleet.ask_all("abort", rid=None),
                fleet.pause("retract", wait_s=1.0),
                fleet.resume(),
                fleet.release_memory(None, "retract", 1.0),
                fleet.resume_memory(None),
                routes.weight_version(None, None),
                routes._from_location(request(path_params={"name": "r1-7"}), server, not_here),
                routes.flush_cache(request(), None),
            ):
                with pytest.raises(ApiError, match="waits for the replicas") as caught:
                    await call
                assert (caught.value.status, caught.value.code) == (503, "fleet_unavailable")

        await check()
        await until(lambda: client.coordinator._members)
        await check()
        world.members[0].engine.paused = "in_place"
        links["r1"].start()
        await until(lambda: not client.coordinator._is_recovering)
        assert client.coordinator._pause == "in_place"
        assert set(await fleet.ask_all("abort", rid=None)) == {"r0", "r1"}

    in_fleet(test)


def test_a_replica_that_joins_again_while_others_are_healed_is_healed_next(monkeypatch):
    monkeypatch.setattr(module, "REJOIN_S", 0.1)

    async def test(world, client, links):
        await links["r0"].call("update", "a", "one", "flush")
        await world.members[0].weights.load("b", version(2, "two"))
        links["r2"]._loop_task.cancel()
        client.die()
        held = await hold_prepare(world.members[1])
        client.start(was_restarted=True)
        await until(lambda: held.waits)
        links["r2"].start()
        await until(lambda: "r2" in client.coordinator._members)
        held.go.set()
        await until(lambda: {m.engine.count for m in world.members} == {2})
        await until(lambda: not client.coordinator._syncing)
        assert (await links["r0"].call("status")).problem is None and world.evicted == []

    in_fleet(test, 3)


def test_replicas_with_other_weights_under_one_count_are_a_problem():
    async def test(world, client, links):
        await world.members[0].weights.load("a", version(1, "one"))
        await world.members[1].weights.load("b", version(1, "one"))
        problem = (await links["r0"].call("status")).problem
        assert problem == "replicas serve version 'one' (update 1) of 'a', version 'one' (update 1) of 'b'"

    in_fleet(test)


def test_a_count_that_was_refused_is_not_used_again():
    async def test(world, client, links):
        world.members[1].engine.refuses = True
        assert (await links["r0"].call("update", BAD, None, "flush")).code == "weights_mismatch"
        assert (await links["r0"].call("update", "a", None, "flush")).update_count == 2

    in_fleet(test)


def test_a_tag_of_a_replica_that_died_with_the_coordinator_is_not_given_again(monkeypatch):
    monkeypatch.setattr(module, "REJOIN_S", 0.1)

    async def test(world, client, links):
        links["r1"]._loop_task.cancel()
        world.members[1].is_alive = False
        client.die()
        client.start(was_restarted=True)
        await until(lambda: "r0" in client.coordinator._members and not client.coordinator._is_recovering)
        late = SimulatedMember(world, "")
        links["late"] = await join(client, late)
        assert late.tag != "r1"

    in_fleet(test)


def test_a_split_is_healed_to_the_highest_version():
    async def test(world, client, links):
        client.die()
        await world.members[1].weights.load("b", version(2, "two"))
        client.start(was_restarted=True)
        await until(lambda: client.coordinator is not None and not client.coordinator._is_recovering)
        assert [(m.engine.weight_version, str(m.engine.path)) for m in world.members] == [(version(2, "two"), "b")] * 2
        assert (await links["r0"].call("status")).version == version(2, "two")

    in_fleet(test)


def test_a_member_that_comes_back_late_is_healed_by_itself():
    async def test(world, client, links):
        await links["r0"].call("update", "a", None, "flush")
        links["r1"]._loop_task.cancel()  # cut off
        client.die()
        client.start(was_restarted=True)
        await until(lambda: not client.coordinator._is_recovering)
        assert (await links["r0"].call("update", "b", None, "flush")).update_count == 2
        assert world.members[1].engine.count == 1
        held = await hold_prepare(world.members[1])
        links["r1"].start()
        await until(lambda: held.waits)
        status, body = await ready(links["r0"])
        assert (status, body["problem"]) == (503, "r1 loads version 'first' (update 2)"), "it serves older weights"
        held.go.set()
        await until(lambda: world.members[1].engine.count == 2)
        assert str(world.members[1].engine.path) == "b" and world.evicted == []

    in_fleet(test)


def test_a_pause_is_taken_over_by_those_that_come_later_and_by_the_next_coordinator():
    async def test(world, client, links):
        await links["r0"].call("set_pause", "in_place")
        for member in world.members:
            member.engine.paused = "in_place"
        client.die()
        client.start(was_restarted=True)
        await until(lambda: not client.coordinator._is_recovering)
        joined = await client.call(
            "join", None, await world.members[0].weights.report(), [world.members[0]], timeout_s=5
        )
        assert joined.pause == "in_place"

    in_fleet(test)


def test_a_member_that_comes_back_late_takes_over_what_was_changed_meanwhile():
    async def test(world, client, links):
        fleet = FleetClient(links["r0"], 5.0)
        links["r1"]._loop_task.cancel()  # cut off
        client.die()
        client.start(was_restarted=True)
        await until(lambda: client.coordinator._members and not client.coordinator._is_recovering)
        await fleet.pause("retract", wait_s=1.0)
        await fleet.release_memory(["kv_cache"], "retract", 1.0)
        assert world.members[1].engine.paused is None
        links["r1"].start()
        await until(lambda: world.members[1].engine.released)
        assert (world.members[1].engine.paused, world.members[1].engine.released) == ("retract", ("kv_cache",))
        await until(lambda: not client.coordinator._syncing)

    in_fleet(test)


def test_an_error_of_an_operation_is_a_sentence_and_ends_nothing(caplog):
    async def test(world, client, links):
        async def broken():
            raise RuntimeError("secret")

        links["r1"]._operations = {**links["r1"]._operations, "abort": lambda rid: broken()}
        answers = await links["r0"].call("ask_all", "abort", 1.0, {"rid": None})
        assert answers["r0"].value == 0 and answers["r1"].refusal.code == "internal_error"
        assert "secret" not in answers["r1"].refusal.message
        answers = await links["r0"].call("ask_all", "dance", 1.0, {})
        assert "has no operation dance" in answers["r0"].refusal.message
        assert (await links["r0"].call("update", "a", None, "flush")).update_count == 1

    in_fleet(test)


def test_an_answer_that_does_not_come_is_a_timeout_of_that_replica_alone():
    async def test(world, client, links):
        links["r1"]._loop_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await links["r1"]._loop_task
        answers = await links["r0"].call("ask_all", "health", 0.5, {})
        assert answers["r0"].value["state"] == "serving"
        assert (answers["r1"].refusal.status, answers["r1"].refusal.code) == (504, "replica_timeout")
        assert [m.state for m in (await links["r0"].call("status")).members] == ["serving", "unreachable"]

    in_fleet(test)


def request(**scope):
    basis = {"type": "http", "method": "GET", "query_string": b"", "headers": [], "state": {"owner": ""}}
    return Request({**basis, **scope})


async def not_here():
    raise ApiError("unknown", status=404, code="routing_not_found")


class Held:
    """The load of a member that waits until `go` is set."""

    def __init__(self):
        self.go, self.waits = asyncio.Event(), False


async def hold_prepare(member):
    held, prepare = Held(), member.weights._prepare
    loop = asyncio.get_running_loop()

    async def wait():
        held.waits = True
        await held.go.wait()

    def slow(path, version):
        asyncio.run_coroutine_threadsafe(wait(), loop).result(20)
        prepare(path, version)

    member.weights._prepare = slow
    return held
