"""The memory plan: sums of what will be allocated, and typed refusals before it is."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.errors import MemoryPlanError
from routed_experts.core.server_args import ServerArgs
from routed_experts.execution.memory_plan import device_bytes, plan_memory
from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.memory.kv_pool import KVPoolSpec

SPEC = CaptureSpec(num_hidden_layers=4, layer_ids=(1, 2, 3), num_experts=16, top_k=4)


class TwoArrays(nnx.Module):
    def __init__(self) -> None:
        self.big, self.small = (
            nnx.Param(jnp.zeros((1000, 30), jnp.bfloat16)),
            nnx.Param(jnp.zeros(7, jnp.float32), wide=True),
        )


def plan(*, context=64, capture=SPEC, dtype=jnp.bfloat16, **args):
    settings = {"page_size": 16, "precompile_bs_paddings": (4,), "precompile_token_paddings": (32,)}
    server_args = ServerArgs(**(settings | args))
    pool = KVPoolSpec(
        num_pages=0, page_size=server_args.page_size, num_layers=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype(dtype)
    )
    return plan_memory(server_args, pool, nnx.state(TwoArrays()), capture, context_length=context, vocab_size=11)


def test_weights_are_the_sum_of_their_leaves():
    assert plan().weights == 1000 * 30 * 2 + 7 * 4


def test_the_pool_is_as_large_as_requested_and_its_bytes_are_those_it_allocates():
    made = plan(max_total_tokens=100)
    assert made.pool.num_pages == 100 // 16 + 1  # and the padding page
    pool = made.pool.allocate()
    assert made.kv == pool.nbytes == made.pool.num_slots * 4 * 2 * 2 * 8 * 2
    assert not np.asarray(pool, np.float32).any()


def test_left_alone_the_pool_holds_every_running_request_twice():
    made = plan(context=64)
    assert (made.pool.num_pages - 1) * 16 == 2 * 4 * 64


def test_the_pool_shrinks_to_what_the_fraction_leaves():
    page_bytes = 16 * 4 * 2 * 2 * 8 * 2
    fixed = plan().weights + 5 * 11 * 5 + 2 * 32 * SPEC.row_bytes
    fraction = (fixed + 5.5 * page_bytes) / device_bytes()
    assert plan(mem_fraction_static=fraction).pool.num_pages == 5  # the padding page among them


def test_capture_costs_one_byte_an_id_a_slot_and_nothing_when_off():
    made = plan(max_total_tokens=160)
    assert made.capture_host == made.pool.num_slots * 3 * 4
    assert made.capture_device == 2 * 32 * 3 * 4
    off = plan(max_total_tokens=160, capture=None)
    assert (off.capture_host, off.capture_device) == (0, 0)


def test_a_size_that_does_not_fit_is_refused_with_one_that_does():
    limit = math.ceil(plan(max_total_tokens=160).weights * 3)
    message = r"weights .* KV pages .*, max_total_tokens=160000 .* above the limit of .*; it fits with"
    with pytest.raises(MemoryPlanError, match=message) as excinfo:
        plan(max_total_tokens=160_000, mem_fraction_static=limit / device_bytes())
    (fits,) = (way["max_total_tokens"] for way in excinfo.value.ways if "max_total_tokens" in way)
    assert f"max_total_tokens={fits}" in str(excinfo.value)
    assert plan(max_total_tokens=fits, mem_fraction_static=limit / device_bytes()).pool.num_pages == fits // 16 + 1
    assert "\n" not in str(excinfo.value) and len(str(excinfo.value)) <= 1024


@pytest.mark.parametrize("max_total_tokens", [None, 16, 1 << 40])
def test_weights_that_leave_no_room_are_refused(max_total_tokens):
    with pytest.raises(
        MemoryPlanError, match=r"weights 58\.6 KiB \+ penalties .* KV pages of 16 tokens.* above the limit of 0 B"
    ) as excinfo:
        plan(max_total_tokens=max_total_tokens, mem_fraction_static=1e-12)
    assert len(str(excinfo.value)) <= 1024


def test_the_printed_plan_names_every_purpose_once():
    lines = plan().lines()
    purposes = ["weights", "penalties", "KV pages", "capture, device", "capture, host", "limit"]
    assert [line.split("  ")[0].strip() for line in lines] == purposes
    assert all(re.search(r"\d [KMG]?i?B", line) for line in lines)


def test_inputs_that_verify_steps_store_of_recurrent_layers_are_planned():
    """By hand: 3 layers, 4 requests of 8 tokens; of each token bfloat16 channels, float32 decays and rates; kernels."""
    shape = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=8, width=4)
    channels, numbers = 2 * 16 + 32, {"context_length": 64, "vocab_size": 11}
    pool = KVPoolSpec(
        **dict(num_pages=0, page_size=16, num_layers=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype(jnp.bfloat16)),
        **dict(num_recurrent=3, recurrent=shape, num_requests=5),
    )
    args = ServerArgs(page_size=16, precompile_bs_paddings=(4,), precompile_token_paddings=(32,), max_total_tokens=64)
    states = nnx.state(TwoArrays())
    plain, drafted = (plan_memory(args, pool, states, SPEC, **numbers, num_drafts=drafts) for drafts in (0, 7))
    assert (plain.verify_inputs, plain.verify_scores) == (0, 0)
    assert drafted.verify_inputs == 3 * (32 * (2 * channels + 4 * 4 + 4 * 4) + 4 * channels * 4)
    purposes = [{line.split("  ")[0].strip() for line in made.lines()} for made in (plain, drafted)]
    assert purposes[1] - purposes[0] == {"verify scores", "verify inputs"}


def test_the_device_has_memory():
    assert jax.local_devices() and device_bytes() > 1 << 28
