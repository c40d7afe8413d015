"""Ctrl-C that arrives where Python cannot raise it: in a callback of the garbage collector, as JAX has one, or in a
`__del__`. Python reports such an exception and continues. While JAX is imported, C++ code may lose it, or crash.

    main thread   collection ─ callback ─ KeyboardInterrupt ─ hook ─ next statements ─ KeyboardInterrupt
    timer                                                    └─ DELAY_S ─ SIGINT ┘"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

DELAY_S = 0.05  # the main thread has left the callback by then; an interrupt that is lost again is sent again


@contextlib.contextmanager
def resend_lost_interrupts() -> Generator[None]:
    """Send an interrupt again that was lost. Raises KeyboardInterrupt at the end of a block that raises nothing, if one
    could not be sent before."""
    before = sys.unraisablehook
    resender = _Resender(before)
    sys.unraisablehook = resender
    try:
        yield
    finally:
        sys.unraisablehook = before
        is_pending = resender.end()
    if is_pending:
        raise KeyboardInterrupt


@contextlib.contextmanager
def hold_interrupts() -> Generator[None]:
    """Delay SIGINT and SIGTERM to the end of the block, which imports libraries in C++. Only those that have a handler
    in Python, and only in the main thread; elsewhere nothing is delayed."""
    held: list[int] = []
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # undone in the other order: SIGTERM is taken first
                if callable(handler := signal.getsignal(number)):
                    stack.callback(_deliver, number, handler, held)
                    signal.signal(number, lambda number, frame: held.append(number))
        yield


def _deliver(number: signal.Signals, handler: Any, held: list[int]) -> None:
    """Set a handler again, and call it for a signal that was held."""
    signal.signal(number, handler)
    if number in held:
        signal.raise_signal(number)


class _Resender:
    """The hook for exceptions that cannot be raised. `before`: the hook of all but interrupts."""

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before
        self._timers: list[threading.Timer] = []
        self._is_pending = False  # an interrupt is lost, and is still to be sent

    def __call__(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._before(unraisable)
        elif not self._is_pending:
            self._is_pending = True
            while not self._start_timer():
                pass  # another came meanwhile; one is sent for both

    def _start_timer(self) -> bool:
        """Send later: within the hook the signal would be lost, too. False: interrupted itself."""
        try:
            timer = threading.Timer(DELAY_S, self._send)
            timer.daemon = True
            self._timers.append(timer)
            timer.start()
        except KeyboardInterrupt:
            return False
        return True

    def _send(self) -> None:
        """Send SIGINT to the main thread, or SIGTERM where SIGINT is ignored: then SIGTERM was what was lost."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                ident = threading.main_thread().ident
                assert ident is not None, "the main thread has started"
                self._is_pending = False
                signal.pthread_kill(ident, number)  # also ends a system call that waits
                return

    def end(self) -> bool:
        """Send nothing from now on; returns whether an interrupt is lost that was not sent."""
        for timer in self._timers:
            timer.cancel()
            if timer.is_alive():
                timer.join()
        return self._is_pending
