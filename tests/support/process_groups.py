"""Process groups for tests: free ports, and groups of real processes that are started, watched and reaped."""

import contextlib
import socket

FIRST_PORT, LAST_PORT = 20_000, 32_000  # below the range that the system gives to outgoing connections


def free_address():
    """An address of this machine whose port and the next one are free."""
    for port in range(FIRST_PORT, LAST_PORT, 2):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for number in (port, port + 1):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("127.0.0.1", number))
            return f"127.0.0.1:{port}"
    raise RuntimeError(f"no two neighbouring ports of {FIRST_PORT} to {LAST_PORT} are free")
