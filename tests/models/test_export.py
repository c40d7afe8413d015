"""A model that was loaded from a checkpoint of transformers, written as tensors again: those that it came from, and a
folder that both loaders read."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file

from oracles.families import CASES, Oracle
from routed_experts.models.base.weight_source import StoredEntries
from routed_experts.models.loading.checkpoint import save
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.models.model_folder import ModelFolder

pytestmark = pytest.mark.usefixtures("fast_compilation")

AS_PUBLISHED = {"Qwen3VLMoe"}  # whose experts transformers 5 writes [E, O, I], and others publish [E, I, O]
IN_EVERY_RUN = AS_PUBLISHED | {
    *("GptOss", "Qwen3Moe", "DeepseekV3", "GraniteMoe", "Ernie4_5_Moe", "Gemma4", "Llama4", "Qwen3Next"),
}
RELOADED = {"GptOss", "Qwen3VLMoe", "DeepseekV3", "Qwen3Next"}  # in every run


def names(in_every_run):
    return [name if name in in_every_run else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]


def read_tensors(folder):
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    return stored


def read_arrays(model):
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype and actual[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("name", names(IN_EVERY_RUN))
def test_tensors_are_those_of_the_checkpoint(tmp_path, name):
    Oracle(CASES[name], tmp_path)
    folder = ModelFolder.open(tmp_path)
    exported = hugging_face_tensors(folder.load(jnp.dtype(jnp.float32)), folder.sources, "float32")
    stored = read_tensors(tmp_path)
    assert exported.keys() <= stored.keys()
    assert len(exported) > len(stored) / 2
    for tensor in exported:
        expected = stored[tensor].astype(np.float32)
        if name in AS_PUBLISHED and expected.ndim == 3:
            expected = np.swapaxes(expected, 1, 2)
        np.testing.assert_array_equal(exported[tensor], expected, err_msg=tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", names(RELOADED))
def test_an_exported_folder_has_the_same_bits_by_both_loaders(tmp_path, name, dtype):
    """Selection biases and decays are float32 in a model of bfloat16, and stay so. Transformers keeps some matrices in
    float32, too, so its files are rounded as the model is."""
    oracle = Oracle(CASES[name], tmp_path / "source")
    folder = ModelFolder.open(tmp_path / "source")
    model = folder.load(jnp.dtype(dtype))
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config |= {"dtype": dtype}
    exported = hugging_face_tensors(model, folder.sources, dtype)
    copy = save(tmp_path / "copy", config, exported)
    assert ModelFolder.open(copy).dtype("auto") == jnp.dtype(dtype)
    assert_same_bits(read_arrays(ModelFolder.open(copy).load(jnp.dtype(dtype))), read_arrays(model))
    if CASES[name].rewrite is None:
        stored = read_tensors(tmp_path / "source")
        rounded = {
            key: array.astype(exported[key].dtype if key in exported else dtype) for key, array in stored.items()
        }
        left, right = (
            type(oracle.model).from_pretrained(path, dtype=getattr(torch, dtype)).state_dict()
            for path in (copy, save(tmp_path / "rounded", config, rounded))
        )
        loaded = [key for key in right if "visual" not in key]  # a vision tower is not read
        assert left.keys() == right.keys() and loaded
        assert all(left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in loaded)


@pytest.mark.parametrize("name", ["DeepseekV3", "Qwen3Next"])
def test_what_a_model_keeps_in_float32_is_written_in_float32(tmp_path, name):
    Oracle(CASES[name], tmp_path)
    folder = ModelFolder.open(tmp_path)
    exported = hugging_face_tensors(folder.load(jnp.dtype(jnp.bfloat16)), folder.sources)
    wide = {tensor for tensor, array in exported.items() if array.dtype == np.float32}
    assert {array.dtype.name for array in exported.values()} == {"float32", "bfloat16"}
    ends = ("e_score_correction_bias",) if name == "DeepseekV3" else ("A_log", "dt_bias")
    assert wide == {tensor for tensor in exported if tensor.endswith(ends)}


def test_a_file_that_the_table_fills_in_part_is_refused(tmp_path):
    Oracle(CASES["GptOss"], tmp_path)
    folder = ModelFolder.open(tmp_path)
    model = folder.load(jnp.dtype(jnp.float32))
    without_up = [source for source in folder.sources if not source.name.endswith(".up_proj")]
    with pytest.raises(ValueError, match=r"gate_up_proj has \d+ entries, and the table fills \d+; correct the table"):
        hugging_face_tensors(model, without_up)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("start", "step"), [(0, 1), (1, 2), (2, 3)])
def test_entries_of_a_stored_tensor_are_those_of_a_slice(start, step, swapped):
    entries = StoredEntries(name="t", start=start, step=step, swapped=swapped)
    stored = np.arange(4 * 5 * 6).reshape(4, 5, 6)
    expected = stored[:, :, start::step]
    expected = expected.transpose(0, 2, 1) if swapped else expected
    assert np.array_equal(entries.view(stored), expected)
    assert entries.shape(stored.shape) == expected.shape and entries.stored_shape(expected.shape) == stored.shape
    box = (slice(1, 3), slice(1, 2), slice(0, 2))
    assert np.array_equal(entries.view(stored[entries.stored_box(box)]), expected[box])
