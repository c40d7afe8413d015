"""Replay for every law of routing, on a stack of sparse layers as decoders run them: scanned, recorded on the recorder,
rematerialised.

C1 executed == forced; C2 self-replay is bitwise; C3 no valid row is live, bitwise; C4 remat changes no gradient; C5
drifted ids give the router a gradient; C6 nothing is traced again. Whole models of every family are judged in
tests/models/test_families.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_scoring_funcs import SPECS
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.routing import LayerRouting, RouterSpec
from routed_experts.models.base.interface import TokenRouting, checkpointed, slice_layers
from routed_experts.models.decoder.sparse_block import ExpertWeights, route, run_experts
from routed_experts.replay.recorder import RoutingRecorder
from support import fast_compile

QUICK = fast_compile.OPTIONS  # gradients are compared with a tolerance
LAYERS, TOKENS, DIM, WIDTH = 3, 20, 8, 6
ALL_SPECS = SPECS | {
    "Qwen3, Mixtral": RouterSpec(num_experts=16, top_k=4, renormalize=True),
    "OLMoE, Qwen2": RouterSpec(num_experts=16, top_k=4, renormalize=False),
}
# Each scoring function, groups, a bias, one expert a token; others differ in constants, which every run compares in
# layers/test_scoring_funcs.py.
IN_EVERY_RUN = "DeepSeek-V3", "DeepSeek-V2", "Llama 4", "GPT-OSS, Granite", "PhiMoE", "Qwen3, Mixtral"
LAWS = [law if law in IN_EVERY_RUN else pytest.param(law, marks=pytest.mark.thorough) for law in ALL_SPECS]


def random_params(spec, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal((LAYERS, *shape)), jnp.float32)

    return {
        "router": draw(DIM, spec.num_experts, scale=0.7),
        "bias": draw(spec.num_experts, scale=0.1),
        "gate_up": draw(spec.num_experts, DIM, 2 * WIDTH, scale=0.4),
        "down": draw(spec.num_experts, WIDTH, DIM, scale=0.4),
    }


def stack(params, x, routed, spec, remat):
    """Residual sparse layers over x [N, D]; gives what leaves the last, and the recorder."""
    kernels = Kernels(moe=MOE_BACKENDS["reference"])
    capture = CaptureSpec(
        num_hidden_layers=LAYERS, layer_ids=tuple(range(LAYERS)), num_experts=spec.num_experts, top_k=spec.top_k
    )

    def layer(carry, scanned):
        x, recorder = carry
        column, weights, rows = scanned
        replayed = None if rows is None else LayerRouting(rows[0], routed.valid, rows[1])
        logits = jnp.dot(x, weights["router"], preferred_element_type=jnp.float32)
        bias = weights["bias"] if spec.biased else None
        routing, recorder = route(logits, replayed, column, recorder, spec=spec, kernels=kernels, bias=bias)
        experts = ExpertWeights(weights["gate_up"], weights["down"], jnp.zeros((), jnp.int32))
        y = run_experts(x, routing, jnp.ones(TOKENS, bool), experts, spec=spec, kernels=kernels)
        return (x + y, recorder), None

    columns = jnp.arange(LAYERS, dtype=jnp.int32)
    body = checkpointed(layer) if remat else layer
    (x, recorder), _ = jax.lax.scan(
        body, (x, RoutingRecorder.start(TOKENS, capture)), (columns, params, slice_layers(routed, 0, LAYERS))
    )
    return x, recorder


def loss(params, x, routed, spec, remat):
    out, recorder = stack(params, x, routed, spec, remat)
    return jnp.sum(jnp.sin(out)), recorder


class World:
    """One law: its forward and its gradient, each compiled once for each kind of routing; `traces` counts."""

    def __init__(self, spec):
        self.spec, self.traces = spec, 0
        self.run = jax.jit(self._run)
        self.gradient = jax.jit(jax.grad(lambda *args: loss(*args, spec, False)[0]), compiler_options=QUICK)
        self.remat_gradient = jax.jit(jax.grad(lambda *args: loss(*args, spec, True)[0]), compiler_options=QUICK)

    def _run(self, params, x, routed):
        self.traces += 1
        out, recorder = stack(params, x, routed, self.spec, False)
        return out, recorder.rows().reshape(TOKENS, LAYERS, self.spec.top_k), recorder.slot_miss


@pytest.fixture(scope="module", params=LAWS)
def world(request):
    return World(ALL_SPECS[request.param])


def inputs(seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((TOKENS, DIM)), jnp.float32)


def drifted(spec, seed=1, valid=None):
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(spec.num_experts, dtype=np.uint8), (TOKENS, LAYERS, 1)), axis=-1)[
        ..., : spec.top_k
    ]
    return TokenRouting(jnp.asarray(ids), jnp.asarray(np.ones(TOKENS, bool) if valid is None else valid))


def some(seed=2):
    return np.random.default_rng(seed).random(TOKENS) < 0.5


def test_every_valid_row_runs_what_it_was_given_in_its_order(world):
    spec, run = world.spec, world.run
    for valid in (None, some()):
        routed = drifted(spec, valid=valid)
        out, executed, _ = run(random_params(spec), inputs(), routed)
        known = np.asarray(routed.valid)
        np.testing.assert_array_equal(np.asarray(executed)[known], np.asarray(routed.ids)[known])
    live = run(random_params(spec), inputs(), None)
    assert not np.array_equal(out, live[0]) and not np.array_equal(executed, live[1])


def test_self_replay_and_replay_of_nothing_are_live_by_the_bit(world):
    spec, run = world.spec, world.run
    params, x = random_params(spec), inputs(3)
    live, ids, missed = run(params, x, None)
    assert not np.any(missed)
    for rows, valid in (
        (ids, np.ones(TOKENS)),
        (ids, some()),
        (ids * 0, np.zeros(TOKENS)),
        (ids * 0 + 255, np.zeros(TOKENS)),
    ):
        again, executed, missed = run(params, x, TokenRouting(jnp.asarray(rows, jnp.uint8), jnp.asarray(valid, bool)))
        assert np.array_equal(again, live) and np.array_equal(executed, ids) and not np.any(missed)


def test_misses_are_what_sets_say(world):
    spec, run = world.spec, world.run
    params, x, routed = random_params(spec), inputs(4), drifted(spec, valid=some())
    _, executed, missed = run(params, x, routed)
    first = run(params, x, None)[1][:, 0]  # nothing is forced before the first layer: its live choice is known
    for token in range(TOKENS):
        expected = spec.top_k - len(
            set(np.asarray(executed)[token, 0].tolist()) & set(np.asarray(first)[token].tolist())
        )
        assert int(missed[0, token]) == expected
    assert not np.any(np.asarray(missed)[:, ~np.asarray(routed.valid)]) and np.any(missed)


@pytest.mark.parametrize("law", LAWS)
def test_remat_changes_no_gradient_and_drifted_ids_give_the_router_one(law):
    world = World(ALL_SPECS[law])
    spec = world.spec
    params, x = random_params(spec), inputs(5)
    for routed in (drifted(spec, valid=some()), drifted(spec, 6)):
        plain, remat = world.gradient(params, x, routed), world.remat_gradient(params, x, routed)
        for left, right in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
            np.testing.assert_allclose(left, right, atol=1e-6, rtol=1e-6)
        router = np.asarray(plain["router"])
        assert np.all(np.isfinite(router)) and np.all(np.linalg.norm(router, axis=(1, 2)) > 1e-3)
        assert not np.any(plain["bias"]), "a selection bias is no part of a weight"


def test_new_ids_and_flags_trace_nothing(world):
    spec, run = world.spec, world.run
    run(random_params(spec), inputs(), drifted(spec))
    before = world.traces
    for seed in range(3):
        run(random_params(spec, seed), inputs(seed), drifted(spec, seed, valid=some(seed)))
    assert world.traces == before


def test_weights_that_are_replayed_replace_the_routers_and_stop_its_gradient():
    world = World(ALL_SPECS["DeepSeek-V3"])
    spec, run, gradient = world.spec, world.run, world.gradient
    params, x, routed = random_params(spec), inputs(7), drifted(spec)
    out, *_ = run(params, x, routed)
    fixed = TokenRouting(routed.ids, routed.valid, jnp.full(routed.ids.shape, 0.5, jnp.float32))
    assert not np.array_equal(run(params, x, fixed)[0], out)
    assert not np.any(gradient(params, x, fixed)["router"])
    nowhere = TokenRouting(fixed.ids, jnp.zeros(TOKENS, bool), fixed.weights)
    assert np.array_equal(run(params, x, nowhere)[0], run(params, x, None)[0])


def test_the_choice_of_experts_is_saved_and_not_made_again():
    """One top-k in the program of the gradient, whether layers are computed again or not."""
    spec = ALL_SPECS["Qwen3, Mixtral"]

    def count(remat):
        program = jax.make_jaxpr(jax.grad(lambda p, x: loss(p, x, None, spec, remat)[0]))(random_params(spec), inputs())
        return str(program).count("top_k[")

    assert (count(False), count(True)) == (1, 1)
    forgetful = jax.checkpoint(lambda x: jnp.sum(jnp.sin(x * x[jax.lax.top_k(x, 2)[1][0]])))
    again = jax.make_jaxpr(jax.grad(forgetful))(jnp.arange(5.0))
    assert str(again).count("top_k[") == 2, "the count would see a second one"
