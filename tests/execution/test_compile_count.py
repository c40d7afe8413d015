"""Compile counts survive a library that removes all other listeners, and then report that they are incomplete."""

import jax
import jax.monitoring
import pytest

from routed_experts.execution.compile_count import CompileCount


def compile_something(size):
    """A program that no other test has compiled."""
    jax.jit(lambda x: x * 3 + size)(jax.numpy.zeros(size))


@pytest.fixture
def counts():
    counts = CompileCount()
    yield counts
    counts.close()


def test_programs_count_before_and_after_the_engine_is_ready(counts):
    compile_something(7001)
    startup = counts.startup
    counts.start_serving()
    assert startup > 0 == counts.serving
    compile_something(7002)
    assert counts.serving > 0 and counts.startup == startup and counts.is_complete


def test_removed_listeners_are_added_again_and_the_counts_are_called_incomplete(counts, caplog):
    jax.monitoring.clear_event_listeners()
    compile_something(7003)
    assert counts.startup == 0 and not counts.is_complete
    compile_something(7004)
    assert counts.startup > 0 and not counts.is_complete
    assert caplog.text.count("compile counts are incomplete") == 1


def test_closing_survives_removed_listeners():
    counts = CompileCount()
    jax.monitoring.clear_event_listeners()
    counts.close()
    counts.close()
    compile_something(7005)
    assert counts.startup == 0, "a closed count does not listen again"


def test_closing_leaves_no_listener(counts):
    other = CompileCount()
    other.close()
    compile_something(7006)
    assert other.startup == 0 < counts.startup
