"""A whole step on the TPU's backends, interpreted, against the plain ones: the same ids, hidden states and pool. Their
selection: by platform, by name, and refused without a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.forward_batch import pack
from routed_experts.execution.programs import ProgramSpec, forward
from routed_experts.layers.tpu.backends import tpu_attention, tpu_kernels
from support.small_runner import SHAPES, Fed, build, build_step

pytestmark = pytest.mark.usefixtures("fast_compilation")

PROMPTS = [tuple(range(3, 16)), (40, 41, 42, 43, 44, 45)]
PAGES = [(1, 5, 2, 9, 20), (7, 3, 30, 31)]


@functools.cache
def shared_runner():
    return build()


@functools.cache
def program(mode, backends, capture):
    spec, shape = shared_runner().spec, SHAPES[mode]
    kernels, attention = (
        (tpu_kernels(interpret=True), tpu_attention(interpret=True))
        if backends == "tpu"
        else (spec.kernels, spec.attention)
    )
    made = ProgramSpec(
        graphdef=spec.graphdef,
        capture=spec.capture if capture else None,
        kernels=kernels,
        attention=attention,
        num_pages=spec.num_pages,
        raw_logprobs=False,
    )
    return jax.jit(functools.partial(forward, spec=made, shape=shape))


def two_steps(backends, *, capture=True):
    """Prefill two prompts, then feed each one token more. Slots without an owner are NaN."""
    runner = shared_runner()
    pool = jnp.full(runner.config.pool.abstract.shape, jnp.nan, jnp.float32)
    last = jnp.zeros(runner.config.num_request_slots, jnp.int32)
    prefill = build_step(
        *[Fed(slot, pages, ids) for slot, (pages, ids) in enumerate(zip(PAGES, PROMPTS, strict=True), start=1)]
    )
    again = [
        Fed(slot, pages, (99,), start=len(ids))
        for slot, (pages, ids) in enumerate(zip(PAGES, PROMPTS, strict=True), start=1)
    ]
    decode = build_step(*again, mode=ForwardMode.DECODE)
    outs = []
    for batch in (prefill, decode):
        pool, out = program(batch.mode, backends, capture)(runner.state, pool, last, pack(batch))
        rows = None if out.rows is None else np.asarray(out.rows)[: batch.num_tokens]
        outs.append((np.asarray(out.hidden)[: batch.num_tokens], rows))
    return outs, np.asarray(pool)


def test_prefill_and_decode_equal_the_plain_backends():
    (steps, pool), (plain_steps, plain_pool) = two_steps("tpu"), two_steps("plain")
    for (hidden, rows), (plain_hidden, plain_rows) in zip(steps, plain_steps, strict=True):
        assert np.array_equal(rows, plain_rows) and len(np.unique(rows)) > 8
        np.testing.assert_allclose(hidden, plain_hidden, atol=2e-4)
    pages, positions = [page for pages in PAGES for page in pages], slice(0, 3)
    for layer in range(shared_runner().config.pool.num_layers):
        first = layer * shared_runner().spec.num_pages
        own, plain = pool[first + np.array(pages), positions], plain_pool[first + np.array(pages), positions]
        assert np.array_equal(np.isnan(own), np.isnan(plain))
        np.testing.assert_allclose(own, plain, atol=2e-4)


def test_capture_changes_no_number_of_a_step():
    (on, _), (off, _) = two_steps("tpu"), two_steps("tpu", capture=False)
    for (hidden, rows), (hidden_off, rows_off) in zip(on, off, strict=True):
        assert rows is not None and rows_off is None
        assert np.array_equal(hidden, hidden_off)


def test_auto_is_the_tpus_own_on_a_tpu_alone():
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), platform="tpu")
    assert (kernels.moe.name, kernels.linear.name, attention.name) == ("tpu", "tpu", "tpu")
    assert kernels.router is not None and kernels.moe.reveals_ids
    for platform in ("cpu", "gpu", "another"):
        kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), platform=platform)
        assert "tpu" not in (kernels.moe.name, attention.name)
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(deterministic=True), platform="tpu")
    assert (kernels.moe.name, attention.name) == ("reference", "reference")


@pytest.mark.parametrize("field", ["moe_backend", "attention_backend"])
def test_a_tpu_backend_is_refused_where_there_is_no_tpu(field):
    with pytest.raises(ConfigError, match=rf"{field}='tpu' cannot run here: it runs on tpu, .* a cpu; or choose auto"):
        DEFAULT_BACKENDS.choose(ServerArgs(**{field: "tpu"}))
