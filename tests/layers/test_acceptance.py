"""Accepted drafts against a loop over the tokens of each request."""

import itertools

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from routed_experts.layers.acceptance import count_accepted


def accepted_one_by_one(sampled, fed, starts):
    counts = []
    for first, last in itertools.pairwise(starts):
        count = 0
        while first + count + 1 < last and fed[first + count + 1] == sampled[first + count]:
            count += 1
        counts.append(count)
    return counts


@given(data=st.data())
def test_accepted_drafts_are_the_leading_equal_ones(data):
    num_drafts = data.draw(st.integers(0, 4))
    counts = data.draw(st.lists(st.integers(0, num_drafts + 1), min_size=1, max_size=5))
    padding = data.draw(st.integers(0 if sum(counts) > 1 else 2, 3))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    size = int(starts[-1]) + padding
    tokens = st.lists(st.integers(0, 1), min_size=size, max_size=size)  # two letters: many are equal by chance
    sampled, fed = (np.array(data.draw(tokens), np.int32) for _ in range(2))
    result = count_accepted(jnp.asarray(sampled), jnp.asarray(fed), jnp.asarray(starts), num_drafts=num_drafts)
    expected = accepted_one_by_one(sampled, fed, starts)
    assert result.tolist() == expected
