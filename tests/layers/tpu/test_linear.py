"""TPU projections, interpreted, against NumPy; matrices of other layers are NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.kernels import float32_product
from routed_experts.layers.linear import reference_linear
from routed_experts.layers.tpu.linear import TOKEN_TILE, layered_linear
from support.tpu_aot import compile_tpu, tpu_mesh

pytestmark = pytest.mark.usefixtures("fast_compilation")

RUN = jax.jit(functools.partial(layered_linear, interpret=True), static_argnums=3)


@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [(1, 8, 5), (TOKEN_TILE + 13, 16, 300), (7, 8192, 700)],
    ids=["one row", "tiles of rows", "parts"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_projection_is_the_product_with_its_layers_matrix(num_tokens, inputs, outputs, dtype):
    rng = np.random.default_rng(0)
    weights = np.full((3, inputs, outputs), np.nan, np.float32)
    weights[1] = rng.standard_normal((inputs, outputs)) / inputs**0.5
    x, low = jnp.asarray(rng.standard_normal((num_tokens, inputs)), dtype), jnp.asarray(weights, dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(low[1], np.float64)
    for result in (jnp.float32, dtype):
        out = RUN(x, low, jnp.asarray(1, jnp.int32), result)
        assert out.dtype == result
        np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.03 if result == jnp.bfloat16 else 1e-5)


def test_a_transposed_array_of_one_layer_is_multiplied():
    rng = np.random.default_rng(1)
    x, table = rng.standard_normal((4, 8)).astype(np.float32), rng.standard_normal((11, 8)).astype(np.float32)
    out = RUN(jnp.asarray(x), jnp.asarray(table).T[None], 0, jnp.float32)
    np.testing.assert_allclose(out, x @ table.T, atol=1e-5)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_products_with_a_float32_matrix_keep_its_precision(dtype):
    """A router's: an accelerator's default would round it to bfloat16 or TF32, and decide near ties otherwise."""
    x, router = jax.ShapeDtypeStruct((16, 256), dtype), jax.ShapeDtypeStruct((3, 256, 128), "float32")
    for product in (lambda x, w: reference_linear(x, w, 1, jnp.float32), lambda x, w: float32_product(x, w[1])):
        text = compile_tpu(product, x, router, mesh=tpu_mesh("v5e")).as_text()
        assert "operand_precision={highest,highest}" in text
    half = jax.ShapeDtypeStruct((3, 256, 128), "bfloat16")
    text = compile_tpu(lambda x, w: float32_product(x, w[1]), x, half, mesh=tpu_mesh("v5e")).as_text()
    assert "operand_precision={highest,highest}" not in text
