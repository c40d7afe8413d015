"""Every expert backend against a NumPy loop over tokens and slots, and its gradients against finite differences of that
loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.moe import MOE_BACKENDS, ExpertCall, plan_tiles, tile_rows
from support.kernels import MOE

pytestmark = pytest.mark.usefixtures("fast_compilation")

BACKENDS = sorted(MOE)
RUN = {name: jax.jit(backend.run) for name, backend in MOE.items()}
PLAN = jax.jit(plan_tiles, static_argnames=("num_experts", "tile"))
EXACT = 2e-5  # float32 against float64


def silu(x):
    return x / (1 + np.exp(-x))


def loop(x, ids, weights, valid, gate_up, down, first_expert):
    """The oracle: one row and one slot at a time, in float64."""
    x, weights, gate_up, down = (np.asarray(array, np.float64) for array in (x, weights, gate_up, down))
    y, width = np.zeros_like(x), down.shape[1]
    for n in np.flatnonzero(valid):
        for k in range(ids.shape[1]):
            mixed = x[n] @ gate_up[first_expert + ids[n, k]]
            y[n] += weights[n, k] * ((silu(mixed[:width]) * mixed[width:]) @ down[first_expert + ids[n, k]])
    return y


def random_call(seed, shape, *, layers=1, layer=0, ids=None, valid=None):
    """A call of shape (N, K, E, D, F); experts of the run's other layers are NaN, so that a wrong offset cannot
    hide."""
    num_rows, top_k, experts, dim, width = shape
    rng = np.random.default_rng(seed)
    if ids is None:
        ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(num_rows)])
    gate_up = np.full((layers * experts, dim, 2 * width), np.nan, np.float32)
    down = np.full((layers * experts, width, dim), np.nan, np.float32)
    own = slice(layer * experts, (layer + 1) * experts)
    gate_up[own] = rng.standard_normal((experts, dim, 2 * width)) / dim**0.5
    down[own] = rng.standard_normal((experts, width, dim)) / width**0.5
    return ExpertCall(
        x=jnp.asarray(rng.standard_normal((num_rows, dim)), jnp.float32),
        ids=jnp.asarray(ids, jnp.int32),
        weights=jnp.asarray(rng.random((num_rows, top_k)), jnp.float32),
        valid=jnp.asarray(rng.random(num_rows) < 0.7 if valid is None else valid),
        gate_up=jnp.asarray(gate_up),
        down=jnp.asarray(down),
        first_expert=jnp.asarray(layer * experts, jnp.int32),
        num_experts=experts,
    )


def oracle(call):
    fields = [np.asarray(vars(call)[name]) for name in ("x", "ids", "weights", "valid", "gate_up", "down")]
    return loop(*fields, int(call.first_expert))


def with_rows(call, **arrays):
    return dataclasses.replace(
        call, **{name: jnp.asarray(array, vars(call)[name].dtype) for name, array in arrays.items()}
    )


STANDARD = (24, 3, 10, 8, 4)  # N, K, E, D, F; one shape compiles once
SHAPES = {
    "one row": (1, 1, 3, 8, 4),
    "one expert": (7, 1, 1, 8, 4),
    "fewer rows than experts": (3, 2, 64, 8, 4),
    "prime": (37, 3, 11, 13, 7),
    "all experts": (5, 4, 4, 8, 4),
    "five of six": (13, 5, 6, 8, 4),
    "six of seven": (15, 6, 7, 8, 5),
    "seven of 257": (9, 7, 257, 6, 2),
    "tiles of 64": (150, 8, 9, 8, 4),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_backend_equals_the_loop(name, shape):
    call = random_call(0, shape)
    out = RUN[name](call)
    np.testing.assert_allclose(out, oracle(call), atol=EXACT)
    assert not np.any(np.asarray(out)[~np.asarray(call.valid)])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_backend_reads_the_experts_of_its_layer_alone(name, layer):
    call = random_call(1, STANDARD, layers=3, layer=layer)
    np.testing.assert_allclose(RUN[name](call), oracle(call), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("hot", [0, 5, 9])
def test_one_hot_expert_and_nine_empty_ones(name, hot):
    call = random_call(2, STANDARD, ids=np.full((24, 3), hot))
    np.testing.assert_allclose(RUN[name](call), oracle(call), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
def test_first_and_last_experts_are_empty(name):
    ids = np.random.default_rng(3).permuted(np.tile([3, 4, 6], (24, 1)), axis=1)
    call = random_call(3, STANDARD, ids=ids)
    np.testing.assert_allclose(RUN[name](call), oracle(call), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_valid", [0, 1, 24])
def test_padding_rows_are_zero_and_need_no_expert(name, num_valid):
    call = random_call(4, STANDARD, valid=np.arange(24) < num_valid)
    np.testing.assert_allclose(RUN[name](call), oracle(call), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_nan_in_padding_rows_reaches_no_valid_row(name, poison):
    call = random_call(5, STANDARD)
    valid = np.asarray(call.valid)
    x, weights = np.array(call.x), np.array(call.weights)
    x[~valid], weights[~valid] = poison, poison
    assert np.array_equal(RUN[name](with_rows(call, x=x, weights=weights)), RUN[name](call))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_nan_stays_alone(name):
    call = random_call(6, STANDARD, valid=np.ones(24, bool))
    x = np.array(call.x)
    x[11] = np.nan
    out = np.asarray(RUN[name](with_rows(call, x=x)))
    assert np.all(np.isnan(out[11]))
    others = np.arange(24) != 11
    np.testing.assert_allclose(out[others], oracle(call)[others], atol=EXACT)


def test_a_row_of_reference_does_not_depend_on_the_others_by_a_bit():
    call = random_call(7, STANDARD, valid=np.ones(24, bool))
    other = random_call(8, STANDARD)
    keep = np.arange(24) == 3
    mixed = {
        name: np.where(keep.reshape(-1, *[1] * (vars(call)[name].ndim - 1)), vars(call)[name], vars(other)[name])
        for name in ("x", "ids", "weights", "valid")
    }
    assert np.array_equal(RUN["reference"](with_rows(call, **mixed))[3], RUN["reference"](call)[3])


@pytest.mark.parametrize("name", BACKENDS)
def test_executed_order_of_equal_pairs_does_not_matter_beyond_rounding(name):
    call = random_call(9, STANDARD)
    turned = with_rows(call, ids=np.asarray(call.ids)[:, ::-1], weights=np.asarray(call.weights)[:, ::-1])
    np.testing.assert_allclose(RUN[name](turned), RUN[name](call), atol=EXACT)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_low_precision_keeps_its_dtype(name, dtype, atol):
    call = random_call(10, (21, 4, 8, 16, 8))
    low = dataclasses.replace(
        call, x=call.x.astype(dtype), gate_up=call.gate_up.astype(dtype), down=call.down.astype(dtype)
    )
    out = RUN[name](low)
    assert out.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(out, np.float64), oracle(low), atol=atol)


@pytest.mark.parametrize("seed", range(8))
def test_a_tile_plan_gives_every_valid_slot_one_row_of_its_expert(seed):
    rng = np.random.default_rng(seed)
    num_rows, top_k, experts = [(1, 1, 1), (39, 3, 8), (40, 4, 3)][seed % 3]
    ids = (
        np.full((num_rows, top_k), experts - 1, np.int32)
        if seed == 5
        else rng.integers(0, experts, (num_rows, top_k)).astype(np.int32)
    )
    valid = rng.random(num_rows) < (0.0 if seed == 4 else 0.8)
    tile = tile_rows(ids.size, experts)
    plan = jax.tree.map(np.asarray, PLAN(jnp.asarray(ids), jnp.asarray(valid), num_experts=experts, tile=tile))
    assert plan.num_tiles == sum(-(-int(np.sum(ids[valid] == e)) // tile) for e in range(experts))
    assert plan.num_tiles <= plan.tile_expert.size
    rows = []
    for slot in range(ids.size):
        assert plan.order[plan.position[slot]] == slot
        if valid[slot // top_k]:
            at, row = divmod(int(plan.row[slot]), tile)
            rows.append((at, row))
            assert at < plan.num_tiles
            assert plan.tile_expert[at] == ids.reshape(-1)[slot]
            assert plan.tile_start[at] + row == plan.position[slot]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("name", ["grouped", "reference", "permuted"])
@pytest.mark.parametrize("shape", [(9, 2, 4, 6, 3), (21, 3, 5, 7, 4), (4, 1, 1, 5, 3)])
def test_gradients_are_finite_differences_of_the_loop(name, shape):
    call = random_call(11, shape)
    rng = np.random.default_rng(12)
    mix = rng.standard_normal(call.x.shape)

    def loss(x, weights, gate_up, down):
        moved = dataclasses.replace(call, x=x, weights=weights, gate_up=gate_up, down=down)
        return jnp.sum(MOE[name].run(moved) * mix.astype(np.float32))

    point = [np.asarray(vars(call)[field]) for field in ("x", "weights", "gate_up", "down")]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*point)
    ids, valid = np.asarray(call.ids), np.asarray(call.valid)

    def exact(x, weights, gate_up, down):
        return np.sum(loop(x, ids, weights, valid, gate_up, down, 0) * mix)

    step = 1e-5
    for index, gradient in enumerate(gradients):
        for _ in range(3):
            direction = rng.standard_normal(gradient.shape)
            ends = [[p.astype(np.float64) for p in point] for _ in range(2)]
            ends[0][index] += step * direction
            ends[1][index] -= step * direction
            expected = (exact(*ends[0]) - exact(*ends[1])) / (2 * step)
            assert np.sum(np.asarray(gradient, np.float64) * direction) == pytest.approx(expected, rel=1e-4, abs=2e-4)


@pytest.mark.parametrize("name", ["grouped", "reference", "permuted"])
def test_experts_that_ran_no_token_and_padding_rows_have_gradient_zero(name):
    call = random_call(13, (18, 2, 8, 6, 3), ids=np.tile([1, 6], (18, 1)), valid=np.arange(18) < 11)

    def loss(x, gate_up, down):
        return jnp.sum(MOE[name].run(dataclasses.replace(call, x=x, gate_up=gate_up, down=down)) ** 2)

    of_x, of_gate_up, of_down = (
        np.asarray(g) for g in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(call.x, call.gate_up, call.down)
    )
    assert not np.any(of_x[11:]) and np.all(np.any(of_x[:11], axis=1))
    idle = np.setdiff1d(np.arange(8), [1, 6])
    for gradient in (of_gate_up, of_down):
        assert not np.any(gradient[idle]) and np.any(gradient[1]) and np.any(gradient[6])


def test_ids_and_the_split_of_rows_are_inputs_that_compile_nothing():
    traces = []

    @jax.jit
    def run(call):
        traces.append(1)
        return MOE_BACKENDS["grouped"].run(call)

    for seed in range(4):
        call = random_call(seed, (15, 2, 6, 8, 4))
        np.testing.assert_allclose(run(call), oracle(call), atol=EXACT)
    assert len(traces) == 1


def biased_loop(call):
    """Experts with biases, and the activation of GPT-OSS (gate up to 7, up within 7 of 0, gate * sigmoid(1.702 gate) *
    (up + 1)) or of Gemma (gate * Phi(gate) * up, with Phi by its approximation in tanh)."""
    x, weights, gate_up, down, gate_up_bias, down_bias = (
        np.asarray(part, np.float64)
        for part in (call.x, call.weights, call.gate_up, call.down, call.gate_up_bias, call.down_bias)
    )
    y, width, first = np.zeros_like(x), down.shape[1], int(call.first_expert)
    for n in np.flatnonzero(call.valid):
        for k in range(call.ids.shape[1]):
            expert = first + int(call.ids[n, k])
            mixed = x[n] @ gate_up[expert] + gate_up_bias[expert]
            gate, up = mixed[:width], mixed[width:]
            if call.activation == "tanh gelu":
                hidden = gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
            else:
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            y[n] += weights[n, k] * (hidden @ down[expert] + down_bias[expert])
    return y


@pytest.mark.parametrize("activation", ["clamped swiglu", "tanh gelu"])
@pytest.mark.parametrize("name", BACKENDS)
def test_biased_experts_with_another_activation_equal_the_loop(name, activation):
    layers, layer = (1, 0) if not MOE[name].takes_stacked else (3, 1)
    call = random_call(7, (19, 3, 6, 10, 8), layers=layers, layer=layer)
    rng = np.random.default_rng(8)
    biases = [jnp.asarray(rng.standard_normal((layers * 6, size)), jnp.float32) for size in (16, 10)]
    call = dataclasses.replace(call, x=call.x * 6, gate_up_bias=biases[0], down_bias=biases[1], activation=activation)
    assert call.needs <= MOE[name].features
    np.testing.assert_allclose(RUN[name](call), biased_loop(call), atol=2e-4)
