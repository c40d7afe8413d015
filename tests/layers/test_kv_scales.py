"""Pools of e4m3 codes with a scale a layer for keys and one for values: attention is that of a NumPy loop, float64,
over keys and values rounded as scale * e4m3(number / scale); every backend writes the same codes."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from layers.test_attention import LAYER, RAGGED, make_step, oracle
from layers.test_native_layer_stack import build_case
from routed_experts.layers.attention import FusedQKV
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.attention_variants import ATTENTION_BACKENDS
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.kv_format import KV_CODES, KVScales, from_stored
from routed_experts.layers.native.ops import NATIVE_ATTENTION
from routed_experts.layers.paged_attend import PagedAttend
from routed_experts.layers.rotary import RotarySpec

pytestmark = pytest.mark.usefixtures("fast_compilation")

BACKENDS = {**ATTENTION_BACKENDS, "native": NATIVE_ATTENTION, "gpu": gpu_attention_backend(interpret=True)}
SCALES = np.array([[31.0, 37.0], [0.3, 2.7], [41.0, 43.0]], np.float32)  # by layer; LAYER attends
LARGEST = 448.0


def e4m3(numbers):
    """The numbers of e4m3 that are stored, float64."""
    clipped = np.clip(np.asarray(numbers, np.float32), -LARGEST, LARGEST)
    return clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def scaled_step(requests, *, scales=SCALES[LAYER], **sizes):
    """A step with the codes of its pool, and with the keys and values that these stand for."""
    step, rounded = make_step(requests, page_size=16, **sizes), []
    for parts, scale in zip((step.keys, step.values), scales, strict=True):
        rounded.append([np.float64(scale) * e4m3(part / scale) for part in parts])
    by_row = np.tile(scales, step.pool.shape[2] // 2)[:, None]
    codes = e4m3(step.pool / by_row).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return dataclasses.replace(step, keys=rounded[0], values=rounded[1]), jnp.asarray(codes)


def run(name, step, codes, features=None, *, scales=SCALES, dtype=jnp.float32):
    """Attention of the new tokens, and the pool after."""
    num_pages = codes.shape[0] // len(SCALES)
    kv_scales = () if scales is None else (jnp.asarray(scales),)
    attend = PagedAttend(
        backend=BACKENDS[name].for_kv_scales(), batch=step.batch, num_pages=num_pages, kv_scales=kv_scales
    )
    new = [jnp.asarray(part) for part in (step.new_keys, step.new_values)]
    call = jax.jit(lambda q, k, v, pool, layer: attend(q, k, v, pool, layer, features))
    mixed, pool = call(jnp.asarray(step.queries, dtype), *new, codes, jnp.int32(LAYER))
    assert mixed.dtype == dtype
    return np.asarray(mixed, np.float64)[: step.num_tokens], np.asarray(pool)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("requests", RAGGED.values(), ids=RAGGED)
def test_ragged_attention_is_the_loop_over_scaled_codes(name, requests):
    step, codes = scaled_step(requests)
    np.testing.assert_allclose(run(name, step, codes)[0], oracle(step), atol=5e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_decode_is_the_loop_over_scaled_codes(name):
    step, codes = scaled_step([(3, 1), (0, 1), (90, 1), (17, 1)], decode=True)
    np.testing.assert_allclose(run(name, step, codes)[0], oracle(step), atol=5e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("decode", [False, True])
def test_windows_sinks_and_a_scale_of_their_own_stay_as_they_are(name, decode):
    requests = [(3, 1), (0, 1), (90, 1)] if decode else [(0, 20), (45, 1), (9, 3)]
    step, codes = scaled_step(requests, decode=decode)
    sinks, window, scale = np.array([0.5, -1.0, 2.0, 0.0]), 7, 0.4
    features = AttentionFeatures(sinks=jnp.asarray(sinks, jnp.float32), window=window, scale=scale)
    expected = np.zeros((step.num_tokens, 4, 8))
    positions, rows = np.asarray(step.batch.positions), np.asarray(step.batch.token_rows)
    for n in range(step.num_tokens):
        seen = slice(max(0, positions[n] + 1 - window), positions[n] + 1)
        for head in range(4):
            keys, values = (parts[rows[n]][seen, head // 2] for parts in (step.keys, step.values))
            scores = np.append(keys @ step.queries[n, head].astype(np.float64) * scale, sinks[head])
            weights = np.exp(scores - scores.max())
            expected[n, head] = (weights / weights.sum())[:-1] @ values
    np.testing.assert_allclose(run(name, step, codes, features)[0], expected, atol=5e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_of_half_precision_are_not_rounded_with_the_scale(name):
    """They give what the same numbers in float32 give, rounded once; the GPU's kernels also round weights."""
    step, codes = scaled_step([(40, 5), (7, 1)])
    queries = np.asarray(jnp.asarray(step.queries * 3, jnp.bfloat16), np.float32)
    step = dataclasses.replace(step, queries=queries)
    half, wide = (run(name, step, codes, dtype=dtype)[0] for dtype in (jnp.bfloat16, jnp.float32))
    np.testing.assert_allclose(wide, oracle(step), atol=5e-5)
    if name == "gpu":
        np.testing.assert_allclose(half, wide, atol=2e-2)
    else:
        np.testing.assert_array_equal(half, wide.astype(ml_dtypes.bfloat16).astype(np.float64))


@pytest.mark.parametrize("name", BACKENDS)
def test_new_keys_and_values_are_stored_divided_by_their_scales(name):
    step, codes = scaled_step([(0, 20), (45, 1), (9, 3)])
    _, pool = run(name, step, codes)
    table, at, rows = (np.asarray(x) for x in (step.batch.page_table, step.batch.positions, step.batch.token_rows))
    for n in range(step.num_tokens):
        stored = pool[step.first_page + table[rows[n], at[n] // 16], at[n] % 16].view(ml_dtypes.float8_e4m3fn)
        for part, numbers, scale in zip((0, 1), (step.new_keys, step.new_values), SCALES[LAYER], strict=True):
            np.testing.assert_array_equal(stored[part::2].astype(np.float64), e4m3(numbers[n] / scale))


@pytest.mark.parametrize("scale", [0.3, 1.1, 0.7])
def test_quotients_are_rounded_once(scale):
    """Of all numbers of bfloat16 that are not too large: some quotients are halfway between two codes."""
    numbers = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    numbers = numbers[(np.abs(numbers) < 1e4) & ((np.abs(numbers) > 1e-30) | (numbers == 0))].reshape(-1, 1, 1)
    scales = KVScales(jnp.full((2, 2), scale, jnp.float32), jnp.int32(1))
    for quotients in jax.jit(scales.divide)(jnp.asarray(numbers), jnp.asarray(numbers)):
        np.testing.assert_array_equal(quotients, numbers / np.float32(scale))


@pytest.mark.parametrize("name", BACKENDS)
def test_scales_of_one_change_no_bit(name):
    step, codes = scaled_step([(0, 20), (45, 1), (9, 3)], scales=np.ones(2, np.float32))
    plain, ones = (run(name, step, codes, scales=scales) for scales in (None, np.ones_like(SCALES)))
    np.testing.assert_array_equal(plain[1], ones[1])
    np.testing.assert_array_equal(plain[0], ones[0])


def test_a_wrong_scale_is_far_from_the_loop():
    """Else the tests above prove nothing."""
    step, codes = scaled_step([(40, 5)])
    for wrong in (SCALES[[0, 0, 0]], np.roll(SCALES, 1, axis=0), SCALES[:, ::-1], np.ones_like(SCALES)):
        mixed, _ = run("reference", step, codes, scales=np.ascontiguousarray(wrong))
        assert np.abs(mixed - oracle(step)).max() > 0.05


def test_fused_kernels_are_left_out_where_they_take_no_scales():
    for backend in BACKENDS.values():
        own = backend.for_kv_scales()
        assert (own.fused is None) == (backend.fused is None or not backend.fused_takes_kv_scales)
    unable = dataclasses.replace(NATIVE_ATTENTION, fused_takes_kv_scales=False)
    assert unable.for_kv_scales() == dataclasses.replace(unable, fused=None)


@pytest.mark.parametrize("name", ["native", "gpu"])
def test_fused_kernels_write_and_attend_by_the_scales(name):
    """The layer of the stack is another one than that of the pool."""
    step, codes = scaled_step([(0, 20), (45, 1), (9, 3)])
    tokens, dim, rng = step.queries.shape[0], step.queries.shape[2], np.random.default_rng(5)
    norms = jnp.asarray(rng.random((2, 3, dim)) + 0.5, jnp.float32)
    angles = RotarySpec(inverse=tuple(1e4 ** -(np.arange(dim // 2) / dim))).cos_sin(step.batch.positions)
    cos, sin = (jnp.tile(part, (1, 2)) for part in angles)
    parts = (step.queries, step.new_keys, step.new_values)
    qkv = jnp.asarray(np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1))
    projected = FusedQKV(
        qkv=qkv, q_norm=norms[0], k_norm=norms[1], layer=jnp.int32(0), cos=cos, sin=sin, eps=1e-6, head_dim=dim
    )
    attend = PagedAttend(
        backend=BACKENDS[name], batch=step.batch, num_pages=codes.shape[0] // 3, kv_scales=(jnp.asarray(SCALES),)
    )
    mixed, pool = jax.jit(attend.attend_fused)(projected, codes, jnp.int32(LAYER))

    def prepared(heads, norm):
        wide = np.asarray(heads, np.float64)
        normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm, np.float64)
        halves = np.concatenate([-normed[..., dim // 2 :], normed[..., : dim // 2]], axis=-1)
        return (normed * np.asarray(cos)[:, None] + halves * np.asarray(sin)[:, None]).astype(np.float32)

    queries, keys = prepared(step.queries, norms[0][0]), prepared(step.new_keys, norms[1][0])
    unfused, expected_pool = run("reference", dataclasses.replace(step, queries=queries, new_keys=keys), codes)
    np.testing.assert_allclose(np.asarray(mixed, np.float64)[: step.num_tokens], unfused, atol=5e-4)
    changed = np.asarray(pool) != expected_pool
    changed[step.first_page] = False  # padding
    assert changed.mean() < 1e-4, "a number between two codes may be rounded to either"
    assert tokens == step.num_tokens


def stack_case(scales, **sizes):
    """A native run over codes with these scales; the pool holds what the codes of `build_case` stand for."""
    case = build_case(**sizes)
    attend = dataclasses.replace(case.attend, kv_scales=() if scales is None else (jnp.asarray(scales),))
    codes = e4m3(np.asarray(case.pool)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return dataclasses.replace(case, attend=attend, pool=jnp.asarray(codes))


@pytest.mark.parametrize("dim", [8, 20])
@pytest.mark.parametrize("biased", [False, True])
def test_a_native_run_takes_powers_of_two_into_its_weights_by_the_bit(dim, biased):
    """Keys of 2^-a times the norm of keys, and values, queries and outputs accordingly: the codes and the sums are the
    same numbers, and the scales undo it. With biases keys and values are written elsewhere."""
    scales = np.exp2([[2.0, -3.0], [-1.0, 4.0]]).astype(np.float32)
    scaled = stack_case(scales, dim=dim)
    groups, heads = 2, 4
    bias = np.random.default_rng(3).standard_normal((2, (heads + 2 * groups) * dim)).astype(np.float32)
    arrays = dataclasses.replace(scaled.arrays, qkv_bias=jnp.asarray(bias) if biased else None)
    keys, values = (scales[:, part].reshape(2, 1) for part in (0, 1))
    is_value = np.repeat([False, True], [(heads + groups) * dim, groups * dim])
    by_column = jnp.asarray(np.where(is_value, 1 / values, 1.0), jnp.float32)
    folded = dataclasses.replace(
        arrays,
        q_norm=arrays.q_norm * keys,
        k_norm=arrays.k_norm / keys,
        qkv=arrays.qkv * by_column[:, None],
        qkv_bias=arrays.qkv_bias * by_column if biased else None,
        out=arrays.out * values[:, None],
    )
    plain = dataclasses.replace(stack_case(None, dim=dim), arrays=folded)
    for own, expected in zip(dataclasses.replace(scaled, arrays=arrays).run(), plain.run(), strict=True):
        np.testing.assert_array_equal(own, expected)
    unscaled = dataclasses.replace(stack_case(None, dim=dim), arrays=arrays).run()
    assert not np.array_equal(np.asarray(unscaled[0]), np.asarray(plain.run()[0]))


def test_a_native_run_refuses_scales_that_do_not_fit():
    case = stack_case(np.ones((2, 2), np.float32))
    case.run()
    message = "scales of keys and values are float32"
    for scales in (np.ones((1, 2), np.float32), np.ones((2, 3), np.float32), np.ones((2, 2), np.float16)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            dataclasses.replace(case, attend=dataclasses.replace(case.attend, kv_scales=(jnp.asarray(scales),))).run()
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        case.run(pool=from_stored(case.pool, jnp.float32))


def test_scales_are_of_pools_of_codes():
    step, codes = scaled_step([(3, 1)])
    with pytest.raises(AssertionError):
        run("reference", step, from_stored(codes, jnp.float32))
    assert codes.dtype == KV_CODES
