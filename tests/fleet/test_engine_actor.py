"""EngineActor without Ray: an engine that remembers answers, and whose calls are aborted."""

import threading

import pytest

from routed_experts import ServerArgs, SpeculativeConfig
from routed_experts.core.errors import InvalidRequestError
from routed_experts.fleet import engine_actor as module
from routed_experts.fleet.settings import FleetSettings
from routed_experts.fleet.spec import ReplicaSpec
from routed_experts.server.limits import ServerSettings
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

SIZES = {"page_size": 4, "max_total_tokens": 512, "context_length": 128, "precompile_bs_paddings": (4,)}
SIZES |= {"precompile_token_paddings": (32,), "skip_tokenizer_init": True, "enable_return_routed_experts": True}
SAMPLING = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "max_new_tokens": 16}
PROMPT = [5, 6, 7, 8]
REMEMBERING = SpeculativeConfig(algorithm="NGRAM", scope="namespace", adaptive=False)


@pytest.fixture(scope="module")
def actor(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    args = ServerArgs(model_path=str(folder), **SIZES)
    settings = FleetSettings(num_replicas=1, ray_address="auto")
    spec = ReplicaSpec(args=args, server=ServerSettings(), fleet=settings, speculative=REMEMBERING)
    with pytest.MonkeyPatch.context() as patch, lazy_compilation():
        patch.setattr(module, "actor_id", lambda: "one")
        actor = module.EngineActor(spec, [])
        yield actor
        actor.shutdown()


def accepted(result):
    return result["meta_info"]["spec_accept_token_num"]


def test_an_answer_that_is_handed_in_is_a_draft_until_it_is_flushed(actor):
    (first,) = actor.generate([PROMPT], SAMPLING, {"return_routed_experts": True}, "first")
    actor.remember_rollouts(PROMPT, first["output_ids"], 7, 0, None)
    (second,) = actor.generate([PROMPT], SAMPLING, {"return_routed_experts": True}, "second")
    assert second["output_ids"] == first["output_ids"] and accepted(second) > max(accepted(first), 8)
    assert (second["routed_experts"] == first["routed_experts"]).all()
    assert actor.flush_cache(True, False) > 0
    (third,) = actor.generate([PROMPT], SAMPLING, {}, "third")
    assert third["output_ids"] == first["output_ids"] and accepted(third) == accepted(first)
    with pytest.raises(InvalidRequestError, match="seed=-1 must be an integer"):
        actor.remember_rollouts(PROMPT, [5], -1, 0, None)


def test_an_abort_ends_a_call_that_waits_in_a_pause(actor):
    actor.pause("in_place")
    before, results = actor.stats(), []
    thread = threading.Thread(
        target=lambda: results.append(actor.generate([PROMPT] * 3, SAMPLING, {"rid": list("abc")}, "x"))
    )
    thread.start()
    actor.abort("x")  # whether it has begun or not
    thread.join(30)
    actor.flush_cache(False, False)  # between steps, after the abort
    stats = actor.stats()
    assert results == [None] and (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["finished"].get("length") == before["finished"].get("length")
    actor.resume()
    assert len(actor.generate([PROMPT] * 3, SAMPLING, {"rid": list("abc")}, "y")) == 3
