"""Ports that are found are free, and below those that the system gives to outgoing connections."""

import socket

import pytest

from routed_experts.core.errors import MachineError
from routed_experts.fleet import ports


def test_a_port_and_a_pair_can_be_bound():
    for find, length in ((ports.free_port, 1), (lambda: ports.free_pair("127.0.0.1"), 2)):
        actual = {find() for _ in range(5)}
        assert len(actual) > 1, "searches begin at random places"
        for port in actual:
            assert ports.FIRST <= port <= ports.LAST < 32_768
            for number in range(port, port + length):
                with socket.socket() as sock:
                    sock.bind(("127.0.0.1", number))


def test_taken_ports_are_passed_over_and_none_left_is_a_sentence(monkeypatch):
    with socket.socket() as first, socket.socket() as third:
        base = ports._free_run("127.0.0.1", 3)
        monkeypatch.setattr(ports, "FIRST", base)
        monkeypatch.setattr(ports, "LAST", base + 3)
        first.bind(("127.0.0.1", base))
        third.bind(("127.0.0.1", base + 2))
        assert {ports.free_port("127.0.0.1") for _ in range(8)} == {base + 1}
        monkeypatch.setattr(ports, "LAST", base + 2)
        with pytest.raises(MachineError, match="no 2 neighbouring ports"):
            ports.free_pair("127.0.0.1")
