"""The TPU kernel that chooses experts under capacity: interpreted, against the law one slot at a time; and compiled for
the chips."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layers.balanced_selection.test_selection import (
    FULL,
    VARIANTS,
    full_case,
    outcome_counts,
    random_case,
    same_bits,
    sequential,
)
from oracles.selection import num_filled
from routed_experts.layers.balanced_selection.admission import SelectionInputs, assign
from routed_experts.layers.balanced_selection.selection import balanced_expert_selection
from routed_experts.layers.balanced_selection.tpu_kernel import VMEM_BYTES, choose_by_tpu_kernel, fits
from support.tpu_aot import compile_tpu, tpu_mesh

pytestmark = pytest.mark.usefixtures("fast_compilation")


@functools.partial(jax.jit, static_argnames=("k", "overflows"))
def interpreted(inputs, k, overflows):
    return assign(inputs, functools.partial(choose_by_tpu_kernel, interpret=True), k, overflows=overflows)


def assigned(case, k, *, overflows=True):
    order = case.order if case.order.ndim == 3 else case.order[None]
    sources = np.zeros(len(case.scores), np.int32) if case.sources is None else case.sources
    scores = np.where(np.isnan(case.scores), -np.inf, case.scores).astype(np.float32)
    capacity = np.clip(case.capacity, 0, k * len(scores)).astype(np.int32)
    return interpreted(SelectionInputs(*map(jnp.asarray, (scores, order, capacity, sources, case.valid))), k, overflows)


def assert_equals_reference(case, k, *, overflows=True):
    got, reference = assigned(case, k, overflows=overflows), sequential(case, k, "overflow" if overflows else "drop")
    assert same_bits(got.ids, reference.logical_ids) and same_bits(got.instances, reference.instance_ids)
    assert (int(got.num_rerouted), int(got.num_overflowed)) == outcome_counts(reference)[:2]
    return int(got.rounds), reference


@pytest.mark.parametrize(("shape", "num_sources", "on_exhausted"), [VARIANTS[1], VARIANTS[5]], ids=str)
def test_the_kernel_is_the_law_bit_for_bit(shape, num_sources, on_exhausted):
    @settings(max_examples=150)
    @given(st.integers(0, 2**32 - 1))
    def holds(seed):
        case = random_case(seed, shape, num_sources)
        rounds, _ = assert_equals_reference(case, shape[2], overflows=on_exhausted == "overflow")
        within = sequential(case, shape[2], "drop").logical_ids
        assert rounds <= num_filled(case, within) + 1 + bool(np.any(case.capacity == 0))

    holds()


@pytest.mark.parametrize(("spread", "factor"), [(0.5, 1.25), (1, 1.25), (2, 0.9)])
def test_512_tokens_of_256_experts_are_the_law(spread, factor):
    case = full_case(0, spread, factor, 0)
    rounds, reference = assert_equals_reference(case, FULL[2])
    assert rounds <= num_filled(case, sequential(case, FULL[2], "drop").logical_ids) + 1 and reference.num_rerouted > 0


def test_sizes_that_fill_no_tile_and_tokens_of_several_blocks_are_the_law():
    for seed, shape in enumerate([(1, 3, 3, 5, 3), (130, 11, 2, 20, 4)]):
        for trial in range(4):
            assert_equals_reference(random_case(10 * seed + trial, shape), shape[2])


def test_a_batch_beyond_vmem_is_left_to_other_code():
    assert (
        fits(512, 256, 8)
        and fits(400, 255, 8)
        and not fits(513, 256, 8)
        and not fits(512, 257, 8)
        and not fits(1, 256, 129)
    )


def abstract(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_the_kernel_compiles_for_the_chip_within_4_mib_of_vmem(chip):
    num_tokens, num_experts, k, *_ = FULL
    assert VMEM_BYTES == 4 << 20  # the compiler is held to it: more is an error
    arguments = (
        abstract(num_tokens, num_experts, dtype=jnp.float32),
        abstract(num_experts),
        abstract(num_tokens, dtype=bool),
    )
    compile_tpu(functools.partial(choose_by_tpu_kernel, top_k=k), *arguments, mesh=tpu_mesh(chip))


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("mode", "chip"), [("reroute", "v5e"), ("replicas", "v6e")])
def test_the_whole_operation_compiles_for_the_chip(mode, chip):
    num_tokens, num_experts, k, num_instances, width = FULL
    scores = abstract(num_tokens, num_experts, dtype=jnp.float32)
    arguments = (
        scores,
        scores,
        abstract(num_experts, width),
        *([abstract(num_instances)] if mode == "reroute" else []),
    )
    sizes = {"num_devices": 32, "num_instances": num_instances} if mode == "replicas" else {}
    compiled = compile_tpu(
        functools.partial(balanced_expert_selection, k=k, mode=mode, **sizes), *arguments, mesh=tpu_mesh(chip)
    )
    assert ("choose_experts" in compiled.as_text()) == (mode == "reroute"), "the kernel is what `auto` takes on a TPU"
