"""The channel over real sockets: orders arrive in order, beats go on while a peer does not read, and ends are told."""

import contextlib
import queue
import socket
import threading

import numpy as np
import pytest

from routed_experts.execution.order_channel import Connection, OrderChannel
from routed_experts.execution.orders import Order, OrderKind, encode


class Events:
    """Notes what the channel reports."""

    def __init__(self):
        self.orders, self.closed, self.ticks = queue.Queue(), queue.Queue(), queue.Queue()

    def on_order(self, rank, order):
        self.orders.put((rank, order))

    def on_closed(self, rank, reason):
        self.closed.put((rank, reason))

    def make_beat(self):
        return Order(kind=OrderKind.BEAT, seq=7)

    def on_tick(self):
        self.ticks.put(None)


@pytest.fixture
def pair():
    """Two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        yield left, right


@contextlib.contextmanager
def channel(sock, interval_s=60.0):
    events = Events()
    opened = OrderChannel({1: Connection(sock)}, events, interval_s=interval_s)
    opened.start()
    try:
        yield opened, events
    finally:
        opened.close()


def test_orders_arrive_in_order_and_whole(pair):
    with channel(pair[0]) as (sender, _), channel(pair[1]) as (_, events):
        for seq in range(200):
            sender.send(Order(kind=OrderKind.STEP, seq=seq, arrays=(np.full(seq * 50, seq, np.int32),)))
        steps: list[Order] = []
        while len(steps) < 200:  # a beat may come between them
            order = events.orders.get(timeout=60)[1]
            steps += [order] if order.kind is OrderKind.STEP else []
        assert [order.seq for order in steps] == list(range(200))
        assert all((order.arrays[0] == order.seq).all() and order.arrays[0].size == order.seq * 50 for order in steps)


def test_beats_go_on_while_an_order_waits_for_a_peer_that_does_not_read(pair):
    with channel(pair[0], interval_s=0.01) as (sender, events):
        big = Order(kind=OrderKind.STEP, arrays=(np.zeros(50 << 20, np.uint8),))
        blocked = threading.Thread(target=sender.send, args=(big,), daemon=True)
        blocked.start()
        for _ in range(20):
            events.ticks.get(timeout=10)
        assert blocked.is_alive()
        pair[1].close()
        assert events.closed.get(timeout=10)[0] == 1
        sender.close()
        blocked.join(10)
        assert not blocked.is_alive()


def test_an_end_and_bytes_that_are_no_order_are_told_once(pair):
    with channel(pair[0]) as (_, events):
        pair[1].sendall(b"".join(encode(Order(kind=OrderKind.BEAT, seq=3))) + b"G" * 40)
        assert "sent what is no order" in events.closed.get(timeout=10)[1]
        pair[1].close()
        with pytest.raises(queue.Empty):
            events.closed.get(timeout=0.2)


def test_an_order_that_cannot_be_handled_is_told_and_the_thread_goes_on(pair):
    with channel(pair[0], interval_s=0.01) as (_, events):
        events.on_order = lambda rank, order: order.head["missing"]
        pair[1].sendall(b"".join(encode(Order(kind=OrderKind.STEP))))
        assert events.closed.get(timeout=10) == (1, "sent an order that cannot be handled (KeyError)")
        while not events.ticks.empty():
            events.ticks.get()
        events.ticks.get(timeout=10)


def test_a_connection_that_ends_is_told(pair):
    with channel(pair[0]) as (sender, events):
        pair[1].close()
        rank, reason = events.closed.get(timeout=10)
        assert rank == 1 and "its connection" in reason  # closed, or reset where a beat was on its way
        sender.send(Order(kind=OrderKind.STEP))  # raises nothing: the end has been told
