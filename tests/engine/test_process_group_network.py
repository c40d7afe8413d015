"""A group over two hosts: where the cable is cut, both end in bounded time, though no connection is closed; a slow and
lossy one changes no answer and is no alarm."""

import pytest

from engine.test_process_group_death import (
    LONG,
    PROMPT,
    SHORT,
    SLACK_S,
    WATCHDOG_S,
    answer,
    assert_lost,
    open_group,
)
from support.network_namespaces import two_hosts
from support.process_groups import Stopwatch
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.netns


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), tokenizer=False, num_hidden_layers=1, mlp_only_layers=[], num_experts=8
    )


def open_hosts(folder, hosts):
    address, namespaces = f"{hosts.addresses[0]}:5000", hosts.namespaces()
    return open_group(folder, address=address, namespaces=namespaces, watchdog_s=WATCHDOG_S)


@pytest.mark.parametrize("fault", ["cut", pytest.param("one way", marks=pytest.mark.thorough)])
def test_a_network_that_is_cut_ends_both_hosts(folder, fault):
    with two_hosts() as hosts, open_hosts(folder, hosts) as (leader, follower):
        answer(leader, SHORT)
        leader.begin("generate", prompts=[PROMPT] * 64, params=LONG)
        hosts.cut() if fault == "cut" else hosts.drop_from(1)
        watch = Stopwatch()
        assert "process 1 of 2 at 10.77.0.2:" in assert_lost(leader)
        assert watch.seconds < WATCHDOG_S + SLACK_S
        assert (leader.exit_code(20), follower.exit_code(20)) == (3, 3), follower.log()[-2000:]
        assert watch.seconds < WATCHDOG_S + SLACK_S + 5.0


def test_200_ms_there_and_back_and_a_hundredth_of_lost_packets_are_no_alarm_and_change_no_answer(folder, is_thorough):
    with two_hosts(ours=True) as hosts, open_hosts(folder, hosts) as (leader, follower):
        expected = answer(leader, SHORT)
        hosts.cable.delay_s = 0.1
        for _ in range(10 if is_thorough else 1):
            assert answer(leader, SHORT)["tokens"] == expected["tokens"]
        hosts.cable.delay_s, hosts.cable.loss = 0.0, 0.01
        while hosts.cable.num_lost < (100 if is_thorough else 5):
            assert answer(leader)["tokens"][:5] == expected["tokens"]
        hosts.cable.loss = 0.0
        assert leader.end() == 0 and follower.exit_code() == 0, follower.log()[-2000:]
