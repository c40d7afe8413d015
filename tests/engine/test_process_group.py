"""A leader and followers over real sockets, in one process and without JAX: threads stand for processes, and what would
end a process is noted instead.

test_process_group_serving.py has real processes."""

import contextlib
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from routed_experts.core.dist_config import DistConfig
from routed_experts.core.errors import PeerLostError, ProcessMismatchError
from routed_experts.engine.group import process_group
from routed_experts.engine.group.process_group import (
    DIGEST_STEPS,
    EXIT_LOST,
    MAX_UNSENT,
    FollowingGroup,
    LeadingGroup,
    StepDigests,
)
from routed_experts.execution.order_channel import Connection
from routed_experts.execution.orders import Order, OrderKind

TIMEOUT_S = 20


def dist(rank=0, nnodes=2, watchdog=20.0):
    return DistConfig(
        nnodes=nnodes, node_rank=rank, dist_init_addr="127.0.0.1:5000", dist_timeout=10.0, watchdog_timeout=watchdog
    )


def connected_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


@contextlib.contextmanager
def group(num_followers=1, watchdog=20.0):
    """A leader and its followers, and the queue of (rank, exit code) of processes that would have ended."""
    exits, nnodes = queue.Queue(), num_followers + 1
    pairs = {rank: connected_pair() for rank in range(1, nnodes)}
    leader = LeadingGroup(
        dist(0, nnodes, watchdog),
        {rank: Connection(pair[0]) for rank, pair in pairs.items()},
        exit_process=lambda code: exits.put((0, code)),
    )
    followers = [
        FollowingGroup(
            dist(rank, nnodes, watchdog),
            {0: Connection(pair[1])},
            exit_process=lambda code, rank=rank: exits.put((rank, code)),
        )
        for rank, pair in pairs.items()
    ]
    everyone = [leader, *followers]
    for member in everyone:
        member.start()
    try:
        yield leader, followers, exits
    finally:
        for member in everyone:
            member._closed = True  # what is left of it ends without a word
            member._error = None
            member._stopping = True
            member._channel.close()


def all_exits(exits, count):
    return dict(exits.get(timeout=TIMEOUT_S) for _ in range(count))


def table(*tokens):
    return np.array([[token, 0] for token in tokens], np.int32)


def step(seq, *words):
    return Order(kind=OrderKind.STEP, seq=seq, arrays=(np.array(words, np.int32),))


def follow(follower):
    """Carry out orders until STOP; returns their kinds."""
    kinds = []
    while True:
        order = follower.receive()
        kinds.append(order.kind)
        if order.kind is OrderKind.STOP:
            follower.stopped(order.seq)
            return kinds
        follower.done(order.seq)


def test_values_are_exchanged_by_rank_and_orders_arrive_in_order_until_a_clean_end():
    with group(num_followers=3) as (leader, followers, exits), ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(follower.exchange, "pages", 10 * follower.rank) for follower in followers]
        assert leader.exchange("pages", 5) == [5, 10, 20, 30]
        assert [future.result(TIMEOUT_S) for future in asked] == [[5, 10, 20, 30]] * 3
        running = [pool.submit(follow, follower) for follower in followers]
        for seq in range(1, 50):
            assert leader.send(OrderKind.STEP, {}, (np.arange(seq, dtype=np.int32),)) == seq
        leader.close()
        assert [future.result(TIMEOUT_S) for future in running] == [[OrderKind.STEP] * 49 + [OrderKind.STOP]] * 3
        assert leader.error is None and exits.empty()


def test_replies_are_collected_from_every_follower():
    with group(num_followers=2) as (leader, followers, _), ThreadPoolExecutor(2) as pool:

        def reply(follower):
            order = follower.receive()
            follower.reply(order.seq, **({"error": "no such folder"} if follower.rank == 2 else {}))

        running = [pool.submit(reply, follower) for follower in followers]
        seq = leader.send(OrderKind.PREPARE_WEIGHTS, {"path": "x"})
        assert leader.collect(seq, TIMEOUT_S, "loaded") == {1: {}, 2: {"error": "no such folder"}}
        for future in running:
            future.result(TIMEOUT_S)


def test_a_read_of_a_lost_group_ends_with_its_error_at_once():
    with group() as (leader, (follower,), exits), ThreadPoolExecutor(1) as pool:
        seq, began = leader.send(OrderKind.SCORE), threading.Event()
        assert leader.read(seq, lambda: 5) == 5
        reading = pool.submit(leader.read, seq, lambda: (began.set(), threading.Event().wait()))
        assert began.wait(TIMEOUT_S)
        follower._channel.close()
        error = reading.exception(TIMEOUT_S)
        assert isinstance(error, PeerLostError) and "process 1 of 2" in str(error)
        assert all_exits(exits, 1) == {0: EXIT_LOST}


def test_a_read_that_hangs_ends_the_group_and_one_that_fails_too():
    with group(watchdog=1.0) as (leader, (follower,), exits), ThreadPoolExecutor(1) as pool:
        seq = leader.send(OrderKind.SCORE)
        follower.done(follower.receive().seq)
        reading = pool.submit(leader.read, seq, threading.Event().wait)
        assert "a score of the group has not ended for" in str(reading.exception(TIMEOUT_S))
        assert all_exits(exits, 1) == {0: EXIT_LOST}
    with group() as (leader, _, exits):
        with pytest.raises(ZeroDivisionError):
            leader.read(leader.send(OrderKind.SCORE), lambda: 1 // 0)
        assert all_exits(exits, 2) == {0: EXIT_LOST, 1: EXIT_LOST}


def test_a_follower_that_goes_ends_every_process_with_3():
    with group(num_followers=2) as (leader, followers, exits):
        lost = queue.Queue()
        leader.set_on_lost(lost.put)
        followers[0]._channel.close()
        error = lost.get(timeout=TIMEOUT_S)
        assert isinstance(error, PeerLostError) and "process 1 of 3" in str(error) and "restart the group" in str(error)
        with pytest.raises(PeerLostError, match="process 1 of 3"):
            leader.send(OrderKind.STEP)
        with pytest.raises(PeerLostError, match="process 1 of 3"):
            leader.exchange("late", 1)
        assert all_exits(exits, 1) == {0: EXIT_LOST}


@pytest.mark.parametrize("running", [False, True])
def test_a_leader_that_goes_ends_its_followers_with_3(running):
    with group() as (leader, (follower,), exits):
        if running:
            received = queue.Queue()
            threading.Thread(target=lambda: received.put(follower.receive()), daemon=True).start()
            leader.send(OrderKind.STEP)
            received.get(timeout=TIMEOUT_S)
        leader._channel.close()
        assert all_exits(exits, 1) == {1: EXIT_LOST}
        assert "process 0 of 2" in str(follower.error)
        with pytest.raises(PeerLostError, match="process 0 of 2"):
            follower.receive()


def test_a_process_that_fails_tells_the_others_why():
    with group() as (leader, (follower,), exits):
        follower.fail(ValueError("no memory\nleft"))
        with pytest.raises(
            PeerLostError, match=r"process 1 of 2 at .* has ended by an error: ValueError: no memory left;"
        ):
            leader.exchange("plan", 1)
        assert all_exits(exits, 1) == {0: EXIT_LOST}


def test_a_phase_that_one_process_does_not_reach_ends_in_bounded_time():
    with group() as (leader, _, _):
        leader.dist = DistConfig(nnodes=2, dist_init_addr="127.0.0.1:5000", dist_timeout=1.0)
        with pytest.raises(PeerLostError, match="not every process has come to the phase 'plan' within 1 s"):
            leader.exchange("plan", 1)


def test_an_order_that_is_not_done_and_silence_end_the_group():
    with group(watchdog=1.0) as (leader, (follower,), exits):
        leader.send(OrderKind.STEP)
        follower.receive()  # and never done
        assert all_exits(exits, 1)[0] == EXIT_LOST
        assert "answers, but has not finished order 1 (STEP)" in str(leader.error)
    with group(watchdog=1.0) as (leader, (follower,), exits):
        follower._channel.try_send = lambda order: None  # its thread goes on, but sends no beats
        assert all_exits(exits, 1)[0] == EXIT_LOST
        assert "sent nothing for" in str(leader.error)


def test_what_no_follower_may_send_and_garbage_end_the_group():
    with group() as (leader, (follower,), exits):
        follower._channel.send(Order(kind=OrderKind.STEP))
        assert all_exits(exits, 2) == {0: EXIT_LOST, 1: EXIT_LOST}
        assert isinstance(leader.error, ProcessMismatchError) and "sent the order STEP" in str(leader.error)
    with group() as (leader, (follower,), exits):
        follower._channel._connections[0].send(b"\x80\x04pickle" + b"." * 40)
        assert all_exits(exits, 1)[0] == EXIT_LOST
        assert "sent what is no order" in str(leader.error)


def test_a_follower_passes_sigterm_on_to_process_0():
    with group() as (leader, (follower,), _):
        drained = threading.Event()
        leader.on_drain = drained.set
        follower.request_drain()
        assert drained.wait(TIMEOUT_S)


def test_a_group_that_is_abandoned_while_it_starts_exits_0_process_0_last():
    """JAX aborts a process that outlives process 0."""
    with group(num_followers=2) as (leader, followers, exits):
        abandoning = threading.Thread(target=leader.abandon)
        abandoning.start()
        assert all_exits(exits, 2) == {1: 0, 2: 0}
        for follower in followers:
            assert abandoning.is_alive()
            follower._channel._connections[0].socket.shutdown(socket.SHUT_RDWR)  # as its exit does
        abandoning.join(TIMEOUT_S)
        assert not abandoning.is_alive() and leader.error is None


def test_process_0_of_an_abandoned_group_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(process_group, "_ABANDON_S", 0.1)
    with group() as (leader, _, exits):
        leader.abandon()
        assert all_exits(exits, 1) == {1: 0} and leader.error is None


def run_steps(leader, follower, count, *, change=None):
    """Steps of both sides with their digests; `change(index, order, tokens)` of the follower's alone."""
    digests = StepDigests()
    for index in range(count):
        leader.send(OrderKind.STEP, {}, (np.arange(4, dtype=np.int32) + index,))
        leader.begin_wait()
        leader.end_wait(table(index, 3))
        order, tokens = follower.receive(), table(index, 3)
        if change is not None:
            order, tokens = change(index, order, tokens)
        digests.add_order(order)
        if (due := digests.add_tokens(tokens)) is not None:
            follower.add_digest(*due)
        follower.done(order.seq)


def flip_word(index, order, tokens):
    words = order.arrays[0].copy()
    words[2] ^= 1 << 9 if index == 37 else 0
    return Order(kind=order.kind, seq=order.seq, arrays=(words,)), tokens


def flip_token(index, order, tokens):
    tokens[1, 0] ^= index == 37
    return order, tokens


@pytest.mark.parametrize("change", [flip_word, flip_token])
def test_one_flipped_bit_in_64_steps_ends_the_group(change):
    with group(watchdog=4.0) as (leader, (follower,), exits):
        run_steps(leader, follower, DIGEST_STEPS, change=change)
        assert all_exits(exits, 2) == {0: EXIT_LOST, 1: EXIT_LOST}
        assert isinstance(leader.error, ProcessMismatchError)
        assert "process 1 of 2 at" in str(leader.error) and "in steps 1 to 64" in str(leader.error)


def test_equal_digests_are_compared_and_dropped():
    with group(watchdog=4.0) as (leader, (follower,), exits):
        run_steps(leader, follower, 3 * DIGEST_STEPS)
        with leader._changed:
            assert leader._changed.wait_for(lambda: not leader._due, TIMEOUT_S)
        assert leader.error is None and exits.empty()


def test_orders_that_cannot_leave_are_bounded_and_the_caller_waits(monkeypatch):
    leave = threading.Event()

    class HeldChannel(process_group.OrderChannel):
        def _send_now(self, orders):
            assert leave.wait(TIMEOUT_S)
            super()._send_now(orders)

    monkeypatch.setattr(process_group, "OrderChannel", HeldChannel)
    with group() as (leader, (follower,), exits), ThreadPoolExecutor(2) as pool:
        for _ in range(MAX_UNSENT):
            leader.send(OrderKind.TAKE_COUNTS)
        waiting = pool.submit(leader.send, OrderKind.TAKE_COUNTS)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        leave.set()
        assert waiting.result(TIMEOUT_S) == MAX_UNSENT + 1
        running = pool.submit(follow, follower)
        leader.close()
        assert len(running.result(TIMEOUT_S)) == MAX_UNSENT + 2 and exits.empty()


def test_an_order_that_cannot_be_encoded_ends_the_group_with_its_reason():
    with group() as (leader, (follower,), exits):
        leader.send(OrderKind.STEP, {}, (np.zeros(3, np.complex64),))
        assert all_exits(exits, 2) == {0: EXIT_LOST, 1: EXIT_LOST}
        assert "complex" in str(leader.error) or "<c8" in str(leader.error)
        assert "process 0 of 2" in str(follower.error) and "<c8" in str(follower.error)


def test_orders_of_steps_and_their_tokens_may_be_noted_by_two_threads_in_any_order():
    def due(first_orders):
        digests, actual = StepDigests(), []
        orders = [lambda index=index: digests.add_order(step(index, index)) for index in range(2 * DIGEST_STEPS)]
        tokens = [lambda index=index: digests.add_tokens(table(index)) for index in range(2 * DIGEST_STEPS)]
        for call in orders + tokens if first_orders else tokens + orders:
            actual += [result for result in (call(),) if result is not None]
        return actual

    assert due(True) == due(False) and [steps for steps, _ in due(True)] == [DIGEST_STEPS, 2 * DIGEST_STEPS]


def test_digests_depend_on_every_order_its_kind_and_its_sequence():
    def digest(*orders, token=1):
        tokens = table(token)
        digests = StepDigests()
        for index in range(DIGEST_STEPS):
            for order in orders if index == 5 else ():
                digests.add_order(order)
            digests.add_order(step(index, index))
            due = digests.add_tokens(tokens)
        assert due[0] == DIGEST_STEPS and len(bytes.fromhex(due[1])) == 8
        return due[1]

    first, second = (Order(kind=OrderKind.SCORE, arrays=(np.array([n], np.int32),)) for n in (1, 2))
    counts = Order(kind=OrderKind.TAKE_COUNTS)
    actual = {
        digest(),
        digest(first),
        digest(second),
        digest(first, second),
        digest(second, first),
        digest(counts),
        digest(token=2),
    }
    assert len(actual) == 7
    assert digest(first, second) == digest(first, second)
