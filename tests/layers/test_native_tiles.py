"""Products in tiles of bfloat16 (native/tiles.h): against loops in float64, with bits that do not depend on the other
rows nor on the way of a number of rows. Tiles are emulated on every processor; one that has them gives those bits."""

import ctypes
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from layers.test_moe import silu
from layers.test_native_batch_invariance import bits, rounded
from layers.test_native_codes import FORMATS, ROUNDING, coded, looped
from support.tile_libraries import tile_libraries

SOURCE = """
#include "experts.h"
using namespace rex;
template <class Matrix>
bool product(int64_t rows, int64_t depth, int64_t cols, const bf16* x, Matrix w, float* out) {
  if (!fits_bf16(w, depth, cols)) return false;
  Team team(1, [](std::function<void()>) {});
  linear(team, rows, depth, cols, x, w, out);
  return true;
}
extern "C" bool plain(int64_t rows, int64_t depth, int64_t cols, const bf16* x, const bf16* w, float* out) {
  return product(rows, depth, cols, x, w, out);
}
extern "C" bool coded(int64_t rows, int64_t depth, int64_t cols, int64_t group, int shift, const bf16* x,
                      Format format, const uint8_t* codes, const float* scales, float* out) {
  const ScaleRows own{scales, ScaleDtype::kFloat32, cols >> shift, shift};
  return product(rows, depth, cols, x, Codes{format, codes, own, group}, out);
}
extern "C" int64_t padding() { return kPad; }
"""
EXPERT = """
extern "C" void expert(int64_t rows, int64_t depth, int64_t width, int64_t parts, const float* x, const bf16* gate_up,
                       const bf16* down, const int32_t* order, float* outputs) {
  const ExpertShape shape{rows, 1, depth, width, 1, 0};
  ExpertRun<bf16, float, const bf16*, bf16> run{shape, x, gate_up, down, {}, order, outputs, nullptr};
  std::vector<bf16> hidden(rows * run.hidden_step());
  run.hidden = hidden.data();
  const Piece piece{0, 0, rows};
  if (parts == 1) return run.run_whole(piece);
  for (int64_t i = 0; i < parts; i++)
    run.gate_up_part(piece, part_start(width, i, parts), part_start(width, i + 1, parts));
  const RowMatrix<const bf16> rounded = run.hidden_rows(piece, run.hidden);
  for (int64_t i = 0; i < parts; i++)
    run.down_part(piece, rounded, part_start(depth, i, parts), part_start(depth, i + 1, parts));
}
"""
COUNTS = 1, 2, 3, 16, 17, 32, 33  # one row and two in vectors; one tile of rows and two; panels
SHAPES = [
    (96, 48),
    (1090, 144),
    (34, 16),
]  # depth, columns: whole blocks; panels and what is left over; a part of a block


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Libraries by build; "processor" where this one has tiles."""
    made = tile_libraries(tmp_path_factory.mktemp("tiles"), SOURCE + EXPERT)
    for library in made.values():
        library.plain.restype = library.coded.restype = ctypes.c_bool
        library.padding.restype = ctypes.c_int64
    return made


def multiply(library, rows, x, weight):
    """The product of the first rows; None where the matrix does not fit tiles."""
    cols = weight.shape[-1]
    out = np.full((rows, cols), np.nan, np.float32)
    sizes = (ctypes.c_int64(size) for size in (rows, x.shape[1], cols))
    if isinstance(weight, np.ndarray):
        fits = library.plain(*sizes, *(ctypes.c_void_p(array.ctypes.data) for array in (x, weight, out)))
    else:
        codes, scales = (np.ascontiguousarray(array[0]) for array in (weight.codes, weight.scales))
        group, form = ctypes.c_int64(weight.group), ctypes.c_int(FORMATS.index(weight.format))
        shift = ctypes.c_int(weight.span.bit_length() - 1)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (codes, scales, out))
        fits = library.coded(*sizes, group, shift, ctypes.c_void_p(x.ctypes.data), form, *pointers)
    return out if fits else None


def assert_products_are_alike(libraries, x, weight, expected, bound, counts=COUNTS):
    products = {build: multiply(library, len(x), x, weight) for build, library in libraries.items()}
    first = products["emulated"]
    assert np.all(np.abs(first - expected) <= bound)
    for build, library in libraries.items():
        np.testing.assert_array_equal(bits(products[build]), bits(first), err_msg=build)
        for rows in counts:
            np.testing.assert_array_equal(
                bits(multiply(library, rows, x, weight)), bits(first)[:rows], err_msg=f"{build}, {rows} rows"
            )


@pytest.mark.parametrize(("depth", "cols"), SHAPES)
def test_products_of_bfloat16_do_not_depend_on_the_way_of_a_number_of_rows(libraries, depth, cols):
    rng = np.random.default_rng(depth)
    x = rng.standard_normal((70, depth)).astype(jnp.bfloat16)
    weight = rng.standard_normal((depth, cols)).astype(jnp.bfloat16)
    wide, matrix = x.astype(np.float64), weight.astype(np.float64)
    assert_products_are_alike(libraries, x, weight, wide @ matrix, depth * 2.0**-24 * (np.abs(wide) @ np.abs(matrix)))


def test_pieces_of_many_rows_give_what_their_rows_give_alone(libraries):
    """1,535 rows are three pieces that begin with a group of rows; 160 columns are two."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((1535, 64)).astype(jnp.bfloat16)
    weight = rng.standard_normal((64, 160)).astype(jnp.bfloat16)
    wide, matrix = x.astype(np.float64), weight.astype(np.float64)
    bound = 64 * 2.0**-24 * (np.abs(wide) @ np.abs(matrix))
    assert_products_are_alike(libraries, x, weight, wide @ matrix, bound, counts=(1, 543))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("group", "depth", "cols", "span"),
    [(32, 96, 48, 1), (128, 1090, 144, 1), (512, 1090, 16, 1), (64, 34, 16, 1), (128, 194, 256, 128)],
)
def test_products_of_codes_do_not_depend_on_the_way_of_a_number_of_rows(libraries, form, group, depth, cols, span):
    rng = np.random.default_rng(depth + group)
    weight = coded(rng, 1, depth, cols, group, form=form, span=span)
    x = rng.standard_normal((70, depth)).astype(jnp.bfloat16)
    expected, size = looped(x.astype(np.float64), weight, 0)
    assert_products_are_alike(libraries, x, weight, expected, ROUNDING["float32"] * size)


def test_subnormal_numbers_and_sums_are_zero_in_every_way(libraries):
    """Of x, of the matrix, of products and of sums; each row and column has its own size."""
    rng, sizes = np.random.default_rng(5), 2.0 ** np.arange(-130.0, -60.0)
    x = (rng.standard_normal((70, 96)) * sizes[:, None]).astype(jnp.bfloat16)
    weight = (rng.standard_normal((96, 48)) * 2.0 ** rng.integers(-132, 0, (96, 48))).astype(jnp.bfloat16)
    flushed = [
        np.where(np.abs(array.astype(np.float64)) < 2.0**-126, 0, array.astype(np.float64)) for array in (x, weight)
    ]
    assert any(np.any(array != flush) for array, flush in zip((x, weight), flushed, strict=True))
    bound = 96 * (2.0**-126 + 2.0**-24 * (np.abs(flushed[0]) @ np.abs(flushed[1])))
    assert_products_are_alike(libraries, x, weight, flushed[0] @ flushed[1], bound)


def test_a_matrix_whose_groups_or_columns_are_no_whole_tiles_takes_another_way(libraries):
    rng = np.random.default_rng(6)
    x = np.zeros((1, 1056), jnp.bfloat16)
    for library in libraries.values():
        for group in (16, 48, 96, 1024):
            assert multiply(library, 1, x, coded(rng, 1, 1056, 64, group)) is None
        assert multiply(library, 1, x, np.zeros((1056, 40), jnp.bfloat16)) is None
        assert multiply(library, 1, x[:, :33].copy(), np.zeros((33, 64), jnp.bfloat16)) is None


@pytest.mark.parametrize("width", [64, 208])  # hidden values: whole blocks; half of one is left over
def test_an_expert_in_tiles_is_its_products_and_the_same_in_parts(libraries, width):
    """Rows in another order; hidden values are rounded to bfloat16 once."""
    rng, rows, depth = np.random.default_rng(7), 45, 144
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    gate_up = (rng.standard_normal((depth, 2 * width)) / 8).astype(jnp.bfloat16)
    down = (rng.standard_normal((width, depth)) / 8).astype(jnp.bfloat16)
    order = rng.permutation(rows).astype(np.int32)
    gate, up = np.split(rounded(x[order]) @ gate_up.astype(np.float64), 2, axis=1)
    expected = rounded(silu(gate) * up) @ down.astype(np.float64)
    outputs = {}
    for (build, library), parts in itertools.product(libraries.items(), (1, 3)):
        out = np.full((rows, depth + library.padding()), np.nan, np.float32)
        arrays = (ctypes.c_void_p(array.ctypes.data) for array in (x, gate_up, down, order, out))
        library.expert(*(ctypes.c_int64(size) for size in (rows, depth, width, parts)), *arrays)
        outputs[build, parts] = out[:, :depth]
        np.testing.assert_array_equal(bits(outputs[build, parts]), bits(outputs[build, 1]))
    for out in outputs.values():
        assert np.mean(np.abs(out - expected)) < 1e-3 * np.mean(np.abs(expected))
        np.testing.assert_array_less(np.abs(out - expected), 0.02)
