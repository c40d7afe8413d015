"""In bfloat16 too, the CPU's kernels give the same bits however a prompt is cut into steps, and whether tokens are
decoded or scored."""

import numpy as np
import pytest

from routed_experts import Engine
from routed_experts.demo import demo_model_path
from routed_experts.formats.meta_info import record_from_meta_info

pytestmark = pytest.mark.usefixtures("lazy_compilation")

PROMPT = np.random.default_rng(0).integers(3, 900, 150).tolist()


def answer(chunk):
    sizes = {
        "precompile_bs_paddings": (4,),
        "precompile_token_paddings": (chunk,),
        "chunked_prefill_size": chunk,
        "context_length": 256,
    }
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    with Engine(
        str(demo_model_path()), enable_return_routed_experts=True, disable_radix_cache=True, dtype="bfloat16", **sizes
    ) as engine:
        output = engine.generate(
            input_ids=PROMPT,
            sampling_params=sampling,
            return_routed_experts=True,
            return_logprob=True,
            logprob_start_len=0,
        )
        (scored,) = engine.score([PROMPT + output["output_ids"]])
    meta = output["meta_info"]
    logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    return output["output_ids"], record_from_meta_info(output).ids, np.array(logprobs), scored


@pytest.fixture(scope="module")
def whole():
    return answer(160)


@pytest.mark.parametrize("chunk", [16, 50])
def test_chunks_do_not_change_a_bit(whole, chunk):
    (tokens, ids, logprobs, scored), (expected_tokens, expected_ids, expected_logprobs, expected_scored) = (
        answer(chunk),
        whole,
    )
    assert tokens == expected_tokens
    assert np.array_equal(ids, expected_ids)
    assert np.array_equal(logprobs, expected_logprobs)
    assert np.array_equal(scored.routed_experts.ids, expected_scored.routed_experts.ids)
    assert np.array_equal(scored.logprobs, expected_scored.logprobs)


def test_score_has_the_rows_and_logprobs_of_the_rollout(whole):
    """The logprob of a token that was chosen is rounded in another formula, its logits are the same."""
    _, ids, logprobs, scored = whole
    assert np.array_equal(scored.routed_experts.ids[: len(ids)], ids)
    assert np.array_equal(scored.logprobs[: len(PROMPT) - 1], logprobs[: len(PROMPT) - 1])
    np.testing.assert_allclose(scored.logprobs, logprobs, atol=2e-6)
