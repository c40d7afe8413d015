"""A model that was loaded from a checkpoint of transformers, written as tensors again: those that it came from."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from oracles.families import CASES, Oracle
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.models.model_folder import ModelFolder

pytestmark = pytest.mark.usefixtures("fast_compilation")

PARTS = {"GptOss", "Qwen3VLMoe"}  # whose experts loading reads through other tensors: [E, O, I], gate and up apart
IN_EVERY_RUN = PARTS | {"Qwen3Moe", "DeepseekV3", "GraniteMoe", "Ernie4_5_Moe", "Gemma4", "Llama4", "Qwen3Next"}


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in CASES]
)
def test_tensors_are_those_of_the_checkpoint(tmp_path, name):
    Oracle(CASES[name], tmp_path)
    folder = ModelFolder.open(tmp_path)
    exported = hugging_face_tensors(folder.load(jnp.dtype(jnp.float32)), folder.sources, "float32")
    stored = {}
    for file in tmp_path.glob("*.safetensors"):
        stored |= load_file(file)
    common = exported.keys() & stored.keys()
    if name not in PARTS:
        assert len(common) == len(exported)
    assert len(common) > len(stored) / 2
    for tensor in common:
        expected = stored[tensor].astype(np.float32)
        if name in PARTS and expected.ndim == 3:
            expected = np.swapaxes(expected, 1, 2)
        np.testing.assert_array_equal(exported[tensor], expected, err_msg=tensor)
