"""A group ends in bounded time, with a typed error for every caller and exit code 3, when a process dies, stops, hangs
or fails; its ports are free at once. SIGTERM of any process drains all of them. Strangers change nothing."""

import contextlib
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
ENGINE = {
    "enable_return_routed_experts": True,
    "precompile_bs_paddings": [2],
    "precompile_token_paddings": [16],
    "max_running_requests": 2,
}
PROMPT = np.random.default_rng(0).integers(3, VOCAB_SIZE, 6).tolist()
LONG = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 110}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        tokenizer=False,
        num_hidden_layers=2,
        num_experts=8,
        max_position_embeddings=256,
    )


def open_group(folder, *, watchdog_s=PATIENT_S, **options):
    dist = {"watchdog_timeout": watchdog_s}
    return group(folder, ENGINE, lazy=True, fast=True, dist=dist, **options)


def answer(leader):
    return leader.call("generate", prompts=[PROMPT], params=LONG, return_routed_experts=True)[0]


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


def wait_steps(leader):
    """Begin a long answer; the first one has compiled what it needs."""
    answer(leader)
    leader.begin("generate", prompts=[PROMPT] * 2, params=LONG, return_routed_experts=True)


@pytest.mark.parametrize(
    ("number", "bound_s", "reason"),
    [
        (signal.SIGKILL, SLACK_S, "its connection"),
        (signal.SIGSTOP, WATCHDOG_S + SLACK_S, "sent nothing for"),
    ],
    ids=["killed", "stopped"],
)
def test_a_follower_that_is_killed_or_stopped_ends_the_group_and_the_ports_are_free(folder, number, bound_s, reason):
    address = free_address()
    watchdog_s = WATCHDOG_S if number == signal.SIGSTOP else PATIENT_S
    with open_group(folder, address=address, watchdog_s=watchdog_s) as (leader, follower):
        first = answer(leader)
        leader.begin("generate", prompts=[PROMPT] * 64, params=LONG)
        follower.signal(number)
        watch = Stopwatch()
        text = assert_lost(leader)
        assert watch.seconds < bound_s + 1.0, watch.seconds  # starting the call is in it
        assert "process 1 of 2 at 127.0.0.1:" in text and reason in text
        if number == signal.SIGSTOP:
            follower.signal(signal.SIGCONT)
        assert_all_exit([leader], [3])
        assert follower.exit_code(20) in (3, -signal.SIGKILL)
    if number == signal.SIGKILL:
        with open_group(folder, address=address) as (leader, follower):
            assert answer(leader)["tokens"] == first["tokens"]
            assert leader.end() == 0 and follower.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_leader_that_is_killed_or_stopped_ends_its_followers(folder, number):
    watchdog_s = WATCHDOG_S if number == signal.SIGSTOP else PATIENT_S
    with open_group(folder, watchdog_s=watchdog_s) as (leader, follower):
        answer(leader)
        leader.signal(number)
        watch = Stopwatch()
        assert follower.exit_code(WATCHDOG_S + SLACK_S + EXIT_S) == 3, follower.log()[-2000:]
        assert watch.seconds < (WATCHDOG_S if number == signal.SIGSTOP else 0) + SLACK_S
        assert "process 0 of 2" in follower.log()


TRAPS = {
    "sleeps in an order": ({"at": 30, "does": "sleep"}, "answers, but has not finished order"),
    "fails in an order": ({"at": 30, "does": "raise"}, "has ended by an error: RuntimeError: a fault of the test"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_follower_that_hangs_or_fails_in_an_order_ends_the_group(folder, name):
    trap, reason = TRAPS[name]
    watchdog_s = WATCHDOG_S if trap["does"] == "sleep" else PATIENT_S
    with open_group(folder, traps={1: trap}, watchdog_s=watchdog_s) as (leader, follower):
        leader.begin("generate", prompts=[PROMPT], params=LONG)
        assert reason in assert_lost(leader)
        assert follower.since_trap() < WATCHDOG_S + SLACK_S
        assert leader.exit_code(20) == 3
        assert follower.exit_code(20) == 3
        assert follower.since_trap() < WATCHDOG_S + SLACK_S + EXIT_S


@pytest.mark.parametrize(
    ("rank", "trap"),
    [
        (1, {"at": "load", "does": "exit"}),
        (0, {"at": "compile", "does": "kill"}),
    ],
    ids=["a follower exits in load", "the leader is killed in compile"],
)
def test_a_process_that_goes_while_the_group_starts_ends_the_others(folder, rank, trap):
    with open_group(folder, traps={rank: trap}, ready=False) as members:
        other = members[1 - rank]
        members[rank].exit_code(60)
        assert other.exit_code(WATCHDOG_S + SLACK_S + EXIT_S) in (1, 3), other.log()[-2000:]
        assert f"process {rank} of 2" in other.log()


def test_a_follower_that_exits_while_it_prepares_weights_ends_the_group(folder, tmp_path):
    with open_group(folder, traps={1: {"at": "prepare", "does": "exit"}}) as (leader, follower):
        answer(leader)
        leader.begin("update_weights", path=str(folder), version=1)
        assert "its connection" in assert_lost(leader)
        assert_all_exit([leader, follower], [3, 9])


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
    traps = {1: {"at": 700, "does": "flip"}}
    with open_group(folder, address=address, watchdog_s=30.0, traps=traps) as (leader, follower):
        first, resident = answer(leader), leader.call("resident_bytes")
        for _ in range(3):
            disturb(address)
            assert answer(leader)["tokens"] == first["tokens"]
        late = GroupProcess.of_engine(1, folder, {**ENGINE, "tp_size": 2}, {"nnodes": 2, "dist_init_addr": address})
        with processes(late):
            assert late.exit_code(60) == 1
            assert "the group of 2 processes is complete and runs" in late.log()
        assert answer(leader)["tokens"] == first["tokens"]
        assert leader.call("resident_bytes") < resident + (64 << 20)
        leader.begin("generate", prompts=[PROMPT] * 12, params=LONG)
        text = assert_lost(leader, "process_mismatch", "ProcessMismatchError")
        assert "process 1 of 2 at" in text and "in steps 641 to 704" in text
        assert_all_exit([leader, follower], [3, 3])
