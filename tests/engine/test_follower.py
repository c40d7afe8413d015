"""A follower carries out what arrives on its runner, and reads nothing but tokens; what it does not know ends it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine.test_process_group import TIMEOUT_S, all_exits, group, table
from routed_experts.core.errors import ProcessMismatchError, WeightsMismatchError
from routed_experts.core.model_worker_batch import ForwardMode, SamplingMode
from routed_experts.engine import follower as follower_module
from routed_experts.engine.control import weight_control
from routed_experts.engine.control.weights import value_digests
from routed_experts.engine.follower import Follower
from routed_experts.engine.group.process_group import DIGEST_STEPS
from routed_experts.execution.forward_batch import BatchShape, StepInputs
from routed_experts.execution.orders import Order, OrderKind
from support.tiny_checkpoint import write_tiny_checkpoint

SHAPE = BatchShape(mode=ForwardMode.DECODE, num_tokens=2, num_requests=2, table_width=3)


class Rows:
    """Rows that may not be read."""

    def __array__(self, *args, **kwargs):
        raise AssertionError("a follower reads no rows")


class RecordingRunner:
    """Notes the calls of its methods; stands for a device."""

    def __init__(self):
        self.calls, self.rows, self.num_ranks = [], Rows(), 1

    def follow_step(self, inputs):
        self.calls.append(("step", inputs))
        return table(len(self.calls), 1)

    def take_counts(self):
        self.calls.append(("take_counts",))

    def release(self, *, pool, weights):
        self.calls.append(("release", pool, weights))

    def allocate_pool(self):
        self.calls.append(("allocate_pool",))

    def update_weights(self, state, *, version):
        self.calls.append(("update_weights", state, version))


def step_inputs(word=0, mode=SamplingMode.GREEDY, targets=None):
    bias = (np.ones((2, 3), np.int32), np.ones((2, 3), np.float32)) if mode is SamplingMode.FULL else None
    return StepInputs(SHAPE, mode, np.full(SHAPE.packed.shape, word, np.int32), bias, targets)


def send(leader, inputs):
    leader.send(OrderKind.STEP, inputs.head, inputs.arrays)


@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize("targets", [None, np.arange(2, dtype=np.int32)], ids=["no targets", "targets"])
def test_a_step_keeps_its_values_through_its_order(mode, targets):
    inputs = step_inputs(7, mode, targets)
    read = StepInputs.from_order(Order(kind=OrderKind.STEP, head=inputs.head, arrays=inputs.arrays), num_ranks=1)
    assert (read.shape, read.sampling_mode) == (SHAPE, mode)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(read.arrays, inputs.arrays, strict=True))
    assert (read.bias is None) == (inputs.bias is None) and (read.prompt_targets is None) == (targets is None)


@pytest.mark.parametrize(
    ("head", "arrays"),
    [
        ({}, ()),
        ({"step": ["decode", 2, 2, 3, 0]}, (np.zeros(3, np.int32),)),
        ({"step": ["decoding", 2, 2, 3, 0, False]}, (np.zeros(3, np.int32),)),
        ({"step": ["decode", 2, 2, 3, 9, False]}, (np.zeros(3, np.int32),)),
        ({"step": ["decode", 2, 2, 3, 0, False]}, (np.zeros(3, np.int32),)),
        ({"step": ["decode", 2, 2, 3, 3, False]}, (np.zeros(SHAPE.packed.shape, np.int32),)),
        ({"step": ["decode", 2, 2, 3, 0, True]}, (np.zeros(SHAPE.packed.shape, np.int32),)),
        ({"step": ["decode", 2, 2, 3, 0, False]}, ()),
    ],
)
def test_an_order_that_is_no_step_is_refused(head, arrays):
    with pytest.raises(ProcessMismatchError, match="order 5 "):
        StepInputs.from_order(Order(kind=OrderKind.STEP, seq=5, head=head, arrays=arrays), num_ranks=1)


def test_orders_reach_the_runner_in_order_and_the_last_is_reported_as_done():
    with group(watchdog=4.0) as (leader, (member,), exits), ThreadPoolExecutor(1) as pool:
        runner = RecordingRunner()
        running = pool.submit(Follower(member, runner, served=None).run)
        for word in range(3):
            send(leader, step_inputs(word))
        leader.send(OrderKind.TAKE_COUNTS)
        leader.send(OrderKind.RELEASE, {"pool": True, "weights": False})
        leader.send(OrderKind.ALLOCATE_POOL)
        leader.send(OrderKind.SET_VERSION, {"version": 4})
        leader.close()
        running.result(TIMEOUT_S)
        assert [call[0] for call in runner.calls] == [
            *["step"] * 3,
            "take_counts",
            "release",
            "allocate_pool",
            "update_weights",
        ]
        assert [call[1].packed[0] for call in runner.calls[:3]] == [0, 1, 2]
        assert runner.calls[4][1:] == (True, False) and runner.calls[-1][1:] == (None, 4)
        assert exits.empty()


def test_tokens_are_read_a_digest_at_a_time_and_never_those_of_the_step_in_flight():
    with group() as (_, (member,), _):
        follower = Follower(member, RecordingRunner(), served=None)
        inputs = step_inputs()
        for seq in range(1, DIGEST_STEPS + 1):
            follower.carry_out(Order(kind=OrderKind.STEP, seq=seq, head=inputs.head, arrays=inputs.arrays))
        assert not member._digests and len(follower._tokens) == DIGEST_STEPS
        follower.carry_out(Order(kind=OrderKind.STEP, seq=seq + 1, head=inputs.head, arrays=inputs.arrays))
        assert [steps for steps, _ in member._digests] == [DIGEST_STEPS] and len(follower._tokens) == 1


def run_to_its_error(change):
    """What ends a follower after `change(leader)`, and the exit codes."""
    with group() as (leader, (member,), exits), ThreadPoolExecutor(1) as pool:
        running = pool.submit(Follower(member, RecordingRunner(), served=None).run)
        send(leader, step_inputs())
        change(leader)
        error = running.exception(TIMEOUT_S)
        codes = all_exits(exits, 1)
        assert codes == {0: 3} and "process 1 of 2" in str(leader.error)
        return error


def test_a_missing_and_a_repeated_order_end_the_group():
    def skip(leader):
        leader._seq += 1
        send(leader, step_inputs())

    def repeat(leader):
        leader._seq -= 1
        send(leader, step_inputs())

    for change, expected in ((skip, "order 3 follows order 1"), (repeat, "order 1 follows order 1")):
        error = run_to_its_error(change)
        assert isinstance(error, ProcessMismatchError) and expected in str(error)


def test_orders_that_this_follower_cannot_carry_out_end_the_group():
    error = run_to_its_error(lambda leader: leader.send(OrderKind.COMMIT_WEIGHTS, {"version": 3}))
    assert "commits version 3, which was not prepared" in str(error)
    error = run_to_its_error(lambda leader: leader.send(OrderKind.MOVE_LAYER, {"layer": [0, 0]}))
    assert "an order about placed experts, and this process has none" in str(error)


def test_the_leader_sends_in_the_order_in_which_it_holds_the_lock():
    with group() as (leader, (member,), _):
        seqs, held = [], threading.Event()

        def other():
            held.wait(TIMEOUT_S)
            seqs.append(leader.send(OrderKind.TAKE_COUNTS))

        thread = threading.Thread(target=other)
        thread.start()
        with leader.in_order():
            held.set()
            seqs.append(leader.send(OrderKind.STEP))
            seqs.append(leader.send(OrderKind.STEP))
        thread.join(TIMEOUT_S)
        assert seqs == [1, 2, 3]
        assert [member.receive().kind for _ in range(3)] == [OrderKind.STEP, OrderKind.STEP, OrderKind.TAKE_COUNTS]


def test_a_clean_end_does_not_wait_for_new_weights_that_a_follower_still_loads(monkeypatch):
    began, leave = threading.Event(), threading.Event()
    monkeypatch.setattr(follower_module, "load_ready", lambda path, served: (began.set(), leave.wait()))
    with group() as (leader, (member,), exits), ThreadPoolExecutor(1) as pool:
        running = pool.submit(Follower(member, RecordingRunner(), served=None).run)
        leader.send(OrderKind.PREPARE_WEIGHTS, {"path": "new", "version": 1})
        assert began.wait(TIMEOUT_S)
        leader.send(OrderKind.DROP_WEIGHTS)
        leader.send(OrderKind.PREPARE_WEIGHTS, {"path": "newer", "version": 2})
        leader.close()
        running.result(TIMEOUT_S)
        loaders = [thread for thread in threading.enumerate() if thread.name == "load"]
        assert len(loaders) == 2 and all(thread.daemon for thread in loaders), "Python waits for others at its exit"
        assert exits.empty()
        member._at_exit()
        assert all_exits(exits, 1) == {1: 0}
        leave.set()
        for thread in loaders:
            thread.join(TIMEOUT_S)
        member._at_exit()
        assert exits.empty()


@pytest.mark.parametrize("seed", [0, 1], ids=["equal values", "other values"])
def test_new_weights_whose_values_are_not_those_of_process_0_are_refused_by_name(tmp_path, monkeypatch, seed):
    first, other = (write_tiny_checkpoint(tmp_path / str(n), seed=n, tokenizer=False) for n in range(2))
    digests, state = [value_digests(folder) for folder in (first, other)], object()
    name = next(name for name in sorted(digests[0]) if digests[0][name] != digests[1][name])
    for module in (follower_module, weight_control):
        monkeypatch.setattr(module, "load_ready", lambda path, served: state)
    monkeypatch.setattr(follower_module, "value_digests", lambda path: digests[seed])  # as on another host
    with group() as (leader, (member,), _), ThreadPoolExecutor(1) as pool:
        running = pool.submit(Follower(member, RecordingRunner(), served=None).run)
        if seed == 0:
            assert weight_control._prepare(leader, None, first, 1) is state
        else:
            with pytest.raises(
                WeightsMismatchError, match=f"process 1: its values of {name} are not those of process 0"
            ):
                weight_control._prepare(leader, None, first, 1)
        leader.close()
        running.result(TIMEOUT_S)
