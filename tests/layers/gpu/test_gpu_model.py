"""A whole step on the GPU's kernels, interpreted, against the plain code: the fused run of layers, the capture, the
pool."""

import functools

import numpy as np

from routed_experts.layers.attention import ATTENTION_BACKENDS
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from support.model_steps import PAGES, drifted_rows, run_steps, tiny_model

PLAIN = Kernels(moe=MOE_BACKENDS["reference"])


@functools.cache
def on_gpu_kernels(*, capture: bool):
    return run_steps(tiny_model(), gpu_kernels(interpret=True), gpu_attention_backend(interpret=True), capture=capture)


def test_a_step_equals_plain_code():
    pool, outs = on_gpu_kernels(capture=True)
    wanted_pool, expected = run_steps(tiny_model(), PLAIN, ATTENTION_BACKENDS["reference"], capture=True)
    for (hidden, rows), (wanted_hidden, wanted_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, wanted_rows)
        np.testing.assert_allclose(hidden, wanted_hidden, rtol=2e-4, atol=2e-5)
    for layer in range(3):  # page 0 of a layer takes padding in the one and nothing in the other
        actual, plain_pages = (x[layer * PAGES + 1 : (layer + 1) * PAGES] for x in (pool, wanted_pool))
        np.testing.assert_allclose(actual, plain_pages, rtol=2e-4, atol=2e-5)


def test_rows_that_are_given_run_as_in_plain_code():
    """By the same few kernels: of half of the tokens, in an order that no router gives."""
    ids, valid = drifted_rows()
    gpu, plain = (
        (gpu_kernels(interpret=True), gpu_attention_backend(interpret=True)),
        (PLAIN, ATTENTION_BACKENDS["reference"]),
    )
    (_, outs), (_, expected) = (
        run_steps(tiny_model(), *kernels, capture=True, routed=(ids, valid)) for kernels in (gpu, plain)
    )
    for (hidden, rows), (wanted_hidden, wanted_rows) in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(rows, wanted_rows)
        np.testing.assert_array_equal(
            rows[valid[: len(rows)]], ids[: len(rows)].reshape(len(rows), -1)[valid[: len(rows)]]
        )
        np.testing.assert_allclose(hidden, wanted_hidden, rtol=2e-4, atol=2e-5)


def test_no_rows_that_are_valid_are_the_live_step_by_a_bit():
    pool, outs = on_gpu_kernels(capture=True)
    nothing = (np.full((16, 2, 2), 255, np.uint8), np.zeros(16, bool))
    kernels = (gpu_kernels(interpret=True), gpu_attention_backend(interpret=True))
    pool_given, replayed = run_steps(tiny_model(), *kernels, capture=True, routed=nothing)
    np.testing.assert_array_equal(pool, pool_given)
    for (hidden, rows), (hidden_given, rows_given) in zip(outs, replayed, strict=True):
        np.testing.assert_array_equal(rows, rows_given)
        np.testing.assert_array_equal(hidden, hidden_given)


def test_capture_changes_no_value():
    (pool_on, on), (pool_off, off) = on_gpu_kernels(capture=True), on_gpu_kernels(capture=False)
    np.testing.assert_array_equal(pool_on, pool_off)
    for (hidden_on, rows_on), (hidden_off, rows_off) in zip(on, off, strict=True):
        assert rows_on is not None and rows_off is None
        np.testing.assert_array_equal(hidden_on, hidden_off)
