"""The native kernels of the head: the product with a table of embeddings, and logprobs. Judged by NumPy and SciPy in
float64; a row's bits depend on that row alone, and all logprobs of a row have one normaliser."""

import ctypes
import platform
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.layers.lm_head import HeadProduct, LmHead
from routed_experts.layers.logprobs import prompt_logprobs, ranked_logprobs, token_logprobs
from routed_experts.layers.native import toolchain
from routed_experts.layers.native.ops import NATIVE_KERNELS, native_argmax, native_logprobs, native_tied_linear
from routed_experts.layers.sampling import SamplingBatch, sample
from support import fast_compile
from support.tile_libraries import FEW_OPTIMISATIONS

DTYPES = "float32", "bfloat16", "float16"
# [V, D]: a ragged last tile, less than one, a ragged depth, a long one
TABLES = [(211, 64), (5, 8), (64, 31), (40, 1040)]
ROWS, COUNTS, FEW_COUNTS = 64, (*range(1, 10), 25, 33), (1, 3, 9)
TIED, ARGMAX, LOGPROBS = jax.jit(native_tied_linear), jax.jit(native_argmax), jax.jit(native_logprobs)
DRAW = jax.jit(sample, static_argnums=2, compiler_options=fast_compile.OPTIONS)  # a score divided by 1 is that score
PROMPTS_IN_EVERY_RUN = {("bfloat16", False), ("float32", True), ("float16", True)}  # dtype, and whether tied


def bits(array):
    return np.asarray(array).view(np.int32)


def random_table(dtype, shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((ROWS, shape[1])), dtype), jnp.asarray(rng.standard_normal(shape), dtype)


def random_logits(rows, vocabulary, seed=0):
    """Around 100: a normaliser in one number would round them."""
    return (100 + 4 * np.random.default_rng(seed).standard_normal((rows, vocabulary))).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", TABLES)
def test_a_product_with_a_table_is_that_of_float64_and_a_row_of_it_its_own(dtype, shape):
    x, table = random_table(dtype, shape)
    whole, (wide, columns) = np.asarray(TIED(x, table)), (np.asarray(a, np.float64) for a in (x, table.T))
    assert whole.dtype == np.float32
    assert np.all(np.abs(whole - wide @ columns) <= shape[1] * 2.0**-24 * (np.abs(wide) @ np.abs(columns)))
    rng, x = np.random.default_rng(1), np.asarray(x)
    for count in COUNTS if shape == TABLES[0] else FEW_COUNTS:
        rows = rng.permutation(ROWS)[:count]
        np.testing.assert_array_equal(bits(TIED(x[rows], table)), bits(whole)[rows])


ALONE = """
#include "argmax.h"
#include "tied_linear.h"
extern "C" int lanes() { return rex::kLanes; }
extern "C" void product(int64_t rows, int64_t depth, int64_t lines, const float* x, const float* w, float* y) {
  rex::Team team(1, {});
  rex::tied_linear(team, rows, depth, lines, x, w, y);
}
extern "C" void logprobs(int64_t rows, int64_t vocabulary, const float* scores, const int32_t* tokens, float* out) {
  rex::Team team(1, {});
  rex::token_logprobs(team, rows, vocabulary, 1, scores, tokens, out);
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere vectors have one width")
def test_a_processor_with_shorter_vectors_has_the_same_within_rounding(tmp_path, is_thorough):
    """But in scripts/thorough with few optimisations."""
    source, made = tmp_path / "head.cpp", tmp_path / "head.so"
    source.write_text(ALONE)
    folders = f"-I{toolchain.HERE}", f"-I{jax.ffi.include_dir()}"
    compiler = toolchain.compiler() or ()
    command = [*compiler, *toolchain.FLAGS, "-mno-avx512f", *folders, str(source), "-o", str(made)]
    command += [] if is_thorough else FEW_OPTIMISATIONS
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    library = ctypes.CDLL(str(made))
    assert library.lanes() == 8
    library.product.argtypes = (*(ctypes.c_int64,) * 3, *(ctypes.c_void_p,) * 3)
    library.logprobs.argtypes = (*(ctypes.c_int64,) * 2, *(ctypes.c_void_p,) * 3)
    library.product.restype = library.logprobs.restype = None

    for shape in TABLES:
        x, table = (np.ascontiguousarray(array) for array in random_table("float32", shape))
        products = {rows: np.empty((rows, shape[0]), np.float32) for rows in (ROWS, *COUNTS)}
        for rows, out in products.items():
            library.product(rows, shape[1], shape[0], x.ctypes.data, table.ctypes.data, out.ctypes.data)
            np.testing.assert_array_equal(bits(out), bits(products[ROWS])[:rows])
        np.testing.assert_allclose(products[ROWS], TIED(x, table), rtol=0, atol=1e-6 * shape[1])
    logits, tokens = random_logits(4, 313), np.array([0, 312, 8, 100], np.int32)
    out = np.empty(4, np.float32)
    library.logprobs(4, 313, logits.ctypes.data, tokens.ctypes.data, out.ctypes.data)
    np.testing.assert_allclose(out, log_softmax(logits.astype(np.float64), axis=-1)[range(4), tokens], atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 7, 313, 1024, 1025, 151_936])
def test_logprobs_are_scipy_s(vocabulary):
    logits = random_logits(3, vocabulary)
    tokens = np.random.default_rng(1).integers(0, vocabulary, (3, 5)).astype(np.int32)
    expected = np.take_along_axis(log_softmax(logits.astype(np.float64), axis=-1), tokens, axis=-1)
    np.testing.assert_allclose(LOGPROBS(logits, tokens), expected, rtol=2e-7, atol=1e-6)


def test_all_logprobs_of_a_row_have_one_normaliser():
    """Of the greedy kernel, of one token and of the best ones, in any batch; and those of scores that a temperature of
    1 has gone through."""
    logits = jnp.asarray(random_logits(33, 313))
    tokens, greedy = ARGMAX(logits)
    one = token_logprobs(logits, tokens, native_logprobs)
    chosen, best, ids = ranked_logprobs(logits, tokens, 5, native_logprobs)
    np.testing.assert_array_equal(ids[:, 0], tokens)
    for other in (one, chosen, best[:, 0]):
        np.testing.assert_array_equal(bits(other), bits(greedy))
    for count in (1, 5, 32):
        np.testing.assert_array_equal(bits(ARGMAX(logits[:count])[1]), bits(greedy)[:count])
        np.testing.assert_array_equal(bits(LOGPROBS(logits[:count], ids[:count])), bits(best)[:count])

    zeros = jnp.zeros(33, jnp.int32)
    rest = dict(top_k=zeros, top_p=jnp.ones(33), min_p=jnp.zeros(33), choice=zeros, position=zeros)
    batch = SamplingBatch(temperature=jnp.ones(33), seed=jnp.arange(66, dtype=jnp.uint32).reshape(33, 2), **rest)
    for mode in (SamplingMode.RANDOM, SamplingMode.FILTERED):
        drawn, processed = DRAW(logits, batch, mode)
        assert not np.array_equal(drawn, tokens)
        processed_logprobs = token_logprobs(processed, drawn, native_logprobs)
        np.testing.assert_array_equal(bits(processed_logprobs), bits(token_logprobs(logits, drawn, native_logprobs)))


def test_broken_and_dropped_scores():
    logits = random_logits(3, 40)
    logits[0, 3], logits[1, 3], logits[2] = -np.inf, np.nan, -np.inf
    got = np.asarray(LOGPROBS(logits, np.array([[3, 5]] * 3, np.int32)))
    assert got[0, 0] == -np.inf and np.isfinite(got[0, 1])
    assert np.isnan(got[1:]).all()


@pytest.mark.parametrize(
    ("tied", "dtype"),
    [
        pytest.param(tied, dtype, marks=[] if (dtype, tied) in PROMPTS_IN_EVERY_RUN else pytest.mark.thorough)
        for tied in (False, True)
        for dtype in DTYPES
    ],
)
def test_a_prompt_s_logprobs_are_those_of_steps_of_few_rows(dtype, tied):
    """One block of 64 rows and a part of one, and a softcap and a bias."""
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.standard_normal((90, 64)), dtype)
    matrix = jnp.asarray(rng.standard_normal((211, 64) if tied else (64, 211)), dtype)
    head = LmHead(matrix=matrix, bias=jnp.asarray(rng.standard_normal(211), dtype), tied=tied, softcap=3.0)
    product, targets = NATIVE_KERNELS.prompt_head, jnp.asarray(rng.integers(0, 211, 90), jnp.int32)
    assert product == HeadProduct(linear=NATIVE_KERNELS.linear, tied=native_tied_linear)

    @jax.jit
    def prompt(hidden, targets):
        return prompt_logprobs(hidden, head, targets, top=4, product=product, kernel=native_logprobs)

    @jax.jit
    def step(hidden, targets):
        return ranked_logprobs(head.logits(hidden, NATIVE_KERNELS.lm_head), targets, 4, native_logprobs)

    whole = prompt(hidden, targets)
    logits = np.asarray(hidden, np.float64) @ np.asarray(head.columns, np.float64) + np.asarray(head.bias, np.float64)
    expected = log_softmax(3 * np.tanh(logits / 3), axis=-1)[range(90), targets]
    np.testing.assert_allclose(whole.target, expected, atol=2e-5)
    for rows in (slice(0, 1), slice(3, 11), slice(60, 90)):
        few = step(hidden[rows], targets[rows])
        for got, all_rows in zip(few, (whole.target, whole.top, whole.top_ids), strict=True):
            np.testing.assert_array_equal(bits(got), bits(all_rows)[rows])
        part = prompt(hidden[rows], targets[rows])
        np.testing.assert_array_equal(bits(part.target), bits(whole.target)[rows])
