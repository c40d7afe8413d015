"""Every GPU kernel against the plain code that it replaces: small cases interpreted, large ones on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.layers.delta_rule import DeltaShape
from routed_experts.layers.gpu.delta_rule import gpu_delta
from routed_experts.layers.gpu.extend_attention import EXTEND_STEPS
from routed_experts.layers.gpu.paged_keys import keys_of_step
from routed_experts.layers.gpu.router import route_rows
from routed_experts.layers.kv_format import KV_CODES
from routed_experts.layers.routing import LayerRouting, RouterSpec, replay_topk
from support.gpu_cases import large_cases, small_cases
from support.gpu_mixer_cases import delta_inputs, large_mixer_cases, small_mixer_cases
from support.routing_blocks import empty_block

pytestmark = pytest.mark.usefixtures("fast_compilation")

SMALL = [*small_cases(), *small_mixer_cases()]
CASES = {f"{case.kernel}: {case.name}": case for case in SMALL}
assert len(CASES) == len(SMALL), "two cases have one name"
SHARED_MEMORY = 232_448  # bytes of a block on an H100
ON_GPU = [*(case for case in CASES.values() if case.kernel == "router"), *large_cases(), *large_mixer_cases()]


REPEATS = {  # cases whose features, formats and dtypes others have, in another combination: in scripts/thorough
    *(
        f"moe: N,K,E,D,F={case}, float32"
        for case in (
            "(13, 3, 11, 20, 9) padding, lists, tile 16, silu",
            "(5, 3, 8, 20, 9) padding, slots, tile 16, silu",
            "(6, 3, 8, 20, 9) padding, lists, tile 16, silu, biased",
            "(6, 3, 8, 20, 9) padding, lists, tile 16, tanh gelu, biased",
        )
    ),
    "moe: N,K,E,D,F=(6, 3, 8, 20, 9) padding, slots, tile 16, silu, biased, bfloat16",
    "moe: N,K,E,D,F=(6, 3, 8, 20, 9) padding, slots, tile 16, clamped swiglu, biased, bfloat16",
    "moe: N,K,E,D,F=(6, 3, 8, 20, 9) padding, lists, float32, shared experts of 22",
    *(
        f"router: N=5 E=24 K=3 {law}, renormalised, captured"  # of all laws half of the rows are replayed
        for law in (
            "softmax",
            "sigmoid",
            "logits",
            "sparsemixer",
            "softmax, biased",
            "softmax, best of 3 groups, scaled",
        )
    ),
    "router: N=7 E=32 K=4 softmax, renormalised, ties",
    "router: N=9 E=60 K=4 softmax, ties, captured",
    "router: N=13 E=128 K=8 softmax, renormalised, captured",
    "router: N=1 E=8 K=2 softmax, replayed",
    *(
        f"attention: extend, 5+2 requests, 6/2 heads of 12, page 4, {form}"
        for form in ("float32", "float32, codes", "bfloat16, codes", "bfloat16, scaled codes")
    ),
    "attention: extend, 5+2 requests, 8/2 heads of 16, window 21, chunk 0, scale 0.0, sinks, page 4, bfloat16, "
    "scaled codes",
    *(
        f"attention: decode, splits {splits}, 4+1 requests, 8/2 heads of 16, page 4, {form}"
        for splits, form in (
            (1, "float32"),
            (1, "float32, scaled codes"),
            (4, "bfloat16, codes"),
            (4, "bfloat16, scaled codes"),
        )
    ),
    "attention: verify of 5, splits 1, 5+2 requests, 8/2 heads of 16, page 4, float32",
    "attention: verify of 5, splits 4, 5+2 requests, 8/2 heads of 16, page 4, bfloat16, scaled codes",
    "attention: verify of 5, splits 2, 5+2 requests, 6/2 heads of 12, window 3, chunk 0, scale 0.0, page 4, float32",
    "prepare: extend, 5 requests, 8/2 heads, float32, 0 parts",
    "prepare: decode, 4 requests, 8/2 heads, float32, 0 parts",
    "prepare: extend, 3 requests, 4/4 heads, float32, 0 parts",
    "prepare: extend, 3 requests, 8/2 heads, bfloat16, qk_norm bare, biased, 2 parts",
    "prepare: extend, 3 requests, 8/2 heads, bfloat16, norm_after_rope True, biased, 2 parts",
    "prepare: extend, 3 requests, 8/2 heads, bfloat16, 0 parts, codes",
    "prepare: extend, 5 requests, 6/2 heads, float32, 0 parts, codes",
    "prepare: extend, 5 requests, 6/2 heads, bfloat16, 0 parts, scaled codes",
    "prepare: decode, 4 requests, 8/2 heads, bfloat16, qk_norm , rotary False, 2 parts, scaled codes",
    "write: keys and values, bfloat16",
    "write: keys and values, float32, codes",
    "write: latent rows, float32",
    "residual: N=5 D=24 S=3 K=4 float32",
    "latent: decode, 4+1 requests, 4 heads, rank 12 + 4, halves, page 4, bfloat16",
    "delta: 3 requests, 2/4 heads of 5, 40, chunk 32, float32",
    "delta: 3 requests, 1/2 heads of 72, 6, chunk 16, float32",
    "delta: 5 requests, 2/4 heads of 8, 6, chunk 32, a decay of each channel up to 0.3, float32",
    "delta: 2 requests, 2/4 heads of 5, 40, chunk 64, like keys, a decay of each channel up to 0.3, bfloat16",
}
assert set(CASES) >= REPEATS, REPEATS - set(CASES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.thorough if name in REPEATS else ())
        for name, case in CASES.items()
    ],
)
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
