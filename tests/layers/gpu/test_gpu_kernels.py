"""Every GPU kernel, interpreted, against the plain code that it stands for. The same cases run on a card:
benchmarks/gpu_check.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from support.gpu_cases import small_cases

pytestmark = pytest.mark.usefixtures("fast_compilation")

CASES = {f"{case.kernel}: {case.name}": case for case in small_cases()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_plain_code(case):
    outcome = case.run(True)
    assert outcome.is_good, outcome


@pytest.mark.parametrize("replays", [False, True])
def test_logits_that_are_no_numbers_still_choose_distinct_experts(replays):
    """Whatever the experts then run, an id must lie in the weights: only rows with broken logits may differ from plain
    code."""
    spec, rng = RouterSpec(num_experts=13, top_k=4, renormalize=True), np.random.default_rng(0)
    logits = rng.standard_normal((6, 13)).astype(np.float32)
    logits[1], logits[3, 5], logits[4, 2] = np.nan, np.nan, np.inf
    routed = LayerRouting(jnp.zeros((6, 4), jnp.uint16), jnp.zeros(6, bool)) if replays else None
    found, block = route_rows(jnp.asarray(logits), routed, jnp.full((4, 6), -1), jnp.int32(0), spec, interpret=True)
    wanted, ids = replay_topk(jnp.asarray(logits), None, spec=spec), np.asarray(found.ids)
    whole = [0, 2, 5]
    assert np.array_equal(ids[whole], np.asarray(wanted.ids)[whole]) and np.array_equal(np.asarray(block).T, ids)
    np.testing.assert_allclose(np.asarray(found.weights)[whole], np.asarray(wanted.weights)[whole], rtol=1e-6)
    assert ids.min() >= 0 and ids.max() < 13 and all(len(set(row)) == 4 for row in ids.tolist())
    assert np.isnan(np.asarray(found.weights)[1]).all()
