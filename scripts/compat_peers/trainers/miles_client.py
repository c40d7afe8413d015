"""Miles' functions against a server: its rollout, and update from a disk."""

import argparse
import asyncio
from urllib.parse import urlparse

import httpx
import miles.rollout.sglang_rollout as rollout
import miles.utils.http_utils as http_utils
import pytest
from miles.backends.sglang_utils.sglang_engine import SGLangEngine
from miles.utils.types import Sample
from vllm.tokenizers import get_tokenizer

from compat_peers.trainers.common import NUM_LAYERS, TOP_K, trained_server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with trained_server(tmp_path_factory.mktemp("miles")) as (url, weights):
        yield url, weights


class State:
    """Miles' GenerateState without its processes: a tokenizer."""

    def __init__(self, args):
        self.tokenizer, self.processor = get_tokenizer("policy"), None


@pytest.fixture
def args(served, monkeypatch):
    monkeypatch.setattr(rollout, "GenerateState", State)
    monkeypatch.setattr(rollout, "lora_rollout_enabled", lambda args: False)
    monkeypatch.setattr(rollout, "compute_routing_headers", lambda args, sample: None)
    address = urlparse(served[0])
    return argparse.Namespace(
        ci_test=False,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        use_rollout_routing_replay=True,
        num_layers=NUM_LAYERS,
        moe_router_topk=TOP_K,
        sglang_speculative_algorithm=None,
        partial_rollout=False,
    )


def run(make, *, limit_s=100):
    """Run a coroutine with Miles' HTTP client."""

    async def main():
        async with httpx.AsyncClient(timeout=limit_s, trust_env=False) as client:
            http_utils._http_client = client
            return await asyncio.wait_for(make(), limit_s)

    return asyncio.run(main())


def test_a_rollout_is_a_sample_with_rows(args):
    for length in (1, 8):
        sample = Sample(prompt="The sea is")
        run(lambda sample=sample, n=length: rollout.generate(args, sample, {"max_new_tokens": n, "ignore_eos": True}))
        assert sample.status == Sample.Status.TRUNCATED and sample.response_length == length
        assert len(sample.rollout_log_probs) == length
        assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, NUM_LAYERS, TOP_K)


def test_weights_come_from_a_disk(served, args):
    url, weights = served
    address = urlparse(url)
    engine = SGLangEngine.__new__(SGLangEngine)
    engine.node_rank, engine.server_host, engine.server_port = 0, address.hostname, address.port
    for label in ("base-v0", "step-4", "step-4", "step-0"):  # repeats and rollbacks
        engine.pause_generation()
        engine.flush_cache()
        assert engine.update_weights_from_disk(weights, weight_version=label)["success"] is True
        engine.continue_generation()
        assert engine.get_weight_version() == label
        sample = Sample(prompt="The sea is")
        run(lambda sample=sample: rollout.generate(args, sample, {"max_new_tokens": 2, "ignore_eos": True}))
        assert sample.weight_versions == [label]
