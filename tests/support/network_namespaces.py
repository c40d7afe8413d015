"""Two network namespaces of this machine, joined by a virtual cable: two hosts for tests, whose cable can be cut.

veth        a cable of the kernel's
Cable       one of ours, between two TUN devices: a thread carries each packet, after a time, or loses it"""

import contextlib
import ctypes
import fcntl
import functools
import heapq
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
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


class Cable:
    """Carries packets between two TUN devices. `delay_s` of each packet, `loss` as a fraction, drawn from a seed."""

    def __init__(self, names):
        self.delay_s, self.loss, self.num_lost = 0.0, 0.0, 0
        self._noise = random.Random(0)
        self._fds = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in names]
        for fd, name in zip(self._fds, names, strict=True):
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def start(self):
        """Carry from now on."""
        self._thread.start()

    def close(self):
        """End the thread and remove the devices."""
        os.write(self._wake, b"x")
        if self._thread.ident is not None:
            self._thread.join()
        for fd in (*self._fds, self._wake, self._woken):
            os.close(fd)

    def _carry(self):
        waiting, count = [], 0  # (when, number, to, packet)
        while True:
            until = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready = select.select([*self._fds, self._woken], [], [], until)[0]
            if self._woken in ready:
                return
            for source in ready:
                packet, count = os.read(source, 1 << 16), count + 1
                if self._noise.random() < self.loss:
                    self.num_lost += 1
                    continue
                to = self._fds[1 - self._fds.index(source)]
                heapq.heappush(waiting, (time.monotonic() + self.delay_s, count, to, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                with contextlib.suppress(OSError):  # the device is full, or down: the packet is lost
                    os.write(to, packet)


class TwoHosts:
    """Namespaces 0 and 1 with addresses, and the cable between them; `cable`: None for the kernel's own."""

    def __init__(self):
        self._names = [f"rexo-{os.getpid()}-{number}" for number in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self.cable = None

    def namespaces(self):
        """Names of the namespaces, by number."""
        return dict(enumerate(self._names))

    def cut(self):
        """Take the cable out: nothing arrives, and no end is told."""
        _ip("-n", self._names[0], "link", "set", "eth", "down")

    def drop_from(self, number):
        """Drop what this host sends; what it receives still arrives."""
        _ip("-n", self._names[number], "route", "add", "blackhole", f"{self.addresses[1 - number]}/32")

    def make(self, *, ours):
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("netns", "add", name)
            (HOSTS / name).mkdir(parents=True, exist_ok=True)  # gloo connects by the name of the host
            (HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        first, second = self._names
        if ours:
            devices = [f"rexo{os.getpid()}{number}" for number in "ab"]
            self.cable = Cable(devices)
            for device, name in zip(devices, self._names, strict=True):
                _ip("link", "set", device, "netns", name)
                _ip("-n", name, "link", "set", device, "name", "eth")
            self.cable.start()
        else:
            _ip("-n", first, "link", "add", "eth", "type", "veth", "peer", "name", "eth", "netns", second)
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth")
            for device in ("lo", "eth"):
                _ip("-n", name, "link", "set", device, "up")

    def remove(self):
        if self.cable is not None:
            self.cable.close()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(HOSTS / name, ignore_errors=True)


@contextlib.contextmanager
def two_hosts(*, ours=False):
    """Two hosts, which are removed at the end of the block; `ours`: joined by a Cable."""
    hosts = TwoHosts()
    try:
        hosts.make(ours=ours)
        yield hosts
    finally:
        hosts.remove()


def enter_namespace(name):
    """Move this process into a network namespace, with the namespace's /etc/hosts, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
    for call, *arguments in (
        (libc.setns, fd, _CLONE_NEWNET),
        (libc.unshare, _CLONE_NEWNS),
        (libc.mount, b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        (libc.mount, os.fsencode(HOSTS / name / "hosts"), b"/etc/hosts", None, _MS_BIND, None),
    ):
        if call(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    os.close(fd)


def _ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)
