"""What is planned from the shapes of a model's arrays."""

import jax.numpy as jnp
import pytest
from flax import nnx

from oracles.families import CASES, Oracle
from routed_experts import ServerArgs
from routed_experts.engine.build.memory_planning import kv_shapes
from routed_experts.models.model_folder import ModelFolder


@pytest.mark.parametrize(
    ("weights", "expected"), [("float16", "float16"), ("float32", "float32"), ("bfloat16", "float32")]
)
def test_keys_and_values_have_the_dtype_of_the_weights_beside_arrays_that_stay_wide(weights, expected, tmp_path):
    """The first array of Qwen3-Next's layers is float32 in any case; bfloat16 is held as float32 on CPU."""
    Oracle(CASES["Qwen3Next"], tmp_path)
    model = ModelFolder.open(tmp_path).load(jnp.dtype(weights))
    assert kv_shapes(ServerArgs(), model.config, nnx.state(model)).dtype == expected
