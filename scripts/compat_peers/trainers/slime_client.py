"""slime's functions against a server: its discovery of engines, rollout, abort until idle, and update from a disk."""

import asyncio
import threading

import pytest
import requests
import slime.backends.sglang_utils.server_control as server_control
import slime.rollout.sglang_rollout as rollout
import slime.utils.http_utils as http_utils
from slime.backends.sglang_utils.external import discover_external_engines
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.types import Sample

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
    with trained_server(tmp_path_factory.mktemp("slime")) as (url, weights):
        yield url, weights


@pytest.fixture
def args(served, monkeypatch):
    monkeypatch.setattr(rollout, "GenerateState", RolloutState)
    return rollout_args(served[0])


def test_external_engines_are_discovered(served):
    (info,) = discover_external_engines([served[0].removeprefix("http://")])
    assert (info.worker_type, info.num_gpus) == ("regular", 1)
    assert info.parallel_config == {"tp_size": 1, "pp_size": 1, "ep_size": 1, "moe_dp_size": 1}


def test_a_rollout_is_a_sample_with_rows(args):
    sample = Sample(prompt="The sea is")
    params = {"temperature": 1.0, "max_new_tokens": 8, "no_stop_trim": True, "spaces_between_special_tokens": False}
    run(
        http_utils, lambda: rollout.generate(args, sample, {**params, "skip_special_tokens": False, "ignore_eos": True})
    )
    assert sample.status == Sample.Status.TRUNCATED and sample.response_length == 8
    assert len(sample.rollout_log_probs) == 8 and sample.loss_mask == [1] * 8
    assert tuple(sample.rollout_routed_experts.shape) == (len(sample.tokens) - 1, NUM_LAYERS, TOP_K)
    assert len(sample.weight_versions) == 1


def test_a_partial_rollout_goes_on(args):
    sample = Sample(prompt="The sea is")
    for length in (4, 12):
        sample.status = Sample.Status.PENDING
        run(
            http_utils,
            lambda length=length: rollout.generate(args, sample, {"max_new_tokens": length, "ignore_eos": True}),
        )
    assert sample.response_length == 12
    assert tuple(sample.rollout_routed_experts.shape) == (len(sample.tokens) - 1, NUM_LAYERS, TOP_K)


def test_abort_waits_until_the_server_is_idle(served, args):
    samples = [Sample(prompt=f"Story {index}") for index in range(32)]

    async def main():
        tasks = [
            asyncio.create_task(rollout.generate(args, sample, {"max_new_tokens": 1900, "ignore_eos": True}))
            for sample in samples
        ]
        while await server_control._get_server_num_requests(served[0]) < 32:
            assert not any(task.done() for task in tasks)
        await server_control.abort_server_until_idle(served[0], retry_interval=0)
        assert await server_control._get_server_num_requests(served[0]) == 0
        await asyncio.gather(*tasks)

    run(http_utils, main)
    assert all(sample.status == Sample.Status.ABORTED for sample in samples)


def test_weights_come_from_a_disk_while_rollouts_run(served, args):
    """As slime's updater: pause, which ends what runs, flush, load, continue. An ended sample goes on, as a partial
    rollout does. Every sample is whole in the end, and tells the versions that it saw."""
    url, weights = served
    engine, samples = engine_of(SGLangEngine, url), [Sample(prompt=f"Story {index}") for index in range(32)]
    assert engine.health_generate() is True

    def roll_out(samples):
        async def main():
            params = {"max_new_tokens": 200, "ignore_eos": True, "temperature": 1.0}
            await asyncio.gather(*(rollout.generate(args, sample, dict(params)) for sample in samples))

        run(http_utils, main)

    thread = threading.Thread(target=roll_out, args=(samples,))
    thread.start()
    while requests.get(f"{url}/v1/loads?include=core", timeout=10).json()["aggregate"]["total_running_reqs"] < 1:
        assert thread.is_alive()
    engine.pause_generation()
    engine.flush_cache()
    assert engine.update_weights_from_disk(weights, load_format="auto", weight_version="step-4")["success"] is True
    assert engine.get_weight_version() == "step-4"
    engine.continue_generation()
    thread.join()
    ended = [sample for sample in samples if sample.status == Sample.Status.ABORTED]
    assert ended
    for sample in ended:
        sample.status = Sample.Status.PENDING
    roll_out(ended)
    assert all(sample.response_length == 200 for sample in samples)
    assert all(sample.weight_versions[-1] == "step-4" for sample in ended)
    assert all(len(sample.rollout_routed_experts) == len(sample.tokens) - 1 for sample in samples)
    after = Sample(prompt="The sea is")
    run(http_utils, lambda: rollout.generate(args, after, {"max_new_tokens": 2, "ignore_eos": True}))
    assert after.weight_versions == ["step-4"]
