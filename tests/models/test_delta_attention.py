"""The parts of a linear attention layer's projections, compiled, against NumPy: also where a compiler fuses what
follows."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.models.decoder.delta_attention import DeltaAttention

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12, width=4)
LAYER = DeltaAttention(shape=SHAPE, eps=1e-6, layout="key heads")


def by_hand(qkvz, ba):
    """For each key head stand its query, key, two values, two gates; and two rates, two steps."""
    heads, steps = qkvz.reshape(len(qkvz), 2, 64), ba.reshape(len(ba), 2, 4)
    parts = [[heads[:, head, low:high] for head in range(2)] for low, high in ((0, 8), (8, 16), (16, 40), (40, 64))]
    queries, keys, values, gates = (np.concatenate(part, axis=1) for part in parts)
    rates, decays = (np.concatenate([steps[:, head, low : low + 2] for head in range(2)], axis=1) for low in (0, 2))
    return np.concatenate([queries, keys, values], axis=1), gates.reshape(-1, 4, 12), rates, decays


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("padding", [0, 50])
def test_parts_of_each_key_head_find_their_places_also_where_padding_follows(dtype, padding):
    rng = np.random.default_rng(0)
    qkvz, ba = (rng.standard_normal((78, width)).astype(dtype) for width in (SHAPE.channels + 48, 8))

    def run(qkvz, ba):
        return tuple(jnp.pad(part, ((0, padding), *[(0, 0)] * (part.ndim - 1))) for part in LAYER._parts(qkvz, ba))

    for part, expected in zip(jax.jit(run)(qkvz, ba), by_hand(qkvz, ba), strict=True):
        assert np.array_equal(part[:78], expected) and not np.any(np.asarray(part[78:], np.float32))
