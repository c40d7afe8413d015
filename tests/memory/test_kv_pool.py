"""The pool's shape, and how wide a row is where. That a wide pool is in place: tests/execution/test_tpu_programs.py."""

import jax.numpy as jnp
import pytest

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
