"""The rendezvous over real sockets: who joins, who is refused and with what words; strangers change nothing.

Threads stand for processes; nothing here uses JAX."""

import contextlib
import re
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import ConfigError, MachineError
from routed_experts.engine.group.process_group import start_group
from routed_experts.engine.group.rendezvous import MAX_PENDING, GroupAbandonedError, Rendezvous, compare_fields, join
from routed_experts.execution.order_channel import Connection
from routed_experts.execution.orders import Order, OrderKind, OrderReader, encode
from support.process_groups import Stopwatch, free_address

FIELDS = {
    "package": "0.1.0",
    "python": "3.11",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "tp_size": "4",
    "deterministic": "False",
    "placement": "None",
    "config.json": "ab12",
    "weights": "cd34",
    "XLA_FLAGS": "",
    "watchdog_timeout": "30.0",
}


def dist(address, rank=0, nnodes=2, timeout=20.0):
    return DistConfig(nnodes=nnodes, node_rank=rank, dist_init_addr=address, dist_timeout=timeout)


@contextlib.contextmanager
def leader(nnodes=2, timeout=20.0, fields=FIELDS):
    """A rendezvous that waits in a thread; yields its address and the future of its members."""
    address = free_address()
    rendezvous = Rendezvous(dist(address, nnodes=nnodes, timeout=timeout), fields)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(rendezvous.wait_for_all)
        try:
            yield address, future
        finally:
            with contextlib.suppress(MachineError):
                for connection in future.result(timeout + 5).values():
                    connection.close()
            rendezvous.close()


def connect(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def refusal(address, order):
    """What the rendezvous answers to an order; None where it closes without a word."""
    with connect(address) as sock:
        sock.sendall(b"".join(encode(order)))
        reader = OrderReader()
        while data := sock.recv(4096):
            for answer in reader.feed(data):
                assert answer.kind is OrderKind.REFUSE
                return answer.head["reason"]
    return None


def hello(rank=1, nnodes=2, fields=FIELDS, **more):
    return Order(kind=OrderKind.HELLO, head={"rank": rank, "nnodes": nnodes, "fields": dict(fields), **more})


def test_processes_that_are_alike_join_in_any_order():
    with leader(nnodes=4) as (address, members), ThreadPoolExecutor(3) as pool:
        joined = [pool.submit(join, dist(address, rank, 4), FIELDS) for rank in (3, 1, 2)]
        connections = [future.result(20) for future in joined]
        assert list(members.result(20)) == [1, 2, 3]
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("name", [*FIELDS, "new"])
def test_a_field_that_differs_is_named_with_both_values(name):
    theirs = FIELDS | {name: "other"}
    text = compare_fields(FIELDS, theirs, 1)
    ours = FIELDS.get(name, "absent")
    assert f"process 1 differs from process 0 in {name} ({ours} on process 0, other on 1)" in text
    assert compare_fields(FIELDS, dict(FIELDS), 1) is None


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (hello(fields=FIELDS | {"tp_size": "8"}), r"tp_size \(4 on process 0, 8 on 1\)"),
        (hello(fields={}), r"package \(0.1.0 on process 0, absent on 1\).* and 7 more"),
        (hello(nnodes=3), r"nnodes=3, and process 0 has nnodes=2"),
        (hello(rank=0), r"node_rank=0 is outside 1\.\.1"),
        (hello(rank=2), r"node_rank=2 is outside 1\.\.1"),
        (hello(rank=True), r"node_rank=True is outside"),
        (hello(rank="1"), r"node_rank='1' is outside"),
        (hello(failure="no checkpoint folder m"), r"process 1 cannot start: no checkpoint folder m$"),
        (hello(failure="a\nb\x1b[2J"), r"process 1 cannot start: a b \[2J$"),
        (hello(fields=FIELDS | {"new\nline": "\r"}), r"in new line \(absent on process 0,   on 1\)"),
        (Order(kind=OrderKind.HELLO, head={"rank": 1, "nnodes": 2}), "expects one hello"),
        (Order(kind=OrderKind.STEP), "expects one hello"),
        (Order(kind=OrderKind.BEAT), "expects one hello"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_and_the_right_one_still_joins(order, expected):
    with leader() as (address, members):
        assert re.search(expected, refusal(address, order))
        join(dist(address, 1), FIELDS).close()
        assert list(members.result(20)) == [1]


def test_a_follower_raises_what_process_0_refuses():
    with leader() as (address, members):
        with pytest.raises(
            ConfigError, match=r"process 0 at .* refuses: process 1 differs .*jax \(0\.10\.2 on .*9 on 1"
        ):
            join(dist(address, 1), FIELDS | {"jax": "9"})
        join(dist(address, 1), FIELDS).close()
        members.result(20)


def test_a_taken_rank_and_a_late_process_are_refused():
    with leader(nnodes=3) as (address, members), ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, dist(address, 1, 3), FIELDS)
        while (text := refusal(address, hello(rank=1, nnodes=3, fields=FIELDS | {"jax": "9"}))) and "taken" not in text:
            continue
        assert re.search(r"node_rank=1 is taken by the process at 127\.0\.0\.1:\d+", text)
        second = join(dist(address, 2, 3), FIELDS)
        first.result(20).close()
        assert list(members.result(20)) == [1, 2]
        assert "the group of 3 processes is complete" in refusal(address, hello(rank=1, nnodes=3))
        second.close()


def test_strangers_change_nothing_before_and_after_all_have_come():
    with leader() as (address, members):
        strangers = []

        def disturb():
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04pickled", b"REXO" + b"\xff" * 28, b"REXO"):
                strangers.append(connect(address))
                strangers[-1].sendall(data)
            for _ in range(200):
                strangers.append(connect(address))

        tracemalloc.start()
        disturb()
        member = join(dist(address, 1), FIELDS)
        (connection,) = members.result(20).values()
        disturb()
        assert "complete" in refusal(address, hello())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20, peak
        connection.send(b"".join(encode(Order(kind=OrderKind.BEAT, seq=5))))
        received = []
        while not received:
            received = member.receive()
        assert received[0].seq == 5
        for sock in strangers:
            sock.close()
        member.close()
    assert MAX_PENDING < 200


def test_more_processes_than_strangers_are_held_may_connect_at_once_and_say_hello_later():
    nnodes = MAX_PENDING + 40
    with leader(nnodes=nnodes) as (address, members), contextlib.ExitStack() as stack:
        connected = [stack.enter_context(connect(address)) for _ in range(1, nnodes)]
        assert refusal(address, hello(rank=nnodes, nnodes=nnodes)) is not None  # all before it are accepted by now
        for rank, sock in enumerate(connected, start=1):
            sock.sendall(b"".join(encode(hello(rank=rank, nnodes=nnodes))))
        assert list(members.result(20)) == list(range(1, nnodes))


def test_a_process_that_leaves_before_all_have_come_may_come_again():
    with leader(nnodes=3) as (address, members), ThreadPoolExecutor(1) as pool:
        with connect(address) as gone:
            gone.sendall(b"".join(encode(hello(rank=1, nnodes=3))))
            while "taken" not in (refusal(address, hello(rank=1, nnodes=3, fields={})) or ""):
                continue
        again = None
        while again is None:
            again = pool.submit(join, dist(address, 1, 3), FIELDS)
            with contextlib.suppress(ConfigError, TimeoutError):
                again.result(0.3)
            again = None if again.done() and again.exception() else again
        join(dist(address, 2, 3), FIELDS).close()
        again.result(20).close()
        assert list(members.result(20)) == [1, 2]


def test_the_absent_are_named_after_dist_timeout():
    address = free_address()
    rendezvous = Rendezvous(dist(address, nnodes=3, timeout=1.0), FIELDS)
    with pytest.raises(
        MachineError, match=r"processes 1, 2 of 3 did not come to .* within dist_timeout=1 s \(came: 0\)"
    ):
        rendezvous.wait_for_all()
    rendezvous.close()


def is_taken(address, rank, nnodes):
    return "taken" in (refusal(address, hello(rank=rank, nnodes=nnodes, fields={})) or "")


def await_(is_so, seconds=30.0):
    """Each look is a connection that process 0 answers."""
    watch = Stopwatch()
    while not is_so():
        assert watch.seconds < seconds, "it does not come about"


def await_arrival(address, rank, nnodes):
    await_(lambda: is_taken(address, rank, nnodes))


def await_departure(address, rank, nnodes):
    await_(lambda: not is_taken(address, rank, nnodes))


def test_processes_that_have_come_raise_what_process_0_raises_after_dist_timeout():
    """Also one whose own time began before: it waits for the answer of process 0."""
    earlier = [time.monotonic() - 0.9]
    clocks = {1: time.monotonic, 2: lambda: earlier.pop() if earlier else time.monotonic()}
    with leader(nnodes=5, timeout=3.0) as (address, members), ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(join, dist(address, rank, 5, 3.0), FIELDS, clock=clocks[rank]) for rank in clocks]
        error = members.exception(20)
        assert re.search(
            r"processes 3, 4 of 5 did not come to .* within dist_timeout=3 s \(came: 0, 1, 2\)", str(error)
        )
        for future in joining:
            assert type(future.exception(20)) is MachineError and str(future.exception()) == str(error)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([1], r"processes 2 of 3 did not come to .* \(came: 0; 1 came, and left after \d s\)"),
        ([1, 2], r"processes 1, 2 of 3 did not stay at .* \(came: 0; 1 came, and left after \d s; 2 came, and left"),
    ],
)
def test_processes_that_came_and_left_are_named_after_dist_timeout(ranks, expected):
    with leader(nnodes=3, timeout=3.0) as (address, members):
        for rank in ranks:
            with connect(address) as gone:
                gone.sendall(b"".join(encode(hello(rank=rank, nnodes=3))))
                await_arrival(address, rank, 3)
            await_departure(address, rank, 3)
        assert re.search(expected, str(members.exception(20)))


def test_a_process_that_left_and_came_again_is_there():
    with leader(nnodes=3, timeout=3.0) as (address, members):
        with connect(address) as gone:
            gone.sendall(b"".join(encode(hello(rank=1, nnodes=3))))
            await_arrival(address, 1, 3)
        await_departure(address, 1, 3)
        with connect(address) as back:
            back.sendall(b"".join(encode(hello(rank=1, nnodes=3))))
            await_arrival(address, 1, 3)
            assert re.search(r"processes 2 of 3 did not come to .* \(came: 0, 1\)", str(members.exception(20)))


def test_processes_that_have_come_are_told_that_process_0_was_asked_to_end():
    address = free_address()
    rendezvous = Rendezvous(dist(address, nnodes=4), FIELDS)
    with ThreadPoolExecutor(3) as pool:
        leading = pool.submit(rendezvous.wait_for_all)
        joining = pool.submit(join, dist(address, 1, 4), FIELDS)
        starting = pool.submit(start_group, dist(address, 2, 4), FIELDS, num_devices=None)
        for rank in (1, 2):
            await_arrival(address, rank, 4)
        rendezvous.abandon()
        assert leading.done()
        for future in (leading, joining, starting):
            assert isinstance(future.exception(20), GroupAbandonedError)
    rendezvous.close()
    rendezvous.abandon()  # of one that is closed: nothing


def test_where_one_cannot_be_welcomed_the_others_end_with_the_reason(monkeypatch):
    address = free_address()
    rendezvous, welcome = Rendezvous(dist(address, nnodes=4), FIELDS), Connection.send

    def send(connection, data):
        if data == b"".join(encode(Order(kind=OrderKind.WELCOME, head={"nnodes": 4}))) and connection in refusing:
            raise BrokenPipeError("it has ended")
        welcome(connection, data)

    refusing = []
    monkeypatch.setattr(Connection, "send", send)
    with ThreadPoolExecutor(4) as pool:
        joining = {rank: pool.submit(join, dist(address, rank, 4), FIELDS) for rank in (1, 2)}
        leading = pool.submit(rendezvous.wait_for_all)
        for rank in (1, 2):
            await_arrival(address, rank, 4)
        refusing.append(rendezvous._members[2])
        joining[3] = pool.submit(join, dist(address, 3, 4), FIELDS)
        with pytest.raises(MachineError, match=r"process 2 left while the group started \(it has ended\)") as caught:
            leading.result(20)
        with contextlib.closing(joining[1].result(20)) as welcomed:
            assert welcomed.socket.recv(1) == b"", "its connection has ended"
        for rank in (2, 3):
            assert str(joining[rank].exception(20)) == str(caught.value)
    rendezvous.close()


def test_a_program_that_gives_no_answer_is_named(monkeypatch):
    monkeypatch.setattr("routed_experts.engine.group.rendezvous._ANSWER_MARGIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = dist(f"127.0.0.1:{server.getsockname()[1]}", 1, timeout=1.0)
        with pytest.raises(MachineError, match=r"gave no answer for 1\.1 s: .* or it hangs"):
            join(silent, FIELDS)


def test_a_leader_that_is_absent_or_another_program_is_named():
    address = free_address()
    with pytest.raises(MachineError, match=rf"process 0 is not reached at {address} within dist_timeout=1 s"):
        join(dist(address, 1, timeout=1.0), FIELDS)
    for answer in (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b""):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve(server=server, answer=answer):
                sock, _ = server.accept()
                sock.recv(100)
                sock.sendall(answer)
                sock.close()

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(MachineError, match="is no process 0 of this protocol, or it has ended"):
                join(dist(f"127.0.0.1:{server.getsockname()[1]}", 1), FIELDS)
            thread.join()


def test_ports_that_are_in_use_and_addresses_of_other_machines_are_refused():
    address = free_address()
    host, port = address.rsplit(":", 1)
    with (
        socket.create_server((host, int(port))),
        pytest.raises(MachineError, match=r"cannot listen .*in use.*dist_init"),
    ):
        Rendezvous(dist(address), FIELDS)
    with socket.create_server((host, int(port) + 1)), pytest.raises(MachineError, match="JAX's coordinator, the next"):
        Rendezvous(dist(address), FIELDS)
    with pytest.raises(MachineError, match=r"cannot listen on 192\.0\.2\.1"):
        Rendezvous(dist("192.0.2.1:5000"), FIELDS)


def test_a_follower_whose_connection_is_with_itself_tries_again(monkeypatch):
    """As TCP connects it where nobody listens yet and the system chooses the same port for its own end."""
    connect, own = socket.create_connection, []

    def connect_to_itself_first(address, timeout):
        if own:
            return connect(address, timeout)
        own.append(socket.socket())
        own[0].bind(("127.0.0.1", 0))
        own[0].connect(own[0].getsockname())
        return own[0]

    with leader() as (address, members):
        monkeypatch.setattr(socket, "create_connection", connect_to_itself_first)
        join(dist(address, 1), FIELDS).close()
        assert list(members.result(20)) == [1] and own[0].fileno() == -1
