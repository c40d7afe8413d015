"""Two network namespaces of this machine, joined by a virtual cable: two hosts for tests, whose cable can be cut."""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
from pathlib import Path

HOSTS = Path("/etc/netns")  # `ip netns exec` shows NAME/hosts as /etc/hosts


@functools.cache
def can_make_namespaces():
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"rexo-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return done.returncode == 0


class TwoHosts:
    """Namespaces 0 and 1 with addresses, and the cable between them."""

    def __init__(self):
        self._names = [f"rexo-{os.getpid()}-{number}" for number in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def prefix(self, number):
        """Of a command that runs in a namespace."""
        return ("ip", "netns", "exec", self._names[number])

    def cut(self):
        """Take the cable out: nothing arrives, and no end is told."""
        _ip("-n", self._names[0], "link", "set", "eth", "down")

    def drop_from(self, number):
        """Drop what this host sends; what it receives still arrives."""
        _ip("-n", self._names[number], "route", "add", "blackhole", f"{self.addresses[1 - number]}/32")

    def make(self):
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("netns", "add", name)
            (HOSTS / name).mkdir(parents=True, exist_ok=True)  # gloo connects by the name of the host
            (HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        first, second = self._names
        _ip("-n", first, "link", "add", "eth", "type", "veth", "peer", "name", "eth", "netns", second)
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth")
            for device in ("lo", "eth"):
                _ip("-n", name, "link", "set", device, "up")

    def remove(self):
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(HOSTS / name, ignore_errors=True)


@contextlib.contextmanager
def two_hosts():
    """Two hosts, which are removed at the end of the block."""
    hosts = TwoHosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def _ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
