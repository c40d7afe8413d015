"""Abort, shutdown and death: each request ends once, with the output so far and its rows."""

import asyncio
import concurrent.futures
import dataclasses
import gc
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import io_callback

import routed_experts
from routed_experts import CheckpointError, Engine, EngineDeadError, InvalidRequestError
from routed_experts.core.errors import PeerLostError
from routed_experts.core.io_struct import GenerateReqInput
from routed_experts.engine.build.backends import BackendRegistry
from routed_experts.engine.requests.outputs import request_output
from routed_experts.engine.requests.sequence_state import SequenceState
from routed_experts.engine.requests.sglang_output import sglang_output
from routed_experts.formats.meta_info import extract_routed_experts_from_meta_info, record_from_meta_info
from routed_experts.layers.moe import MoeBackend, reference_experts
from routed_experts.replay import merge_turns
from routed_experts.scheduling.schedule_batch import Req
from support.backends import with_moe
from support.engines import SMALL, assert_idle, on_engine_thread
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LONG = GREEDY | {"max_tokens": 400}
ABORTED = {"type": "abort", "message": "aborted by the caller"}
SHUT_DOWN = {"type": "abort", "message": "the engine was shut down"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def assert_row_law(result, whole):
    """Rows, tokens and text of an aborted request are those that an unhurried one begins with."""
    ids, meta = result["output_ids"], result["meta_info"]
    assert ids == whole["output_ids"][: len(ids)] and meta["completion_tokens"] == len(ids)
    record, start = record_from_meta_info(result), meta["routed_experts_start_len"]
    if not ids:
        info = meta["routed_experts_info"]
        assert meta["routed_experts"] is None and record is None
        assert (
            info["shape"][0] == info["prompt_rows"] == 0
            and info["num_tokens"] == info["num_prompt_tokens"] == meta["prompt_tokens"]
        )
        return
    record.validate()
    assert record.num_rows == meta["prompt_tokens"] + len(ids) - 1 - start
    assert np.array_equal(record.ids, record_from_meta_info(whole).ids[start : start + record.num_rows])


# --- abort, step by step


def play(engine, kwargs, script):
    """Play a scene with the requests of one call on the engine thread: `script(core, rids)` yields whenever a step is
    to be made. Returns the answers, and how many steps after its abort each ended."""
    requests = engine.input_processor.process(GenerateReqInput(**kwargs))
    answers = {
        request.rid: SequenceState(
            request, engine.tokenizer, logprobs_mode="processed", capture=engine.components.capture
        )
        for request in requests
    }

    def scene(core):
        core.add([Req(request) for request in requests])
        steps = script(core, [request.rid for request in requests])
        ends = {}
        for number in range(1000):
            next(steps, None)
            for out in core.step().outs:
                answers[out.rid].update(out)
                if out.finish_reason is not None:
                    assert out.rid not in ends, "a second end"
                    ends[out.rid] = number
            assert core.check_integrity() == []
            if core.is_idle:
                return
        raise AssertionError("no end")

    on_engine_thread(engine, scene)
    assert_idle(engine)
    return [sglang_output(answer) for answer in answers.values()]


LONG_PROMPT = [int(token) for token in np.random.default_rng(5).integers(3, 313, 100)]  # four chunks of 32


@pytest.mark.parametrize("start", [0, 40, 100])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5, 6, 9, 30])
def test_an_abort_at_any_step_keeps_the_output_and_its_rows(engine, num_steps, start):
    """Queued, in each chunk of the prefill, at the first token, in decode: with the next step always in flight."""
    engine.flush_cache()
    kwargs = {"input_ids": LONG_PROMPT, "sampling_params": GREEDY | {"max_tokens": 40}, "return_routed_experts": True}
    whole = engine.generate(**kwargs)
    engine.flush_cache()

    def script(core, rids):
        for _ in range(num_steps):
            yield
        assert core.abort(rids[0]) and not core.abort(rids[0])
        assert core.request_table.num_live == 0 and not core.ranks[0].running, "pages are back at once"
        assert core.check_integrity() == [], "and what was recorded of them is forgotten"

    (result,) = play(engine, kwargs | {"routed_experts_start_len": start}, script)
    assert result["meta_info"]["finish_reason"] == ABORTED
    assert len(result["output_ids"]) == max(0, num_steps - 4)  # four chunks; outputs arrive one step later
    assert_row_law(result, whole)


def test_a_request_aborted_before_its_first_token_has_no_rows(engine):
    """Null on the wire; empty as vLLM's arrays; and its continuation is merged with it."""
    request = {"input_ids": LONG_PROMPT, "sampling_params": GREEDY | {"max_tokens": 4}, "return_routed_experts": True}
    (sequence,) = (
        SequenceState(made, engine.tokenizer, logprobs_mode="processed", capture=engine.components.capture)
        for made in engine.input_processor.process(GenerateReqInput(**request))
    )

    def scene(core):
        core.add([Req(sequence.request)])
        core.abort(sequence.request.rid)
        for out in core.step().outs:
            sequence.update(out)

    on_engine_thread(engine, scene)
    assert_idle(engine)
    answer, output = sglang_output(sequence), request_output([sequence], None)
    assert extract_routed_experts_from_meta_info(answer) is record_from_meta_info(answer) is None
    assert output.prompt_routed_experts.shape == output.outputs[0].routed_experts.shape == (0, 3, 4)
    empty = output.outputs[0].record
    assert (empty.num_rows, empty.num_tokens, empty.num_prompt_tokens) == (0, len(LONG_PROMPT), len(LONG_PROMPT))
    whole = engine.generate(**request)
    tokens, record = np.array([*LONG_PROMPT, *whole["output_ids"]]), record_from_meta_info(whole)
    merged = merge_turns([(np.array(LONG_PROMPT), empty), (tokens, record)], tokens)
    assert merged.valid is None and np.array_equal(merged.ids, record.ids)
    alone = merge_turns([(np.array(LONG_PROMPT), empty)], tokens)
    assert alone.num_rows == tokens.size - 1 and not alone.known.any()


def test_the_prompt_of_an_output_is_that_of_the_first_choice_with_a_token(engine):
    sampling = GREEDY | {"max_tokens": 4, "n": 2, "prompt_logprobs": 1}
    request = GenerateReqInput(input_ids=LONG_PROMPT, sampling_params=sampling, return_routed_experts=True)
    requests = engine.input_processor.process(request)
    whole, call = engine.new_call(requests), engine.new_call(requests)
    list(whole.outputs())
    engine.pause(mode="in_place")
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            read = pool.submit(lambda: list(call.outputs()))
            while on_engine_thread(engine, lambda core: core.request_table.num_live) < 2:
                assert not read.done(), read.result()
            assert engine.abort(requests[0].rid) == 1
            engine.resume()
            read.result(30)
    finally:
        engine.resume()
    output, expected = request_output(call.sequences, None), request_output(whole.sequences, None)
    assert [choice.finish_reason for choice in output.outputs] == ["abort", "length"]
    assert output.prompt_routed_experts.shape[0] == len(LONG_PROMPT)
    assert np.array_equal(output.prompt_routed_experts, expected.prompt_routed_experts)
    assert output.prompt_logprobs == expected.prompt_logprobs is not None


def test_an_aborted_prefix_serves_the_next_request(engine):
    engine.flush_cache()
    kwargs = {"input_ids": LONG_PROMPT, "sampling_params": LONG}

    def script(core, rids):
        for _ in range(4):
            yield
        core.abort(rids[0])

    play(engine, kwargs, script)
    result = engine.generate(
        input_ids=LONG_PROMPT, sampling_params=GREEDY, max_new_tokens=4, return_routed_experts=True
    )
    assert result["meta_info"]["cached_tokens"] == 96, "the chunks that were read stay cached"
    engine.flush_cache()
    whole = engine.generate(input_ids=LONG_PROMPT, sampling_params=GREEDY, max_new_tokens=4, return_routed_experts=True)
    assert result["output_ids"] == whole["output_ids"]
    assert np.array_equal(record_from_meta_info(result).ids, record_from_meta_info(whole).ids)


def test_an_abort_while_retracted_keeps_tokens_and_rows(engine):
    kwargs = {
        "input_ids": [LONG_PROMPT[:20], LONG_PROMPT[40:60]],
        "sampling_params": GREEDY | {"max_tokens": 40},
        "return_routed_experts": True,
    }
    whole = engine.generate(**kwargs)

    def script(core, rids):
        for _ in range(12):
            yield
        core.drain()
        second = core.request_table.find(rids[1])
        core.retract(second)
        assert core.abort(rids[1])

    results = play(engine, kwargs, script)
    assert [item["meta_info"]["finish_reason"]["type"] for item in results] == ["length", "abort"]
    assert 8 <= len(results[1]["output_ids"]) <= 12
    for result, complete in zip(results, whole, strict=True):
        assert_row_law(result, complete)


def test_abort_of_one_choice_leaves_the_others(engine):
    kwargs = {
        "input_ids": LONG_PROMPT[:20],
        "sampling_params": {"n": 3, "seed": 2, "max_tokens": 20, "ignore_eos": True},
    }
    whole = engine.generate(**kwargs)

    def script(core, rids):
        for _ in range(6):
            yield
        core.abort(rids[0])

    results = play(engine, kwargs, script)
    assert [result["meta_info"]["finish_reason"]["type"] for result in results] == ["abort", "length", "length"]
    assert [result["output_ids"] for result in results[1:]] == [result["output_ids"] for result in whole[1:]]


# --- abort through the engine's API


class Background:
    """A call that runs in a thread of its own; its first event has come, so it decodes."""

    def __init__(self, engine, *args, **kwargs) -> None:
        self.events = queue.SimpleQueue()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._running = self._pool.submit(self._run, engine, args, kwargs)
        self.events.get(timeout=60)

    def _run(self, engine, args, kwargs):
        last = {}
        for event in engine.generate(*args, stream=True, **kwargs):
            last[event.get("index", 0)] = event
            self.events.put(event)
        return [last[index] for index in sorted(last)]

    def result(self):
        answer = self._running.result(timeout=60)
        self._pool.shutdown()
        return answer


def test_abort_by_id_ends_all_choices_and_prompts_of_the_call(engine):
    call = Background(engine, ["once upon", "the cat"], LONG | {"n": 2}, rid="job")
    assert engine.abort("job") == 4
    assert [result["meta_info"]["finish_reason"] for result in call.result()] == [ABORTED] * 4
    assert engine.abort("job") == engine.abort("nobody") == 0


def test_an_id_that_only_looks_like_part_of_a_call_is_another_request(engine):
    call, other = (
        Background(engine, "once upon", LONG | {"n": 2}, rid="job"),
        Background(engine, "experts", LONG, rid="job-7"),
    )
    assert engine.abort("job") == 2
    assert [result["meta_info"]["finish_reason"] for result in call.result()] == [ABORTED] * 2
    assert engine.abort("job-7") == 1
    assert other.result()[0]["meta_info"]["finish_reason"] == ABORTED


@pytest.mark.parametrize(("rids", "n", "name", "ended"), [
    (["job-1", "job-2"], 1, "job", 0),
    (["job-1", "job-2"], 1, "job-2", 1),
    (["job-1", "solo"], 2, "job-1", 2),
    (["job-1", "solo"], 2, "solo", 2),
    (["job-1", "solo"], 2, "solo-0", 1),
])  # fmt: skip
def test_abort_by_the_id_of_a_prompt_in_a_list_ends_its_choices_alone(engine, rids, n, name, ended):
    call = Background(engine, ["once upon", "the cat"], LONG | {"n": n}, rid=rids)
    assert engine.abort(name) == ended
    aborted = [result["meta_info"]["id"] for result in call.result() if result["meta_info"]["finish_reason"] == ABORTED]
    assert len(aborted) == ended and all(rid.startswith(name) for rid in aborted)


def test_a_call_with_a_repeated_id_is_refused_and_other_requests_go_on(engine):
    other = Background(engine, "experts", LONG, rid="other")
    for rids, counts in ((["a", "a-1"], [2, 1]), (["b-0", "b"], [1, 2]), (["c", "c-0"], [2, 2])):
        params = [{**GREEDY, "n": count} for count in counts]
        with pytest.raises(InvalidRequestError, match="twice") as caught:
            engine.generate(["once", "upon"], params, rid=rids)
        assert (caught.value.param, caught.value.code) == ("rid", "duplicate_request_id")
    assert engine.abort("other") == 1
    assert other.result()[0]["meta_info"]["finish_reason"] == ABORTED
    first, second = engine.generate(["once", "upon"], GREEDY, rid=["a", "a-1"])  # no id occurs twice
    assert (first["meta_info"]["id"], second["meta_info"]["id"]) == ("a", "a-1")


@pytest.mark.parametrize(("live", "count", "rid", "n"), [("d", 2, "d-0", 2), ("e-1", 2, "e", 2), ("f", 1, "f", 2)])
def test_an_id_of_a_live_call_or_choice_is_no_id_of_another_call(engine, live, count, rid, n):
    call = Background(engine, "once upon", LONG | {"n": count}, rid=live)
    with pytest.raises(InvalidRequestError, match="Duplicate request ID") as caught:
        engine.generate("the cat", GREEDY | {"n": n}, rid=rid)
    assert caught.value.code == "duplicate_request_id"
    assert engine.abort(live) == count
    assert all(result["meta_info"]["finish_reason"] == ABORTED for result in call.result())


def test_an_id_in_a_list_is_not_that_of_a_call_with_one_prompt(engine):
    call = Background(engine, "once upon", LONG, rid="a")
    (answer,) = engine.generate(["the cat"], GREEDY, rid=["a-0"])
    assert answer["meta_info"]["id"] == "a-0" and engine.abort("a") == 1
    assert call.result()[0]["meta_info"]["finish_reason"] == ABORTED


def test_abort_of_one_choice_by_its_id(engine):
    call = Background(engine, "once upon", LONG | {"n": 2}, rid="pair")
    assert engine.abort("pair-1") == 1
    assert [result["meta_info"]["finish_reason"]["type"] for result in call.result()] == ["length", "abort"]


def test_abort_all_ends_everything_and_keeps_rows(engine):
    whole = engine.generate("once upon", GREEDY, max_new_tokens=400, return_routed_experts=True)
    calls = [Background(engine, "once upon", LONG, return_routed_experts=True) for _ in range(3)]
    assert engine.abort(abort_all=True) == 3
    for call in calls:
        (result,) = call.result()
        assert result["meta_info"]["finish_reason"] == ABORTED
        assert_row_law(result, whole)
    assert engine.abort(abort_all=True) == 0
    assert_idle(engine)


def test_abort_requires_one_of_its_two_arguments(engine):
    for kwargs in ({}, {"rid": "x", "abort_all": True}):
        with pytest.raises(InvalidRequestError, match="give one of them"):
            engine.abort(**kwargs)


def test_an_aborted_call_at_once_returns_its_answer(engine):
    started = threading.Event()

    def ask():
        started.set()
        return engine.generate("once upon", LONG, rid="at-once")

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        started.wait()
        while not answer.done() and engine.abort("at-once") == 0:
            pass
    assert answer.result()["meta_info"]["finish_reason"] == ABORTED


# --- shutdown


def build(folder, **args):
    with lazy_compilation():
        return Engine(str(folder), **(SMALL | args))


def test_shutdown_ends_every_caller_with_what_it_has(folder):
    engine = build(folder, enable_return_routed_experts=True)
    whole = engine.generate("once upon", GREEDY, max_new_tokens=400, return_routed_experts=True)
    calls = [Background(engine, "once upon", LONG, return_routed_experts=True) for _ in range(3)]
    waiting = Background(engine, ["a", "b", "c", "d", "e", "f"], LONG)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for stopped in [pool.submit(engine.shutdown) for _ in range(3)]:  # from several threads at once
            stopped.result(timeout=60)
    for call in calls:
        (result,) = call.result()
        assert result["meta_info"]["finish_reason"] == SHUT_DOWN
        assert_row_law(result, whole)
    assert [item["meta_info"]["finish_reason"] for item in waiting.result()] == [SHUT_DOWN] * len(waiting.result())
    assert not engine.thread.is_alive
    engine.shutdown()
    assert_dead(engine, "it was shut down")


def assert_dead(engine, cause):
    """Every entry point raises it."""

    async def ask():
        return await engine.async_generate("the cat")

    calls = (
        lambda: engine.generate("the cat"),
        lambda: list(engine.generate("the cat", stream=True)),
        lambda: asyncio.run(ask()),
        lambda: engine.abort("x"),
        engine.flush_cache,
        engine.check_integrity,
    )
    for call in calls:
        with pytest.raises(EngineDeadError, match=f"the engine has ended: .*{cause}.*; build a new Engine") as excinfo:
            call()
        assert "\n" not in str(excinfo.value) and len(str(excinfo.value)) <= 1024
    engine.shutdown()


def test_a_failed_start_leaves_no_thread(tmp_path):
    damaged = write_tiny_checkpoint(tmp_path / "damaged")
    (damaged / "generation_config.json").write_text("{", encoding="utf-8")
    before = set(threading.enumerate())
    for path in (tmp_path / "missing", damaged):
        with pytest.raises(CheckpointError), Engine(str(path), skip_tokenizer_init=True, **SMALL):
            pass
    gc.collect()
    assert not set(threading.enumerate()) - before


# --- death


class Poison:
    """Experts that run until they are told to fail."""

    def __init__(self) -> None:
        self.armed = False

    @property
    def registry(self):
        return with_moe(BackendRegistry(), MoeBackend(name="poison", run=self.run))

    def run(self, call):
        def check(x):
            if self.armed:
                raise RuntimeError("the experts are\ngone " + "and gone " * 400)
            return x

        x = io_callback(check, jax.ShapeDtypeStruct(call.x.shape, call.x.dtype), call.x, ordered=True)
        return reference_experts(dataclasses.replace(call, x=x))


def test_death_ends_every_waiting_request_once_and_every_later_call(folder, caplog):
    poison = Poison()
    engine = build(folder, registry=poison.registry, moe_backend="poison", max_total_tokens=2048)
    assert len(engine.generate("the cat", GREEDY, max_new_tokens=3)["output_ids"]) == 3
    calls = [Background(engine, prompt, LONG) for prompt in ("once upon", ["the cat", "a", "b", "c", "d"])]

    async def ask():
        return await asyncio.gather(*(engine.async_generate(f"q{i}", LONG) for i in range(3)), return_exceptions=True)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, ask())
        while engine.get_server_info()["requests_accepted"] < 1 + 1 + 5 + 3:
            pass
        poison.armed = True
        assert [type(error) for error in future.result(timeout=60)] == [EngineDeadError] * 3
    for call in calls:
        with pytest.raises(EngineDeadError, match="the experts are") as excinfo:
            call.result()
        assert (
            excinfo.value.__cause__ is not None and "\n" not in str(excinfo.value) and len(str(excinfo.value)) <= 1024
        )
    assert "the engine thread ends" in caplog.text
    assert_dead(engine, "the experts are")


@pytest.mark.parametrize(
    ("explained", "error", "text"),
    [(None, EngineDeadError, "the device is gone"), (PeerLostError("process 1"), PeerLostError, "process 1")],
    ids=["by itself", "by another process"],
)
def test_a_step_that_fails_while_a_command_waits_for_it_ends_the_engine_with_its_cause(
    folder, monkeypatch, explained, error, text
):
    """The command that drains a failing step gets the cause, and so do its requests and all later calls."""
    engine = build(folder, enable_return_routed_experts=True)
    if explained is not None:
        monkeypatch.setattr(engine.thread, "_explain", lambda _: explained)
    core = engine.components.core
    drain = core.drain

    def broken():
        if core._pending is None:
            return drain()
        raise RuntimeError("the device is gone")

    call = Background(engine, "the cat", LONG)  # it decodes: a step is in flight whenever a command is taken
    monkeypatch.setattr(core, "drain", broken)
    with pytest.raises(error, match=text):
        engine.thread.run_drained(lambda: None)
    for later in (call.result, engine.flush_cache, lambda: engine.generate("the cat")):
        with pytest.raises(error, match=text):
            later()
    engine.shutdown()


def test_commands_that_come_in_while_it_dies_get_the_cause(folder):
    """The engine thread is held inside a command; what queues up behind it is never run."""
    engine = build(folder, enable_return_routed_experts=True)
    blocked, go = threading.Event(), threading.Event()

    def hold():
        blocked.set()
        go.wait()
        raise RuntimeError("struck down")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        engine.thread.post(hold)
        blocked.wait()
        calls = [
            pool.submit(engine.generate, "the cat", LONG),
            pool.submit(engine.check_integrity),
            pool.submit(engine.flush_cache),
        ]
        while engine.thread.num_pending_commands < 3:
            pass
        go.set()
        for call in calls:
            with pytest.raises(EngineDeadError, match="RuntimeError: struck down"):
                call.result(timeout=60)
    engine.shutdown()


def test_a_kill_ends_the_command_that_runs_and_those_that_wait(folder):
    """The thread may be in a program that never ends: where processes share a model, of a lost one."""
    began, leave = threading.Event(), threading.Event()
    with (
        build(folder) as engine,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        running = pool.submit(engine.thread.run_between_steps, lambda: (began.set(), leave.wait()))
        try:
            assert began.wait(30)
            waiting = pool.submit(engine.thread.run_between_steps, lambda: None)
            while not engine.thread.num_pending_commands:
                continue
            engine.thread.kill(PeerLostError("process 1 of 2 is gone"))
            for future in (running, waiting):
                assert isinstance(future.exception(10), PeerLostError) and "process 1 of 2" in str(future.exception())
        finally:
            leave.set()
        with pytest.raises(PeerLostError):
            engine.thread.run_between_steps(lambda: None)


FORKED = """
import asyncio, os, signal, sys, warnings
warnings.simplefilter("ignore")  # JAX's own, of a fork
import jax
from flax import nnx
from routed_experts import Engine, EngineDeadError
engine = Engine(
    sys.argv[1], precompile_bs_paddings=(4,), precompile_token_paddings=(32,), max_total_tokens=512, context_length=128
)
state = jax.tree.map(jax.numpy.copy, engine.components.core.runner.state)
context = engine._weights._context
locks = [context.weights_lock, context.scorer.lock, engine.input_processor._compiler_lock]
calls = {
    "generate": lambda: engine.generate("a", {"regex": "a"}),
    "async_generate": lambda: asyncio.run(engine.async_generate("a", {"regex": "a"})),
    "stream": lambda: engine.stream("a"),
    "abort": lambda: engine.abort("x"),
    "abort_request": lambda: engine.abort_request("x"),
    "score": lambda: engine.score([5, 6, 7]),
    "update_weights": lambda: engine.update_weights(state, donate=True),
    "update_weights_from_disk": lambda: engine.update_weights_from_disk("nowhere"),
    "prepare_weights": lambda: engine.prepare_weights("nowhere"),
    "commit_weights": lambda: engine.commit_weights(),
    "drop_weights": lambda: engine.drop_weights(),
    "update_weight_version": lambda: engine.update_weight_version("new"),
    "release_memory_occupation": lambda: engine.release_memory_occupation(),
    "resume_memory_occupation": lambda: engine.resume_memory_occupation(),
    "pause": lambda: engine.pause(mode="wait"),
    "resume": lambda: engine.resume(),
    "pause_generation": lambda: engine.pause_generation(),
    "continue_generation": lambda: engine.continue_generation(),
    "async_pause_generation": lambda: asyncio.run(engine.async_pause_generation()),
    "async_continue_generation": lambda: asyncio.run(engine.async_continue_generation()),
    "hold_admission": lambda: engine.hold_admission(),
    "open_admission": lambda: engine.open_admission(),
    "apply_placement": lambda: engine.apply_placement(None),
    "set_capacity_factor": lambda: engine.set_capacity_factor(1),
    "apply_residency": lambda: engine.apply_residency(None),
    "residency": lambda: engine.residency(),
    "routing_stats": lambda: engine.routing_stats(),
    "reset_routing_stats": lambda: engine.reset_routing_stats(),
    "flush_cache": lambda: engine.flush_cache(),
    "async_flush_cache": lambda: asyncio.run(engine.async_flush_cache()),
    "remember_rollouts": lambda: engine.remember_rollouts([5], [6]),
    "check_integrity": lambda: engine.check_integrity(),
}
for lock in locks:
    lock.acquire()  # as another thread of the parent may hold it
child = os.fork()
if child == 0:
    signal.alarm(60)
    reached = []
    for name, call in calls.items():
        try:
            call()
        except EngineDeadError as error:
            if "forked after the engine was built; build the Engine in the child" not in str(error):
                reached.append(name)
        except Exception as error:
            reached.append(name)
        else:
            reached.append(name)
    reached += ["donated arrays"] * any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    reached += ["admission"] * engine.admission_held
    engine.shutdown()
    os.write(1, f"reached {reached}\\n".encode())
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
for lock in locks:
    lock.release()
engine.generate("a", {"temperature": 0}, max_new_tokens=1)
engine.shutdown()
print("child", status, *sorted({name for name in dir(Engine) if name[0] != "_"} - set(calls)), flush=True)
"""
# Of any state of an engine, also of one that has ended.
READS = {
    "admission_held",
    "async_get_server_info",
    "get_default_sampling_params",
    "get_model_info",
    "get_server_info",
    "get_weight_version",
    "loop",
    "memory_plan",
    "new_call",
    "paused",
    "placement_stats",
    "prepared_version",
    "released",
    "shutdown",
    "stats",
    "tokenizer",
}


def test_a_forked_process_is_told_that_it_has_no_engine(folder):
    """The engine thread does not exist there: a command would wait for ever, and a lock may be held. Every call that
    needs the thread is refused before it takes a lock, or loads, copies or deletes an array."""
    env = {**os.environ, "PYTHONPATH": str(Path(routed_experts.__file__).parents[1])}
    command = [sys.executable, "-c", FORKED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["reached []"]), (done.stdout, done.stderr)
    assert done.stdout.splitlines()[1:] == [" ".join(["child 0", *sorted(READS)])]
