"""A token with non-finite values (NaN from bad weights or an overflow) spoils its own request from there on, and
nothing else: no neighbour in a step, no earlier token, no later user of its pages and its slot."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.driver import Bench, request
from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts.models.model_folder import ModelFolder

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

BROKEN, WHOLE = 200, 201  # token ids: the first is embedded as NaN
FAMILIES = ("Mixtral", "GptOss", "DeepseekV3", "Llama4", "Qwen3_5Moe")  # windows; sinks; latent rows; chunks; states


def prompts(middle):
    """A request with `middle` as its 21st token, and its neighbours; all are cut into the same steps and tiles."""
    rng = np.random.default_rng(0)
    first, *others = (rng.integers(0, BROKEN, size) for size in (50, 9, 33, 20))
    first[20] = middle
    return [first, *others]


def run_prompts(drive, prompts):
    drive.run(*(request(str(i), prompt, 6, prompt_logprobs_from=0) for i, prompt in enumerate(prompts)), check=False)
    return [drive.outputs[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_that_is_no_number_spoils_its_own_request_alone(tmp_path, name):
    model = ModelFolder.open(Oracle(CASES[name], tmp_path).folder).load(jnp.dtype(jnp.float32))
    model.embed = nnx.Param(model.embed[...].at[BROKEN].set(jnp.nan))
    bench = Bench(
        model,
        page_size=8,
        context_length=80,
        max_total_tokens=160,
        precompile_bs_paddings=(4,),
        precompile_token_paddings=(32,),
        moe_backend="tiled",
        attention_backend="paged",
        disable_radix_cache=True,
    )
    whole, broken = (run_prompts(bench.drive(), prompts(middle)) for middle in (WHOLE, BROKEN))
    for before, after in zip(whole[1:], broken[1:], strict=True):
        assert after.tokens == before.tokens and len(after.tokens) == 6
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)
        np.testing.assert_allclose(after.prompt_logprobs[1:], before.prompt_logprobs[1:], atol=1e-5)
    scored = np.array(broken[0].prompt_logprobs[1:], float)  # of tokens 1, 2, ...; the 21st is scored by the 20th
    np.testing.assert_allclose(scored[:19], np.array(whole[0].prompt_logprobs[1:20], float), atol=1e-5)
    assert np.all(np.isnan(scored[20:]))
    drive = bench.drive()  # pages and slots are those that were spoiled
    assert [output.tokens for output in run_prompts(drive, prompts(BROKEN)[1:])] == [
        output.tokens for output in whole[1:]
    ]
    assert VOCAB_SIZE > WHOLE
