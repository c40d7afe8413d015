"""The pool's shape, and how wide a row is where. That a wide pool is in place: tests/execution/test_tpu_programs.py."""

import jax.numpy as jnp
import pytest

from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.memory.kv_pool import KVPoolSpec, row_width, tiled_state


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


def test_states_of_requests_fill_whole_tiles_on_a_tpu_where_their_numbers_do():
    assert tiled_state((3, 8192)) == (192, 128)  # 3 rows are no tile
    assert tiled_state((32, 128, 128)) == (32, 128, 128) and tiled_state((2, 1024)) == (16, 128)
    assert tiled_state((3, 7)) == (3, 7) and tiled_state((3, 1024)) == (3, 1024)  # 24 rows of 128: no tile of 16
    shape = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4)
    cache = CacheLayout(num_layers=1, num_kv_heads=1, head_dim=128, num_recurrent=2, recurrent=shape)
    sizes = dict(num_pages=2, page_size=4, dtype=jnp.dtype("bfloat16"), num_requests=5)
    on_tpu, elsewhere = (KVPoolSpec.create(cache, **sizes, platform=platform) for platform in ("tpu", "cpu"))
    assert on_tpu.abstract.states.conv.shape == (2, 5, 192, 128)
    assert elsewhere.abstract.states.conv.shape == (2, 5, 3, 8192)
    assert on_tpu.state_bytes == elsewhere.state_bytes
