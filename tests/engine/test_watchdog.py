"""The watchdog's judgement, by an injected clock: closed, silent, stuck, slow but alive, and a step that hangs."""

import pytest

from routed_experts.core.errors import EngineDeadError
from routed_experts.engine.group.watchdog import Watchdog


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dog(clock):
    return Watchdog({1: "10.0.0.2:40000", 2: "10.0.0.3:40000"}, num_processes=3, timeout_s=30.0, clock=clock)


def beat(dog, done_seq=0):
    for rank in (1, 2):
        dog.note_alive(rank, done_seq)


def run(dog, clock, seconds, done_seq=0, ranks=(1, 2)):
    """Beats of these ranks, once a second; returns the first error."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        for rank in ranks:
            dog.note_alive(rank, done_seq)
        if (error := dog.check()) is not None:
            return error
    return None


def test_a_closed_connection_is_a_lost_process_at_once(dog):
    assert dog.check() is None
    dog.closed(2, "closed its connection")
    dog.closed(2, "is late with another reason")
    error = dog.check()
    assert isinstance(error, EngineDeadError) and error.code == "peer_lost" and error.status == 503
    assert str(error) == "process 2 of 3 at 10.0.0.3:40000 closed its connection; restart the group"


def test_silence_is_a_lost_process_after_the_timeout_and_not_before(dog, clock):
    beat(dog)
    assert run(dog, clock, 27, ranks=(2,)) is None  # 0.9 of the bound
    error = run(dog, clock, 5, ranks=(2,))
    assert "process 1 of 3 at 10.0.0.2:40000 sent nothing for 31 s" in str(error)


def test_a_process_that_answers_but_does_not_finish_an_order_is_lost(dog, clock):
    dog.sent(1, "STEP")
    dog.note_alive(2, 1)
    for _ in range(31):
        clock.now += 1.0
        dog.note_alive(1, 0)
        dog.note_alive(2, 1)
        error = dog.check()
    assert "process 1 of 3 at 10.0.0.2:40000 answers, but has not finished order 1 (STEP) for 31 s" in str(error)


def test_a_process_that_is_slow_but_goes_on_is_not_lost(dog, clock):
    for seq in range(1, 40):
        dog.sent(seq, "STEP")
    for done in range(1, 40):  # each order takes 0.9 of the bound
        assert run(dog, clock, 27, done_seq=done - 1) is None
        beat(dog, done)
        dog.end_wait()
    assert dog.lag() == {1: 0, 2: 0}


def test_an_order_with_a_bound_of_its_own_may_take_longer(dog, clock):
    dog.sent(1, "SCORE", 300.0)
    assert run(dog, clock, 290) is None
    assert "SCORE" in str(run(dog, clock, 20))


def test_an_idle_group_is_well_for_ever(dog, clock):
    dog.sent(1, "STEP")
    beat(dog, 1)
    dog.end_wait()
    dog.sent(2, "TAKE_COUNTS")
    beat(dog, 2)
    assert run(dog, clock, 10_000, done_seq=2) is None


@pytest.mark.parametrize("waits", [True, False], ids=["process 0 waits", "process 0 hangs before"])
def test_a_step_that_does_not_end_ends_the_group(dog, clock, waits):
    dog.sent(1, "STEP")
    if waits:
        dog.begin_wait()
    assert run(dog, clock, 27, done_seq=1) is None
    dog.end_wait()
    assert run(dog, clock, 100, done_seq=1) is None
    dog.sent(2, "STEP")
    if waits:
        dog.begin_wait()
    assert "a step of the group has not ended for 31 s, although every process answers" in str(
        run(dog, clock, 40, done_seq=2)
    )


def test_a_process_that_holds_a_step_up_is_named_although_its_last_beat_of_progress_came_late(dog, clock):
    dog.sent(1, "STEP")
    dog.sent(2, "STEP")
    dog.begin_wait()
    clock.now += 0.9
    beat(dog, 1)  # the first step was done long before this beat
    dog.note_alive(1, 2)
    clock.now += 29.2
    dog.note_alive(1, 2)
    dog.note_alive(2, 1)
    assert "process 2 of 3 at 10.0.0.3:40000 answers, but has not finished order 2 (STEP) for 30 s" in str(dog.check())


def test_an_order_with_a_longer_bound_may_hold_a_step_up_so_long(dog, clock):
    dog.sent(1, "STEP")
    dog.sent(2, "SCORE", 100.0)
    assert run(dog, clock, 95, done_seq=2) is None
    dog.sent(3, "STEP")
    assert "a step of the group has not ended for 31 s" in str(run(dog, clock, 40, done_seq=3))


def test_steps_that_end_in_time_are_no_alarm_however_many_are_in_flight(dog, clock):
    for seq in range(1, 20):
        dog.sent(seq, "STEP")
        assert run(dog, clock, 27, done_seq=seq) is None
        if seq > 1:
            dog.end_wait()
    dog.end_wait()
    assert run(dog, clock, 100, done_seq=19) is None


def test_lag_counts_orders_that_are_not_done(dog):
    for seq in range(1, 6):
        dog.sent(seq, "STEP")
    dog.note_alive(1, 2)
    assert dog.lag() == {1: 3, 2: 5}


def test_a_score_must_be_read_in_time_once_every_process_has_run_its_order(dog, clock):
    for seq in (1, 2):
        dog.sent(seq, "SCORE", 300.0)
        dog.begin_read(seq)
        assert run(dog, clock, 200, done_seq=seq - 1) is None  # others compile
        assert run(dog, clock, 27, done_seq=seq) is None
        dog.end_read()
        assert run(dog, clock, 100, done_seq=seq) is None
    dog.begin_read(2)
    assert "a score of the group has not ended for 31 s, although every process answers" in str(
        run(dog, clock, 40, done_seq=2)
    )
