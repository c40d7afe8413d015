"""What is planned from the shapes of a model's arrays."""

import jax.numpy as jnp
import pytest
from flax import nnx

from oracles.families import CASES, Oracle
from routed_experts import ServerArgs
from routed_experts.engine.build.memory_planning import kv_shapes
from routed_experts.layers.attention import ATTENTION_BACKENDS
from routed_experts.layers.native.ops import NATIVE_ATTENTION
from routed_experts.models.model_folder import ModelFolder


@pytest.mark.parametrize("weights", ["float16", "float32", "bfloat16"])
def test_keys_and_values_have_the_dtype_of_the_weights_beside_arrays_that_stay_wide(weights, tmp_path):
    """The first array of Qwen3-Next's layers is float32 in any case."""
    Oracle(CASES["Qwen3Next"], tmp_path)
    model = ModelFolder.open(tmp_path).load(jnp.dtype(weights))
    assert kv_shapes(ServerArgs(), model.config, nnx.state(model), NATIVE_ATTENTION).dtype == weights
    wide = "float32" if weights == "bfloat16" else weights  # array code would convert the whole pool to write to it
    assert kv_shapes(ServerArgs(), model.config, nnx.state(model), ATTENTION_BACKENDS["paged"]).dtype == wide
