"""A group over two hosts whose cable is cut: both end in bounded time, though no connection is closed."""

import pytest

from engine.test_process_group_death import LONG, PROMPT, SLACK_S, WATCHDOG_S, answer, assert_lost, open_group
from support.network_namespaces import two_hosts
from support.process_groups import Stopwatch
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.netns


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), tokenizer=False, num_hidden_layers=1, mlp_only_layers=[], num_experts=8
    )


@pytest.mark.parametrize("fault", ["cut", "one way"])
def test_a_network_that_is_cut_ends_both_hosts(folder, fault):
    with two_hosts() as hosts:
        prefix = {rank: hosts.prefix(rank) for rank in range(2)}
        with open_group(folder, address=f"{hosts.addresses[0]}:5000", prefix=prefix, watchdog_s=WATCHDOG_S) as (
            leader,
            follower,
        ):
            answer(leader)
            leader.begin("generate", prompts=[PROMPT] * 64, params=LONG)
            hosts.cut() if fault == "cut" else hosts.drop_from(1)
            watch = Stopwatch()
            assert "process 1 of 2 at 10.77.0.2:" in assert_lost(leader)
            assert watch.seconds < WATCHDOG_S + SLACK_S
            assert (leader.exit_code(20), follower.exit_code(20)) == (3, 3), follower.log()[-2000:]
            assert watch.seconds < WATCHDOG_S + SLACK_S + 5.0
