"""Ctrl-C in a callback of the garbage collector ends the program, as it does anywhere else."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import routed_experts
from routed_experts.core.interrupts import hold_interrupts, resend_lost_interrupts

SRC = Path(routed_experts.__file__).parents[1]
LOSE = """
import gc, signal, sys, threading
sys.path.insert(0, {src!r})
from routed_experts.core.interrupts import resend_lost_interrupts

interrupt = lambda: signal.raise_signal(signal.{number})
wait = lambda: threading.Event().wait(60)  # until a signal ends it
steps = {steps}

def callback(phase, details):  # two calls a collection
    if steps:
        steps.pop(0)()

def handler(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, {sigint})
signal.signal(signal.SIGTERM, handler)
gc.disable()
gc.callbacks.append(callback)
try:
    with resend_lost_interrupts():
        gc.collect()
        {work}
except KeyboardInterrupt:
    print("interrupted")
else:
    print("ended")
"""


@pytest.mark.parametrize(
    ("number", "sigint", "steps", "work"),
    [
        ("SIGINT", "signal.default_int_handler", "[interrupt]", "wait()"),
        ("SIGINT", "signal.default_int_handler", "[interrupt, interrupt]", "wait()"),
        ("SIGINT", "signal.default_int_handler", "[interrupt, wait]", "wait()"),  # lost again when it is sent again
        ("SIGINT", "signal.default_int_handler", "[interrupt]", "pass"),  # the work ends before it is sent again
        ("SIGTERM", "handler", "[interrupt]", "wait()"),
        ("SIGTERM", "signal.SIG_IGN", "[interrupt]", "wait()"),  # as in a shell's background
    ],
)
def test_an_interrupt_in_a_collection_is_not_lost(number, sigint, steps, work):
    script = LOSE.format(src=str(SRC), number=number, sigint=sigint, steps=steps, work=work)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


def test_other_exceptions_are_reported_as_before(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    before, unraisable = sys.unraisablehook, SimpleNamespace(exc_type=ValueError)
    with resend_lost_interrupts():
        sys.unraisablehook(unraisable)
    assert reported == [unraisable] and sys.unraisablehook is before


def test_a_held_interrupt_is_raised_at_the_end():
    ran = []

    def work():
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            ran.append("after the signal")

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background of a shell ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert ran and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_both_held_signals_are_taken_and_handlers_are_back():
    taken = []

    def handler(number, frame):
        taken.append(number)
        raise KeyboardInterrupt

    def work():
        with hold_interrupts():
            for number in numbers:
                signal.raise_signal(number)
            assert not taken

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert sorted(taken) == sorted(numbers)
        assert [signal.getsignal(number) for number in numbers] == [handler, handler]
    finally:
        for number, former in zip(numbers, before, strict=True):
            signal.signal(number, former)


def test_signals_without_a_handler_in_python_and_other_threads_are_left_alone():
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with hold_interrupts():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: hold_interrupts().__enter__()).result(10)
    finally:
        signal.signal(signal.SIGTERM, former)
