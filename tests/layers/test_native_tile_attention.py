"""Attention in tiles of bfloat16 (native/attention_tiles.h): against loops in float64, with bits that do not depend on
how many tokens of a request a step has. Tiles are emulated on every processor; one that has them gives those bits."""

import ctypes
import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_native_batch_invariance import bits, rounded
from support.tile_libraries import tile_libraries

SOURCE = """
#include "attention.h"
using namespace rex;
extern "C" bool attend(const int64_t* sizes, float scale, const float* sinks, const int32_t* positions,
                       const int32_t* starts, const int32_t* table, const float* queries, const bf16* pool,
                       float* out) {
  AttentionShape shape{};
  int64_t* const into[] = {&shape.tokens, &shape.heads, &shape.groups, &shape.dim, &shape.requests, &shape.pages,
                           &shape.page, &shape.row, &shape.latent, &shape.window, &shape.chunk};
  for (int64_t* size : into) *size = *sizes++;
  shape.scale = scale, shape.sinks = sinks;
  if (!InTiles::fits(shape)) return false;
  const PagedStep step{positions, starts, table, 0};
  for (const QueryPiece& piece : query_pieces(shape, step, 1)) attend<InTiles>(shape, step, piece, queries, pool, out);
  return true;
}
"""
TOKENS, PAGE = 150, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer: H heads of C numbers, G kv heads; of a latent row its first `latent` numbers are the value."""

    heads: int
    groups: int
    dim: int
    latent: int = 0
    window: int = 0
    chunk: int = 0
    scale: float = 0.0
    has_sinks: bool = False

    @property
    def value_dim(self):
        return self.latent or self.dim


CASES = {
    "one head": Case(1, 1, 32),
    "two heads of a key": Case(4, 2, 64, scale=0.3),
    "eight heads of a key": Case(8, 1, 96),
    "many heads of a key": Case(20, 1, 32),
    "window": Case(4, 2, 64, window=37),
    "chunks": Case(2, 2, 128, chunk=45),
    "sinks": Case(6, 3, 64, window=70, has_sinks=True),
    "latent": Case(5, 1, 96, latent=64),
    "many latent heads": Case(18, 1, 160, latent=128),
}
LONG = "eight heads of a key", "many latent heads"  # others have more heads than a tile has rows, or latent rows


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Libraries by build; "processor" where this one has tiles."""
    made = tile_libraries(tmp_path_factory.mktemp("tiles"), SOURCE)
    for library in made.values():
        library.attend.restype = ctypes.c_bool
    return made


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The queries of a request, its keys and values in pages of a pool in another order, and the sinks of a layer."""

    queries: np.ndarray  # [TOKENS, H, C]
    pool: np.ndarray  # [pages, PAGE, 2 G or 1, C]
    table: np.ndarray
    sinks: np.ndarray | None

    def slots(self):
        """[TOKENS, 2 G or 1, C]; a view of the pool where one position is assigned."""
        positions = np.arange(TOKENS)
        return self.table[positions // PAGE], positions % PAGE


def prompt_of(case, seed=0):
    rng, pages = np.random.default_rng(seed), -(-TOKENS // PAGE)
    rows = 1 if case.latent else 2 * case.groups
    pool = (2 * rng.standard_normal((pages + 1, PAGE, rows, case.dim))).astype(jnp.bfloat16)
    queries = rng.standard_normal((TOKENS, case.heads, case.dim)).astype(np.float32)
    sinks = rng.standard_normal(case.heads).astype(np.float32) if case.has_sinks else None
    return Prompt(queries, pool, (rng.permutation(pages) + 1).astype(np.int32), sinks)


def attend(library, case, prompt, begin, end):
    """What tokens begin..end-1 mix, as the only request of a step, float32; None where tiles do not fit."""
    count, pool = end - begin, np.ascontiguousarray(prompt.pool)
    out = np.full((count, case.heads, case.value_dim), np.nan, np.float32)
    sizes = (
        count,
        case.heads,
        case.groups,
        case.dim,
        1,
        len(prompt.table),
        PAGE,
        case.dim,
        case.latent,
        case.window,
        case.chunk,
    )
    arrays = (np.arange(begin, end, dtype=np.int32), np.asarray([0, count], np.int32), prompt.table)
    arrays += (np.ascontiguousarray(prompt.queries[begin:end]), pool, out)
    sinks = None if prompt.sinks is None else prompt.sinks.ctypes.data
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
    fits = library.attend(
        (ctypes.c_int64 * len(sizes))(*sizes), ctypes.c_float(case.scale), ctypes.c_void_p(sinks), *pointers
    )
    return out if fits else None


def in_steps(library, case, prompt, counts):
    """The whole prompt, in steps of these counts of tokens, over and over."""
    parts, begin, steps = [], 0, itertools.cycle(counts)
    while begin < TOKENS:
        end = min(TOKENS, begin + next(steps))
        parts.append(attend(library, case, prompt, begin, end))
        begin = end
    return np.concatenate(parts)


def looped(case, prompt):
    """The same in float64, of queries that are rounded once; weights are not."""
    scale = np.float32(case.scale or 1 / np.sqrt(np.float32(case.dim)))
    queries, slots = rounded(prompt.queries * scale), prompt.pool.astype(np.float64)[prompt.slots()]
    out = np.zeros((TOKENS, case.heads, case.value_dim))
    for token, head in np.ndindex(TOKENS, case.heads):
        group = head // (case.heads // case.groups)
        first = max(
            0, token - case.window + 1 if case.window else 0, token // case.chunk * case.chunk if case.chunk else 0
        )
        keys = slots[first : token + 1, 0 if case.latent else 2 * group]
        values = keys[:, : case.latent] if case.latent else slots[first : token + 1, 2 * group + 1]
        scores = keys @ queries[token, head]
        sink = [] if prompt.sinks is None else [float(prompt.sinks[head])]
        weights = np.exp(scores - max([*scores, *sink]))
        total = weights.sum() + sum(np.exp(np.asarray(sink) - max([*scores, *sink])))
        out[token, head] = weights @ values / total
    return out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LONG else name for name in CASES]
)
def test_rows_are_those_of_the_loop_and_the_same_in_steps_of_any_size(libraries, name):
    """Weights are rounded to bfloat16: an error of 2^-8 of the largest value at most."""
    case = CASES[name]
    prompt = prompt_of(case)
    expected = looped(case, prompt)
    bound = 2.0**-8 * np.abs(prompt.pool.astype(np.float64)).max()
    outputs = {build: attend(library, case, prompt, 0, TOKENS) for build, library in libraries.items()}
    for build, library in libraries.items():
        out = outputs[build]
        np.testing.assert_array_less(np.abs(out - expected), bound)
        assert np.mean(np.abs(out - expected)) < 4e-3 * np.mean(np.abs(expected))
        for counts in ([1], [3, 1, 33], [64], [5, 90]):
            steps = in_steps(library, case, prompt, counts)
            np.testing.assert_array_equal(bits(steps), bits(out), err_msg=f"{build}, steps of {counts}")
    if "processor" in outputs:  # its vectors are as long; shorter ones add weights in another order
        np.testing.assert_array_equal(bits(outputs["processor"]), bits(outputs["emulated"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, marks=[] if (row + column) % 2 == 0 else pytest.mark.thorough)
        for row, name in enumerate(["two heads of a key", "window", "sinks", "latent"])
        for column, value in enumerate([np.nan, np.inf])
    ],
)
def test_what_a_token_does_not_see_changes_no_bit_of_it(libraries, name, value):
    """A slot that is not finite reaches the tokens that see it alone; slots of no position, none."""
    case, at = CASES[name], 77
    prompt = prompt_of(case)
    pool = prompt.pool.copy()
    pages, offsets = prompt.slots()
    pool[pages[at], offsets[at]] = value
    pool[0] = value
    pool[prompt.table[-1], TOKENS % PAGE :] = value
    spoilt = dataclasses.replace(prompt, pool=pool)
    end = at + case.window if case.window else TOKENS
    for library in libraries.values():
        expected = attend(library, case, prompt, 0, TOKENS)
        for out in (attend(library, case, spoilt, 0, TOKENS), in_steps(library, case, spoilt, [1, 40, 3])):
            np.testing.assert_array_equal(bits(out)[:at], bits(expected)[:at])
            np.testing.assert_array_equal(bits(out)[end:], bits(expected)[end:])
            assert not np.any(np.all(np.isfinite(out[at:end]), axis=(1, 2)))


def test_subnormal_numbers_are_zero_in_steps_of_any_size(libraries):
    case = CASES["two heads of a key"]
    prompt = prompt_of(case)
    sizes = 2.0 ** np.random.default_rng(1).integers(-134, -120, (*prompt.pool.shape[:3], 1))
    values = prompt.pool.copy()
    values[:, :, 1::2] = (values.astype(np.float64) * sizes)[:, :, 1::2].astype(jnp.bfloat16)
    prompt = dataclasses.replace(prompt, pool=values)
    for library in libraries.values():
        first = attend(library, case, prompt, 0, TOKENS)
        assert np.any(first != 0)
        for counts in ([1], [40]):
            np.testing.assert_array_equal(in_steps(library, case, prompt, counts), first)


@pytest.mark.parametrize("case", [Case(2, 1, 48), Case(2, 1, 64, latent=48)])
def test_heads_that_are_no_whole_tiles_take_another_way(libraries, case):
    for library in libraries.values():
        assert attend(library, case, prompt_of(case), 0, TOKENS) is None
