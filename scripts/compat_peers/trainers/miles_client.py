"""Miles' functions against a server: its rollout, and update from a disk."""

import miles.rollout.sglang_rollout as rollout
import miles.utils.http_utils as http_utils
import pytest
from miles.backends.sglang_utils.sglang_engine import SGLangEngine
from miles.utils.types import Sample

from compat_peers.trainers.common import (
    NUM_LAYERS,
    TOP_K,
    RolloutState,
    engine_of,
    rollout_args,
    run,
    trained_server,
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with trained_server(tmp_path_factory.mktemp("miles")) as (url, weights):
        yield url, weights


@pytest.fixture
def args(served, monkeypatch):
    monkeypatch.setattr(rollout, "GenerateState", RolloutState)
    monkeypatch.setattr(rollout, "lora_rollout_enabled", lambda args: False)
    monkeypatch.setattr(rollout, "compute_routing_headers", lambda args, sample: None)
    return rollout_args(served[0], partial_rollout=False)


def test_a_rollout_is_a_sample_with_rows(args):
    for length in (1, 8):
        sample = Sample(prompt="The sea is")
        run(
            http_utils,
            lambda sample=sample, n=length: rollout.generate(args, sample, {"max_new_tokens": n, "ignore_eos": True}),
        )
        assert sample.status == Sample.Status.TRUNCATED and sample.response_length == length
        assert len(sample.rollout_log_probs) == length
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, NUM_LAYERS, TOP_K)


def test_weights_come_from_a_disk(served, args):
    url, weights = served
    engine = engine_of(SGLangEngine, url)
    for label in ("base-v0", "step-4", "step-4", "step-0"):  # repeats and rollbacks
        engine.pause_generation()
        engine.flush_cache()
        assert engine.update_weights_from_disk(weights, weight_version=label)["success"] is True
        engine.continue_generation()
        assert engine.get_weight_version() == label
        sample = Sample(prompt="The sea is")
        run(http_utils, lambda sample=sample: rollout.generate(args, sample, {"max_new_tokens": 2, "ignore_eos": True}))
        assert sample.weight_versions == [label]
