"""Combine weights beside the ids: what multiplied the output of each expert, in every pass, and played back.

The oracles: the model in NumPy float64, an engine that records ids alone, and a router that was changed after the
rollout, whose choice must not matter where rows and weights are replayed. Rows of every schedule are judged by the
probe at the experts (test_fidelity, test_speculation), weights of every family by transformers (test_families)."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.full_sequence import FullSequence
from routed_experts import (
    CaptureDisabledError,
    ConfigError,
    ExpertPlacement,
    InvalidRequestError,
    PlacementConfig,
    RoutingAlignmentError,
)
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import Sample, align, forward, merge_turns
from support.engines import open_engine
from support.fast_compile import fast_compilation
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import tiny_config, tiny_tensors, write_tiny_checkpoint

ORACLE = FullSequence(tiny_config(), tiny_tensors(tiny_config()))
WEIGHTS = {"enable_return_routed_experts": True, "enable_return_routed_experts_weights": True}
ASKED = {"return_routed_experts": True, "return_routed_experts_weights": True}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "ignore_eos": True}


def random_tokens(length, seed=0):
    return np.random.default_rng(seed).integers(0, 313, length).tolist()


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    with contextlib.ExitStack() as stack:
        with lazy_compilation():  # not longer: engines that modules share compile all their programs
            engine = stack.enter_context(open_engine(tiny_checkpoint, **WEIGHTS))
        yield engine


@pytest.fixture(scope="module")
def rollout(engine):
    """An answer, its tokens, its record and its logprobs."""
    prompt = random_tokens(30)
    result = engine.generate(input_ids=prompt, sampling_params=SAMPLED, return_logprob=True, **ASKED)
    logprobs = np.array([value for value, _, _ in result["meta_info"]["output_token_logprobs"]], np.float32)
    return [*prompt, *result["output_ids"]], record_from_meta_info(result), logprobs


def test_weights_are_those_of_the_model_in_numpy(rollout):
    tokens, record, _ = rollout
    judged = ORACLE.run(tokens, record.ids)
    assert (record.weights.dtype, record.weights.shape) == (np.float32, record.ids.shape)
    np.testing.assert_allclose(record.weights, judged.weights[:-1], atol=1e-5)
    assert np.ptp(record.weights) > 0.3, "equal weights prove nothing"


def test_an_engine_that_records_them_answers_as_one_that_does_not(rollout, tiny_engine):
    tokens, record, logprobs = rollout
    result = tiny_engine.generate(
        input_ids=tokens[:30], sampling_params=SAMPLED, return_logprob=True, return_routed_experts=True
    )
    assert result["output_ids"] == tokens[30:]
    assert [value for value, _, _ in result["meta_info"]["output_token_logprobs"]] == logprobs.tolist()
    assert record_from_meta_info(result) == dataclasses.replace(record, weights=None)


def test_only_a_request_that_asks_gets_them(engine):
    greedy = {"max_tokens": 3, "temperature": 0.0}
    ask = {"input_ids": random_tokens(9), "sampling_params": greedy}
    quiet = engine.generate(**ask)["meta_info"]
    ids = engine.generate(**ask, return_routed_experts=True)["meta_info"]
    both = engine.generate(**ask, **ASKED)["meta_info"]
    in_params = {**ask, "sampling_params": {**greedy, **ASKED}}
    assert "routed_experts_weights" not in quiet | ids and ids["routed_experts_info"]["weights"] is None
    assert both["routed_experts_info"]["weights"] == "float32" and both["routed_experts"] == ids["routed_experts"]
    assert engine.generate(**in_params)["meta_info"]["routed_experts_weights"] == both["routed_experts_weights"]
    lists = {**ask, "input_ids": [ask["input_ids"]] * 2, "return_routed_experts": [True, False]}
    asked, silent = engine.generate(**lists, return_routed_experts_weights=True)
    assert asked["meta_info"]["routed_experts_weights"] == both["routed_experts_weights"]
    assert "routed_experts" not in silent["meta_info"]


def test_a_start_choices_and_streamed_deltas_are_cuts_of_the_whole(engine, rollout):
    tokens, record, _ = rollout
    ask = {"input_ids": tokens[:30], "sampling_params": SAMPLED, **ASKED}
    late = record_from_meta_info(engine.generate(**ask, routed_experts_start_len=17))
    assert late == record[17:]
    first, second = engine.generate(**ask | {"sampling_params": SAMPLED | {"n": 2}})
    other = record_from_meta_info(second).weights
    assert record_from_meta_info(first) == record
    assert other.shape == record.weights.shape and not np.array_equal(other, record.weights)
    parts = [
        part
        for event in engine.generate(**ask, stream=True, routed_experts_stream=True)
        if (part := record_from_meta_info(event)) is not None and part.num_rows
    ]
    assert len(parts) > 1
    assert np.array_equal(np.concatenate([part.weights for part in parts]), record.weights)
    last = record_from_meta_info(engine.generate(**ask, routed_experts_include_last=True))
    assert last.num_rows == record.num_rows + 1 and np.array_equal(last.weights[:-1], record.weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_that_of_the_engine_and_rounds_once(tiny_checkpoint, rollout, dtype):
    tokens, record, _ = rollout
    with lazy_compilation(), open_engine(tiny_checkpoint, **WEIGHTS, routed_experts_weights_dtype=dtype) as engine:
        answer = engine.generate(input_ids=tokens[:30], sampling_params=SAMPLED, **ASKED)
        assert answer["output_ids"] == tokens[30:]
        read = record_from_meta_info(answer)
        assert read.weights.dtype.name == dtype and np.array_equal(read.weights, record.weights.astype(dtype))
        aborted = engine.generate(input_ids=tokens, sampling_params={"max_tokens": 1}, **ASKED)
        assert record_from_meta_info(aborted).weights.dtype.name == dtype
        (line,) = (line for line in engine.memory_plan if line.startswith("capture, host"))
        assert f"of them {12 * read.weights.dtype.itemsize} are combine weights" in line


def test_a_score_has_the_weights_of_the_rollout(engine, rollout):
    tokens, record, logprobs = rollout
    for routed in (None, record):
        out = engine.score(tokens, routed=routed)
        assert np.array_equal(out.routed_experts.weights[:-1], record.weights)
        np.testing.assert_array_equal(out.logprobs[29:], logprobs)


def test_replayed_weights_run_whatever_the_router_says(engine, rollout):
    """The routers are changed after the rollout: ids alone give other logprobs, ids and weights those of the
    rollout."""
    tokens, record, logprobs = rollout
    core = engine.components.core
    before = engine.thread.run_between_steps(lambda: core.runner.state)
    other = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0.5 if "router" in jax.tree_util.keystr(path) else leaf, before
    )
    try:
        engine.update_weights(other)
        ids_alone = engine.score(tokens, routed=record)
        both = engine.score(tokens, routed=record, replay_weights=True)
    finally:
        engine.update_weights(before)
    assert np.abs(ids_alone.logprobs[29:] - logprobs).max() > 1e-3
    np.testing.assert_array_equal(both.logprobs[29:], logprobs)
    assert np.array_equal(both.routed_experts.weights[:-1], record.weights)
    assert not np.array_equal(ids_alone.routed_experts.weights[:-1], record.weights)


def test_rows_that_are_not_valid_take_the_weights_of_the_live_router(engine, rollout):
    tokens, record, _ = rollout
    live = engine.score(tokens)
    known = np.arange(record.num_rows) % 2 == 0
    halved = dataclasses.replace(record, weights=record.weights / 2, valid=known)
    out = engine.score(tokens, routed=halved, replay_weights=True).routed_experts
    first = np.array_equal(out.weights[:-1][known], halved.weights[known])
    assert first and not np.array_equal(out.weights[:-1][~known], halved.weights[~known])
    nothing = dataclasses.replace(halved, valid=np.zeros_like(known))
    again = engine.score(tokens, routed=nothing, replay_weights=True)
    np.testing.assert_allclose(again.logprobs, live.logprobs, atol=1e-5)


@fast_compilation()
def test_a_trainer_replays_them(engine, rollout, tiny_checkpoint):
    """`align(weights=True)` and `forward`: the logprobs of the rollout, and no gradient for the router."""
    tokens, record, logprobs = rollout
    model = ModelFolder.open(tiny_checkpoint)
    graphdef, state = nnx.split(model.load(jnp.dtype("float32")))
    sample = Sample(record, num_tokens=len(tokens), prompt_len=30)
    spec, batch = model.config.capture_spec, jnp.asarray([tokens], jnp.int32)
    aligned = {
        weights: align([sample], layout="pad_right", seq_len=len(tokens), spec=spec, weights=weights)
        for weights in (False, True)
    }

    def loss(state, routed):
        logits = forward(nnx.merge(graphdef, state), batch, routed=routed).logits[0, 29:-1]
        chosen = jax.nn.log_softmax(logits)[jnp.arange(24), batch[0, 30:]]
        return jnp.mean(chosen), chosen

    of_router = {}
    for weights, routed in aligned.items():
        (_, chosen), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(state, routed)
        np.testing.assert_allclose(chosen, logprobs, atol=1e-4)
        leaves = jax.tree_util.tree_flatten_with_path(gradient)[0]
        of_router[weights] = [leaf for path, leaf in leaves if "router" in jax.tree_util.keystr(path)]
    assert all(np.any(np.asarray(leaf)) for leaf in of_router[False])
    assert not any(np.any(np.asarray(leaf)) for leaf in of_router[True]), "every token that is scored has its weights"


def test_turns_of_a_conversation_keep_them(engine, rollout):
    tokens, record, _ = rollout
    turn = [*tokens, 7, 8, 9]
    answer = engine.generate(input_ids=turn, sampling_params={"max_tokens": 4, "ignore_eos": True}, **ASKED)
    whole = np.array([*turn, *answer["output_ids"]])
    merged = merge_turns([(np.array(tokens), record), (whole, record_from_meta_info(answer))], whole)
    assert merged.valid is None and np.array_equal(merged.weights[: record.num_rows], record.weights)
    np.testing.assert_allclose(merged.weights, ORACLE.run(whole, merged.ids).weights[:-1], atol=1e-5)


@fast_compilation()
def test_experts_on_the_host_run_on_weights_that_are_recorded(tmp_path, rollout):
    tokens, record, _ = rollout
    write_tiny_checkpoint(tmp_path)
    experts = ExpertOffloadConfig(kt_num_gpu_experts=8, kt_cpuinfer=1)
    with lazy_compilation(), open_engine(tmp_path, experts=experts, **WEIGHTS) as engine:
        out = engine.score(tokens, routed=record).routed_experts
        np.testing.assert_allclose(out.weights[:-1], record.weights, atol=1e-5)
        halved = dataclasses.replace(record, weights=record.weights / 2)
        forced = engine.score(tokens, routed=halved, replay_weights=True).routed_experts
        np.testing.assert_array_equal(forced.weights[:-1], halved.weights)
        answer = engine.generate(input_ids=tokens[:30], sampling_params=SAMPLED, **ASKED)
        read = record_from_meta_info(answer)
        whole = [*tokens[:30], *answer["output_ids"]]
        np.testing.assert_allclose(read.weights, ORACLE.run(whole, read.ids).weights[:-1], atol=1e-4)


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"tp_size": 4}, id="width", marks=pytest.mark.thorough),
        pytest.param({"tp_size": 4, "ep_size": 4, "dp_size": 2}, id="ranks"),
    ],
)
@fast_compilation()
def test_several_devices_record_them(tmp_path, mesh):
    write_tiny_checkpoint(tmp_path)
    prompts = [random_tokens(length, length) for length in (5, 40, 17, 61)]
    with lazy_compilation(), open_engine(tmp_path, **WEIGHTS, **mesh) as engine:
        for prompt, answer in zip(
            prompts, engine.generate(input_ids=prompts, sampling_params=SAMPLED, **ASKED), strict=True
        ):
            record, tokens = record_from_meta_info(answer), [*prompt, *answer["output_ids"]]
            np.testing.assert_allclose(record.weights, ORACLE.run(tokens, record.ids).weights[:-1], atol=1e-4)
            out = engine.score(tokens, routed=record, replay_weights=True)
            np.testing.assert_array_equal(out.routed_experts.weights[:-1], record.weights)


@pytest.mark.devices(4)
@fast_compilation()
def test_capacities_that_move_slots_record_the_weights_that_ran(tmp_path):
    write_tiny_checkpoint(tmp_path)
    plan = ExpertPlacement.identity(len(ORACLE.moe_layers), 16, 2)
    placement = PlacementConfig(plan=plan, mode="reroute", capacity_factor=1)
    prompts = [random_tokens(length, length) for length in (30, 5, 17, 1)]
    sizes = {"page_size": 4, "context_length": 96, "max_total_tokens": 512}
    sizes |= {"tp_size": 2, "ep_size": 2}
    with lazy_compilation(), open_engine(tmp_path, placement=placement, **sizes, **WEIGHTS) as engine:
        greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 10}
        answers = engine.generate(input_ids=prompts, sampling_params=greedy, **ASKED)
        assert sum(answer["meta_info"]["rerouted_slots"] for answer in answers) > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            record, tokens = record_from_meta_info(answer), [*prompt, *answer["output_ids"]]
            np.testing.assert_allclose(record.weights, ORACLE.run(tokens, record.ids).weights[:-1], atol=1e-5)
            scored = engine.score(tokens, routed=record, replay_weights=True).routed_experts
            assert np.array_equal(scored.weights[:-1], record.weights)


def test_what_cannot_be_given_is_refused_by_name(engine, tiny_engine, rollout, tmp_path):
    tokens, record, _ = rollout
    ask = {"input_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
    with pytest.raises(CaptureDisabledError, match="--enable-return-routed-experts-weights") as error:
        tiny_engine.generate(**ask, **ASKED)
    assert error.value.param == "return_routed_experts_weights"
    with pytest.raises(InvalidRequestError, match="without return_routed_experts=True has no effect"):
        engine.generate(**ask, return_routed_experts_weights=True)
    with pytest.raises(InvalidRequestError, match="must be true or false"):
        engine.generate(**ask, **ASKED | {"return_routed_experts_weights": "yes"})
    with pytest.raises(InvalidRequestError, match="replay_weights=True without records to replay"):
        engine.score(tokens, replay_weights=True)
    with pytest.raises(RoutingAlignmentError, match="sample 1: the record has no combine weights"):
        engine.score([tokens, tokens], routed=[record, dataclasses.replace(record, weights=None)], replay_weights=True)
    broken = dataclasses.replace(record, weights=np.where(np.arange(4) == 2, np.nan, record.weights).astype(np.float32))
    with pytest.raises(RoutingAlignmentError, match="sample 0, token 0, hidden layer 1, slot 2: weight nan"):
        engine.score(tokens, routed=broken, replay_weights=True)
    unknown = dataclasses.replace(broken, valid=np.zeros(record.num_rows, bool))
    assert np.isfinite(engine.score(tokens, routed=unknown, replay_weights=True).logprobs).all()
    for args, text in (
        ({"routed_experts_weights_dtype": "bfloat16", "enable_return_routed_experts": True}, "has no effect without"),
        ({"enable_return_routed_experts_weights": True}, "set enable_return_routed_experts=True too"),
        (WEIGHTS | {"routed_experts_weights_dtype": "float16"}, "choose one of float32, bfloat16"),
    ):
        with pytest.raises(ConfigError, match=text), open_engine(tmp_path, **args):
            pass
