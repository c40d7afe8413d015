"""The laws of quantised matrices against float64 written apart, to the bit; and any box against that box of the whole.

Shapes are odd on purpose: blocks count from 0 and are cut short at the end."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.quantization_config import Codes, StorageFormat
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.quantized_part import E4M3_VALUES
from routed_experts.models.loading.quantized_tensors import QuantizedMatrix, scale_values, unpack_words
from support.quantized_checkpoints import exact, grid_of, pack

SIDES = st.integers(1, 300)
BLOCK_SIDES = st.sampled_from([1, 32, 64, 128, 0])
SCALES = st.sampled_from(["float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8"])


def any_scales(rng, grid, dtype):
    """Scales of the dtype, and their values in float64."""
    if dtype in ("float8_e8m0fnu", "uint8"):
        exponents = rng.integers(100, 140, grid).astype(np.uint8)
        stored = exponents if dtype == "uint8" else exponents.view(ml_dtypes.float8_e8m0fnu)
        return stored, 2.0 ** (exponents.astype(np.float64) - 127)
    stored = (rng.random(grid) * 0.02 + 1e-4).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    return stored, stored.astype(np.float64)


def any_box(draw, shape):
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append(slice(start, draw(st.integers(start + 1, size))))
    return tuple(box)


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(
        {name: np.require(tensor, requirements="C") for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return Checkpoint(folder)


def same_bits(left, right):
    return left.dtype == right.dtype == np.float32 and left.tobytes() == np.ascontiguousarray(right).tobytes()


def test_every_code_of_e4m3_has_the_value_of_its_bits():
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
        value = sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        if code & 127 == 127:
            assert np.isnan(E4M3_VALUES[code])
        else:
            assert E4M3_VALUES[code] == value
            assert np.float32(ml_dtypes.bfloat16(value)) == value, "exact in bfloat16"


def test_bytes_of_scales_are_exponents():
    scales = scale_values(np.arange(255, dtype=np.uint8))
    assert np.array_equal(scales.astype(np.float64), 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(scale_values(np.array([255], np.uint8))[0])


@given(data=st.data(), outputs=SIDES, inputs=SIDES, rows=BLOCK_SIDES, columns=BLOCK_SIDES, dtype=SCALES)
def test_float_codes_are_scaled_to_the_bit_and_every_box_is_that_of_the_whole(
    tmp_path_factory, data, outputs, inputs, rows, columns, dtype
):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codes = rng.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    codes[codes & 127 == 127] = 0x7E  # no NaN
    codes = codes.view(ml_dtypes.float8_e4m3fn)
    scales, wide = any_scales(rng, grid_of(codes.shape, (rows, columns)), dtype)
    expected = exact(codes.astype(np.float64), wide, (rows, columns))
    checkpoint = write(tmp_path_factory.mktemp("law"), {"w": codes, "s": scales})
    storage = StorageFormat(codes=Codes.E4M3, rows=rows, columns=columns)
    matrix = QuantizedMatrix(name="w", shape=codes.shape, storage=storage, codes="w", scales="s")
    assert matrix.grid == scales.shape
    assert same_bits(matrix.read(checkpoint, (slice(0, outputs), slice(0, inputs))), expected)
    for _ in range(3):
        box = any_box(data.draw, codes.shape)
        assert same_bits(matrix.read(checkpoint, box), expected[box]), box


@given(
    data=st.data(),
    spans=st.integers(1, 5),
    groups=st.integers(1, 5),
    span=st.sampled_from((1, 2, 8)),
    group=st.sampled_from((1, 4, 16)),
    short=st.integers(0, 15),
)
def test_every_box_of_the_scales_of_spans_and_groups_is_that_of_the_whole(
    tmp_path_factory, data, spans, groups, span, group, short
):
    """Blocks of 8 x 16, whose scales are shown for each span of outputs and group of inputs that divide them; the last
    group may be short."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = (8 * spans, max(1, 16 * groups - short))
    scales, wide = any_scales(rng, grid_of(shape, (8, 16)), "float32")
    codes = np.zeros(shape, ml_dtypes.float8_e4m3fn)
    checkpoint = write(tmp_path_factory.mktemp("scales"), {"w": codes, "s": scales})
    storage = StorageFormat(codes=Codes.E4M3, rows=8, columns=16)
    matrix = QuantizedMatrix(name="w", shape=shape, storage=storage, codes="w", scales="s")
    shown = matrix.as_scales(group, span)
    rows, columns = np.arange(0, shape[0], span) // 8, np.arange(0, shape[1], group) // 16
    expected = np.stack([[wide[row, column] for column in columns] for row in rows])
    assert shown.header({}) == (expected.shape, "float32")
    for _ in range(3):
        box = any_box(data.draw, expected.shape)
        assert same_bits(shown.read(checkpoint, box), expected[box].astype(np.float32)), box


@given(
    data=st.data(),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 9),
    group=st.sampled_from([1, 3, 8, 32, 0]),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    zeros=st.sampled_from(["none", "packed", "plain"]),
    permuted=st.booleans(),
)
def test_packed_integers_are_scaled_to_the_bit_and_every_box_is_that_of_the_whole(
    tmp_path_factory, data, outputs, groups, group, bits, dtype, zeros, permuted
):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    inputs = group * groups if group else 7 * groups
    grid, half = (outputs, groups if group else 1), 1 << (bits - 1)
    codes = rng.integers(-half, half, (outputs, inputs))
    scales, wide = any_scales(rng, grid, dtype)
    points = None if zeros == "none" else rng.integers(-half, half, grid).astype(np.int8)
    order = rng.permutation(np.arange(inputs) // (group or inputs)) if permuted else None
    expected = exact(codes, wide, (1, group), points, order)
    tensors = {"p": pack(codes, bits), "s": scales}
    if points is not None:
        tensors["z"] = points if zeros == "plain" else pack(points.T, bits).T
    if order is not None:
        tensors["g"] = order.astype(np.int32)
    checkpoint = write(tmp_path_factory.mktemp("law"), tensors)
    storage = StorageFormat(codes=Codes.PACKED, bits=bits, rows=1, columns=group)
    matrix = QuantizedMatrix(
        name="w",
        shape=codes.shape,
        storage=storage,
        codes="p",
        scales="s",
        zero_points=None if points is None else "z",
        has_packed_zeros=zeros == "packed",
        group_map=None if order is None else "g",
    )
    assert same_bits(matrix.read(checkpoint, (slice(0, outputs), slice(0, inputs))), expected)
    for _ in range(3):
        box = any_box(data.draw, codes.shape)
        assert same_bits(matrix.read(checkpoint, box), expected[box]), box


@given(
    data=st.data(),
    outputs=st.integers(1, 70),
    inputs=SIDES,
    group=st.sampled_from([0, 1, 16, 32, 128]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    zeros=st.booleans(),
)
def test_bytes_are_scaled_to_the_bit(tmp_path_factory, data, outputs, inputs, group, dtype, zeros):
    """By channel (0) and by group, of which the last may be short."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codes, grid = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8), grid_of((outputs, inputs), (1, group))
    scales, wide = any_scales(rng, grid, dtype)
    points = rng.integers(-128, 128, grid).astype(np.int8) if zeros else None
    expected = exact(codes, wide, (1, group), points)
    tensors = {"w": codes, "s": scales} | ({"z": points} if zeros else {})
    matrix = QuantizedMatrix(
        name="w",
        shape=codes.shape,
        storage=StorageFormat(codes=Codes.INT8, rows=1, columns=group),
        codes="w",
        scales="s",
        zero_points="z" if zeros else None,
    )
    box = any_box(data.draw, codes.shape)
    assert same_bits(matrix.read(write(tmp_path_factory.mktemp("law"), tensors), box), expected[box])


@given(data=st.data(), experts=st.integers(1, 3), outputs=st.integers(1, 200), inputs=st.integers(1, 200))
def test_stacked_experts_have_a_grid_each(tmp_path_factory, data, experts, outputs, inputs):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codes = rng.integers(0, 127, (experts, outputs, inputs)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales, wide = any_scales(rng, (experts, *grid_of((outputs, inputs), (128, 128))), "float32")
    pairs = zip(codes.astype(np.float64), wide, strict=True)
    expected = np.stack([exact(of_expert, scale, (128, 128)) for of_expert, scale in pairs])
    storage = StorageFormat(codes=Codes.E4M3, rows=128, columns=128)
    matrix = QuantizedMatrix(name="w", shape=codes.shape, storage=storage, codes="w", scales="s")
    box = any_box(data.draw, codes.shape)
    checkpoint = write(tmp_path_factory.mktemp("law"), {"w": codes, "s": scales})
    assert same_bits(matrix.read(checkpoint, box), expected[box])


def test_words_hold_the_lowest_bits_first():
    assert unpack_words(np.array([[0x76543210]], np.int32), 4).tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]
    assert unpack_words(np.array([[-1]], np.int32), 8).tolist() == [[127] * 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"s": np.array([[-0.5]], np.float32)}, r"s holds -0\.5; expected finite scales"),
        ({"s": np.array([[np.nan]], np.float32)}, "s holds nan; expected finite scales"),
        ({"s": np.array([[np.inf]], np.float32)}, "s holds inf; expected finite scales"),
        ({"s": np.array([[255]], np.uint8)}, "s holds nan; expected finite scales"),
        ({"w": np.full((2, 3), 0x7F, np.uint8)}, "w holds a NaN code"),
        ({"w": np.full((2, 3), 0xFF, np.uint8)}, "w holds a NaN code"),
        ({"s": np.array([[3e38]], np.float32)}, "w holds a product beyond float32"),
    ],
)
def test_numbers_that_no_matrix_has_are_refused_by_tensor(tmp_path, change, words):
    tensors = {"w": np.full((2, 3), 0x7E, np.uint8), "s": np.array([[0.5]], np.float32)} | change
    tensors["w"] = tensors["w"].view(ml_dtypes.float8_e4m3fn)
    storage = StorageFormat(codes=Codes.E4M3, rows=128, columns=128)
    matrix = QuantizedMatrix(name="w", shape=(2, 3), storage=storage, codes="w", scales="s")
    with pytest.raises(CheckpointError, match=words):
        matrix.read(write(tmp_path / "m", tensors), (slice(0, 2), slice(0, 3)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"g": np.array([0, 1, 2, 0], np.int32)}, "g holds 2; expected groups 0 to 1"),
        ({"g": np.array([0, -1, 1, 0], np.int32)}, "g holds -1; expected groups 0 to 1"),
        ({"z": np.array([[0, 8]], np.int8)}, "z holds 8; expected -8 to 7"),
    ],
)
def test_a_map_or_a_zero_point_out_of_range_is_refused(tmp_path, change, words):
    tensors = {
        "p": pack(np.zeros((1, 4), np.int8), 4),
        "s": np.ones((1, 2), np.float32),
        "z": np.zeros((1, 2), np.int8),
        "g": np.array([0, 1, 1, 0], np.int32),
    } | change
    storage = StorageFormat(codes=Codes.PACKED, bits=4, rows=1, columns=2)
    matrix = QuantizedMatrix(
        name="w", shape=(1, 4), storage=storage, codes="p", scales="s", zero_points="z", group_map="g"
    )
    with pytest.raises(CheckpointError, match=words):
        matrix.read(write(tmp_path / "m", tensors), (slice(0, 1), slice(0, 4)))
