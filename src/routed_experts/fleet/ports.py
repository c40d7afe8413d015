"""Free ports of this machine, below the range that the system gives to outgoing connections.

A port is free when it is looked up. Searches begin at random places, so that processes that start together meet other
ports."""

import contextlib
import secrets
import socket

from routed_experts.core.errors import MachineError

FIRST, LAST = 20_000, 29_990


def free_port(host: str = "0.0.0.0") -> int:
    """A port that nothing listens on. Raises MachineError where none is left."""
    return _free_run(host, 1)


def free_pair(host: str) -> int:
    """A port that is free together with the next one. Raises MachineError where none is left."""
    return _free_run(host, 2)


def _free_run(host: str, length: int) -> int:
    size = LAST - FIRST
    start = secrets.randbelow(size)
    for offset in range(size):
        port = FIRST + (start + offset) % size
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in range(port, port + length):
                stack.enter_context(contextlib.closing(socket.socket())).bind((host, number))
            return port
    raise MachineError(f"no {length} neighbouring ports of {FIRST} to {LAST} are free on {host}; close some")
