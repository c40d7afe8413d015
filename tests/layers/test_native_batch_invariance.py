"""The native kernels are batch-invariant: a row's result depends on that row and the weights alone, bitwise, in every
dtype. It does not depend on the number of other rows, their values or order, the cuts of a prompt into steps, or the
number of threads. Rows against bfloat16 weights are rounded to bfloat16 once and multiplied in pairs, compared with
float64; routers round nothing."""

import ctypes
import dataclasses
import functools
import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_moe import random_call, silu, with_rows
from layers.test_native_layer_stack import build_case
from routed_experts.layers.attention import PagedBatch
from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.layers.kv_format import KV_CODES, to_stored
from routed_experts.layers.layer_stack import StackOffsets, StepInputs
from routed_experts.layers.native import toolchain
from routed_experts.layers.native.host_expert_queue import HostExpertQueue
from routed_experts.layers.native.layer_stack import native_layer_stack
from routed_experts.layers.native.ops import NATIVE_ATTENTION, native_experts, native_linear
from routed_experts.layers.paged_attend import PagedAttend
from support.routing_blocks import empty_block
from support.tile_libraries import FEW_OPTIMISATIONS

DTYPES = "bfloat16", "float32", "float16"
ROWS, COUNTS, FEW_COUNTS = 64, (*range(1, 21), 25, 64), (1, 8, 25, 64)
MATRICES = [
    (96, 320),
    (1040, 48),
    (33, 48),
    (64, 40),
]  # [D, O]: pairs; two panels deep; depth is odd; columns are ragged: no pairs
EXPERTS = [(256, 272), (64, 48), (40, 24)]  # D, F: parts, whole experts, no pairs
LINEAR, EXPERT_SUMS = jax.jit(native_linear, static_argnames="dtype"), jax.jit(native_experts)


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


def groups(counts=COUNTS):
    """Rows of 0..63 in another order, of every count."""
    rng = np.random.default_rng(1)
    return [rng.permutation(ROWS)[:count] for count in counts]


def matrix(dtype, shape):
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.standard_normal((ROWS, shape[0])), dtype), jnp.asarray(
        rng.standard_normal((1, *shape)), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MATRICES)
def test_a_row_of_a_product_is_its_own(dtype, shape):
    x, weights = matrix(dtype, shape)
    expected = bits(LINEAR(x, weights, 0, dtype=jnp.float32))
    for rows in groups(COUNTS if shape == MATRICES[0] else FEW_COUNTS):
        np.testing.assert_array_equal(bits(LINEAR(x[rows], weights, 0, dtype=jnp.float32)), expected[rows])


def expert_call(dtype, shape):
    """64 rows of two slots over 4 experts, where few rows are streamed and many tiled."""
    call = random_call(3, (ROWS, 2, 4, *shape), valid=np.ones(ROWS, bool))
    return dataclasses.replace(call, **{name: vars(call)[name].astype(dtype) for name in ("x", "gate_up", "down")})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EXPERTS)
def test_a_row_of_experts_is_its_own(dtype, shape):
    call, rng = expert_call(dtype, shape), np.random.default_rng(4)
    expected = bits(EXPERT_SUMS(call))
    for rows in groups():
        order = rng.permutation(ROWS)  # their positions; the others are padding
        arrays = {name: np.asarray(vars(call)[name])[rng.permutation(ROWS)] for name in ("x", "ids", "weights")}
        for name, array in arrays.items():
            array[order[: rows.size]] = np.asarray(vars(call)[name])[rows]
        out = EXPERT_SUMS(with_rows(call, **arrays, valid=np.isin(np.arange(ROWS), order[: rows.size])))
        np.testing.assert_array_equal(bits(out)[order[: rows.size]], expected[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", EXPERTS[:2])
def test_a_queue_gives_the_same_rows_with_any_number_of_threads(dtype, shape):
    """Of weights, and of rows that come in another dtype."""
    call = expert_call(dtype, shape)
    store, rng = ExpertTable(call.gate_up, call.down), np.random.default_rng(5)
    for fed in dict.fromkeys([dtype, "float32"]):
        x, results = call.x.astype(fed), []
        for num_threads in (1, 2, 3):
            queue = HostExpertQueue([store], num_experts=4, num_threads=num_threads)
            send = functools.partial(run_job, queue)
            results.append(bits(send(x, call.ids, call.weights)))
            for count in (1, 5, 20):
                rows = rng.permutation(ROWS)[:count]
                np.testing.assert_array_equal(bits(send(x[rows], call.ids[rows], call.weights[rows])), results[0][rows])
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


def run_job(queue, x, ids, weights):
    return jax.jit(lambda *inputs: queue.wait(queue.submit(inputs[0], jnp.int32(0), *inputs[1:], store=0))[1])(
        x, ids, weights
    )


class Served:
    """A run of two layers over 64 requests of up to 48 tokens each: rows of every token; with `codes` of keys."""

    PAGE, WIDTH, TOKENS = 8, 6, 96

    def __init__(self, dtype, hidden, width, experts=6, codes=False):
        rng, self.case = (
            np.random.default_rng(6),
            build_case(dtype=dtype, experts=experts, hidden=hidden, width=width, dim=20),
        )
        pages = 1 + ROWS * self.WIDTH
        self.table = 1 + np.arange(ROWS * self.WIDTH).reshape(ROWS, self.WIDTH)
        self.rows = jnp.asarray(rng.standard_normal((ROWS, 48, hidden)), dtype)
        self.angles = rng.standard_normal((2, 48, 20)).astype(np.float32)
        self.pool = jnp.asarray(rng.standard_normal((2 * pages, self.PAGE, 4, 20)), jnp.float32)
        self.pool = to_stored(self.pool, KV_CODES) if codes else self.pool
        self.block = empty_block(6, self.TOKENS)
        self.num_pages, self._run = pages, jax.jit(self._traced)

    def _traced(self, x, pool, angles, batch):
        step = StepInputs(cos=angles[0], sin=angles[1], valid=batch.valid)
        attend = PagedAttend(backend=NATIVE_ATTENTION, batch=batch, num_pages=self.num_pages)
        offsets = StackOffsets(first_layer=0, first_moe_layer=1)
        return native_layer_stack(x, self.case.arrays, step, attend, pool, self.block, None, offsets, self.case.spec)

    def step(self, chunks, pool=None):
        """Run (request, first position, tokens), in that order. Gives stream, norm, ids and weights of each, as bits,
        and the pool."""
        total, counts = sum(count for _, _, count in chunks), [count for _, _, count in chunks]
        requests, positions = np.zeros(self.TOKENS, np.int32), np.zeros(self.TOKENS, np.int32)
        requests[:total] = np.repeat([request for request, _, _ in chunks], counts)
        positions[:total] = np.concatenate([np.arange(start, start + count) for _, start, count in chunks])
        named, ends = [request for request, _, _ in chunks] + [0] * (ROWS - len(chunks)), np.cumsum([0, *counts])
        batch = PagedBatch(
            positions=jnp.asarray(positions),
            token_rows=jnp.asarray(np.repeat(np.arange(len(chunks) + 1), [*counts, self.TOKENS - total]), jnp.int32),
            valid=jnp.arange(self.TOKENS) < total,
            query_starts=jnp.asarray(np.pad(ends, (0, ROWS + 1 - ends.size), mode="edge"), jnp.int32),
            seq_lens=jnp.zeros(ROWS, jnp.int32),
            page_table=jnp.asarray(self.table[named], jnp.int32),
            decode=False,
        )
        out = self._run(
            self.rows[requests, positions],
            self.pool if pool is None else pool,
            jnp.asarray(self.angles[:, positions]),
            batch,
        )
        columns = [bits(out[0]), bits(out[1]), np.asarray(out[3].ids)[2:].T, bits(out[3].weights[2:].T)]
        return [[column[begin:end] for column in columns] for begin, end in itertools.pairwise(ends)], out[2]

    def pages_written(self, pool, request):
        """Keys and values of a request, in both layers."""
        return bits(pool).reshape(2, self.num_pages, -1)[:, self.table[request]]


RUNS = [*((dtype, 64, 48) for dtype in DTYPES), ("bfloat16", 40, 24), ("bfloat16", 64, 48, 6, True)]


@functools.cache
def served(case):
    return Served(*case)


@pytest.mark.parametrize("case", RUNS, ids=str)
def test_a_request_of_a_run_is_its_own(case):
    """64 requests with one token each, alone, in groups of every count, and beside prompts."""
    run, rng = served(case), np.random.default_rng(7)
    tokens = [(request, request % 40, 1) for request in range(ROWS)]
    expected, pool = run.step(tokens)
    pages = [run.pages_written(pool, request) for request in range(ROWS)]
    for count, rows in zip(COUNTS, groups(), strict=True):
        chunks = [tokens[row] for row in rows]
        if count <= 20:
            others = rng.permutation(np.setdiff1d(np.arange(ROWS), rows))[:2]
            chunks[count // 2 : count // 2] = [(request, 3, 7 + request % 19) for request in others]
        results, pool = run.step(chunks)
        for (request, _, number), outs in zip(chunks, results, strict=True):
            if number == 1:
                for actual, alone in zip(outs, expected[request], strict=True):
                    np.testing.assert_array_equal(actual, alone)
                np.testing.assert_array_equal(run.pages_written(pool, request), pages[request])


@pytest.mark.parametrize("case", RUNS, ids=str)
def test_how_a_prompt_is_cut_changes_no_bit(case):
    """Few queries of a request meet its keys in another loop than many, and few rows the weights."""
    run, length = served(case), 45
    (whole,), pool = run.step([(9, 0, length)])
    pages = run.pages_written(pool, 9)
    for cuts in ((20, 25), (9, 8, 7, 21), (1, 44), (44, 1), (2, 3, 4, 5, 6, 25), (1,) * length):
        pool, start, parts = None, 0, []
        for count in cuts:
            results, pool = run.step([(17, 5, 1), (9, start, count), (30, 0, 11)], pool)
            parts.append(results[1])
            start += count
        for actual, expected in zip(zip(*parts, strict=True), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(actual), expected)
        np.testing.assert_array_equal(run.pages_written(pool, 9), pages)


def everything():
    """Sums of each kind, in each dtype, as bits by name."""
    arrays = {}
    for dtype in DTYPES:
        x, weights = matrix(dtype, MATRICES[0])
        arrays |= {f"{dtype} product {n}": bits(LINEAR(x[:n], weights, 0, dtype=jnp.float32)) for n in (1, 7, 64)}
        arrays |= {f"{dtype} experts {shape}": bits(EXPERT_SUMS(expert_call(dtype, shape))) for shape in EXPERTS[:2]}
        outs, _ = served((dtype, 64, 48)).step([(9, 0, 45), (17, 5, 1)])
        arrays |= {f"{dtype} run {index}": array for index, array in enumerate(outs[0] + outs[1])}
    return arrays


ON_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import numpy as np
from layers.test_native_batch_invariance import everything
np.savez(sys.argv[1], **everything())
"""


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


@pytest.mark.skipif(CORES < 2, reason="a process that may have two cores is given one of them, as Linux does it")
def test_one_thread_gives_the_bits_of_many(tmp_path):
    """XLA gives a kernel as many threads as the process has cores."""
    file, tests = tmp_path / "told.npz", Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    subprocess.run([sys.executable, "-c", ON_ONE_CORE, str(file)], env=environment, check=True, timeout=300)
    actual, single = everything(), np.load(file)
    assert sorted(actual) == sorted(single)
    for name, expected in actual.items():
        np.testing.assert_array_equal(single[name], expected, err_msg=name)


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("count", [1, 8, 64])
def test_products_of_bfloat16_are_those_of_float64(shape, count):
    """Products of two are exact in float32, and so only sums round: half of 2^-23, relative, of the sum so far, at each
    addition."""
    x, weights = (np.asarray(array, np.float64) for array in matrix("bfloat16", shape))
    out = np.asarray(
        LINEAR(jnp.asarray(x[:count], jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16), 0, dtype=jnp.float32),
        np.float64,
    )
    bound = shape[0] * 2.0**-24 * (np.abs(x[:count]) @ np.abs(weights[0]))
    assert np.all(np.abs(out - x[:count] @ weights[0]) <= bound)


GEMM_ALONE = """
#include "bf16_gemm.h"
#define PRODUCT(name, Row, Weight)                                                                              \\
  extern "C" void name(int64_t rows, int64_t depth, int64_t cols, const Row* x, const Weight* w, float* out) { \\
    rex::multiply(rex::RowMatrix<const Row>{x, rows, depth, false}, w, cols, cols, out, cols);                 \\
  }
PRODUCT(pairs_bfloat16, rex::bf16, rex::bf16)
PRODUCT(floats_float32, float, float)
PRODUCT(floats_bfloat16, float, rex::bf16)
PRODUCT(floats_float16, float, rex::f16)
"""
WITHOUT = (
    pytest.param(("-mno-avx512bf16", "-U__AMX_TILE__"), marks=pytest.mark.thorough),
    ("-mno-avx512f", "-U__AMX_TILE__"),
    pytest.param(("-mno-avx2", "-mno-fma", "-mno-f16c"), marks=pytest.mark.thorough),
)


@pytest.mark.parametrize("without", WITHOUT if platform.machine() == "x86_64" else [()], ids=" ".join)
def test_processors_that_know_less_have_the_same_products(tmp_path, without):
    """Compiled without the instructions of pairs and tiles, where products of each number are added in sequence; with
    short vectors; and without conversions, the latter two with few optimisations. The numbers of rows are those at
    which the way of a product changes."""
    source, made = tmp_path / "gemm.cpp", tmp_path / "gemm.so"
    source.write_text(GEMM_ALONE)
    command = [
        *(toolchain.compiler() or ()),
        *toolchain.FLAGS,
        *toolchain.simd_flags(),
        *without,
        *(() if without == WITHOUT[0] else FEW_OPTIMISATIONS),
        f"-I{toolchain.HERE}",
        str(source),
        "-o",
        str(made),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    library = ctypes.CDLL(str(made))
    for rows_of, dtype in (("pairs", "bfloat16"), ("floats", "float32"), ("floats", "bfloat16"), ("floats", "float16")):
        multiply = getattr(library, f"{rows_of}_{dtype}")
        multiply.argtypes, multiply.restype = (ctypes.c_int64,) * 3 + (ctypes.c_void_p,) * 3, None
        x, weights = (np.ascontiguousarray(array) for array in matrix(dtype, (1040, 112)))
        x = x if rows_of == "pairs" else x.astype(np.float32)
        wide, matrix_wide = x.astype(np.float64), weights[0].astype(np.float64)
        bound, products = 1040 * 2.0**-24 * (np.abs(wide) @ np.abs(matrix_wide)), []
        for rows in (64, 1, 2, 3, 5, 6, 8, 9, 24, 25):
            products.append(np.full((rows, 112), np.nan, np.float32))
            multiply(rows, 1040, 112, x.ctypes.data, weights.ctypes.data, products[-1].ctypes.data)
            np.testing.assert_array_equal(bits(products[-1]), bits(products[0])[:rows])
        assert np.all(np.abs(products[0] - wide @ matrix_wide) <= bound)


def rounded(array):
    return np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64)


@pytest.mark.parametrize("shape", EXPERTS)
def test_experts_of_bfloat16_round_hidden_values_once(shape):
    """And what they give: nearly all of it is what one rounding gives, and much less what none gives, or one more.
    Where rows and weights make no pairs, or the processor is faster with floats, hidden values stay float32."""
    call = expert_call("bfloat16", shape)
    x, gate_up, down = (np.asarray(vars(call)[name], np.float64) for name in ("x", "gate_up", "down"))
    ways = {"once": rounded, "never": lambda hidden: hidden, "twice": rounded}
    expected = {way: np.zeros_like(x) for way in ways}
    for (n, k), (way, last) in itertools.product(np.ndindex(*call.ids.shape), ways.items()):
        gate, up = np.split(x[n] @ gate_up[call.ids[n, k]], 2)
        gate, up = (rounded(gate), rounded(up)) if way == "twice" else (gate, up)
        expected[way][n] += float(call.weights[n, k]) * (last(silu(gate) * up) @ down[call.ids[n, k]])
    out = np.asarray(EXPERT_SUMS(call), np.float64)
    same = {way: float(np.mean(rounded(values) == out)) for way, values in expected.items()}
    print(same)
    gains = toolchain.own_bf16_gains(toolchain.library())
    best = "once" if max(gains) > 1.0 and shape[0] % 16 == 0 and shape[1] % 16 == 0 else "never"
    assert same[best] > 0.95 and all(share < 0.85 for way, share in same.items() if way != best), same


def test_a_router_of_bfloat16_sees_rows_that_are_not_rounded():
    """Two experts whose scores of each row are a hair apart, the first one's higher: rounded norms would often have it
    otherwise."""
    rng, apart = np.random.default_rng(8), np.repeat([1.0, -1.0], 8)
    drawn = 1 + rng.integers(0, 128, (60_000, 16)) / 128
    close = drawn[drawn @ apart == 1 / 128][:96]
    x = np.concatenate(
        [close, np.full((96, 1), 2.0), rng.integers(-99, 99, (96, 47)) / 64], axis=1
    )  # as bfloat16 has them
    router = np.zeros((2, 64, 16))  # as many columns as make pairs
    router[:, :16, 0], router[:, :16, 1], router[:, 16, :2] = apart / 2, -apart / 2, 4.0

    run = Served("bfloat16", 64, 48, experts=16)
    arrays = run.case.arrays
    still = dataclasses.replace(
        arrays, router=jnp.asarray(router, jnp.bfloat16), out=jnp.zeros_like(arrays.out)
    )  # the stream is x
    run.case, run.rows = (
        dataclasses.replace(run.case, arrays=still),
        run.rows.at[:24, :4].set(x.reshape(24, 4, 64).astype(jnp.bfloat16)),
    )
    ids = np.concatenate([outs[2][:, :2] for outs in run.step([(request, 0, 4) for request in range(24)])[0]])
    assert np.array_equal(ids, np.tile([0, 1], (96, 1)))
    rounded = (x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + arrays.eps)).astype(jnp.bfloat16).astype(np.float64)
    assert np.mean(rounded[:, :16] @ apart < 0) > 0.1
