"""Tensors that are computed when they are read: MXFP4 against transformers, interleaved ones against slices, and what
is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from oracles.families import CASES, Oracle
from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.weight_source import StoredEntries
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.virtual_tensors import (
    Mxfp4,
    PackedRuns,
    StoredView,
    VirtualCheckpoint,
    dequantize_mxfp4,
)
from routed_experts.models.model_folder import ModelFolder


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


@pytest.mark.parametrize("method", ["nvfp4", "awq", "gptq", None])
def test_other_quantisations_are_refused_by_name(tmp_path, method):
    Oracle(CASES["GptOss"], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(
        CheckpointError, match=f"quant_method='{method}'.*mxfp4" if method else "quantization_config; expected"
    ):
        ModelFolder.open(tmp_path)
