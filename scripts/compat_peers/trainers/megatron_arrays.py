"""Megatron's RouterReplay on our arrays: the ids that a router takes are those of the record."""

import importlib.util

import pytest
import torch

from compat_peers.trainers.arrays import CHECKOUT, EXPERTS, LAYERS, TOP_K, record
from routed_experts import formats


@pytest.fixture
def replay():
    """The module of the checkout; it imports torch alone."""
    path = CHECKOUT / "megatron/core/transformer/moe/router_replay.py"
    spec = importlib.util.spec_from_file_location("router_replay", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.RouterReplay.clear_global_router_replay_instances()


def test_a_router_takes_the_experts_of_the_record_and_its_own_scores(replay):
    rollout, routers = record(), [replay.RouterReplay() for _ in LAYERS]
    per_layer, mask = formats.megatron.encode(rollout)
    replay.RouterReplay.set_replay_data([torch.from_numpy(ids) for ids in per_layer])
    replay.RouterReplay.set_global_router_replay_action(replay.RouterReplayAction.REPLAY_FORWARD)
    scores = torch.rand(rollout.num_tokens, EXPERTS)
    for column, router in enumerate(routers):
        weights, ids = router.get_replay_topk(scores, TOP_K)
        assert (ids.numpy()[mask] == rollout.ids[:, column]).all() and torch.equal(weights, scores.gather(1, ids))
    assert mask.tolist() == [True] * (rollout.num_tokens - 1) + [False]


def test_another_number_of_layers_and_a_row_of_minus_one_are_errors(replay):
    router = replay.RouterReplay()
    with pytest.raises(ValueError, match="does not match instances"):
        replay.RouterReplay.set_replay_data([torch.zeros(2, TOP_K, dtype=torch.int64)] * 2)
    router.set_target_indices(torch.full((2, TOP_K), -1))
    router.set_router_replay_action(replay.RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        router.get_replay_topk(torch.rand(2, EXPERTS), TOP_K)
