"""Codes and scales that a device multiplies: every format, box, target and cut between devices against float64 written
apart, to the bit; what a device would round otherwise is multiplied on the host; faults name their tensor."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from routed_experts.core.errors import CheckpointError
from routed_experts.execution.compile_count import CompileCount
from routed_experts.layers.quantized import has_nan
from routed_experts.models.base.quantization_config import Codes, QuantizationConfig, StorageFormat
from routed_experts.models.base.weight_format import weight_format
from routed_experts.models.base.weight_source import WeightSource
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.quantized_checkpoint import open_quantized
from routed_experts.models.loading.quantized_part import INT8, QuantizedPart
from routed_experts.models.loading.quantized_tensors import QuantizedMatrix
from routed_experts.models.loading.virtual_tensors import Mxfp4, VirtualCheckpoint, with_axes_swapped
from routed_experts.models.loading.weight_loader import _Loader, _write_pieces, load, pieces_writer
from support.quantized_checkpoints import (
    compressed_config,
    exact,
    forms,
    fp8,
    fp8_config,
    integers_of_a_tensor,
    mxfp4,
    pack,
    write_folder,
)
from support.tpu_aot import REPLICATED, tpu_mesh, without_compilation_cache

LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 3, 160, 320
DTYPES = ["float32", "bfloat16", "float16"]
E4M3 = ml_dtypes.float8_e4m3fn


class RecordingCheckpoint(VirtualCheckpoint):
    """Names of tensors that are read as numbers."""

    def __init__(self, source, tensors):
        super().__init__(source, tensors)
        self.as_numbers = []

    def read(self, name, box=()):
        self.as_numbers.append(name)
        return super().read(name, box)


class PartsCheckpoint(Checkpoint):
    """Parts that are in memory, which are read as a whole."""

    def __init__(self, parts):
        self.parts = parts

    def names(self):
        return {
            name: ((*part.codes.shape[:-1], len(part.column_groups)), "float32") for name, part in self.parts.items()
        }

    def read_part(self, name, box):
        return self.parts[name]


def expert_names(layers):
    return [
        (layer, expert, part)
        for layer in range(layers)
        for expert in range(EXPERTS)
        for part in ("gate_proj", "up_proj", "down_proj")
    ]


def name_of(layer, expert, part):
    return f"layers.{layer}.experts.{expert}.{part}.weight"


def expert_table(layers=LAYERS):
    """gate|up joined and transposed, all experts stacked; down stacked by layers, and once more as it is stored."""
    for layer, expert, part in expert_names(layers):
        name, is_down = name_of(layer, expert, part), part == "down_proj"
        shape = (HIDDEN, WIDTH) if is_down else (WIDTH, HIDDEN)
        if is_down:
            yield WeightSource(name=name, shape=shape, target="down", index=(layer, expert), transpose=True)
            yield WeightSource(name=name, shape=shape, target="as_stored", index=(layer, expert))
        else:
            offset, row = WIDTH * (part == "up_proj"), (layer * EXPERTS + expert,)
            yield WeightSource(name=name, shape=shape, target="gate_up", index=row, transpose=True, offset=offset)


def targets(dtype, layers=LAYERS):
    shapes = {
        "gate_up": (layers * EXPERTS, HIDDEN, 2 * WIDTH),
        "down": (layers, EXPERTS, WIDTH, HIDDEN),
        "as_stored": (layers, EXPERTS, HIDDEN, WIDTH),
    }
    return {target: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for target, shape in shapes.items()}


def write(folder, form, layers=LAYERS):
    """A checkpoint of the form that records what is read as numbers, and the exact numbers, float32."""
    rng, stored, numbers = np.random.default_rng(3), {}, {}
    for layer, expert, part in expert_names(layers):
        shape = (HIDDEN, WIDTH) if part == "down_proj" else (WIDTH, HIDDEN)
        written, name = form.write(rng.standard_normal(shape).astype(np.float32)), name_of(layer, expert, part)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{end}": array for end, array in written.stored.items()}
        numbers[name] = written.numbers
    config = {"quantization_config": form.config}
    write_folder(folder, config, stored)
    return opened(folder, config), numbers


def opened(folder, config):
    quantized = open_quantized(Checkpoint(folder), QuantizationConfig.read(folder, config))
    return RecordingCheckpoint(quantized.stored, quantized.matrices)


def joined(numbers, dtype, layers=LAYERS):
    """The targets with NumPy, without a table."""
    parts = {
        part: [numbers[name_of(*name)] for name in expert_names(layers) if name[2] == part]
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    gate_up = [np.concatenate([gate.T, up.T], 1) for gate, up in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
    down = np.stack(parts["down_proj"]).reshape(layers, EXPERTS, HIDDEN, WIDTH)
    arrays = {"gate_up": np.stack(gate_up), "down": down.swapaxes(2, 3), "as_stored": down}
    return {target: np.ascontiguousarray(array).astype(jnp.dtype(dtype)) for target, array in arrays.items()}


def assert_same_bits(loaded, expected):
    assert loaded.keys() == expected.keys()
    for target, array in expected.items():
        assert loaded[target].dtype == array.dtype
        assert np.asarray(loaded[target]).tobytes() == array.tobytes(), target


def whole(shape):
    return tuple(slice(0, side) for side in shape)


def part_of(codes, format, **more):
    """A part of one output with the scale 1."""
    inputs = codes.shape[-1] * (1 if format in ("e4m3", INT8) else 2)
    ones = np.ones((1, 1), np.float32)
    return QuantizedPart(
        codes=codes, scales=ones, zero_points=None, column_groups=np.zeros(inputs, np.int32), format=format, **more
    )


def traced(part):
    return np.asarray(jax.jit(QuantizedPart.numbers)(part))


# formats


@pytest.mark.parametrize("format", ["e4m3", "e2m1", "int4", INT8])
def test_every_byte_has_the_value_of_its_bits(format):
    code_bytes = np.array([code for code in range(256) if format != "e4m3" or code & 127 != 127], np.uint8)[None]
    halves = np.stack([code_bytes & 15, code_bytes >> 4], -1).reshape(1, -1).astype(np.float64)
    if format == "e4m3":
        sign, exponent, mantissa = code_bytes >> 7, (code_bytes >> 3 & 15).astype(np.float64), code_bytes & 7
        size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        expected = np.where(sign == 1, -size, size)
    elif format == "e2m1":
        expected = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[halves.astype(int) & 7] * np.where(halves > 7, -1, 1)
    else:
        expected = halves - 8 if format == "int4" else code_bytes.view(np.int8)
    part = part_of(code_bytes.view(np.int8) if format == INT8 else code_bytes, format)
    wide = np.asarray(expected).astype(np.float32)
    assert part.dequantize().tobytes() == traced(part).tobytes() == wide.tobytes(), "zeros have their signs"


def test_nan_codes_are_the_two_of_e4m3():
    assert not has_nan(np.zeros((0, 4), E4M3))
    for code in range(256):
        codes = np.zeros(5, np.uint8)
        codes[3] = code
        assert has_nan(codes.view(E4M3)) == np.isnan(codes.view(E4M3).astype(np.float32)).any() == (code & 127 == 127)


@settings(max_examples=30)
@given(
    data=st.data(),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 5),
    group=st.sampled_from([3, 8, 32, 0]),
    bits=st.sampled_from([4, 8]),
    zeros=st.booleans(),
    permuted=st.booleans(),
)
def test_a_device_multiplies_any_box_of_packed_integers(
    tmp_path_factory, data, outputs, groups, group, bits, zeros, permuted
):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    inputs, half = (group or 7) * groups, 1 << (bits - 1)
    grid = (outputs, groups if group else 1)
    codes = rng.integers(-half, half, (outputs, inputs))
    scales = (rng.random(grid) * 0.02 + 1e-4).astype(np.float32)
    points = rng.integers(-half, half, grid).astype(np.int8) if zeros else None
    order = rng.permutation(np.arange(inputs) // (group or inputs)) if permuted else None
    expected = exact(codes, scales, (1, group), points, order)
    tensors = {"p": pack(codes, bits), "s": scales} | ({"z": points} if zeros else {})
    tensors |= {"g": order.astype(np.int32)} if permuted else {}
    matrix = QuantizedMatrix(
        name="w",
        shape=codes.shape,
        storage=StorageFormat(codes=Codes.PACKED, bits=bits, rows=1, columns=group),
        codes="p",
        scales="s",
        zero_points="z" if zeros else None,
        group_map="g" if permuted else None,
    )
    check_box(matrix, tmp_path_factory.mktemp("box"), tensors, data, expected)


@settings(max_examples=30)
@given(
    data=st.data(),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 40),
    form=st.sampled_from([("int-quantized", 8), ("pack-quantized", 8), ("pack-quantized", 4)]),
    shape=st.sampled_from([(), (1,), (1, 1)]),
)
def test_a_device_multiplies_any_box_of_integers_with_a_zero_point_a_tensor(
    tmp_path_factory, data, outputs, inputs, form, shape
):
    """As compressed-tensors stores them: int8, of the shape [1]."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weights = rng.standard_normal((outputs, inputs)).astype(np.float32)
    written = integers_of_a_tensor(weights, form[1], zero_shape=shape, packed=form[0] == "pack-quantized")
    config = compressed_config(form[0], num_bits=form[1], strategy="tensor", symmetric=False)
    tensors = {f"a.{end}": tensor for end, tensor in written.stored.items()}
    folder = write_folder(tmp_path_factory.mktemp("zero"), {}, tensors)
    read = QuantizationConfig.read(folder, {"quantization_config": config})
    matrix = open_quantized(Checkpoint(folder), read).matrices["a.weight"]
    check_box(matrix, folder, tensors, data, written.numbers)
    assert matrix.read(Checkpoint(folder), whole(weights.shape)).tobytes() == written.numbers.tobytes()


@settings(max_examples=30)
@given(
    data=st.data(),
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 300),
    rows=st.sampled_from([1, 32, 128, 0]),
    columns=st.sampled_from([1, 32, 128, 0]),
)
def test_a_device_multiplies_any_box_of_float_codes(tmp_path_factory, data, outputs, inputs, rows, columns):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codes = rng.integers(0, 256, (outputs, inputs)).astype(np.uint8)
    codes[codes & 127 == 127] = 0
    codes = codes.view(E4M3)
    storage = StorageFormat(codes=Codes.E4M3, rows=rows, columns=columns)
    matrix = QuantizedMatrix(name="w", shape=codes.shape, storage=storage, codes="w", scales="s")
    scales = (rng.random(matrix.grid) * 0.02).astype(np.float32)
    expected = exact(codes.astype(np.float64), scales, (rows, columns))
    check_box(matrix, tmp_path_factory.mktemp("box"), {"w": codes, "s": scales}, data, expected)


def check_box(matrix, folder, tensors, data, expected):
    """Draw a box, and compare it in both orders of its axes."""
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    box = []
    for size in matrix.shape:
        start = data.draw(st.integers(0, size - 1))
        box.append(slice(start, data.draw(st.integers(start + 1, size))))
    part = matrix.read_part(Checkpoint(folder), tuple(box))
    assert part.is_normal
    cut = np.ascontiguousarray(expected[tuple(box)])
    assert traced(part).tobytes() == part.dequantize().tobytes() == cut.tobytes()
    assert np.ascontiguousarray(traced(part.swapped()).T).tobytes() == cut.tobytes()


@pytest.mark.parametrize("start", [None, 0, 1])
@pytest.mark.parametrize("columns", [(0, 96), (32, 64), (7, 40), (33, 34)])
def test_a_device_multiplies_any_box_of_mxfp4(tmp_path, start, columns):
    weights = np.random.default_rng(1).standard_normal((3, 96, 8)).astype(np.float32)
    blocks, scales, numbers = (np.ascontiguousarray(array) for array in mxfp4(weights))
    save_file({"b": blocks, "s": scales}, tmp_path / "model.safetensors")
    numbers = numbers.swapaxes(1, 2)[:, slice(None) if start is None else slice(start, None, 2)]
    box = (slice(1, 3), slice(1, 4), slice(*columns))
    part = Mxfp4("b", "s", start).read_part(Checkpoint(tmp_path), box)
    assert part.is_normal and traced(part).tobytes() == np.ascontiguousarray(numbers[box]).tobytes()


# loading


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(dtype, form, marks=[] if (row + column) % 3 == 0 else pytest.mark.thorough)
        for row, dtype in enumerate(DTYPES)
        for column, form in enumerate(forms())
    ],
)
def test_every_target_has_the_bits_of_its_numbers(tmp_path, form, dtype):
    """Slabs of 23 rows begin and end inside of blocks."""
    checkpoint, numbers = write(tmp_path, forms()[form])
    loaded = load(checkpoint, expert_table(), targets(dtype), host_bytes=60_000)
    assert_same_bits(loaded, joined(numbers, dtype))
    assert not checkpoint.as_numbers, "a device multiplies"


@pytest.mark.parametrize("host_bytes", [64 << 20, 1_000_000, 200_000, 1])
def test_slabs_of_any_size_have_the_bits_of_the_whole(tmp_path, host_bytes):
    checkpoint, numbers = write(tmp_path, forms()["int4 asymmetric, permuted"], layers=1)
    loaded = load(checkpoint, expert_table(1), targets("bfloat16", 1), host_bytes=host_bytes)
    assert_same_bits(loaded, joined(numbers, "bfloat16", 1))


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "form",
    [
        "fp8 blocks",
        pytest.param("int4", marks=pytest.mark.thorough),  # zero points and a map are more than that
        "int4 asymmetric, permuted",
        "float channel",
    ],
)
def test_each_device_multiplies_its_own_shard(tmp_path, form):
    """Shards of 80 and 40 inputs cut blocks of 128 and groups of 32."""
    checkpoint, numbers = write(tmp_path, forms()[form])
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    specs = {"gate_up": P(None, "tp"), "down": P(None, None, "tp"), "as_stored": P(None, None, "tp")}
    placed = {
        target: jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=NamedSharding(mesh, specs[target]))
        for target, of in targets("bfloat16").items()
    }
    loaded = load(checkpoint, expert_table(), placed, host_bytes=60_000)
    for target, expected in joined(numbers, "bfloat16").items():
        assert loaded[target].sharding == placed[target].sharding
        for shard in loaded[target].addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes(), target
    assert not checkpoint.as_numbers


def test_swapped_stacks_of_experts_are_multiplied_on_a_device(tmp_path):
    rng = np.random.default_rng(5)
    written = [fp8(rng.standard_normal((160, 192)).astype(np.float32), (32, 16)) for _ in range(4)]
    tensors = {
        "w.weight": np.stack([matrix.stored["weight"] for matrix in written]),
        "w.weight_scale_inv": np.stack([matrix.stored["weight_scale_inv"] for matrix in written]),
    }
    config = {"quantization_config": fp8_config((32, 16))}
    quantized = opened(write_folder(tmp_path, config, tensors), config)
    checkpoint = RecordingCheckpoint(quantized, {"swapped": with_axes_swapped("w.weight")})
    table = [WeightSource(name="swapped", shape=(4, 192, 160), target="w")]
    loaded = load(checkpoint, table, {"w": jax.ShapeDtypeStruct((4, 192, 160), jnp.bfloat16)}, host_bytes=1)
    numbers = np.stack([matrix.numbers.T for matrix in written])
    assert_same_bits(loaded, {"w": numbers.astype(ml_dtypes.bfloat16)})
    assert not checkpoint.as_numbers and not quantized.as_numbers


def test_progress_counts_all_bytes_once(tmp_path):
    checkpoint, numbers = write(tmp_path, forms()["fp8 blocks"], layers=1)
    for host_bytes in (64 << 20, 60_000):
        calls = []
        load(
            checkpoint,
            expert_table(1),
            targets("float32", 1),
            host_bytes=host_bytes,
            progress=lambda *pair, calls=calls: calls.append(pair),
        )
        size = sum(array.nbytes * (2 if "down" in name else 1) for name, array in numbers.items())
        assert calls[-1] == (size, size)


def test_parts_of_other_dtypes_are_not_cast_to_those_of_the_first():
    """Stacks have two rows, and zero points of 300 do not fit a byte."""
    rng, parts = np.random.default_rng(0), {}
    for row in range(6):
        parts[f"w.{row}"] = QuantizedPart(
            codes=rng.integers(-128, 128, (8, 16)).astype(np.int8),
            scales=np.full((8, 1), 0.5, np.float32),
            zero_points=np.full((8, 1), 300, np.int16) if row % 2 else np.full((8, 1), 3, np.int8),
            column_groups=np.zeros(16, np.int32),
            format=INT8,
        )
    table = [WeightSource(name=name, shape=(8, 16), target="w", index=(row,)) for row, name in enumerate(parts)]
    target = jax.ShapeDtypeStruct((6, 8, 16), jnp.float32)
    loaded = load(PartsCheckpoint(parts), table, {"w": target}, host_bytes=2 * 2 * 8 * 16 * 4)
    expected = [(part.codes.astype(np.float64) - part.zero_points) * 0.5 for part in parts.values()]
    assert_same_bits(loaded, {"w": np.stack(expected).astype(np.float32)})


# programs and memory


def test_stacks_of_codes_count_as_the_bytes_that_they_hold(tmp_path, monkeypatch):
    """Those of float32 would be near four times as many."""
    checkpoint, _ = write(tmp_path, forms()["fp8 blocks"])
    reserved, reserve = [], _Loader._reserve
    monkeypatch.setattr(_Loader, "_reserve", lambda self, size: (reserved.append(size), reserve(self, size)))
    target = targets("bfloat16")["down"]
    table = [source for source in expert_table() if source.target == "down"]
    load(checkpoint, table, {"down": target}, host_bytes=500_000)  # a matrix a stack
    scales, column_groups = HIDDEN * 2 * 4, WIDTH * 4
    assert reserved == [HIDDEN * WIDTH + scales + column_groups] * LAYERS * EXPERTS


def test_the_number_of_programs_does_not_depend_on_that_of_layers_and_experts(tmp_path):
    counts = []
    for layers in (2, 5):
        checkpoint, _ = write(tmp_path / str(layers), forms()["fp8 blocks"], layers)
        jax.clear_caches()
        with contextlib.closing(CompileCount()) as count:
            load(checkpoint, expert_table(layers), targets("bfloat16", layers), host_bytes=500_000)
            counts.append(count.startup)
            assert count.is_complete
    assert counts[0] == counts[1] <= 3 + 4, "one for each target that writes to it; a few make zeros"


def test_a_stack_of_codes_is_multiplied_into_the_donated_target():
    target, starts = jax.ShapeDtypeStruct((64, 320, 160), jnp.uint16), jax.ShapeDtypeStruct((4, 3), jnp.int32)
    stack = QuantizedPart(
        codes=jax.ShapeDtypeStruct((4, 320, 160), jnp.uint8),
        scales=jax.ShapeDtypeStruct((4, 3, 160), jnp.float32),
        zero_points=None,
        column_groups=jax.ShapeDtypeStruct((4, 320), jnp.int32),
        format="e4m3",
        inputs_last=False,
    )
    count, piece = jax.ShapeDtypeStruct((), jnp.int32), (1, 320, 160)
    lowered = _write_pieces.lower(target, stack, starts, count, False, piece, np.dtype(jnp.bfloat16))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 64 * 320 * 160 * 2
    assert memory.temp_size_in_bytes <= 2 * 320 * 160 * 4, "a slab or two, in float32 at the most"


@pytest.mark.tpu_aot
@pytest.mark.parametrize("format", ["e4m3", "e2m1"])
def test_a_tpu_multiplies_into_the_donated_target_as_well(format):
    """2,880 columns are no multiple of its lanes: the target has an order of its own."""
    sharding, side = NamedSharding(tpu_mesh("v5e", (1,)), REPLICATED), 2880

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    own_format = weight_format(sharding, (64, side, side))
    target = jax.ShapeDtypeStruct((64, side, side), jnp.bfloat16, sharding=own_format)
    stack = QuantizedPart(
        codes=struct((4, side, side if format == "e4m3" else side // 2), jnp.uint8),
        scales=struct((4, side, 90), jnp.float32),
        zero_points=None,
        column_groups=struct((4, side), jnp.int32),
        format=format,
    )
    arguments = target, stack, struct((4, 3), jnp.int32), struct((), jnp.int32), True, (1, side, side)
    with without_compilation_cache():
        memory = pieces_writer(own_format).lower(*arguments, np.dtype(jnp.bfloat16)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 64 * side * side * 2
    assert memory.temp_size_in_bytes <= 2 * side * side * 4


# what a device does not multiply


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-118, 2.0**-117, 2.0**-100])
def test_subnormal_products_are_those_of_numpy(tmp_path, scale):
    """A device may make zeros of them: they are multiplied on the host."""
    codes = np.tile(np.array([1, 8, 0x81, 0x7E], np.uint8), (64, 32)).view(E4M3)
    config = {"quantization_config": fp8_config()}
    tensors = {"w.weight": codes, "w.weight_scale_inv": np.full((1, 1), scale, np.float32)}
    checkpoint = opened(write_folder(tmp_path, config, tensors), config)
    table = [WeightSource(name="w.weight", shape=(64, 128), target="w", transpose=True)]
    loaded = load(checkpoint, table, {"w": jax.ShapeDtypeStruct((128, 64), jnp.float32)}, host_bytes=1)
    expected = (codes.astype(np.float64) * scale).astype(np.float32)
    assert np.count_nonzero(expected) == expected.size
    assert_same_bits(loaded, {"w": np.ascontiguousarray(expected.T)})
    assert bool(checkpoint.as_numbers) == (scale * 2.0**-9 < 2.0**-126)


@pytest.mark.parametrize("host_bytes", [64 << 20, 1], ids=["host", "device"])
def test_a_nan_scale_of_mxfp4_stops_the_load_by_name(tmp_path, host_bytes):
    """Where numbers are computed on the host, and where a device multiplies codes by scales. 254 is loaded."""
    blocks = np.arange(2 * 4 * 2 * 16, dtype=np.uint8).reshape(2, 4, 2, 16)
    scales = np.full((2, 4, 2), 127, np.uint8)
    table = [WeightSource(name="w", shape=(2, 4, 64), target="w")]
    target = {"w": jax.ShapeDtypeStruct((2, 4, 64), jnp.bfloat16)}
    for exponent in (254, 255):
        scales[-1, -1, -1] = exponent
        save_file({"b": blocks, "s": scales}, tmp_path / "model.safetensors")
        checkpoint = RecordingCheckpoint(Checkpoint(tmp_path), {"w": Mxfp4("b", "s")})
        if exponent == 254:
            with np.errstate(over="ignore"):
                assert load(checkpoint, table, target, host_bytes=host_bytes).keys() == {"w"}
            continue
        with pytest.raises(CheckpointError, match="s holds 255, which is NaN; expected exponents 0 to 254"):
            load(checkpoint, table, target, host_bytes=host_bytes)
        assert bool(checkpoint.as_numbers) == (host_bytes > 1)


@pytest.mark.parametrize("host_bytes", [64 << 20, 60_000])
@pytest.mark.parametrize(
    ("end", "value", "words"),
    [
        ("weight_scale_inv", np.nan, "weight_scale_inv holds nan; expected finite scales"),
        ("weight_scale_inv", np.inf, "weight_scale_inv holds inf; expected finite scales"),
        ("weight_scale_inv", -1.0, r"weight_scale_inv holds -1\.0; expected finite scales"),
        ("weight_scale_inv", 3e38, "weight holds a product beyond float32"),
        ("weight", np.nan, "weight holds a NaN code"),
        ("weight", -np.nan, "weight holds a NaN code"),
    ],
)
def test_numbers_that_no_matrix_has_stop_the_load_by_name(tmp_path, host_bytes, end, value, words):
    rng, form = np.random.default_rng(0), fp8_config()
    stored = fp8(rng.standard_normal((160, 320)).astype(np.float32)).stored
    tensors = {f"{module}.{key}": array.copy() for module in "ab" for key, array in stored.items()}
    tensors[f"b.{end}"][-1, -1] = value
    checkpoint = opened(write_folder(tmp_path, {}, tensors), {"quantization_config": form})
    table = [
        WeightSource(name=f"{module}.weight", shape=(160, 320), target="w", index=(row,), transpose=True)
        for row, module in enumerate("ab")
    ]
    num_arrays = len(jax.live_arrays())
    with pytest.raises(CheckpointError, match=rf"b\.{words}") as failure:
        load(checkpoint, table, {"w": jax.ShapeDtypeStruct((2, 320, 160), jnp.bfloat16)}, host_bytes=host_bytes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("allocate")]
    del failure  # its frames hold the arrays
    assert len(jax.live_arrays()) <= num_arrays, "nothing is left"
