"""The clock of a process that may be stopped, with a time of its own."""

import pytest

from routed_experts.fleet.stop_clock import BEAT_S, SETTLE_S, STOPPED_S, StopClock


class Loop:
    """An event loop that runs its calls when a test lets time pass."""

    def __init__(self):
        self.now, self.calls = 100.0, []

    def call_later(self, seconds, call):
        self.calls.append((self.now + seconds, call))

    def run(self, seconds, *, is_stopped=False):
        """Time passes; a process that is stopped finds what is due at the end alone."""
        end = self.now + seconds
        while not is_stopped and self.calls[0][0] <= end:
            self.now, call = self.calls.pop(0)
            call()
        self.now = end
        if is_stopped and self.calls[0][0] <= end:
            self.calls.pop(0)[1]()


@pytest.mark.parametrize("stopped_s", [STOPPED_S, 1000.0])
def test_a_stop_is_known_for_a_time_after_it(stopped_s):
    loop = Loop()
    clock = StopClock(lambda: loop.now, loop.call_later)
    loop.run(30 * BEAT_S)
    assert clock.recent_stop_s is None
    loop.run(stopped_s, is_stopped=True)
    assert clock.recent_stop_s == pytest.approx(stopped_s, abs=BEAT_S)
    loop.run(SETTLE_S - 0.5)
    assert clock.recent_stop_s is not None
    loop.run(0.5)
    assert clock.recent_stop_s is None and len(loop.calls) == 1


def test_a_loop_that_is_busy_for_some_seconds_is_no_stop():
    loop = Loop()
    clock = StopClock(lambda: loop.now, loop.call_later)
    for _ in range(5):
        loop.run(STOPPED_S / 2, is_stopped=True)
        assert clock.recent_stop_s is None
