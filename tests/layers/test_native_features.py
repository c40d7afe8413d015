"""What families add to the native kernels, in every dtype and at odd sizes: biased experts and their activations, the
laws of routers, the write to the pool; and that a row of attention with features is its own by a bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_attention import make_step
from layers.test_moe import biased_loop, random_call
from layers.test_native_batch_invariance import bits
from layers.test_scoring_funcs import SPECS, inputs, oracle
from routed_experts.layers.attention import FusedQKV, PagedBatch, write_kv
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import reference_variant, write_latent
from routed_experts.layers.native.ops import (
    NATIVE_KERNELS,
    native_add_gated,
    native_attention,
    native_experts,
    native_gate_heads,
    native_gated,
    native_qk_prepare,
    native_router,
    native_variant,
    native_write,
)
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from routed_experts.layers.stack_traits import StackTraits
from support.routing_blocks import empty_block

pytestmark = pytest.mark.usefixtures("fast_compilation")

EXPERTS, ROUTER, WRITE = jax.jit(native_experts), jax.jit(native_router, static_argnames="spec"), jax.jit(native_write)
VARIANT, PLAIN = jax.jit(native_variant), jax.jit(native_attention)
BOUNDS = {"float32": 1e-4, "float16": 4e-2, "bfloat16": 4e-1}  # of values around 8


def biased_call(dtype, shape, *, activation="clamped swiglu", scale=4.0):
    num_experts, dim, width = shape[2:]
    call = random_call(31, shape, layers=2, layer=1)
    rng = np.random.default_rng(32)
    biases = [jnp.asarray(rng.standard_normal((2 * num_experts, size)), dtype) for size in (2 * width, dim)]
    halves = {name: vars(call)[name].astype(dtype) for name in ("gate_up", "down")} | {
        "x": (call.x * scale).astype(dtype)
    }
    return dataclasses.replace(
        call,
        **halves,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        activation=activation,
        valid=call.valid.at[0].set(True),
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 4, 8, 32, 16), (40, 3, 5, 70, 33), (9, 2, 3, 256, 272), (150, 1, 1, 130, 20)])
def test_biased_experts_equal_the_loop_in_every_dtype(dtype, shape):
    call = biased_call(dtype, shape)
    out = EXPERTS(call)
    assert out.dtype == dtype and not np.any(np.asarray(out)[~np.asarray(call.valid)])
    np.testing.assert_allclose(np.asarray(out, np.float64), biased_loop(call), atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(64, 2, 4, 256, 272), (64, 2, 4, 40, 24)])
def test_a_row_of_biased_experts_is_its_own_by_a_bit(dtype, shape):
    call = biased_call(dtype, shape)
    call = dataclasses.replace(call, valid=jnp.ones(64, bool))
    expected, rng = bits(EXPERTS(call)), np.random.default_rng(33)
    for count in (1, 3, 9, 30):
        rows = rng.permutation(64)[:count]
        alone = {name: vars(call)[name][rows] for name in ("x", "ids", "weights", "valid")}
        np.testing.assert_array_equal(bits(EXPERTS(dataclasses.replace(call, **alone))), expected[rows])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(1, 4, 8, 32, 16), (40, 3, 5, 70, 33)])
def test_experts_with_a_tanh_gelu_equal_the_loop_in_every_dtype(dtype, shape):
    call = biased_call(dtype, shape, activation="tanh gelu", scale=1.0)
    np.testing.assert_allclose(np.asarray(EXPERTS(call), np.float64), biased_loop(call), atol=BOUNDS[dtype])


def test_a_gate_of_minus_infinity_is_zero_in_a_tanh_gelu_and_large_gates_pass():
    gates = jnp.asarray([[-1e4, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4, *(1.0,) * 7]], jnp.float32)
    out = np.asarray(jax.jit(native_gated, static_argnames="activation")(gates, activation="tanh gelu"))[0]
    half = np.asarray(gates[0, :7], np.float64)
    expected = half * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (half + 0.044715 * half**3)))
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)


def test_clamped_experts_differ_from_others_and_limits_are_reached():
    call = biased_call("float32", (40, 3, 5, 70, 33), scale=30.0)
    np.testing.assert_allclose(EXPERTS(call), biased_loop(call), atol=2e-3)
    assert not np.allclose(EXPERTS(dataclasses.replace(call, activation="silu")), biased_loop(call), atol=1.0)


def test_biases_of_another_length_are_an_error_and_not_read():
    call = biased_call("float32", (4, 2, 3, 16, 8))
    with pytest.raises(jax.errors.JaxRuntimeError, match="dtypes or shapes differ: biases"):
        jax.block_until_ready(EXPERTS(dataclasses.replace(call, down_bias=call.down_bias[:4])))


def biased_by(spec, bias):
    return jnp.asarray(bias, jnp.float32) if spec.biased else None


@pytest.mark.parametrize("name", SPECS)
def test_a_law_is_its_loop_live_and_replayed_and_recorded(name):
    spec = SPECS[name]
    assert NATIVE_KERNELS.router is not None and NATIVE_KERNELS.router.supports(spec)
    logits, bias, replayed, valid = inputs(spec)
    block = empty_block(3 * spec.top_k, len(valid))
    live = oracle(logits, bias, replayed, np.zeros_like(valid), spec)[0]
    for mask in (None, valid, np.ones_like(valid)):
        routed = None if mask is None else LayerRouting(jnp.asarray(replayed), jnp.asarray(mask))
        given = np.zeros_like(valid) if mask is None else mask
        ids, weights = oracle(logits, bias, replayed, given, spec)
        args = (jnp.asarray(logits), routed)
        for into in (None, block):
            routing, written = ROUTER(*args, into, jnp.int32(1), spec=spec, bias=biased_by(spec, bias))
            assert np.array_equal(routing.ids, ids) and np.array_equal(routing.native_ids, live)
            assert np.array_equal(routing.replaced, given)
            np.testing.assert_allclose(routing.weights, weights, rtol=1e-5)
            if into is not None:
                for own, before, of_layer in (
                    (written.ids, block.ids, ids),
                    (written.weights, block.weights, routing.weights),
                ):
                    expected = np.array(before)
                    expected[spec.top_k : 2 * spec.top_k] = np.asarray(of_layer).T
                    assert np.array_equal(own, expected)
            else:
                assert written is None


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("experts", "top_k", "groups"), [(24, 3, 4), (160, 6, 8), (260, 8, 4)])
def test_a_law_decides_as_array_code_with_many_experts(name, experts, top_k, groups):
    grouped = SPECS[name].num_groups != 1
    spec = dataclasses.replace(
        SPECS[name],
        num_experts=experts,
        top_k=2 if SPECS[name].scoring_func == "sparsemixer" else top_k,
        num_groups=groups if grouped else 1,
        topk_group=3 if grouped else 1,
    )
    rng = np.random.default_rng(34)
    logits = jnp.asarray(rng.integers(-4000, 4001, (30, experts)) / 1024, jnp.float32)
    bias = biased_by(spec, rng.integers(-64, 65, experts) / 128)
    plain = jax.jit(replay_topk, static_argnames="spec")(logits, None, spec=spec, bias=bias)
    routing, _ = ROUTER(logits, None, None, jnp.int32(0), spec=spec, bias=bias)
    assert np.array_equal(routing.ids, plain.ids)
    np.testing.assert_allclose(routing.weights, plain.weights, rtol=1e-5)


@pytest.mark.parametrize("experts", [1, 8])
def test_groups_of_one_expert_that_are_all_chosen_leave_nothing_out(experts):
    """DeepSeek-V3's law scores a group by its two best experts, and such a group has one."""
    law = {"scoring_func": "sigmoid", "biased": True, "group_score_topk": 2}
    spec = RouterSpec(
        num_experts=experts, top_k=min(3, experts), renormalize=True, num_groups=experts, topk_group=experts, **law
    )
    rng = np.random.default_rng(35)
    logits, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((9, experts), experts))
    routing, _ = ROUTER(logits, None, None, jnp.int32(0), spec=spec, bias=bias)
    plain = replay_topk(logits, None, spec=spec, bias=bias)
    assert np.array_equal(routing.ids, plain.ids)
    np.testing.assert_allclose(routing.weights, plain.weights, rtol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", SPECS)
def test_a_row_that_is_not_finite_has_ids_that_exist_and_stays_alone(name, poison):
    spec = SPECS[name]
    logits, bias, _, _ = inputs(spec)
    clean = ROUTER(jnp.asarray(logits), None, None, jnp.int32(0), spec=spec, bias=biased_by(spec, bias))[0]
    logits[2] = poison
    routing = ROUTER(jnp.asarray(logits), None, None, jnp.int32(0), spec=spec, bias=biased_by(spec, bias))[0]
    assert len(set(np.asarray(routing.ids[2]))) == spec.top_k
    assert np.all((routing.ids[2] >= 0) & (routing.ids[2] < spec.num_experts))
    for got, expected in ((routing.ids, clean.ids), (routing.weights, clean.weights)):
        assert np.array_equal(np.delete(got, 2, axis=0), np.delete(expected, 2, axis=0))


def test_ids_to_replay_that_no_expert_has_are_an_error_where_they_would_run():
    spec = RouterSpec(num_experts=4, top_k=2, renormalize=True)
    ids = jnp.asarray([[0, 1], [2, 9]], jnp.int32)
    logits = jnp.zeros((2, 4))
    for valid, fails in ((jnp.asarray([True, False]), False), (jnp.asarray([True, True]), True)):
        if fails:
            with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="names an expert that does not exist"):
                jax.block_until_ready(ROUTER(logits, LayerRouting(ids, valid), None, jnp.int32(0), spec=spec))
        else:
            assert np.array_equal(
                ROUTER(logits, LayerRouting(ids, valid), None, jnp.int32(0), spec=spec)[0].ids[0], [0, 1]
            )


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wider", [0, 5])
@pytest.mark.parametrize("latent", [False, True])
def test_rows_are_written_where_plain_code_writes_them_and_padding_nowhere(latent, wider, dtype, stored):
    step = make_step([(0, 20), (45, 1), (9, 2)], page_size=16, num_tokens=32, num_requests=5)
    rows = step.pool[:, :, : 1 if latent else None]
    pool = jnp.pad(jnp.asarray(rows, stored), ((0, 0), (0, 0), (0, 0), (0, 0 if latent else wider)))
    keys, values = (jnp.asarray(new, dtype) for new in (step.new_keys, step.new_values))
    first = jnp.asarray(step.first_page, jnp.int32)
    if latent:
        plain = write_latent(pool, keys[:, :1], first, step.batch)
        written = WRITE(pool, keys[:, :1], None, first, step.batch)
    else:
        plain, written = (
            write(pool, keys, values, first, step.batch) for write in (lambda pool, *rest: write_kv(pool, *rest), WRITE)
        )
    expected = np.array(plain.astype(jnp.float32))
    expected[step.first_page] = np.asarray(pool.astype(jnp.float32))[
        step.first_page
    ]  # page 0 takes padding there alone
    np.testing.assert_array_equal(np.asarray(written.astype(jnp.float32)), expected)


@pytest.mark.parametrize(
    ("name", "at", "wrong"), [("positions", 1, 10_000), ("page_table", (0, 0), 10_000), ("page_table", (0, 0), -1)]
)
def test_a_write_outside_the_page_table_or_the_pool_is_an_error_and_not_a_crash(name, at, wrong):
    step = make_step([(0, 3)], page_size=16)
    keys, values = jnp.asarray(step.new_keys), jnp.asarray(step.new_values)
    batch = dataclasses.replace(step.batch, **{name: getattr(step.batch, name).at[at].set(wrong)})
    with pytest.raises(jax.errors.JaxRuntimeError, match="a position is outside the page table, or a page outside"):
        jax.block_until_ready(WRITE(jnp.asarray(step.pool), keys, values, jnp.int32(0), batch))


def test_the_pool_is_updated_in_place():
    step = make_step([(0, 20)], page_size=16)
    pool = jnp.tile(jnp.asarray(step.pool), (50, 1, 1, 1))
    args = (pool, jnp.asarray(step.new_keys), jnp.asarray(step.new_values), jnp.int32(0), step.batch)
    memory = jax.jit(native_write, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes and memory.temp_size_in_bytes < pool.nbytes // 4


PAGE, WIDTH, REQUESTS, DIM = 8, 20, 6, 24
SINKS = jnp.asarray([0.5, -1.0, 3.0, 0.0], jnp.float32)
FEATURES = {
    "plain": AttentionFeatures(),
    "window and sinks": AttentionFeatures(sinks=SINKS, window=21, scale=0.3),
    "short window": AttentionFeatures(window=3),
    "chunk": AttentionFeatures(chunk=20),
    "latent": AttentionFeatures(latent=19, scale=0.2),
}


class Pool:
    """Pages of some requests with 150 tokens each, in random order, and a query for every token."""

    def __init__(self, dtype, features):
        rng = np.random.default_rng(35)
        self.features, pages = features, REQUESTS * WIDTH
        self.table = 1 + rng.permutation(pages).reshape(REQUESTS, WIDTH).astype(np.int32)
        rows = 1 if features.latent else 4
        self.pool = jnp.asarray(rng.standard_normal((1 + pages, PAGE, rows, DIM)), dtype)
        self.queries = jnp.asarray(rng.standard_normal((REQUESTS, PAGE * WIDTH, 4, DIM)), dtype)

    def attend(self, chunks, run=VARIANT):
        """Rows of each (request, first position, tokens)."""
        counts = [count for _, _, count in chunks]
        requests = np.repeat([request for request, _, _ in chunks], counts)
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in chunks])
        ends = np.cumsum([0, *counts])
        batch = PagedBatch(
            positions=jnp.asarray(positions, jnp.int32),
            token_rows=jnp.asarray(np.repeat(np.arange(len(chunks)), counts), jnp.int32),
            valid=jnp.ones(len(positions), bool),
            query_starts=jnp.asarray(ends, jnp.int32),
            seq_lens=jnp.asarray([start + count for _, start, count in chunks], jnp.int32),
            page_table=jnp.asarray(self.table[[request for request, _, _ in chunks]]),
            decode=False,
        )
        out = run(self.queries[requests, positions], self.pool, jnp.int32(0), batch, self.features)
        return np.split(np.asarray(out), ends[1:-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FEATURES)
def test_a_row_of_attention_with_features_is_its_own_by_a_bit(name, dtype):
    """Alone, beside others, and however a prompt is cut: few queries meet keys in another loop than many."""
    case, length = Pool(dtype, FEATURES[name]), 150
    (whole,) = case.attend([(2, 0, length)])
    (plain,) = case.attend([(2, 0, length)], run=jax.jit(reference_variant))
    np.testing.assert_allclose(
        np.asarray(whole, np.float32), np.asarray(plain, np.float32), atol=2e-5 if dtype == "float32" else 4e-2
    )
    for cuts in ((75, 75), (1, 149), (149, 1), (2, 3, 4, 5, 6, 130), (7, 64, 79)):
        start, parts = 0, []
        for count in cuts:
            parts.append(case.attend([(5, 17, 1), (2, start, count), (0, 0, 11), (1, 90, 40)])[1])
            start += count
        np.testing.assert_array_equal(bits(np.concatenate(parts)), bits(whole))
    for at in (0, 1, 19, 20, 63, 64, 149):
        for others in ([], [(request, 30 + request, 1) for request in (0, 1, 3, 4)]):
            np.testing.assert_array_equal(bits(case.attend([*others, (2, at, 1)])[-1]), bits(whole[at : at + 1]))


def test_many_heads_of_a_latent_row_are_divided_and_stay_the_same_by_a_bit():
    """Alone, the heads of a request go to several cores; beside others they stay together."""
    case = Pool("float32", AttentionFeatures(latent=19, scale=0.2))
    case.queries = jnp.asarray(
        np.random.default_rng(36).standard_normal((REQUESTS, PAGE * WIDTH, 40, DIM)), jnp.float32
    )
    together = case.attend([(request, 100, 1) for request in range(REQUESTS)])
    for request in range(REQUESTS):
        np.testing.assert_array_equal(bits(case.attend([(request, 100, 1)])[0]), bits(together[request]))


def test_features_that_do_nothing_are_plain_attention_by_a_bit():
    step = make_step([(0, 20), (45, 1), (130, 9)], page_size=16)
    args = (jnp.asarray(step.queries), jnp.where(step.pool > 1e4, 0, step.pool), jnp.int32(step.first_page), step.batch)
    wide = AttentionFeatures(window=1000, chunk=1000, scale=step.queries.shape[2] ** -0.5)
    np.testing.assert_array_equal(VARIANT(*args, wide), PLAIN(*args))


class Prepared:
    """A projection of a step, and what becomes of it in float64."""

    heads, groups = 4, 2

    def __init__(self, traits, frequencies, *, is_biased=False):
        rng = np.random.default_rng(41)
        self.step = make_step([(0, 20), (45, 1), (9, 1), (0, 3)], page_size=16, num_tokens=31, num_requests=6, heads=4)
        self.traits, self.frequencies = traits, frequencies
        self.tokens, _, self.dim = self.step.queries.shape
        columns = (self.heads * (2 if traits.gated else 1) + 2 * self.groups) * self.dim
        widths = [heads * self.dim if traits.qk_norm == "whole" else self.dim for heads in (self.heads, self.groups)]
        norms = [jnp.asarray(rng.standard_normal((3, width)), jnp.float32) for width in widths]
        angles = rng.standard_normal((self.tokens, frequencies))
        self.projected = FusedQKV(
            qkv=jnp.asarray(rng.standard_normal((self.tokens, columns)), jnp.float32),
            q_norm=norms[0] if traits.qk_norm else None,
            k_norm=norms[1] if traits.qk_norm else None,
            layer=jnp.int32(2),
            cos=jnp.asarray(np.cos(angles), jnp.float32),
            sin=jnp.asarray(np.sin(angles), jnp.float32),
            eps=1e-6,
            is_biased=is_biased,
            traits=traits,
        )

    def run(self, **changes):
        """Queries and the pool."""
        pool, first = jnp.asarray(self.step.pool), jnp.int32(self.step.first_page)
        projected = dataclasses.replace(self.projected, **changes)
        return jax.jit(lambda pool: native_qk_prepare(projected, pool, first, self.step.batch))(pool)

    def expected(self):
        """Queries, keys and values."""
        rows = np.asarray(self.projected.qkv, np.float64).reshape(self.tokens, -1, self.dim)
        queries, keys, values = np.split(rows, [-2 * self.groups, -self.groups], axis=1)
        queries = queries[:, 0::2] if self.traits.gated else queries
        return self.head(queries, self.projected.q_norm), self.head(keys, self.projected.k_norm), values

    def head(self, rows, norms):
        steps = [lambda rows: self.norm(rows, norms), self.rotate]
        for step in reversed(steps) if self.traits.norm_after_rope else steps:
            rows = step(rows)
        return rows

    def norm(self, rows, norms):
        if norms is None:
            return rows
        together = rows.reshape(self.tokens, 1, -1) if self.traits.qk_norm == "whole" else rows
        scale = np.asarray(norms[2], np.float64) + self.traits.qk_norm_offset
        return (together / np.sqrt(np.mean(together**2, axis=-1, keepdims=True) + 1e-6) * scale).reshape(rows.shape)

    def rotate(self, rows):
        count, rows = self.frequencies, rows.copy()
        cos, sin = (np.asarray(part, np.float64)[:, None] for part in (self.projected.cos, self.projected.sin))
        low, high = slice(0, count), slice(count, 2 * count)
        if self.traits.interleaved:
            low, high = slice(0, 2 * count, 2), slice(1, 2 * count, 2)
        first, second = rows[..., low].copy(), rows[..., high].copy()
        rows[..., low], rows[..., high] = first * cos - second * sin, second * cos + first * sin
        return rows


TRAITS = {
    "no norm": (StackTraits(qk_norm=""), 3, False),
    "pairs": (StackTraits(qk_norm="", interleaved=True), 2, False),
    "a norm of all heads": (StackTraits(qk_norm="whole"), 4, False),
    "gated heads, an offset": (StackTraits(qk_norm_offset=1.0, gated=True), 2, False),
    "a norm behind": (StackTraits(norm_after_rope=True), 4, False),
    "no positions": (StackTraits(rotary=False), 0, False),
    "biased": (StackTraits(), 4, True),
}


@pytest.mark.parametrize("name", TRAITS)
def test_a_projection_with_traits_is_prepared_as_in_numpy(name):
    traits, frequencies, is_biased = TRAITS[name]
    case = Prepared(traits, frequencies, is_biased=is_biased)
    queries, written = case.run()
    expected, keys, values = case.expected()
    np.testing.assert_allclose(queries, expected, atol=2e-6)
    step, batch = case.step, case.step.batch
    plain = step.pool.copy()
    for token in np.flatnonzero(batch.valid):
        page, at = divmod(int(batch.positions[token]), 16)
        slot = plain[step.first_page + int(batch.page_table[int(batch.token_rows[token]), page]), at]
        slot[0::2], slot[1::2] = keys[token], values[token]
    np.testing.assert_allclose(written, plain, atol=2e-6)
    assert np.array_equal(np.asarray(written)[plain == step.pool], step.pool[plain == step.pool])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layer=jnp.int32(3)), "the layer is outside the stack"),
        (dict(cos=jnp.zeros((31, 9)), sin=jnp.zeros((31, 9))), "at most C / 2 frequencies"),
        (dict(k_norm=jnp.zeros((3, 7))), "norms are"),
        (dict(sin=jnp.zeros((31, 1))), "a row has the angles"),
    ],
)
def test_a_projection_that_does_not_fit_is_an_error_and_not_a_crash(changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        Prepared(*TRAITS["gated heads, an offset"][:2]).run(**changes)[0].block_until_ready()


def test_gates_of_heads_and_of_shared_experts_are_sigmoids():
    case, rng = Prepared(*TRAITS["gated heads, an offset"][:2]), np.random.default_rng(43)
    mixed = jnp.asarray(rng.standard_normal((case.tokens, case.heads, case.dim)), jnp.float32)
    gates = np.asarray(case.projected.qkv, np.float64).reshape(case.tokens, -1, case.dim)[:, 1 : 2 * case.heads : 2]
    gated = jax.jit(native_gate_heads, static_argnames="groups")(case.projected.qkv, mixed, groups=case.groups)
    np.testing.assert_allclose(gated, np.asarray(mixed) / (1 + np.exp(-gates)), atol=1e-6)
    y, shared, x = (jnp.asarray(rng.standard_normal((70, 45)), jnp.float32) for _ in range(3))
    gate = jnp.asarray(rng.standard_normal((45, 1)), jnp.bfloat16)
    weight = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(gate, np.float64)))
    expected = np.asarray(y) + weight * np.asarray(shared)
    np.testing.assert_allclose(jax.jit(native_add_gated)(y, shared, x, gate), expected, atol=4e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rows are"):
        jax.block_until_ready(native_add_gated(y, shared[:9], x, gate))
    with pytest.raises(jax.errors.JaxRuntimeError, match="beside values"):
        jax.block_until_ready(native_gate_heads(case.projected.qkv, mixed[:, :3], groups=case.groups))
