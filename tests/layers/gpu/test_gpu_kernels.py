"""Every GPU kernel against the plain code that it replaces: small cases interpreted, large ones on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.gpu.attention import EXTEND_STEPS, keys_of_step
from routed_experts.layers.gpu.delta_rule import gpu_delta
from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.kv_format import KV_CODES
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from support.gpu_cases import large_cases, small_cases
from support.gpu_mixer_cases import delta_inputs, large_mixer_cases, small_mixer_cases
from support.routing_blocks import empty_block

pytestmark = pytest.mark.usefixtures("fast_compilation")

CASES = {f"{case.kernel}: {case.name}": case for case in (*small_cases(), *small_mixer_cases())}
SHARED_MEMORY = 232_448  # bytes of a block on an H100
ON_GPU = [*(case for case in CASES.values() if case.kernel == "router"), *large_cases(), *large_mixer_cases()]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernel_equals_plain_code(case):
    outcome = case.run(True)
    assert outcome.is_good, outcome


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=lambda case: f"{case.kernel}: {case.name}")
def test_compiled_kernel_equals_plain_code(case):
    outcome = case.run(False)
    assert outcome.is_good, outcome


@pytest.mark.parametrize("dtype", [jnp.bfloat16, KV_CODES])
@pytest.mark.parametrize("dim", [64, 128, 192, 256, 512])
def test_keys_and_values_of_all_stages_fit_shared_memory(dim, dtype):
    keys, _, stages = next(row[2:] for row in EXTEND_STEPS if dim <= row[0])
    padded = 1 << (dim - 1).bit_length()
    assert 2 * stages * keys_of_step(keys, dim, dtype) * padded * 2 <= SHARED_MEMORY


@pytest.mark.parametrize("replays", [False, True])
def test_logits_that_are_no_numbers_still_choose_distinct_experts(replays):
    """An id must always be a valid index of the weights: only rows with broken logits may differ from plain code."""
    spec, rng = RouterSpec(num_experts=13, top_k=4, renormalize=True), np.random.default_rng(0)
    logits = rng.standard_normal((6, 13)).astype(np.float32)
    logits[1], logits[3, 5], logits[4, 2] = np.nan, np.nan, np.inf
    routed = LayerRouting(jnp.zeros((6, 4), jnp.uint16), jnp.zeros(6, bool)) if replays else None
    empty = empty_block(4, 6)
    routing, block = route_rows(jnp.asarray(logits), routed, empty, jnp.int32(0), spec, interpret=True)
    expected, ids = replay_topk(jnp.asarray(logits), None, spec=spec), np.asarray(routing.ids)
    whole = [0, 2, 5]
    assert np.array_equal(ids[whole], np.asarray(expected.ids)[whole]) and np.array_equal(block.ids.T, ids)
    np.testing.assert_allclose(np.asarray(routing.weights)[whole], np.asarray(expected.weights)[whole], rtol=1e-6)
    assert ids.min() >= 0 and ids.max() < 13 and all(len(set(row)) == 4 for row in ids.tolist())
    assert np.isnan(np.asarray(routing.weights)[1]).all()


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("name", "lengths"), [("mixed", (40, 20, 33)), ("decay", (40, 20, 33)), ("decay", (1, 1, 1))])
def test_a_token_that_is_not_finite_spoils_its_request_from_there_on(name, lengths, by_channel):
    sizes = dict(key_heads=2, value_heads=4, key_dim=8, value_dim=6, width=4)
    rng, shape = np.random.default_rng(9), DeltaShape(**sizes, by_channel=by_channel)
    inputs, states, slots, starts = delta_inputs(rng, shape, lengths)
    run = jax.jit(lambda inputs: gpu_delta(inputs, states, 1, slots, slots < 0, starts, chunk=16, interpret=True))
    clean, after = run(inputs)
    at = lengths[0] + lengths[1] // 2
    spoiled, spoiled_after = run(dataclasses.replace(inputs, **{name: vars(inputs)[name].at[at].set(jnp.nan)}))
    end, slot = lengths[0] + lengths[1], int(slots[1])
    np.testing.assert_array_equal(np.delete(spoiled, slice(at, end), axis=0), np.delete(clean, slice(at, end), axis=0))
    assert np.isnan(spoiled[at:end]).all() and np.isnan(spoiled_after.recurrent[1, slot]).all()
    others = (np.delete(np.asarray(part.recurrent[1]), slot, axis=0) for part in (spoiled_after, after))
    np.testing.assert_array_equal(*others)
