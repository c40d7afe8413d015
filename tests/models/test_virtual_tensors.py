"""Tensors that are computed when they are read: MXFP4 against transformers, interleaved ones against slices, and what
is refused."""

import contextlib
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from oracles.families import CASES, Oracle
from routed_experts.core.errors import CheckpointError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.layers.quantized import CODE_DTYPES
from routed_experts.models.base.weight_source import StoredEntries
from routed_experts.models.decoder.code_selection import CodeSupport
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.virtual_tensors import (
    Mxfp4,
    PackedRuns,
    StoredView,
    VirtualCheckpoint,
    dequantize_mxfp4,
)
from routed_experts.models.model_folder import ModelFolder
from support.quantized_checkpoints import read_tensors, rewrite_folder, write_folder
from support.quantized_families import GPT_OSS, write


def packed(rng, *shape):
    return rng.integers(0, 256, shape).astype(np.uint8), rng.integers(110, 140, shape[:-1]).astype(np.uint8)


def test_mxfp4_is_unpacked_as_transformers_does():
    blocks, scales = packed(np.random.default_rng(0), 3, 8, 2, 16)
    expected = _convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    assert np.array_equal(np.swapaxes(dequantize_mxfp4(blocks, scales), 1, 2), expected.numpy())


def test_any_part_of_a_derived_tensor_is_that_part_of_the_whole(tmp_path):
    rng = np.random.default_rng(1)
    blocks, scales = packed(rng, 3, 8, 2, 16)
    pairs = rng.standard_normal((3, 5, 8)).astype(np.float32)
    save_file({"b": blocks, "s": scales, "p": pairs}, tmp_path / "model.safetensors")
    virtual = {"all": Mxfp4("b", "s"), "odd": Mxfp4("b", "s", 1), "even": StoredView(StoredEntries(name="p", step=2))}
    virtual["swapped"] = StoredView(StoredEntries(name="p", start=1, step=2, swapped=True))
    checkpoint = VirtualCheckpoint(Checkpoint(tmp_path), virtual)
    numbers = dequantize_mxfp4(blocks, scales)
    expected = {"all": numbers, "odd": numbers[:, 1::2], "even": pairs[..., 0::2]}
    for name, whole in (expected | {"swapped": np.swapaxes(pairs[..., 1::2], 1, 2)}).items():
        assert checkpoint.names()[name] == (whole.shape, "bfloat16" if name in ("all", "odd") else "float32")
        assert np.array_equal(checkpoint.read(name).astype(np.float32), whole)
        box = (slice(1, 3), slice(1, 4), slice(20, 45) if name in ("all", "odd") else slice(1, 4))
        assert np.array_equal(checkpoint.read(name, box).astype(np.float32), whole[box])
    assert set(checkpoint.names()) == set(virtual)


def test_scales_that_no_kernel_takes_are_refused(tmp_path):
    """Numbers of any scale are read."""
    blocks, scales = packed(np.random.default_rng(3), 1, 2, 3, 16)
    for exponent in range(255):
        scales[0, 1, 2] = exponent
        save_file({"b": blocks, "s": scales}, tmp_path / "model.safetensors")
        tensor = Mxfp4("b", "s")
        checkpoint = VirtualCheckpoint(Checkpoint(tmp_path), {"scales": tensor.as_scales(32, 1), "numbers": tensor})
        if exponent < 250:  # a product with 6 is finite
            assert np.isfinite(checkpoint.read("numbers").astype(np.float32)).all()
        if exponent - 127 <= 65:
            assert checkpoint.read("scales")[0, 1, 2] == 2.0 ** (exponent - 127)
        else:
            message = rf"s holds {exponent}, a scale of 2\^{exponent - 127}; expected scales of at most 2\^65"
            with pytest.raises(CheckpointError, match=message):
                checkpoint.read("scales")


def written_as(folder, blocks, scales):
    """The same bytes in the dtypes of two tensors, `b` and `s`."""
    save_file({"b": blocks, "s": scales}, folder / "model.safetensors")
    return Checkpoint(folder)


def reads_of(tensor):
    """Each way to read its scales, by name: a function of a checkpoint and a box of the tensor."""
    return {
        "numbers": lambda checkpoint, box: tensor.read(checkpoint, box),
        "part": lambda checkpoint, box: tensor.read_part(checkpoint, box).scales,
        "scales": lambda checkpoint, box: tensor.as_scales(32, 1).read(
            checkpoint, (*box[:2], slice(box[2].start // 32, -(-box[2].stop // 32)))
        ),
    }


E8M0 = ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize("start", [None, 0, 1])
@pytest.mark.parametrize(("of_blocks", "of_scales"), [(np.uint8, E8M0), (np.int8, np.uint8), (np.int8, E8M0)])
def test_bytes_of_mxfp4_are_the_same_in_any_dtype_that_holds_them(tmp_path, of_blocks, of_scales, start):
    blocks, scales = packed(np.random.default_rng(4), 3, 8, 2, 16)
    tensor, box = Mxfp4("b", "s", start), (slice(0, 3), slice(1, 4), slice(20, 45))
    checkpoint = written_as(tmp_path, blocks.view(of_blocks), scales.view(of_scales))
    rows = slice(None) if start is None else slice(start, None, 2)
    numbers = _convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    numbers = np.swapaxes(numbers.numpy(), 1, 2)[:, rows][box]
    assert tensor.read(checkpoint, box).astype(np.float32).tobytes() == np.ascontiguousarray(numbers).tobytes()
    powers = (2.0 ** (scales.astype(np.float64) - 127))[:, rows][box[:2]].astype(np.float32)
    part = tensor.read_part(checkpoint, box)
    assert part.codes.dtype == np.uint8
    stored = blocks.reshape(3, 8, 32)[:, rows][box[:2]]
    assert np.array_equal(part.codes, stored[..., 10:23])
    assert np.array_equal(part.scales, powers)
    assert np.array_equal(reads_of(tensor)["scales"](checkpoint, box), powers)
    codes = tensor.as_codes().read(checkpoint, (*box[:2], slice(0, 32)))
    assert codes.dtype == np.uint8 and np.array_equal(codes, stored)


@pytest.mark.parametrize("how", reads_of(None))
@pytest.mark.parametrize("dtype", [np.uint8, E8M0])
@pytest.mark.parametrize("start", [None, 0, 1])
def test_an_exponent_that_is_nan_is_refused_wherever_it_is_read(tmp_path, how, dtype, start):
    """Output 3 is the second one of every other output from 1 on, and none from 0 on."""
    blocks, scales = packed(np.random.default_rng(5), 2, 4, 3, 16)
    scales[1, 3, 2] = 255
    checkpoint, read = written_as(tmp_path, blocks, scales.view(dtype)), reads_of(Mxfp4("b", "s", start))[how]
    rows = 4 if start is None else 2
    boxes = [(slice(0, 2), slice(0, rows), slice(0, 96)), (slice(1, 2), slice(rows - 1, rows), slice(95, 96))]
    message = f"^{tmp_path}: s holds 255, which is NaN; expected exponents 0 to 254; copy the checkpoint again$"
    for box in boxes:
        with contextlib.nullcontext() if start == 0 else pytest.raises(CheckpointError, match=message):
            assert np.isfinite(read(checkpoint, box).astype(np.float32)).all()
    assert np.isfinite(read(checkpoint, (slice(0, 2), slice(0, rows), slice(0, 64))).astype(np.float32)).all()


@pytest.mark.parametrize("run", [16, 32])
def test_any_part_of_codes_in_runs_is_that_part_of_the_whole(tmp_path, run):
    """Also one that begins or ends inside of a run; against a loop over inputs."""
    blocks, scales = packed(np.random.default_rng(2), 2, 3, 4, 16)
    save_file({"b": blocks, "s": scales}, tmp_path / "model.safetensors")
    codes = PackedRuns(Mxfp4("b", "s").as_codes(), run)
    checkpoint = VirtualCheckpoint(Checkpoint(tmp_path), {"codes": codes})
    assert checkpoint.names()["codes"] == ((2, 3, 64), "uint8")
    stored = blocks.reshape(2, 3, 64)
    whole = np.zeros_like(stored)
    for number in range(128):
        code = stored[..., number // 2] // 16 if number % 2 else stored[..., number // 2] % 16
        pair, rest = divmod(number, 2 * run)
        whole[..., pair * run + rest % run] += code << (4 * (rest // run))
    assert np.array_equal(checkpoint.read("codes"), whole)
    for columns in (slice(0, 32), slice(5, 40), slice(33, 34), slice(63, 64)):
        box = (slice(1, 2), slice(0, 2), columns)
        assert np.array_equal(checkpoint.read("codes", box), whole[box])


def load_state(folder):
    state = nnx.state(ModelFolder.open(folder).load(jnp.dtype(jnp.bfloat16)))
    return {".".join(map(str, path)): np.asarray(leaf[...], np.float32) for path, leaf in nnx.to_flat_state(state)}


def test_a_packed_checkpoint_loads_the_numbers_of_an_unpacked_one(tmp_path):
    """The oracle unpacks with transformers' own function and writes the unpacked layout."""
    Oracle(CASES["GptOss"], tmp_path)
    tensors, rng = load_file(tmp_path / "model.safetensors"), np.random.default_rng(2)
    plain, small = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        inputs = inputs // 32 * 32 or 32
        blocks, scales = packed(rng, experts, outputs, inputs // 32, 16)
        unpacked = _convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        ).numpy()
        plain[name] = np.ascontiguousarray(unpacked)
        small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del small[name]
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 32}
    folders = []
    for kind, weights, extra in (
        ("plain", plain, {}),
        ("packed", small, {"quantization_config": {"quant_method": "mxfp4"}}),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        weights = {name: resized(name, tensor) for name, tensor in weights.items()}
        save_file(
            {name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps(config | extra))
        folders.append(folder)
    left, right = (load_state(folder) for folder in folders)
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)


def resized(name, tensor):
    """Experts of width 32, the size of a block."""
    if name.endswith("gate_up_proj_blocks") or name.endswith("gate_up_proj_scales"):
        return tensor[:, :64]
    return tensor[..., :64] if name.endswith(("gate_up_proj", "gate_up_proj_bias")) else tensor


# GPT-OSS with MXFP4


DOWN, GATE_UP = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("down", "gate_up"))
CODES = CodeSupport(formats=frozenset(CODE_DTYPES))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gpt_oss"), GPT_OSS)


def arrays_of(folder, support=None):
    """Every array of the model, with codes where `support` takes them."""
    opened = ModelFolder.open(folder)
    opened = opened if support is None else opened.with_codes(support)
    state = nnx.state(opened.load(jnp.dtype("float32")))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


def same_arrays(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes() for name in left
    )


@pytest.mark.parametrize(
    ("ends", "dtype"), [("_scales", E8M0), ("_blocks", np.int8)], ids=["scales F8_E8M0", "blocks I8"]
)
def test_a_checkpoint_of_other_dtypes_of_the_same_bytes_is_loaded_to_the_bit(gpt_oss, tmp_path, ends, dtype):
    tensors = read_tensors(gpt_oss.quantized)
    changed = {name: tensor.view(dtype) for name, tensor in tensors.items() if name.endswith(ends)}
    assert len(changed) >= 4
    folder = rewrite_folder(gpt_oss.quantized, tmp_path / "other", changed)
    assert same_arrays(arrays_of(folder), arrays_of(gpt_oss.copy))
    codes = arrays_of(folder, CODES)
    assert any(array.dtype == np.uint8 for array in codes.values())
    assert same_arrays(codes, arrays_of(gpt_oss.quantized, CODES))


@pytest.mark.parametrize("support", [None, CODES], ids=["none", "auto"])
@pytest.mark.parametrize("dtype", [np.uint8, E8M0])
def test_an_exponent_that_is_nan_stops_the_load(gpt_oss, tmp_path, support, dtype):
    exponents = read_tensors(gpt_oss.quantized)[f"{DOWN}_scales"].copy()
    exponents[-1, -1, -1] = 255
    folder = rewrite_folder(gpt_oss.quantized, tmp_path / "bad", {f"{DOWN}_scales": exponents.view(dtype)})
    with pytest.raises(CheckpointError, match=f"^{folder}: {DOWN}_scales holds 255, which is NaN; expected exponents"):
        arrays_of(folder, support)


FAULTS = {  # by words: the tensor, how it is changed, and what the error says of it and of what is expected
    "scales are missing": (f"{DOWN}_scales", None, f"{DOWN}_blocks has no {DOWN}_scales beside it", "grid"),
    "another number of groups": (f"{DOWN}_scales", lambda s: s[..., :1], "is [8, 192, 1] of U8", "grid"),
    "scales with axes swapped": (f"{DOWN}_scales", lambda s: s.swapaxes(0, 1), "is [192, 8, 5] of U8", "grid"),
    "scales without an axis": (f"{DOWN}_scales", lambda s: s.reshape(8, -1), "is [8, 960] of U8", "grid"),
    "scales of float32": (
        f"{DOWN}_scales",
        lambda s: np.ldexp(np.float32(1), s.astype(np.int32) - 127),
        "is [8, 192, 5] of float32",
        "grid",
    ),
    "scales of I8": (f"{DOWN}_scales", lambda s: s.view(np.int8), "is [8, 192, 5] of I8", "grid"),
    "blocks of float32": (
        f"{DOWN}_blocks",
        lambda b: b.astype(np.float32),
        "is [8, 192, 5, 16] of float32",
        "blocks",
    ),
    "blocks of F8_E8M0": (f"{DOWN}_blocks", lambda b: b.view(E8M0), "is [8, 192, 5, 16] of F8_E8M0", "blocks"),
    "blocks side by side": (f"{DOWN}_blocks", lambda b: b.reshape(8, 192, -1), "is [8, 192, 80] of U8", "blocks"),
    "blocks of 16 inputs": (
        f"{DOWN}_blocks",
        lambda b: b.reshape(8, 192, -1, 8),
        "is [8, 192, 10, 8] of U8",
        "blocks",
    ),
    "a gate without its up": (f"{GATE_UP}_blocks", lambda b: b[:, :-1], "is [8, 319, 6, 16]", "pairs"),
    "numbers beside their blocks": (
        DOWN,
        lambda _: np.zeros((8, 160, 192), np.float32),
        f"{DOWN}_blocks and {DOWN} are both there",
        "one",
    ),
}
EXPECTED = {
    "grid": "expected [8, 192, 5] of U8 or F8_E8M0; copy the checkpoint again",
    "blocks": "expected [experts, outputs, blocks, 16] of U8 or I8; copy the checkpoint again",
    "pairs": "expected an even number of outputs: gate and up in turn; copy the checkpoint again",
    "one": "expected one of them; copy the checkpoint again",
}


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_mxfp4_checkpoint_is_refused_by_name(gpt_oss, tmp_path, fault, quantization):
    """By the headers: no weight is read."""
    name, change, actual, expected = FAULTS[fault]
    tensors, config = read_tensors(gpt_oss.quantized), json.loads((gpt_oss.quantized / "config.json").read_text())
    stored = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(stored)
    folder = write_folder(tmp_path / "bad", config, tensors)
    with pytest.raises(CheckpointError) as caught:
        inspect_model(ServerArgs(model_path=str(folder), quantization=quantization))
    message = str(caught.value)
    actual = actual if actual.startswith(DOWN) else f"{name} {actual}"
    assert message == f"{folder}: {actual}; {EXPECTED[expected]}"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (DOWN, (8, 160 * 192), "[experts, inputs, outputs]"),
        (DOWN, (), "[experts, inputs, outputs]"),
        (GATE_UP, (8, 192, 319), "[experts, inputs, outputs], gate and up in turn"),
        (f"{GATE_UP}_bias", (), "[experts, outputs], gate and up in turn"),
        (f"{GATE_UP}_bias", (8, 319), "[experts, outputs], gate and up in turn"),
    ],
)
def test_plain_experts_of_other_axes_are_refused_by_name(gpt_oss, tmp_path, name, shape, expected):
    tensors, config = read_tensors(gpt_oss.copy), json.loads((gpt_oss.copy / "config.json").read_text())
    folder = write_folder(tmp_path / "bad", config, tensors | {name: np.zeros(shape, np.float32)})
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(folder)
    assert str(caught.value) == f"{folder}: {name} is {list(shape)}; expected {expected}; copy the checkpoint again"


@pytest.mark.parametrize("method", ["nvfp4", "awq", "gptq", None])
def test_other_quantisations_are_refused_by_name(tmp_path, method):
    Oracle(CASES["GptOss"], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(
        CheckpointError, match=f"quant_method='{method}'.*mxfp4" if method else "quantization_config; expected"
    ):
        ModelFolder.open(tmp_path)
