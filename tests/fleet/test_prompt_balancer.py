"""Prompts are divided evenly, and what is left over goes where the fewest are open."""

import pytest

from routed_experts.fleet.prompt_balancer import PromptBalancer, split


@pytest.mark.parametrize(("count", "shares"), [(0, [0, 0, 0]), (1, [1, 0, 0]), (5, [2, 2, 1]), (6, [2, 2, 2])])
def test_calls_one_after_another_meet_the_same_engines(count, shares):
    balancer = PromptBalancer(3)
    for _ in range(3):
        with balancer.assign(count) as actual:
            assert actual == shares


def test_open_prompts_turn_the_next_call_to_other_engines():
    balancer = PromptBalancer(3)
    with balancer.assign(1) as first, balancer.assign(1) as second:
        with balancer.assign(4) as third, balancer.assign(2) as fourth:
            assert (first, second, third, fourth) == ([1, 0, 0], [0, 1, 0], [1, 1, 2], [1, 1, 0])
        with balancer.assign(1) as fifth:
            assert fifth == [0, 0, 1]
    with pytest.raises(RuntimeError), balancer.assign(1):
        raise RuntimeError("the call has failed")
    with balancer.assign(2) as shares:
        assert shares == [1, 1, 0], "nothing is open"


def test_values_are_split_in_order():
    assert split("abcde", [2, 0, 3]) == [["a", "b"], [], ["c", "d", "e"]]
