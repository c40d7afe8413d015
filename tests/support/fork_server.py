"""Processes that are forked from one that has imported JAX and the package, but has started no device: its imports, 4 s
of a core, are paid once in a test run and not by every process of every group.

    ForkServer().start(spec, env, stderr)       of the test run
    python -m support.fork_server SOCKET        reads requests; forks twice, so that the process has no parent
The test run adopts such processes (PR_SET_CHILD_SUBREAPER), so it waits for them as for any child of its own."""

import atexit
import ctypes
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys

from support.network_namespaces import enter_namespace

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_MAX_REQUEST = 1 << 16


class ForkedProcess:
    """A process that this one has adopted, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, pid, stdin, stdout):
        self.pid, self.stdin, self.stdout, self.returncode = pid, stdin, stdout, None
        self._pidfd = os.pidfd_open(pid)

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout=None):
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.poll()

    def send_signal(self, number):
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process from which others are forked. Its environment is that of this process."""

    def __init__(self):
        assert ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "support.fork_server", str(theirs.fileno())]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
        )
        theirs.close()
        atexit.register(self.close)

    def start(self, spec, env, stderr, *, namespace=None):
        """Start `support.group_process` with a spec, more variables, and a file for its standard error, in a network
        namespace."""
        stdin, stdout = os.pipe(), os.pipe()
        try:
            fds = [stdin[0], stdout[1], stderr.fileno()]
            socket.send_fds(self._socket, [json.dumps([spec, env, namespace]).encode()], fds)
            pid = int(self._socket.recv(64))
        finally:
            os.close(stdin[0])
            os.close(stdout[1])
        return ForkedProcess(pid, os.fdopen(stdin[1], "w"), os.fdopen(stdout[0]))

    def close(self):
        """End the server. Idempotent."""
        self._socket.close()
        self._process.wait(30)


@functools.cache
def fork_server():
    """The server of this test run."""
    return ForkServer()


def _serve(requests):
    """Fork a process for every request, until the other end closes."""
    from support import group_process

    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 3)
        if not data:
            return
        spec, env, namespace = json.loads(data)
        reading, writing = os.pipe()
        first = os.fork()
        if first == 0:
            second = os.fork()
            if second:
                os.write(writing, str(second).encode())
                os._exit(0)
            requests.close()
            os.close(reading)
            os.close(writing)
            if namespace is not None:
                enter_namespace(namespace)
            _run(group_process.main, spec, env, fds)
        os.waitpid(first, 0)  # from now on the test run is the parent of the second
        requests.send(os.read(reading, 64))
        os.close(reading)
        os.close(writing)
        for fd in fds:
            os.close(fd)


def _run(main, spec, env, fds):
    """Run `main` as a process of its own would be run, and end."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(env)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.exit(main(spec))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
