"""Every GPU kernel against the plain code that it replaces: small cases interpreted, large ones on a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from support.gpu_cases import large_cases, small_cases

pytestmark = pytest.mark.usefixtures("fast_compilation")

CASES = {f"{case.kernel}: {case.name}": case for case in small_cases()}
ON_GPU = [*(case for case in CASES.values() if case.kernel == "router"), *large_cases()]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_plain_code(case):
    outcome = case.run(True)
    assert outcome.is_good, outcome


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: f"{case.kernel}: {case.name}")
def test_compiled_kernel_equals_plain_code(case):
    outcome = case.run(False)
    assert outcome.is_good, outcome


@pytest.mark.parametrize("replays", [False, True])
def test_logits_that_are_no_numbers_still_choose_distinct_experts(replays):
    """An id must always be a valid index of the weights: only rows with broken logits may differ from plain code."""
    spec, rng = RouterSpec(num_experts=13, top_k=4, renormalize=True), np.random.default_rng(0)
    logits = rng.standard_normal((6, 13)).astype(np.float32)
    logits[1], logits[3, 5], logits[4, 2] = np.nan, np.nan, np.inf
    routed = LayerRouting(jnp.zeros((6, 4), jnp.uint16), jnp.zeros(6, bool)) if replays else None
    routing, block = route_rows(jnp.asarray(logits), routed, jnp.full((4, 6), -1), jnp.int32(0), spec, interpret=True)
    expected, ids = replay_topk(jnp.asarray(logits), None, spec=spec), np.asarray(routing.ids)
    whole = [0, 2, 5]
    assert np.array_equal(ids[whole], np.asarray(expected.ids)[whole]) and np.array_equal(np.asarray(block).T, ids)
    np.testing.assert_allclose(np.asarray(routing.weights)[whole], np.asarray(expected.weights)[whole], rtol=1e-6)
    assert ids.min() >= 0 and ids.max() < 13 and all(len(set(row)) == 4 for row in ids.tolist())
    assert np.isnan(np.asarray(routing.weights)[1]).all()
