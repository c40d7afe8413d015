"""A group ends in bounded time, with a typed error for every caller and exit code 3, when a process dies, stops, hangs
or fails; its ports are free at once. SIGTERM of any process drains all of them. Strangers change nothing."""

import contextlib
import os
import signal
import socket

import numpy as np
import pytest

from support.process_groups import CommandError, GroupProcess, Stopwatch, free_address, group, processes
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

WATCHDOG_S = 8.0  # where silence is tested; on busy cores a process may be late by seconds
PATIENT_S = 60.0  # elsewhere
SLACK_S = 2.0  # of callers, beyond the watchdog's bound
EXIT_S = 5.0  # until every process is gone
ENGINE = {  # array code, which is compiled soonest: a death does not depend on the model or on its kernels
    "moe_backend": "reference",
    "attention_backend": "reference",
    "enable_return_routed_experts": True,
    "precompile_bs_paddings": [2],
    "precompile_token_paddings": [16],
    "max_running_requests": 2,
}
PROMPT = np.random.default_rng(0).integers(3, VOCAB_SIZE, 6).tolist()
SHORT = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 5}
LONG = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 110}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        tokenizer=False,
        num_hidden_layers=1,
        mlp_only_layers=[],
        num_experts=8,
        max_position_embeddings=256,
    )


def open_group(folder, *, watchdog_s=PATIENT_S, **options):
    dist = {"watchdog_timeout": watchdog_s}
    return group(folder, ENGINE, lazy=True, fast=True, dist=dist, **options)


def answer(leader, params=LONG):
    return leader.call("generate", prompts=[PROMPT], params=params, return_routed_experts=True)[0]


def assert_lost(leader, code="peer_lost", kind="PeerLostError"):
    """The caller that waits gets the error of the group, once; returns its text."""
    with pytest.raises(CommandError) as caught:
        leader.result()
    assert (caught.value.kind, caught.value.code) == (kind, code), caught.value
    assert "\n" not in caught.value.text and "restart the group" in caught.value.text
    return caught.value.text


def assert_all_exit(members, codes):
    watch = Stopwatch()
    assert [member.exit_code(20) for member in members] == codes, [member.log()[-2000:] for member in members]
    assert watch.seconds < EXIT_S


DEATHS = {
    # a signal while steps run, or a trap; the exit code of the process; whether others hear of it at once
    "SIGKILL": (signal.SIGKILL, -signal.SIGKILL, True),
    "SIGSTOP": (signal.SIGSTOP, None, False),
    "sleeps in an order": ({"at": 30, "does": "sleep"}, 3, False),
    "fails in an order": ({"at": 30, "does": "raise"}, 3, True),
    "exits in load": ({"at": "load", "does": "exit"}, 9, True),
    "exits in compile": ({"at": "compile", "does": "exit"}, 9, True),
    "exits in step 30": ({"at": 30, "does": "exit"}, 9, True),
    "exits between steps": ({"at": "between", "does": "exit"}, 9, True),
    "exits in prepare": ({"at": "prepare", "does": "exit"}, 9, True),
}
REASONS = {
    (1, "SIGSTOP"): "sent nothing for",
    (1, "sleeps in an order"): "answers, but has not finished order",
    (0, "sleeps in an order"): "a step of the group has not ended for",
    (1, "fails in an order"): "process 1 of 2 at 127.0.0.1:",
}
IN_EVERY_RUN = [
    (1, "SIGKILL"),
    (0, "SIGSTOP"),
    (1, "sleeps in an order"),
    (1, "fails in an order"),
    (1, "exits in load"),
    (0, "exits in step 30"),
]


def each_death():
    for death in DEATHS:
        for rank in range(2):
            marks = [] if (rank, death) in IN_EVERY_RUN else [pytest.mark.thorough]
            yield pytest.param(rank, death, marks=marks, id=f"process {rank} {death}")


def assert_ports_are_free(address):
    host, port = address.rsplit(":", 1)
    for number in (int(port), int(port) + 1):
        socket.create_server((host, number)).close()


def let_die(folder, address, rank, death):
    """A death in a new group at this address: callers and the other process end in bounded time."""
    fault, code, is_told = DEATHS[death]
    bound_s = (0.0 if is_told else WATCHDOG_S) + SLACK_S
    trap = fault if isinstance(fault, dict) else None
    starts = trap is not None and trap["at"] in ("load", "compile")
    options = {"watchdog_s": PATIENT_S if is_told else WATCHDOG_S, "traps": {rank: trap}, "ready": not starts}
    with open_group(folder, address=address, **options) as members:
        leader, dead, other = members[0], members[rank], members[1 - rank]
        if not starts:
            assert len(answer(leader, SHORT)["tokens"]) == 5
            if trap is not None and trap["at"] == "prepare":
                leader.begin("update_weights", path=str(folder), version=1)
            else:
                leader.begin("generate", prompts=[PROMPT] * 64, params=LONG)
        if trap is None:
            dead.signal(fault)
            since = Stopwatch()
            seconds = lambda: since.seconds  # noqa: E731
        else:
            seconds = dead.since_trap
        told = seconds() if starts else None
        if not starts and (rank == 1 or death == "sleeps in an order"):  # whose caller is there to be told
            text = assert_lost(leader)
            told = seconds()
            assert REASONS.get((rank, death), "its connection") in text, text
        assert told is None or told < bound_s + 1.0, told  # to start the call is in it
        assert other.exit_code(bound_s + EXIT_S + 60) in (1, 3), other.log()[-2000:]
        assert seconds() < bound_s + EXIT_S + 1.0, seconds()
        assert rank == 1 or death == "sleeps in an order" or "process 0 of 2" in other.log()
        dead.signal(signal.SIGCONT)
        codes = (3, -signal.SIGKILL, -signal.SIGABRT) if code is None else (code,)
        assert dead.exit_code(20) in codes, dead.log()[-2000:]
    assert_ports_are_free(address)


@pytest.mark.parametrize(("rank", "death"), list(each_death()))
def test_a_death_ends_the_group_in_bounded_time_and_the_ports_are_free(folder, rank, death, is_thorough):
    """Thrice at one address, and then a group that serves there, in a thorough run."""
    address, before = free_address(), set(os.listdir("/dev/shm"))
    for _ in range(3 if is_thorough else 1):
        let_die(folder, address, rank, death)
    if is_thorough or (rank, death) == IN_EVERY_RUN[0]:
        with open_group(folder, address=address) as (leader, follower):
            assert answer(leader, SHORT)["tokens"]
            assert leader.end() == 0 and follower.exit_code() == 0
    assert set(os.listdir("/dev/shm")) <= before


def disturb(address):
    """What strangers may do at a port."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04pickle", b"REXO\x01\x00\x01\x00" + b"\xff" * 24, b"R"):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            sock.sendall(data)
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))


def test_strangers_change_nothing_and_one_flipped_word_in_one_followers_order_ends_the_group(folder):
    address = free_address()
    traps = {1: {"at": 200, "does": "flip"}}
    with open_group(folder, address=address, watchdog_s=30.0, traps=traps) as (leader, follower):
        first, resident = answer(leader, SHORT), leader.call("resident_bytes")
        for _ in range(3):
            disturb(address)
            assert answer(leader, SHORT)["tokens"] == first["tokens"]
        late = GroupProcess.of_engine(1, folder, {**ENGINE, "tp_size": 2}, {"nnodes": 2, "dist_init_addr": address})
        with processes(late):
            assert late.exit_code(60) == 1
            assert "the group of 2 processes is complete and runs" in late.log()
        assert answer(leader, SHORT)["tokens"] == first["tokens"]
        assert leader.call("resident_bytes") < resident + (64 << 20)
        leader.begin("generate", prompts=[PROMPT] * 64, params=LONG)  # it must not end before the leader has compared
        text = assert_lost(leader, "process_mismatch", "ProcessMismatchError")
        assert "process 1 of 2 at" in text and "in steps 193 to 256" in text
        assert_all_exit([leader, follower], [3, 3])
