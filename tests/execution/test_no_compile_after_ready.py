"""Once an engine is ready, nothing is traced, lowered or compiled again, whatever an admissible request asks for.

JAX counts for us: it reports each trace, lowering and compilation of the process as an event, those of small eager
operations such as `jnp.zeros` among them. The first test shows that it does; a renamed event would fail there."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from routed_experts import Engine
from support.engines import assert_idle, letter_bias
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

COMPILING = "/jax/core/compile/"
STEPS = {
    COMPILING + step for step in ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
}
PROMPT = "The router scores every expert for every token. "
LONG = PROMPT * 4  # several chunks of prefill
ENGINES = {
    "capture": {"enable_return_routed_experts": True},
    "no capture": {},
    "deterministic": {"enable_return_routed_experts": True, "deterministic": True},
    "raw logprobs": {"enable_return_routed_experts": True, "logprobs_mode": "raw"},
}
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8, "seed": 3},
    "engine's own seed": {"temperature": 1.0},
    "filtered": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.0, "logit_bias": {5: 2.5, VOCAB_SIZE - 1: -100.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "chosen logprobs": {"temperature": 0.7, "logprobs": 0, "seed": 5},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 20},
    "choices": {"temperature": 1.0, "n": 3, "seed": 6},
    "least length": {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": [7, 8]},
    "to the end": {"temperature": 0.0, "ignore_eos": True},
}


@contextlib.contextmanager
def compile_events():
    """Collect what JAX traces, lowers and compiles."""
    events = []

    def on_event(event, duration, **_):
        if event.startswith(COMPILING):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)


def test_a_new_shape_of_a_small_operation_is_seen():
    with compile_events() as compiled:
        jnp.zeros((3, 1, 4, 1, 5, 9, 2, 6))
    assert set(compiled) == STEPS
    with compile_events() as compiled:
        jnp.zeros((3, 1, 4, 1, 5, 9, 2, 6))
        jax.device_put(np.zeros((2, 7, 1, 8)))
    assert compiled == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def other_weights(engine, seed):
    """Weights as a trainer brings them: other arrays of the same shapes."""
    noise = np.random.default_rng(seed)
    state = engine.components.core.runner.state
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf) * np.float32(1 + 0.01 * noise.random())), state)


def ask_everything(engine, *, capture):
    """One request of each kind alone, then all at once, so that batches are mixed in every way."""
    rows = {"return_routed_experts": True} if capture else {}
    for prompt in (PROMPT, LONG):
        for sampling in SAMPLING.values():
            engine.generate(prompt, sampling, max_new_tokens=6)
    engine.generate(PROMPT, {"logit_bias": letter_bias(engine), "stop": ["e", "zz"]}, max_new_tokens=6, **rows)
    engine.flush_cache()
    with ThreadPoolExecutor(len(SAMPLING)) as threads:
        calls = [
            threads.submit(engine.generate, [LONG, PROMPT], sampling, max_new_tokens=9, **rows)
            for sampling in SAMPLING.values()
        ]
        assert all(call.result() for call in calls)


def ask_for_rows(engine):
    """The formats in which rows are requested."""
    how = [{}, {"routed_experts_start_len": 3}, {"routed_experts_format": "npy"}, {"routed_experts_layers": "moe"}]
    for kwargs in how:
        engine.generate(PROMPT, {"temperature": 0.0}, max_new_tokens=4, return_routed_experts=True, **kwargs)


def leave_early(engine):
    """Streams that are closed, requests that are aborted, a task that is cancelled."""
    stream = engine.generate(LONG, {"ignore_eos": True}, max_new_tokens=64, stream=True)
    next(stream)
    stream.close()
    stream = engine.generate(PROMPT, {"ignore_eos": True}, max_new_tokens=200, rid="leaving", stream=True)
    next(stream)
    engine.abort("leaving")
    assert [*stream][-1]["meta_info"]["finish_reason"]["type"] == "abort"
    asyncio.run(engine.async_generate([PROMPT, LONG], {"temperature": 0.5}, max_new_tokens=5))


def change_weights(engine, states):
    """New weights with requests in flight, with and without their pages."""
    for version, (state, cache) in enumerate(zip(states, ("flush", "keep"), strict=True), start=1):
        stream = engine.generate(PROMPT, {"ignore_eos": True, "presence_penalty": 1.0}, max_new_tokens=24, stream=True)
        next(stream)
        engine.update_weights(state, version=version, cache=cache)
        assert [*stream][-1]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("kind", ENGINES)
def test_nothing_compiles_once_the_engine_is_ready(folder, kind):
    args, capture = ENGINES[kind], "enable_return_routed_experts" in ENGINES[kind]
    small = {"precompile_bs_paddings": (1, 4), "precompile_token_paddings": (32,)} if kind == "capture" else {}
    sizes = {
        "precompile_bs_paddings": (4,),
        "precompile_token_paddings": (32,),
        "context_length": 256,
        "max_total_tokens": 512,
    }
    with Engine(str(folder), **(sizes | small | args)) as engine:
        states = [other_weights(engine, seed) for seed in (1, 2)]
        with compile_events() as compiled:
            ask_everything(engine, capture=capture)
            if capture:
                ask_for_rows(engine)
            leave_early(engine)
            change_weights(engine, states)
            engine.get_server_info()
            assert_idle(engine)
        assert engine.components.core.ranks[0].num_retracted > 0  # pages ran out, too
    assert compiled == []
