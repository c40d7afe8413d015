"""The channel over real sockets: orders arrive in order, beats go on while a peer does not read, and ends are told."""

import contextlib
import queue
import socket

import numpy as np
import pytest

from routed_experts.core.errors import OrderFormatError
from routed_experts.execution import order_channel
from routed_experts.execution.order_channel import Connection, OrderChannel
from routed_experts.execution.orders import Order, OrderKind, encode


class Events:
    """Notes what the channel reports."""

    def __init__(self):
        self.orders, self.closed, self.ticks = queue.Queue(), queue.Queue(), queue.Queue()
        self.sent, self.unsent = queue.Queue(), queue.Queue()

    def on_send(self, order):
        self.sent.put(order.seq)

    def on_unsent(self, error):
        self.unsent.put(error)

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
        sender.send(Order(kind=OrderKind.STEP, seq=1, arrays=(np.zeros(50 << 20, np.uint8),)))  # returns at once
        assert events.sent.get(timeout=10) == 1
        sender.send(Order(kind=OrderKind.STEP, seq=2))
        for _ in range(20):
            events.ticks.get(timeout=10)
        assert events.sent.empty(), "the second waits for the first"
        pair[1].close()
        assert events.closed.get(timeout=10)[0] == 1
        sender.close()
        assert not sender._sender.is_alive() and events.unsent.empty()


def test_what_is_queued_leaves_before_the_channel_closes(pair):
    with channel(pair[1]) as (_, events):
        with channel(pair[0]) as (sender, _):
            for seq in range(100):
                sender.send(Order(kind=OrderKind.REPLY, seq=seq, arrays=(np.zeros(10_000, np.uint8),)))
        read: list[int] = []
        while len(read) < 100:
            order = events.orders.get(timeout=60)[1]
            read += [order.seq] if order.kind is OrderKind.REPLY else []
        assert read == list(range(100))


def test_a_channel_whose_peer_does_not_read_closes_in_bounded_time(pair, monkeypatch):
    monkeypatch.setattr(order_channel, "_FLUSH_S", 0.1)
    with channel(pair[0]) as (sender, events):
        sender.send(Order(kind=OrderKind.STEP, seq=1, arrays=(np.zeros(50 << 20, np.uint8),)))
        assert events.sent.get(timeout=10) == 1
        sender.close()
        assert not sender._sender.is_alive()


def test_an_order_that_cannot_be_encoded_is_reported_and_not_sent(pair):
    with channel(pair[0]) as (sender, events), channel(pair[1]) as (_, received):
        sender.send(Order(kind=OrderKind.STEP, seq=1, arrays=(np.zeros(2, np.complex64),)))
        assert isinstance(events.unsent.get(timeout=10), OrderFormatError)
        sender.send(Order(kind=OrderKind.STEP, seq=2))
        while (order := received.orders.get(timeout=10)[1]).kind is OrderKind.BEAT:
            continue
        assert order.seq == 2 and events.sent.get(timeout=10) == 2


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
