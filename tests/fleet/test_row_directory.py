"""Rows by reference of ids that clients give, perhaps several times: those of the last request, from every replica."""

import asyncio
import io
import logging
import types

import numpy as np
import pytest
from starlette.requests import Request

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.fleet import coordinator as module
from routed_experts.fleet import ray_runtime, row_directory
from routed_experts.fleet.fleet_client import FleetClient
from routed_experts.fleet.fleet_routes import FleetRoutes
from routed_experts.fleet.link import Link
from routed_experts.fleet.messages import CoordinatorFailed, CoordinatorLost
from routed_experts.fleet.operations import Operations
from routed_experts.fleet.row_directory import RowDirectory
from routed_experts.fleet.row_reservations import RowReservations, max_retention_s
from routed_experts.server.errors import ApiError, to_response
from routed_experts.server.limits import ServerSettings
from routed_experts.server.routing_store import StoredRows
from routed_experts.server.state import ServerState
from support.fleet_simulation import local_fleet, until

MADE = "r0-" + "0123456789abcdef" * 2  # an id as r0 makes them


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(module, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr("routed_experts.fleet.link.RETRY_S", 0.01)


class RowsFleet:
    """Replicas with the real stores and routes, of one event loop."""

    def __init__(self, world, client, links):
        self.world, self.client, self.links = world, client, links
        self.servers = {tag: self._server(link, world.members[n]) for n, (tag, link) in enumerate(links.items())}

    @staticmethod
    def _server(link, member):
        server = ServerState(ServerSettings(port=0), model_path="tiny", version="0")
        rows = RowReservations(server.store, retention_s=max_retention_s(server.settings))
        own = Operations(server, member.weights, rows, drain=None, proxy="").by_name()
        link._operations = {**link._operations, "route": own["route"], "drop_rows": own["drop_rows"]}
        link._rows = rows.numbered
        rows.attach(link)
        server.on_rows_reserved = rows.reserve
        return server

    async def keep(self, tag, name, num_rows, *, owner="", is_made=False):
        """A request of this id, of a client or made for it, on this replica, to its end."""
        server = self.servers[tag]
        entry = server.store.reserve(name, owner=owner, choices=[0], is_made=is_made)
        await server.reserve_rows(entry)
        record = RoutedExperts(
            ids=np.zeros((num_rows, 1, 2), np.uint8),
            start=0,
            num_tokens=num_rows + 1,
            num_prompt_tokens=1,
            layer_ids=(0,),
            num_hidden_layers=1,
            num_experts=8,
            version_spans=((0, num_rows, 0),),
        )
        rows = StoredRows(record=record, token_ids=np.zeros(num_rows + 1, np.int32), owner=owner)
        server.store.fill(entry, 0, rows)

    async def fetch(self, tag, name, method="GET", *, owner=""):
        scope = {"type": "http", "query_string": b"", "headers": [], "state": {"owner": owner}}
        request = Request({**scope, "method": method, "path_params": {"name": name}})
        routes = FleetRoutes(self.links[tag], 5.0)
        return await (routes.fetch if method == "GET" else routes.delete)(request, self.servers[tag])

    async def ask(self, tag, name, method="GET", *, owner=""):
        """What this replica answers: the number of rows, or else the status, or the code of the error."""
        try:
            response = await self.fetch(tag, name, method, owner=owner)
        except ApiError as error:
            return to_response(error).body["error"]["code"]
        if response.status_code >= 400:  # of another replica
            return response.body.decode().partition('"code":"')[2].partition('"')[0]
        return np.load(io.BytesIO(response.body)).shape[0] if method == "GET" else response.status_code

    async def ask_each(self, name, **options):
        return [await self.ask(tag, name, **options) for tag in self.links]

    def num_kept(self, name):
        """How many replicas have an entry of this id."""
        return sum(server.store.find(name) is not None for server in self.servers.values())

    def freeze_drops(self, monkeypatch, tag):
        """Have this replica keep what it should drop: it does not answer in time."""

        async def frozen(**arguments):
            await asyncio.Event().wait()

        monkeypatch.setattr(module, "DROP_S", 0.01)
        self.links[tag]._operations = {**self.links[tag]._operations, "drop_rows": frozen}


def in_fleet(test, num_members=3):
    async def run():
        async with asyncio.timeout(30), local_fleet(num_members) as (world, client, links):
            await test(RowsFleet(world, client, links))

    asyncio.run(run())


@pytest.mark.parametrize("name", ["mine", MADE, "r1" + MADE[2:], "r77" + MADE[2:]])
@pytest.mark.parametrize("tags", ["r1", "r0 r1", "r1 r0", "r0 r0 r1", "r0 r1 r0", "r0 r1 r2"])
def test_every_replica_gives_the_rows_of_the_last_request_of_an_id_and_deletes_them(name, tags):
    async def test(fleet):
        for number, tag in enumerate(tags.split(), 1):
            await fleet.keep(tag, name, number)
        assert await fleet.ask_each(name) == [number] * 3
        assert fleet.num_kept(name) == 1, "a replica drops the rows of a request before"
        assert await fleet.ask("r2", name, "DELETE") == 204
        assert set(await fleet.ask_each(name)) <= {"routing_not_found", "routing_gone"}
        assert fleet.num_kept(name) == 0

    in_fleet(test)


def test_rows_belong_to_the_key_of_the_last_request():
    async def test(fleet):
        await fleet.keep("r0", "mine", 5, owner="a")
        await fleet.keep("r1", "mine", 7, owner="b")
        assert await fleet.ask_each("mine", owner="b") == [7] * 3
        assert await fleet.ask_each("mine", owner="a") == ["routing_of_another_key"] * 3
        assert await fleet.ask_each("mine", method="DELETE", owner="a") == ["routing_of_another_key"] * 3
        assert await fleet.ask("r0", "mine", "DELETE", owner="b") == 204

    in_fleet(test)


@pytest.mark.parametrize(("name", "is_made"), [("mine", False), (MADE, False), (MADE, True), ("r1" + MADE[2:], False)])
@pytest.mark.parametrize(("first", "second"), [("r0", "r1"), ("r1", "r0")])
@pytest.mark.parametrize("frozen", ["r0", "r1"])
def test_older_rows_that_a_slow_replica_still_has_are_given_to_no_client(
    monkeypatch, name, is_made, first, second, frozen
):
    async def test(fleet):
        fleet.freeze_drops(monkeypatch, frozen)
        if is_made:
            await fleet.keep("r0", name, 3, is_made=True)
        await fleet.keep(first, name, 5)
        await fleet.keep(second, name, 7)
        assert await fleet.ask_each(name) == [7] * 3
        assert frozen != first or fleet.num_kept(name) == 2
        await fleet.keep(second, name, 9)
        assert await fleet.ask_each(name) == [9] * 3
        assert await fleet.ask("r0", name, "DELETE") == 204
        assert await fleet.ask_each(name) == ["routing_not_found"] * 3

    in_fleet(test)


def test_a_made_id_that_a_client_has_given_to_another_replica_is_that_ones(monkeypatch):
    async def test(fleet):
        fleet.freeze_drops(monkeypatch, "r0")
        await fleet.keep("r0", MADE, 5, is_made=True)
        assert await fleet.ask_each(MADE) == [5] * 3
        await fleet.keep("r1", MADE, 7)
        assert await fleet.ask_each(MADE) == [7] * 3
        fleet.client.die()
        fleet.client.start(was_restarted=True)
        await until(lambda: not fleet.client.coordinator._is_recovering)
        assert await fleet.ask_each(MADE) == [7] * 3

    in_fleet(test)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_replica_that_keeps_the_rows_and_does_not_answer_is_named(monkeypatch, method):
    monkeypatch.setattr("routed_experts.fleet.fleet_client.ASK_S", 0.1)

    async def test(fleet):
        async def frozen(**arguments):
            await asyncio.Event().wait()

        await fleet.keep("r1", "mine", 7)
        fleet.links["r1"]._operations = {**fleet.links["r1"]._operations, "route": frozen}
        with pytest.raises(ApiError, match=r"^replica r1 has not answered within 0\.1 s") as caught:
            await fleet.fetch("r0", "mine", method)
        assert (caught.value.status, caught.value.code) == (503, "fleet_unavailable")

    in_fleet(test)


def test_a_request_waits_within_its_time_and_the_log_has_one_line(caplog):
    async def test(fleet):
        fleet.client.die()
        waiting = [asyncio.create_task(fleet.keep("r0", f"mine-{number}", 5)) for number in range(3)]
        _, pending = await asyncio.wait(waiting, timeout=0.1)
        assert len(pending) == 3
        for task in pending:
            task.cancel()
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert ["requests wait for the coordinator" in record.message for record in warnings] == [True]

    in_fleet(test)


class RayError(Exception):
    """Ray's own."""


class RayTaskError(RayError):
    """Of a method of an actor."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RayTaskError("no"), CoordinatorFailed), (RayError("no"), CoordinatorLost), (TimeoutError(), CoordinatorLost)],
)
def test_an_error_of_a_method_is_told_apart_from_a_loss(monkeypatch, error, expected):
    class Handle:
        class method:
            @staticmethod
            async def remote():
                raise error

    class Actor:
        options = staticmethod(lambda **options: types.SimpleNamespace(remote=lambda **arguments: Handle()))

    def get(work, timeout):
        work.close()
        raise error

    ray = types.SimpleNamespace(
        remote=lambda cls: Actor, RayError=RayError, RayTaskError=RayTaskError, get=get
    )  # and its exceptions
    monkeypatch.setattr(ray_runtime, "import_ray", lambda name="ray": ray)
    client = ray_runtime.CoordinatorClient("x", num_replicas=1, weight_update_timeout=1.0)
    with pytest.raises(CoordinatorLost) as caught:
        asyncio.run(client.call("method", timeout_s=5.0))
    assert type(caught.value) is expected
    with pytest.raises(CoordinatorLost) as caught:
        client.call_blocking("method", timeout_s=5.0)
    assert type(caught.value) is expected


def test_an_error_of_the_coordinator_itself_is_not_waited_for():
    calls = []

    class Failing:
        async def call(self, method, *arguments, timeout_s, **more):
            calls.append(method)
            raise CoordinatorFailed(method)

    async def run():
        link = Link(Failing(), handle=None, report=None, operations={})
        with pytest.raises(CoordinatorFailed):
            await link.call_when_reached("reserve_rows", "mine", "r0", 1.0)
        with pytest.raises(ApiError, match="failed") as caught:
            await FleetClient(link, 5.0).locate_rows("mine")
        assert (caught.value.status, len(calls)) == (500, 2)

    asyncio.run(run())


def test_rows_of_a_replica_that_has_ended_are_gone_also_where_another_has_older_ones(monkeypatch):
    async def test(fleet):
        fleet.freeze_drops(monkeypatch, "r0")
        await fleet.keep("r0", "mine", 5)
        await fleet.keep("r1", "mine", 7)
        fleet.world.members[1].is_alive = False
        await until(lambda: "r1" not in fleet.client.coordinator._members)
        assert [await fleet.ask(tag, "mine") for tag in ("r0", "r2")] == ["routing_gone"] * 2
        await fleet.keep("r0", "mine", 9)
        assert [await fleet.ask(tag, "mine") for tag in ("r0", "r2")] == [9, 9]

    in_fleet(test)


def test_a_coordinator_that_was_restarted_learns_who_keeps_the_rows_of_an_id(monkeypatch):
    async def test(fleet):
        for number, tag in enumerate(("r1", "r0", "r2"), 1):
            fleet.freeze_drops(monkeypatch, tag)
            await fleet.keep(tag, "mine", number)
        fleet.client.die()
        assert await fleet.ask_each("mine") == ["fleet_unavailable"] * 3
        fleet.client.start(was_restarted=True)
        assert await fleet.ask("r0", "mine") == "fleet_unavailable", "it may not know yet"
        await until(lambda: not fleet.client.coordinator._is_recovering)
        assert await fleet.ask_each("mine") == [3] * 3
        await fleet.keep("r1", "mine", 4)
        assert await fleet.ask_each("mine") == [4] * 3, "numbers go on above those of the coordinator before"

    in_fleet(test)


def test_a_request_waits_for_a_coordinator_that_is_restarted_before_it_names_its_rows():
    async def test(fleet):
        await fleet.keep("r0", "mine", 5)
        fleet.client.die()
        kept = asyncio.create_task(fleet.keep("r1", "mine", 7))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not kept.done()
        fleet.client.start(was_restarted=True)
        await kept
        await until(lambda: not fleet.client.coordinator._is_recovering)
        assert await fleet.ask_each("mine") == [7] * 3

    in_fleet(test)


def test_rows_of_an_id_that_the_replica_has_made_need_no_coordinator():
    async def test(fleet):
        fleet.client.die()
        await fleet.keep("r0", MADE, 5, is_made=True)
        assert await fleet.ask_each(MADE) == [5, "fleet_unavailable", "fleet_unavailable"]

    in_fleet(test)


def test_an_id_that_no_request_had_is_unknown():
    async def test(fleet):
        assert await fleet.ask_each("mine") == await fleet.ask_each(MADE) == ["routing_not_found"] * 3
        assert await fleet.ask_each("r9" + MADE[2:]) == ["routing_gone"] * 3

    in_fleet(test)


def test_a_drop_that_comes_late_leaves_newer_rows(monkeypatch):
    async def test(fleet):
        await fleet.keep("r0", "mine", 5)
        drop = fleet.links["r0"]._operations["drop_rows"]
        await fleet.keep("r0", "mine", 7)
        await drop(request_id="mine", before=1)
        assert await fleet.ask_each("mine") == [7] * 3
        fleet.servers["r0"].store.reserve("mine", owner="", choices=[0])  # it is just being noted
        await drop(request_id="mine", before=9)
        assert await fleet.ask_each("mine") == ["routing_not_ready"] * 3

    in_fleet(test)


def test_locations_are_forgotten_when_no_rows_can_be_kept_any_more(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)
    directory = RowDirectory(first=7, clock=lambda: clock.now)
    assert directory.reserve("a", "r0", 10.0) == (7, None)
    clock.now = 5.0
    assert directory.reserve("b", "r0", 10.0) == (8, None)
    assert directory.reserve("a", "r1", 10.0) == (9, "r0")
    clock.now = 14.9
    assert (directory.get("a"), directory.get("b")) == ("r1", "r0")
    directory.add("r2", {"a": 8, "c": 3}, 10.0)
    assert (directory.get("a"), directory.get("c")) == ("r1", "r2"), "8 is older than 9"
    clock.now = 15.0
    assert (directory.get("a"), directory.get("b"), directory.get("c")) == (None, None, "r2")
    monkeypatch.setattr(row_directory, "MAX_LOCATIONS", 2)
    directory.reserve("d", "r0", 10.0)
    directory.reserve("e", "r0", 10.0)
    assert (directory.get("c"), directory.get("d"), directory.get("e")) == (None, "r0", "r0")
