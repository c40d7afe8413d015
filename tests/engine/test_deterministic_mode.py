"""`deterministic=True` on the native kernels, for families of several paths: a request alone equals itself in a batch
to the last bit, greedy requests beside sampled ones. A backend that wrongly says it is batch-invariant is caught at
start; test_exactness_grid.py has the grid, and test_native.py the backends that are refused by name."""

import dataclasses
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest

from engine.test_exactness_grid import exact_outputs
from oracles.driver import Bench, request
from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.engine.build.builder import build_engine
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.models.model_folder import ModelFolder
from support.backends import with_moe
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

SIZES = dict(page_size=8, context_length=96, precompile_bs_paddings=(8,), precompile_token_paddings=(64,))
FAMILIES = "Qwen3Moe", "DeepseekV3", "GptOss", "Qwen3Next", "BailingHybrid", "Llama4"
IN_EVERY_RUN = "Qwen3Moe", "DeepseekV3", "Qwen3Next"  # each kind of cache


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_each_request_in_a_batch_equals_itself_alone(name, tmp_path):
    Oracle(CASES[name], tmp_path)
    bench = Bench(
        ModelFolder.open(tmp_path).load(jnp.dtype(jnp.float32)), moe_backend="auto", deterministic=True, **SIZES
    )
    spec, noise = bench.assembly.core.runner.spec, np.random.default_rng(2)
    assert (spec.kernels.moe.name, spec.attention.name) == ("native", "native")
    prompts = [noise.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (50, 3, 1, 20)]

    def requests():
        """Every other one is greedy."""
        return [
            request(f"p{index}", prompt, 6, seed=index, temperature=float(index % 2), prompt_logprobs_from=0)
            for index, prompt in enumerate(prompts)
        ]

    alone = {}
    for req in requests():
        drive = bench.drive(max_running_requests=1, disable_radix_cache=True)
        drive.run(req, check=False)
        alone |= exact_outputs(drive)
    for sizes in (dict(max_running_requests=8), dict(max_running_requests=3, chunked_prefill_size=7)):
        drive = bench.drive(disable_radix_cache=True, **sizes)
        drive.run(*reversed(requests()), check=False)
        assert exact_outputs(drive) == alone


@pytest.mark.parametrize("name", ["BailingHybrid", "Qwen3Next"])
def test_a_state_that_array_code_updates_in_chunks_of_a_step_is_refused(name, tmp_path):
    Oracle(CASES[name], tmp_path)
    model = ModelFolder.open(tmp_path).load(jnp.dtype(jnp.float32))
    args = ServerArgs(deterministic=True, moe_backend="reference", attention_backend="reference", **SIZES)
    with pytest.raises(ConfigError, match="deterministic=True with a delta rule that runs as array code"):
        build_engine(args, model=model, registry=DEFAULT_BACKENDS)


def shared_noise(call):
    """Experts of which each row takes up a little of the others."""
    y = MOE_BACKENDS["reference"].run(call)
    return y + 1e-6 * jnp.mean(jnp.where(call.valid[:, None], y, 0), axis=0)


def test_a_backend_that_wrongly_says_it_is_batch_invariant_is_caught_at_start():
    with tempfile.TemporaryDirectory() as folder:
        opened = ModelFolder.open(write_tiny_checkpoint(folder, tokenizer=False))
        model = opened.load(jnp.dtype(jnp.float32))
    leaky = dataclasses.replace(MOE_BACKENDS["reference"], name="leaky", run=shared_noise)
    args = ServerArgs(moe_backend="leaky", deterministic=True, **SIZES)
    with (
        lazy_compilation(),
        pytest.raises(
            ConfigError, match=r"deterministic=True cannot hold: with moe_backend='leaky'.*depends on the batch"
        ),
    ):
        build_engine(args, model=model, registry=with_moe(DEFAULT_BACKENDS, leaky))
