"""Keys and values as e4m3 codes: each rounding against a search over all numbers of e4m3, in array code and in C++;
attention over codes against attention over their numbers; pools of codes are updated in place."""

import ctypes
import dataclasses
import platform
import re
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from layers.test_attention import LAYERS, RAGGED, make_step, oracle
from layers.test_native_layer_stack import build_case
from routed_experts.layers.attention import FusedQKV, write_kv
from routed_experts.layers.attention_features import AttentionFeatures
from routed_experts.layers.kv_format import KV_CODES, from_stored, to_stored
from routed_experts.layers.native import toolchain
from routed_experts.layers.native.ops import native_attention, native_qk_norm_rope, native_variant, native_write
from routed_experts.layers.paged_attend import PagedAttend
from support.head_angles import head_cos_sin
from support.kernels import ATTENTION

pytestmark = pytest.mark.usefixtures("fast_compilation")

BACKENDS = sorted(ATTENTION)
SIZES = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # of codes 0 to 126
STORE = jax.jit(lambda x: to_stored(x, KV_CODES))
READ = jax.jit(lambda codes: from_stored(codes, jnp.float32))


def searched(numbers):
    """The code of the nearest number, of two equally near ones the even one; NaN: the code of all ones."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = np.asarray(numbers).astype(np.float64).ravel()
    sizes = np.where(np.isnan(wide), 0.0, np.minimum(np.abs(wide), 448.0))
    codes = np.empty(wide.size, np.uint8)
    for part in np.array_split(np.arange(wide.size), -(-wide.size // 4096)):
        distances = np.abs(sizes[part, None] - SIZES)
        nearest = distances == distances.min(axis=1, keepdims=True)
        even = nearest & (np.arange(127) % 2 == 0)
        codes[part] = np.argmax(np.where(even.any(axis=1, keepdims=True), even, nearest), axis=1)
    codes[np.isnan(wide)] = 0x7F
    return (codes | np.where(np.signbit(wide), 0x80, 0).astype(np.uint8)).reshape(np.shape(numbers))


def hard_numbers():
    """Float32: all codes, the numbers halfway between two and their neighbours, numbers of all sizes, none."""
    halves = (SIZES[1:] + SIZES[:-1]) / 2
    exact = np.concatenate([SIZES, halves, [464.0, 480.0, 2.0**-10, 2.0**-11]]).astype(np.float32)
    near = np.concatenate([np.nextafter(exact, np.float32(bound)) for bound in (-1e30, 1e30)])
    rng = np.random.default_rng(0)
    spread = (rng.standard_normal(4000) * np.exp2(rng.uniform(-140, 120, 4000))).astype(np.float32)
    rest = np.array([np.inf, np.nan, 0.0, 1e-45, 3.4e38, 447.9, 448.1], np.float32)
    every = np.concatenate([exact, near, spread, rest])
    return np.concatenate([every, -every])


def all_numbers(dtype):
    if dtype == "float32":
        return hard_numbers()
    return np.arange(65536, dtype=np.uint16).view(jnp.dtype(dtype))


def natively(numbers):
    """Through the kernel that writes keys and values: rows of 31 numbers in slots of 32, keys and values in turn."""
    rows = np.pad(numbers, (0, -numbers.size % (2 * 31 * 64))).reshape(-1, 2, 31)
    step = make_step([(0, len(rows))], page_size=16, groups=1)
    pool = jnp.full((*step.pool.shape[:3], 32), 0xAA, KV_CODES)
    written = jax.jit(native_write)(
        pool, jnp.asarray(rows[:, :1]), jnp.asarray(rows[:, 1:]), jnp.int32(step.first_page), step.batch
    )
    table, at = np.asarray(step.batch.page_table)[0], np.arange(len(rows))
    slots = np.asarray(written)[step.first_page + table[at // 16], at % 16]
    assert not slots[..., 31].any(), "zeros stand beside a row"
    return slots[..., :31].reshape(-1)[: numbers.size]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("store", [lambda x: np.asarray(STORE(jnp.asarray(x))), natively], ids=["array code", "C++"])
def test_codes_are_those_of_a_search(dtype, store):
    numbers = all_numbers(dtype)
    np.testing.assert_array_equal(store(numbers), searched(numbers))


ALONE = """
#include "vec.h"
extern "C" void store_and_load(const float* numbers, rex::kv8* codes, float* read, int64_t count) {
  rex::convert(numbers, codes, count);
  rex::convert(codes, read, count);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="leaves instructions of x86-64 out")
@pytest.mark.parametrize(
    "without",
    [
        *((), ("-mno-avx512f",), ("-mno-avx512f", "-mno-fma", "-mno-f16c")),
        *(("-mno-avx2", "-mno-fma"), ("-mno-avx2", "-mno-fma", "-mno-f16c")),
    ],
    ids=" ".join,
)
def test_processors_that_know_less_have_the_same_codes(tmp_path, without):
    source, made = tmp_path / "alone.cpp", tmp_path / "alone.so"
    source.write_text(ALONE)
    command = [*(toolchain.compiler() or ()), *toolchain.FLAGS, *toolchain.simd_flags(), *without]
    command += [f"-I{toolchain.HERE}", str(source), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    run = ctypes.CDLL(str(made)).store_and_load
    run.argtypes, run.restype = (ctypes.c_void_p,) * 3 + (ctypes.c_int64,), None
    numbers = np.concatenate([hard_numbers(), READ(np.arange(256, dtype=np.uint8))])
    codes, read = np.empty(numbers.size, np.uint8), np.empty(numbers.size, np.float32)
    run(numbers.ctypes.data, codes.ctypes.data, read.ctypes.data, numbers.size)
    np.testing.assert_array_equal(codes, searched(numbers))
    np.testing.assert_array_equal(read, READ(codes))


def test_codes_are_read_as_their_numbers():
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(READ(every), every.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(STORE(READ(every)) & 0x7F, every & 0x7F)


def code_step(requests, **sizes):
    """A step whose pool holds codes, and the same over their numbers, which are also those of the oracle."""
    step = make_step(requests, page_size=16, **sizes)
    keys, values = ([np.asarray(READ(STORE(part))) for part in parts] for parts in (step.keys, step.values))
    codes = STORE(jnp.asarray(step.pool))
    return dataclasses.replace(step, keys=keys, values=values, pool=np.asarray(READ(codes))), codes


def written(step, pool):
    new = (jnp.asarray(part) for part in (step.new_keys, step.new_values))
    return jax.jit(write_kv)(pool, *new, jnp.int32(step.first_page), step.batch)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("requests", RAGGED.values(), ids=RAGGED)
def test_ragged_attention_over_codes_is_the_loop_over_their_numbers(name, requests):
    step, codes = code_step(requests)
    mixed = jax.jit(ATTENTION[name].run)(
        jnp.asarray(step.queries), written(step, codes), jnp.int32(step.first_page), step.batch
    )
    np.testing.assert_allclose(mixed[: step.num_tokens], oracle(step), atol=2e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_decode_over_codes_is_the_loop_over_their_numbers(name):
    step, codes = code_step([(3, 1), (0, 1), (90, 1), (17, 1)], decode=True)
    mixed = jax.jit(ATTENTION[name].run)(
        jnp.asarray(step.queries), written(step, codes), jnp.int32(step.first_page), step.batch
    )
    np.testing.assert_allclose(mixed, oracle(step), atol=2e-5)


@pytest.mark.parametrize("heads", [4, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_native_attention_has_the_bits_of_the_numbers(dtype, heads):
    """In every loop: few queries of a kv head, and many."""
    step, codes = code_step([(0, 20), (130, 1), (9, 1), (0, 70)], heads=heads)
    queries, first = jnp.asarray(step.queries, dtype), jnp.int32(step.first_page)
    pool = written(step, codes)
    over_codes, over_numbers = (jax.jit(native_attention)(queries, p, first, step.batch) for p in (pool, READ(pool)))
    np.testing.assert_array_equal(over_codes, over_numbers)
    features = AttentionFeatures(window=19, scale=0.3, sinks=jnp.linspace(-1, 1, heads))
    run = jax.jit(lambda q, p: native_variant(q, p, first, step.batch, features))
    np.testing.assert_array_equal(run(queries, pool), run(queries, READ(pool)))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_key_that_is_no_number_reaches_only_those_that_see_it(name):
    step, codes = code_step([(40, 3), (20, 2)])
    table = np.asarray(step.batch.page_table)
    pool = written(step, codes).at[step.first_page + table[0, 41 // 16], 41 % 16].set(0x7F)
    mixed = jax.jit(ATTENTION[name].run)(jnp.asarray(step.queries), pool, jnp.int32(step.first_page), step.batch)
    spoiled = np.isnan(np.asarray(mixed)).all(axis=(1, 2))
    np.testing.assert_array_equal(spoiled, [False, True, True, False, False])
    assert np.isfinite(np.asarray(mixed)[~spoiled]).all()


def test_the_native_write_of_prepared_keys_rounds_what_a_pool_of_floats_holds():
    rng, (heads, groups) = np.random.default_rng(21), (6, 2)
    step = make_step([(0, 20), (45, 1)], page_size=16, heads=heads, groups=groups, num_tokens=31, num_requests=6)
    tokens, dim = step.queries.shape[0], step.queries.shape[2]
    qkv = jnp.asarray(rng.standard_normal((tokens, (heads + 2 * groups) * dim)), jnp.float32)
    norms = jnp.asarray(rng.standard_normal((2, 3, dim)), jnp.float32)
    cos, sin = head_cos_sin(step.batch.positions, head_dim=dim, theta=1e4)
    projected = FusedQKV(qkv=qkv, q_norm=norms[0], k_norm=norms[1], layer=jnp.int32(2), cos=cos, sin=sin, eps=1e-6)
    run = jax.jit(lambda pool: native_qk_norm_rope(projected, pool, jnp.int32(step.first_page), step.batch))
    floats, codes = (run(pool) for pool in (jnp.asarray(step.pool), STORE(jnp.asarray(step.pool))))
    np.testing.assert_array_equal(codes[0], floats[0])
    np.testing.assert_array_equal(codes[1], STORE(floats[1]))


def test_the_first_layer_of_a_native_run_rounds_what_a_pool_of_floats_holds():
    case = build_case(dim=20)
    floats, codes = case.run()[2], case.run(pool=STORE(case.pool))[2]
    pages = case.attend.num_pages
    np.testing.assert_array_equal(codes[:pages], STORE(floats)[:pages])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("decode", [False, True])
def test_a_pool_of_codes_is_updated_in_place(name, decode):
    """Over all layers of a step: neither copied, nor converted, nor held twice."""
    step = make_step([(3, 1), (90, 1), (17, 1)], page_size=16, decode=decode)
    num_pages = 4096
    pool = jax.ShapeDtypeStruct((LAYERS * num_pages, *step.pool.shape[1:]), KV_CODES)
    attend = PagedAttend(backend=ATTENTION[name], batch=step.batch, num_pages=num_pages)
    new = [jnp.asarray(part) for part in (step.queries, step.new_keys, step.new_values)]

    def layers(pool):
        return lax.scan(lambda p, layer: attend(*new, p, layer)[::-1], pool, jnp.arange(LAYERS, dtype=jnp.int32))

    compiled = jax.jit(layers, donate_argnums=0).lower(pool).compile()
    memory, size = compiled.memory_analysis(), pool.size
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size // 4
    dims = ",".join(map(str, pool.shape))
    assert not re.findall(rf"= \S*\[{dims}\]\S* (?:copy|convert)\(", compiled.as_text())
