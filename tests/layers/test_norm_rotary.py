"""RMS norm and rotary positions against transformers' own modules, and laws that need no oracle."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    apply_rotary_pos_emb,
)

from routed_experts.layers.norm import rms_norm
from routed_experts.layers.rotary import apply_rotary
from support.head_angles import head_cos_sin

pytestmark = pytest.mark.usefixtures("fast_compilation")

NORM = jax.jit(rms_norm, static_argnames="eps")
ANGLES = jax.jit(head_cos_sin, static_argnames=("head_dim", "theta"))
ROTATE = jax.jit(apply_rotary)
RNG = np.random.default_rng
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 64), (7, 33), (3, 4, 16)])
def test_rms_norm_is_that_of_transformers(dtype, shape):
    rng = RNG(0)
    x, scale = 3 * rng.standard_normal(shape), 1 + 0.1 * rng.standard_normal(shape[-1])
    x[0] *= 1e-4  # where eps counts
    oracle = Qwen3MoeRMSNorm(shape[-1], eps=1e-6).to(TORCH[dtype])
    with torch.no_grad():
        oracle.weight.copy_(torch.from_numpy(scale))
        expected = oracle(torch.from_numpy(x).to(TORCH[dtype])).float().numpy()
    actual = NORM(jnp.asarray(x.astype(NUMPY[dtype])), jnp.asarray(scale.astype(NUMPY[dtype])), eps=1e-6)
    assert actual.dtype == NUMPY[dtype]
    # one unit in the last place: both cast to the dtype before they multiply by the scale
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), expected, rtol=2 * float(ml_dtypes.finfo(NUMPY[dtype]).eps), atol=1e-6
    )


def test_rms_norm_of_zeros_is_zero_and_of_large_values_finite():
    rows = jnp.asarray([[0.0] * 8, [1e18] * 8, [-1e18] * 8], jnp.float32)
    normed = np.asarray(NORM(rows, jnp.ones(8, jnp.float32), eps=1e-6))
    np.testing.assert_allclose(normed, np.array([[0.0], [1.0], [-1.0]]).repeat(8, axis=1), atol=1e-6)


@pytest.mark.parametrize(("head_dim", "theta"), [(16, 1e4), (24, 1e6), (2, 5e5)])
def test_rotary_is_that_of_transformers(head_dim, theta):
    rng, positions = RNG(1), np.array([0, 1, 2, 511, 40_000, 7], np.int32)
    config = Qwen3MoeConfig(head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta})
    x = rng.standard_normal((positions.size, 3, head_dim)).astype(np.float32)
    states = torch.from_numpy(x).transpose(0, 1)[None]  # [N, H, C] -> [1, H, N, C]
    cos, sin = Qwen3MoeRotaryEmbedding(config)(states, torch.from_numpy(positions)[None].long())
    expected, _ = apply_rotary_pos_emb(states, states, cos, sin)
    own_cos, own_sin = ANGLES(jnp.asarray(positions), head_dim=head_dim, theta=theta)
    # an angle of 40,000 radians is known to 2e-3 in float32, in either library
    near = positions < 1000
    np.testing.assert_allclose(np.asarray(own_cos)[near], cos[0].numpy()[near], atol=1e-4)
    np.testing.assert_allclose(np.asarray(own_cos), cos[0].numpy(), atol=5e-3)
    actual = np.asarray(ROTATE(jnp.asarray(x), own_cos, own_sin))
    np.testing.assert_allclose(actual[near], expected[0].transpose(0, 1).numpy()[near], atol=2e-4)
    np.testing.assert_allclose(actual, expected[0].transpose(0, 1).numpy(), atol=2e-2)


def test_rotated_products_depend_on_distance_alone():
    rng = RNG(2)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 16)), jnp.float32) for _ in range(2))

    def product(at_query, at_key):
        turned = [
            ROTATE(x, *ANGLES(jnp.asarray([at], jnp.int32), head_dim=16, theta=1e4))
            for x, at in ((query, at_query), (key, at_key))
        ]
        return float(jnp.vdot(*turned))

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-3)
    assert product(0, 0) == pytest.approx(float(jnp.vdot(query, key)), abs=1e-6)
    assert abs(product(9, 4) - product(4, 9)) > 1e-2  # it has a direction


def test_rotary_keeps_the_dtype_and_computes_in_float32():
    x = jnp.asarray(RNG(3).standard_normal((5, 2, 8)), jnp.float32)
    angles = ANGLES(jnp.arange(5, dtype=jnp.int32), head_dim=8, theta=1e4)
    assert [a.dtype for a in angles] == [jnp.float32, jnp.float32]
    low = ROTATE(x.astype(jnp.bfloat16), *angles)
    assert low.dtype == jnp.bfloat16
    wide = ROTATE(x.astype(jnp.bfloat16).astype(jnp.float32), *angles)
    assert np.array_equal(np.asarray(low), np.asarray(wide.astype(jnp.bfloat16)))
    assert jnp.allclose(
        jnp.linalg.norm(wide, axis=-1), jnp.linalg.norm(x.astype(jnp.bfloat16).astype(jnp.float32), axis=-1), atol=1e-5
    )


def test_a_row_does_not_depend_on_its_neighbours():
    x = RNG(4).standard_normal((4, 32)).astype(np.float32)
    other = x.copy()
    other[1:] = np.nan
    normed = [np.asarray(NORM(rows, jnp.ones(32, jnp.float32), eps=1e-6)) for rows in (x, other)]
    assert np.array_equal(normed[0][0], normed[1][0])
