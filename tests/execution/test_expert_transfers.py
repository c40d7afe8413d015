"""Rounds of transfers against their purpose, played out on lists."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routed_experts.execution.expert_transfers import plan_transfers


def play(old, plan, num_devices):
    """What each instance holds after the rounds, by the rules of `ExpertTransfers`."""
    own = len(old) // num_devices
    before, after = old.reshape(num_devices, own), old.reshape(num_devices, own).copy()
    for index in range(plan.num_rounds):
        for device, (source, target) in enumerate(zip(plan.received[index], plan.written[index], strict=True)):
            if source >= 0:
                after[device, target] = before[source, plan.sent[index, source]]
    return after.reshape(-1)


@st.composite
def layers(draw):
    num_devices, own = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    experts = draw(st.integers(1, num_devices * own))
    seed = draw(st.integers(0, 2**31 - 1))
    rng, total = np.random.default_rng(seed), num_devices * own
    rows = [np.append(np.arange(experts), rng.integers(0, experts, total - experts)) for _ in range(2)]
    return (*(rng.permutation(row) for row in rows), num_devices)


@settings(max_examples=300)
@given(layers())
def test_every_instance_ends_with_its_expert_and_only_what_a_device_lacks_is_copied(case):
    old, new, num_devices = case
    plan, own = plan_transfers(old, new, num_devices=num_devices), len(old) // num_devices
    np.testing.assert_array_equal(play(old, plan, num_devices), new)
    copies_needed = [
        new[at] not in old[at // own * own : (at // own + 1) * own] for at in range(len(old)) if old[at] != new[at]
    ]
    assert plan.num_copied == sum(copies_needed)
    assert plan.num_rounds <= len(copies_needed) and plan.sent.shape == (len(old), num_devices)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_what_stays_takes_no_round(num_devices):
    slots = np.arange(8)
    plan = plan_transfers(slots, slots, num_devices=num_devices)
    assert (plan.num_rounds, plan.num_copied) == (0, 0)


def test_devices_swap_in_as_many_rounds_as_they_have_experts():
    plan = plan_transfers(np.arange(8), np.roll(np.arange(8), 4), num_devices=2)
    assert (plan.num_rounds, plan.num_copied) == (4, 8)
