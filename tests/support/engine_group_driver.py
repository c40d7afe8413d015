"""The driver of an RL framework, for a test: it owns a placement group and puts engines into it.

It prints {"passed": true}. `python -m support.engine_group_driver SPEC`, SPEC a JSON object
with the address of a Ray and the folder of weights."""

import dataclasses
import functools
import json
import os
import signal
import sys

import numpy as np
import ray

from routed_experts import ConfigError, InvalidRequestError, ReplicaLostError, ServerArgs, WeightsMismatchError
from routed_experts.core.errors import MemoryPlanError
from routed_experts.fleet import bundles
from routed_experts.fleet.engine_group import EngineGroup, processes
from routed_experts.fleet.start import application
from support.process_groups import Stopwatch

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 6}
PROMPTS = [[5, 6, 7, number] for number in range(8, 13)]
SIZES = {"page_size": 4, "max_total_tokens": 512, "context_length": 128, "precompile_bs_paddings": (4,)}
SIZES |= {"precompile_token_paddings": (32,), "skip_tokenizer_init": True, "enable_return_routed_experts": True}


def main(spec):
    folder = spec["folders"]
    args = ServerArgs(model_path=f"{folder}/w0", **SIZES)
    assert "call ray.init" in str(raised(ConfigError, lambda: EngineGroup.create(args)))
    ray.init(address=spec["address"], namespace="trainer", log_to_driver=False)
    placement_group = ray.util.placement_group([{"CPU": 1}] * 3)
    ray.get(placement_group.ready())
    free = ray.available_resources()["CPU"]
    wrong = [{"bundle_indices": [0]}, {"bundle_indices": [1, 1]}, {"bundle_indices": [1, 3]}]
    for keywords in wrong:
        create = functools.partial(EngineGroup.create, args, placement_group=placement_group, replicas=2, **keywords)
        assert "bundle_indices=" in str(raised(ConfigError, create))
    absent = functools.partial(EngineGroup.create, ServerArgs(model_path=f"{folder}/absent", **SIZES))
    assert "absent" in str(raised(ConfigError, lambda: absent(placement_group=placement_group, replicas=2)))
    check_what_does_not_fit(args)
    group = EngineGroup.create(args, placement_group=placement_group, bundle_indices=[2, 0], replicas=2)
    assert ray.available_resources()["CPU"] == free, "it reserves nothing beside the group"
    check_answers(group)
    check_weights(group, folder)
    check_memory(group)
    check_death(group)
    group.shutdown()
    two = ServerArgs(model_path=f"{folder}/w0", tp_size=2, **SIZES)
    with_follower = EngineGroup.create(two, processes(2), placement_group=placement_group, bundle_indices=[1, 2])
    alone = with_follower.generate(PROMPTS[:2], GREEDY, return_routed_experts=True)
    assert [result["routed_experts"].shape for result in alone] == [(9, 1, 4)] * 2
    with_follower.prepare_weights(f"{folder}/w1", version="step-1")
    with_follower.commit_weights("step-1")
    assert [(stats["weight_version"], stats["update_count"]) for stats in with_follower.stats()] == [("step-1", 1)]
    with_follower.shutdown()
    bound = application({"model_path": f"{folder}/w0", "num_replicas": 2, "nnodes": 2, "tp_size": 2})
    assert type(bound).__name__ == "Application", "what `serve deploy` and KubeRay import"
    ray.util.remove_placement_group(placement_group)
    print(json.dumps({"passed": True}), flush=True)


def raised(kind, call):
    """The error of a call that must fail."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_what_does_not_fit(args):
    """Of four CPUs the group of this driver has three."""
    bundles.PLACEMENT_S = 2.0
    for keywords, text in (
        ({"replicas": 9}, "replicas=9 do not fit (CPU: 9 needed, 4 free); set replicas=4"),
        ({"replicas": 3}, "not reserved within 2 s: replicas=3 do not fit (CPU: 3 needed, 1 free); set replicas=1"),
        ({"resources": {"CPU": 2}}, "CPU=2 for an engine, above bundle 0"),
    ):
        error = raised(ConfigError, functools.partial(EngineGroup.create, args, **keywords))
        assert text in str(error), error
    large = dataclasses.replace(args, max_total_tokens=10**12)
    error = raised(MemoryPlanError, lambda: EngineGroup.create(large))
    assert error.ways and "max_total_tokens" in str(error), error
    states = [entry["state"] for entry in ray.util.placement_group_table().values()]
    assert states.count("CREATED") == 1 and "PENDING" not in states, states


def check_answers(group):
    results = group.generate(PROMPTS, GREEDY, return_routed_experts=True)
    assert len(results) == 5 and all(len(result["output_ids"]) == 6 for result in results)
    for prompt, result in zip(PROMPTS, results, strict=True):
        rows = result["routed_experts"]
        assert type(rows) is np.ndarray and rows.dtype == np.uint8 and rows.shape == (len(prompt) + 5, 1, 4)
        assert "routed_experts" not in result["meta_info"] and result["layer_ids"] == (1,)
    tokens = [[*prompt, *result["output_ids"]] for prompt, result in zip(PROMPTS, results, strict=True)]
    scores = group.score(tokens)
    assert all((score["token_ids"] == ids).all() for score, ids in zip(scores, tokens, strict=True))
    for score, result in zip(scores, results, strict=True):
        assert score["logprobs"].shape == (9,) and score["logprobs"].dtype == np.float32
        assert (score["routed_experts"][:9] == result["routed_experts"]).all(), "the same routes, on another engine"
    one = group.generate(PROMPTS[:1], GREEDY)
    assert one[0]["output_ids"] == results[0]["output_ids"] and group.generate([], GREEDY) == []
    assert sum(stats["accepted"] for stats in group.stats()) == 6


def check_weights(group, folder):
    before = group.generate(PROMPTS, GREEDY)
    error = raised(WeightsMismatchError, lambda: group.prepare_weights(f"{folder}/other", version=1))
    assert "engine 0: " in str(error) and "engine 1: " in str(error)
    group.prepare_weights(f"{folder}/w1", version=1)
    assert [stats["prepared_version"] for stats in group.stats()] == ["1", "1"]
    assert [r["output_ids"] for r in group.generate(PROMPTS, GREEDY)] == [r["output_ids"] for r in before]
    group.commit_weights(1)
    after = group.generate(PROMPTS, GREEDY)
    assert {result["meta_info"]["weight_version"] for result in after} == {"1"}
    assert [r["output_ids"] for r in after] != [r["output_ids"] for r in before]
    error = raised(InvalidRequestError, lambda: group.prepare_weights(f"{folder}/w1", version="x" * 257))
    assert "has 257 characters, above 256" in str(error)
    group.update_weight_version("1")  # the same label again: another update, on all engines
    assert [(stats["weight_version"], stats["update_count"]) for stats in group.stats()] == [("1", 2)] * 2
    again = group.generate(PROMPTS, GREEDY, return_routed_experts=True)
    assert [r["output_ids"] for r in again] == [r["output_ids"] for r in after]
    assert {result["version_spans"] for result in again} == {((0, 9, 2),)}
    (score,) = group.score([PROMPTS[0]])
    assert (score["weight_version"], score["update_count"]) == ("1", 2)


def check_memory(group):
    freed = group.flush_cache(drafts=True)
    assert len(freed) == 2 and all(pages > 0 for pages in freed), freed
    for _ in range(20):  # of whose two errors one comes late, and is read all the same
        error = raised(InvalidRequestError, lambda: group.remember_rollouts(PROMPTS[0], [5]))
    assert error.param == "speculative_scope" and "takes no answers as drafts" in str(error)
    group.pause()
    assert [stats["paused"] for stats in group.stats()] == ["retract"] * 2
    group.release_memory(["kv_cache"])
    assert [stats["released"] for stats in group.stats()] == [["kv_cache"]] * 2
    group.resume_memory()
    group.resume()
    assert len(group.generate(PROMPTS, GREEDY)) == 5


def check_death(group):
    pid = ray.get(group.actors[1].__ray_call__.remote(lambda actor: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    watch = Stopwatch()
    error = raised(ReplicaLostError, lambda: group.generate(PROMPTS, GREEDY))
    assert error.code == "replica_lost" and watch.seconds < 10
    assert ray.get(group.actors[0].stats.remote())["update_count"] == 2, "the other one is not touched"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
