"""What is planned from the shapes of a model's arrays."""

import jax.numpy as jnp
import pytest
from flax import nnx

from oracles.families import CASES, Oracle
from routed_experts import ServerArgs
from routed_experts.engine.build.draft_model import FoundDraft
from routed_experts.engine.build.memory_planning import kv_shapes
from routed_experts.execution.drafting_runner import STANDALONE
from routed_experts.layers.attention import ATTENTION_BACKENDS
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.native.ops import NATIVE_ATTENTION, NATIVE_KERNELS
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.model_folder import ModelFolder


@pytest.mark.parametrize("weights", ["float16", "float32", "bfloat16"])
def test_keys_and_values_have_the_dtype_of_the_weights_beside_arrays_that_stay_wide(weights, tmp_path):
    """The first array of Qwen3-Next's layers is float32 in any case."""
    Oracle(CASES["Qwen3Next"], tmp_path)
    model = ModelFolder.open(tmp_path).load(jnp.dtype(weights))
    assert kv_shapes(ServerArgs(), model.config, nnx.state(model), NATIVE_ATTENTION).dtype == weights
    wide = "float32" if weights == "bfloat16" else weights  # array code would convert the whole pool to write to it
    assert kv_shapes(ServerArgs(), model.config, nnx.state(model), ATTENTION_BACKENDS["paged"]).dtype == wide


@pytest.mark.parametrize(("backend", "num_bytes"), [(None, 2), (NATIVE_ATTENTION, 2), (ATTENTION_BACKENDS["paged"], 4)])
def test_keys_and_values_of_a_draft_model_have_the_dtype_that_its_own_attention_writes(backend, num_bytes):
    sizes = dict(num_layers=2, num_kv_heads=3, head_dim=16)
    half = dict(dtype=jnp.dtype("bfloat16"), num_pages=4, page_size=8, num_requests=2)
    draft = FoundDraft(
        description="",
        kind=STANDALONE,
        layout=CacheLayout(**sizes),
        shapes=lambda dtype: nnx.State({}),
        load_model=lambda dtype: pytest.fail("nothing is loaded"),
        kernels=None if backend is None else (NATIVE_KERNELS, backend),
    )
    demand = draft.demand(KVPoolSpec(**sizes, **half), jnp.dtype("bfloat16"))
    assert demand.bytes_per_token == num_bytes * 2 * 2 * 3 * 16
