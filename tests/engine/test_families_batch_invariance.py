"""What Qwen3-MoE promises on a CPU holds for families, by kernels of whole layers or of their parts: the output
of a request depends on that request alone, to the last bit, not on the rest of the batch, the padded size, or how its
prompt is cut, and greedy requests run beside sampled ones. `score` runs the experts that the rollout ran and gives its
logprobs and those of its prompt, by the bit; so do the returned rows, played back.

The families are one of each path and each feature. scripts/test has each kind of cache, most routers, and every dtype
and form of keys and values; scripts/thorough has the others."""

import dataclasses
import tempfile

import jax.numpy as jnp
import numpy as np
import pytest

from engine.test_exactness_grid import exact_outputs
from oracles.driver import Bench, request
from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts.core.weight_version import WeightVersion
from routed_experts.engine.control.score import Scorer
from routed_experts.models.model_folder import ModelFolder

SIZES = dict(page_size=8, context_length=128, precompile_bs_paddings=(1, 8), precompile_token_paddings=(16, 128))
NEW_TOKENS = 6
FAMILIES = (
    *("Qwen3Moe", "Mixtral", "Phimoe", "Qwen2Moe", "Olmoe", "DeepseekV3", "Glm4Moe", "GptOss", "GraniteMoe"),
    *("Ernie4_5_Moe", "MiniMaxM2", "Llama4", "Qwen3Next", "BailingHybrid", "Lfm2Moe", "HunYuanMoEV1", "Gemma4"),
)
# Four in pieces, and three whose layers run in one kernel.
IN_BFLOAT16 = ("DeepseekV3", "Qwen3Next", "BailingHybrid", "Gemma4", "GptOss", "Qwen3Moe", "Mixtral")
# Keys and values of 8 bits: in one kernel, in pages of two shapes, and beside states.
IN_CODES = ("Qwen3Moe", "Gemma4", "Qwen3Next")
CASES_OF = {  # by form: dtype, dtype of keys and values, families
    "float32": ("float32", "auto", FAMILIES),
    "codes": ("bfloat16", "fp8_e4m3", IN_CODES),
    "bfloat16": ("bfloat16", "auto", IN_BFLOAT16),
}
IN_EVERY_RUN = {
    "codes": ("Gemma4", "Qwen3Next"),  # pages of two shapes, and states, with codes that are read as bfloat16 numbers
    # Latent rows, states, sinks and windows, one kernel for all layers.
    "bfloat16": ("DeepseekV3", "BailingHybrid", "GptOss", "Mixtral"),
    # States of a convolution; routers: softmax, sigmoid, groups, scaled inputs, a sparse mixer.
    "float32": ("Lfm2Moe", "Qwen3Moe", "MiniMaxM2", "Glm4Moe", "Llama4", "Phimoe"),
}
CELLS = {
    "together": dict(max_running_requests=8, chunked_prefill_size=128),
    "three at once, in parts": dict(max_running_requests=3, chunked_prefill_size=7),
    "together, in parts": dict(max_running_requests=8, chunked_prefill_size=13),
}
NOISE = np.random.default_rng(0)
PROMPTS = [NOISE.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in (100, 17, 1, 33, 5, 60)]


def mixed_request(index):
    """Each third one is greedy."""
    how = {"prompt_logprobs_from": 0} if index % 2 else {}
    return request(f"p{index}", PROMPTS[index], NEW_TOKENS, seed=index, temperature=float(index % 3 > 0), **how)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (name, dtype, kv_cache_dtype),
            id=f"{name}-{form}",
            marks=[] if name in IN_EVERY_RUN[form] else [pytest.mark.thorough],
        )
        for form, (dtype, kv_cache_dtype, names) in CASES_OF.items()
        for name in names
    ],
)
def served(request):
    """A family's bench, and the drives of every request alone."""
    name, dtype, kv_cache_dtype = request.param
    with tempfile.TemporaryDirectory() as folder:
        Oracle(CASES[name], folder)
        model = ModelFolder.open(folder).load(jnp.dtype(dtype))
        bench = Bench(model, moe_backend="auto", kv_cache_dtype=kv_cache_dtype, **SIZES)
    alone = []
    for index in range(len(PROMPTS)):
        alone.append(bench.drive(max_running_requests=1, disable_radix_cache=True))
        alone[-1].run(mixed_request(index), check=False)
    return bench, alone


def test_each_request_in_a_batch_equals_itself_alone(served):
    bench, alone = served
    expected = {rid: output for drive in alone for rid, output in exact_outputs(drive).items()}
    assert bench.assembly.core.runner.spec.kernels.moe.name == "native", "of the kernels that users get"
    assert len({repr(tokens) for tokens, *_ in expected.values()}) > 1, "a constant answer proves nothing"
    for cell, sizes in CELLS.items():
        drive = bench.drive(disable_radix_cache=True, **sizes)
        drive.run(*(mixed_request(index) for index in (3, 0, 5, 2, 1, 4)), check=False)
        assert len(drive.log.forwards) > 1
        assert len(drive.outputs) == len(PROMPTS)
        for rid, output in exact_outputs(drive).items():
            assert output == expected[rid], (cell, rid)


def test_a_score_is_its_rollout_and_so_is_a_replay_of_its_rows(served):
    """All sequences in one call, cut into parts: other steps than those of the rollouts."""
    bench, alone = served
    outputs = [drive.outputs[f"p{index}"] for index, drive in enumerate(alone)]
    records = [output.end.routed_experts for output in outputs]
    sequences = [np.array([*prompt, *output.tokens], np.int32) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    args = dataclasses.replace(bench.args, chunked_prefill_size=13)
    scorer = Scorer(args, bench.assembly.buckets, bench.runner, lambda start: start())
    weights = lambda: (bench.runner.state, WeightVersion(update_count=bench.runner.weight_version))  # noqa: E731
    live, forced = scorer.run(sequences, None, weights), scorer.run(sequences, records, weights)
    assert sum(output.prompt_logprobs is not None for output in outputs) > 1
    for prompt, output, record, scored, again in zip(PROMPTS, outputs, records, live, forced, strict=True):
        np.testing.assert_array_equal(scored.routed_experts.ids[: record.num_rows], record.ids)
        np.testing.assert_array_equal(bits(again.logprobs), bits(scored.logprobs))
        np.testing.assert_array_equal(bits(scored.logprobs[len(prompt) - 1 :]), bits(output.logprobs))
        if output.prompt_logprobs is not None:
            of_prompt = output.prompt_logprobs[-(len(prompt) - 1) :]  # the first token has none
            np.testing.assert_array_equal(bits(scored.logprobs[: len(prompt) - 1]), bits(of_prompt))


def bits(logprobs):
    return np.asarray(logprobs, np.float32).view(np.int32)
