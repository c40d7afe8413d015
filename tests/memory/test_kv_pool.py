"""The pool's shape, and how wide a row is where. That a wide pool is in place: tests/execution/test_tpu_programs.py."""

import jax.numpy as jnp
import pytest

from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.memory.kv_pool import KVPoolSpec, row_width


@pytest.mark.parametrize(("head_dim", "on_tpu"), [(16, 128), (64, 128), (128, 128), (192, 256)])
def test_a_row_is_as_wide_as_a_head_and_on_a_tpu_whole_lanes(head_dim, on_tpu):
    assert row_width(head_dim, "tpu") == on_tpu
    assert row_width(head_dim, "cpu") == row_width(head_dim, "gpu") == head_dim


def test_a_token_takes_the_bytes_of_its_rows_in_all_layers():
    spec = KVPoolSpec(num_layers=3, num_pages=5, page_size=4, num_kv_heads=2, head_dim=16, dtype=jnp.dtype("bfloat16"))
    assert spec.abstract.shape == (15, 4, 4, 16) and spec.num_slots == 20
    assert spec.bytes_per_token * spec.num_slots == spec.abstract.size * 2
    assert not jnp.any(spec.allocate())


def test_rows_of_another_shape_are_in_an_array_of_their_own_and_a_token_takes_the_bytes_of_all():
    other = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=32)
    spec = KVPoolSpec(
        num_layers=3,
        num_pages=5,
        page_size=4,
        num_kv_heads=2,
        head_dim=16,
        dtype=jnp.dtype("bfloat16"),
        others=(other,),
    )
    shapes = [array.shape for array in spec.abstract.arrays]
    assert shapes == [(15, 4, 4, 16), (10, 4, 2, 32)]
    assert spec.bytes_per_token * spec.num_slots == sum(array.size * 2 for array in spec.abstract.arrays)
