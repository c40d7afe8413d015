"""A step as the scheduler hands it over: the sampler mode that a request needs."""

import pytest

from routed_experts.core.model_worker_batch import SamplingMode
from routed_experts.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        (SamplingParams(temperature=0, top_k=5), SamplingMode.GREEDY),
        (SamplingParams(), SamplingMode.RANDOM),
        (SamplingParams(top_p=0.9), SamplingMode.FILTERED),
        (SamplingParams(temperature=0, presence_penalty=0.5), SamplingMode.FULL),
        (SamplingParams(temperature=0, logit_bias={1: 2.0}), SamplingMode.FULL),
    ],
)
def test_the_smallest_mode_that_serves_a_request(sampling: SamplingParams, mode: SamplingMode) -> None:
    assert SamplingMode.required_by(sampling.resolve()) is mode


def test_the_largest_mode_serves_every_row() -> None:
    greedy, random = SamplingParams(temperature=0).resolve(), SamplingParams().resolve()
    filtered = SamplingParams(top_p=0.9).resolve()
    assert max(map(SamplingMode.required_by, [greedy, greedy])) is SamplingMode.GREEDY
    assert max(map(SamplingMode.required_by, [greedy, random])) is SamplingMode.RANDOM
    assert max(map(SamplingMode.required_by, [random, filtered, greedy])) is SamplingMode.FILTERED
