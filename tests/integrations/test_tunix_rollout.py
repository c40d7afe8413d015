"""RoutedExpertsRollout: answers, their seeds and records, pushes of weights, and what is refused."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts import Engine
from routed_experts.core.errors import (
    CaptureDisabledError,
    ConfigError,
    InvalidRequestError,
    RoutingAlignmentError,
    WeightsMismatchError,
)
from routed_experts.integrations.tunix import RoutedExpertsRollout, align_records
from support import tunix_runs
from support.tunix_runs import NEW, PROMPTS, WIDTH, demo_policy, example_of, make_cluster, rollout_config

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fast_compilation"),
]
DEADLINE_S = 60


class Tokenizer:
    """Words of one letter: a tokenizer of its own, as Tunix takes it."""

    def __init__(self, pad=2045, eos=2047):
        self._ids = pad, eos

    def encode(self, text):
        return [3 + ord(letter) % 64 for letter in text]

    def decode(self, ids):
        return "".join(chr(token) for token in ids)

    def dedup_bos_ids(self, ids):
        return ids

    def bos_id(self):
        return None

    def pad_id(self):
        return self._ids[0]

    def eos_id(self):
        return self._ids[1]


def answers(out):
    return [tuple(tokens.tolist()) for tokens in out.tokens]


def test_equal_prompts_have_answers_of_their_own_whatever_the_seed(cluster):
    prompts = [np.str_(PROMPTS[0])] * 4 + [PROMPTS[1]] * 3 + [PROMPTS[0]]
    for seed in (None, 7, jnp.array([3, 4], jnp.uint32), jax.random.key(5)):
        drawn = answers(cluster.rollout.generate(prompts, rollout_config(seed=seed)))
        assert len(set(drawn[:4] + drawn[7:])) == 5 and len(set(drawn[4:7])) == 3, f"seed {seed}"


def test_a_seed_makes_a_run_again_and_no_step_of_it_equal_to_another(demo_engine):
    runs = []
    for _ in range(2):
        rollout = make_cluster(demo_engine).rollout
        runs.append([answers(rollout.generate(PROMPTS[:2], rollout_config(seed=11))) for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]
    other = make_cluster(demo_engine).rollout
    assert answers(other.generate(PROMPTS[:2], rollout_config(seed=12))) != runs[0][0]


def test_an_answer_at_temperature_0_is_the_best_token_of_the_policy(cluster):
    """An oracle of push, prompt and tokens: the policy by itself, without cache or engine."""
    out = cluster.rollout.generate(PROMPTS[:2], rollout_config(temperature=0.0, max_tokens_to_generate=6))
    score = nnx.jit(lambda policy, tokens: policy(tokens)[0])
    for prompt, tokens in zip(PROMPTS[:2], out.tokens, strict=True):
        ids = [*tunix_runs.demo_tokenizer().encode(prompt), *tokens.tolist()]
        logits = score(cluster.actor_trainer.model, jnp.array([ids]))
        best = np.argmax(logits[0, len(ids) - tokens.size - 1 : -1], axis=-1)
        np.testing.assert_array_equal(best, tokens)


def test_outputs_are_what_tunix_expects(cluster):
    out = cluster.rollout.generate([*PROMPTS], rollout_config())
    pad = cluster.rollout.pad_id()
    assert out.left_padded_prompt_tokens.shape == (4, WIDTH) and out.logits is None
    records = cluster.rollout.take()
    for row, prompt, tokens, text, logprobs, record in zip(
        out.left_padded_prompt_tokens, PROMPTS, out.tokens, out.text, out.logprobs, records, strict=True
    ):
        ids = tunix_runs.demo_tokenizer().encode(prompt)
        np.testing.assert_array_equal(row[row != pad], ids[-WIDTH:])  # one that is too long keeps its end
        assert (row[: max(WIDTH - len(ids), 0)] == pad).all() and row[-1] == ids[-1]
        assert tokens.dtype == np.int32 and 0 < tokens.size <= NEW and logprobs.shape == tokens.shape
        ends = tokens[-1] in (pad, cluster.rollout.eos_id())
        assert record.finish_reason == ("stop" if ends else "length") and (ends or tokens.size == NEW)
        assert text == tunix_runs.demo_tokenizer().decode(tokens, skip_special_tokens=True)
        assert record.routed.num_rows == record.num_tokens - 1
    assert len(tunix_runs.demo_tokenizer().encode(PROMPTS[2])) > WIDTH, "one of them is too long"
    assert cluster.rollout.take() == []
    assert cluster.rollout.generate(PROMPTS[:1], rollout_config(return_logprobs=False)).logprobs is None


def test_end_tokens_are_those_of_the_config(cluster):
    """An answer ends with the token at which it is told to end, which it keeps."""
    free = cluster.rollout.generate(PROMPTS[:1], rollout_config(temperature=0.0)).tokens[0]
    end = int(free[3])
    out = cluster.rollout.generate(PROMPTS[:1], rollout_config(temperature=0.0, eos_tokens=[end]))
    np.testing.assert_array_equal(out.tokens[0], free[: free.tolist().index(end) + 1])


def test_sampled_logprobs_are_found_by_their_tokens(cluster):
    example, _ = tunix_runs.make_example(cluster, [PROMPTS[0]] * 4)  # which takes the records
    out = cluster.rollout.generate([*PROMPTS], rollout_config())
    with pytest.raises(RoutingAlignmentError, match="sample 0 is none of the 4 sequences"):
        cluster.rollout.get_per_token_logps(example.prompt_ids, example.completion_ids)
    cluster.rollout.generate([*PROMPTS], rollout_config())  # others, of the same prompts
    padded, logprobs = np.full((4, NEW), cluster.rollout.pad_id(), np.int32), np.zeros((4, NEW), np.float32)
    for index, (tokens, values) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        padded[index, : tokens.size], logprobs[index, : tokens.size] = tokens, values
    order = np.array([2, 0, 3, 1])
    actual = cluster.rollout.get_per_token_logps(out.left_padded_prompt_tokens[order], padded[order])
    np.testing.assert_array_equal(actual, logprobs[order])


def test_answers_of_one_token_have_rows_of_their_prompt(cluster):
    example, records = tunix_runs.make_example(cluster, [*PROMPTS], rollout_config(max_tokens_to_generate=1))
    assert all(record.output_ids.size == 1 for record in records)
    sizes = np.array([record.prompt_ids.size for record in records])
    np.testing.assert_array_equal(example.routed_valid.sum(axis=1), sizes)
    assert example.routed_valid.shape == (4, WIDTH + 1) and not example.routed_valid[:, -1].any()
    report = tunix_runs.see(cluster, example, records, 0).replayed
    assert report.k3 < 1e-10 and report.canary < 0.01


def wait_until(condition):
    """Poll with a deadline."""
    tick = threading.Event()
    for _ in range(DEADLINE_S * 200):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError(f"not in {DEADLINE_S} s")


def aborted(engine, rollout, *, started):
    """Answers of a call whose requests are aborted: in the queue, or once they have run for some steps."""
    outputs = []
    config = rollout_config(max_tokens_to_generate=100, eos_tokens=[1])
    call = threading.Thread(target=lambda: outputs.append(rollout.generate(PROMPTS[:2], config)), daemon=True)
    engine.pause(mode="in_place")
    call.start()
    wait_until(lambda: engine.stats().waiting == 2)
    while started and engine.stats().running < 2:
        engine.resume()
        engine.pause(mode="in_place")
    engine.abort(abort_all=True)
    engine.resume()
    call.join(DEADLINE_S)
    return outputs[0]


@pytest.mark.parametrize("started", [False, True])
def test_an_aborted_answer_trains_on_what_it_has(demo_engine, started):
    cluster = make_cluster(demo_engine)
    cluster.rollout.generate(PROMPTS[:1], rollout_config())  # weights are pushed
    cluster.rollout.take()
    out = aborted(demo_engine, cluster.rollout, started=started)
    records = cluster.rollout.take()
    assert {record.finish_reason for record in records} == {"abort"}
    padded = np.full((2, 100), cluster.rollout.pad_id(), np.int32)
    for row, tokens in zip(padded, out.tokens, strict=True):
        assert tokens.size < 100 and (tokens.size > 0) == started
        row[: tokens.size] = tokens
    example, _ = example_of(cluster, out.left_padded_prompt_tokens, padded, records)
    report = tunix_runs.see(cluster, example, records, 0).replayed
    assert (report.valid > 0.5) == started and report.k3 < 1e-10 and report.canary < 0.01


def test_a_push_serves_copies_under_the_count_of_pushes(demo_engine):
    policy = demo_policy()
    cluster = make_cluster(demo_engine, policy=policy)
    rollout = cluster.rollout
    first = answers(rollout.generate(PROMPTS[:1], rollout_config(temperature=0.0)))
    assert demo_engine.get_weight_version().label == "0"
    count = rollout.update_count
    params = nnx.state(cluster.actor_trainer.model, nnx.Param)
    nnx.update(cluster.actor_trainer.model, jax.tree.map(lambda leaf: leaf * 1.1, params))
    assert answers(rollout.generate(PROMPTS[:1], rollout_config(temperature=0.0))) == first, "copies are served"
    cluster.sync_weights()
    assert (rollout.update_count, demo_engine.get_weight_version().label, cluster.global_steps) == (count + 1, "1", 1)
    assert rollout.take() == [], "records of older weights are dropped"
    assert answers(rollout.generate(PROMPTS[:1], rollout_config(temperature=0.0))) != first
    ours = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(cluster.actor_trainer.model))}
    served = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(demo_engine.components.core.runner.state)}
    assert not ours & served


def test_a_wrong_push_is_named_and_loses_nothing(demo_engine):
    cluster = make_cluster(demo_engine)
    rollout = cluster.rollout
    out = rollout.generate(PROMPTS[:2], rollout_config(temperature=0.0))
    version = demo_engine.get_weight_version()
    whole = nnx.state(demo_policy(), nnx.Param)
    flat = dict(nnx.to_flat_state(whole))
    name = next(path for path in flat if "router" in path)
    missing = nnx.from_flat_state([(path, leaf) for path, leaf in flat.items() if path != name])
    wrong = nnx.from_flat_state(
        [(path, leaf.replace(leaf[..., :-1]) if path == name else leaf) for path, leaf in flat.items()]
    )
    added = nnx.from_flat_state([*flat.items(), (("decoder", "bias"), flat[name])])
    nan = jax.tree.map(lambda leaf: leaf * jnp.nan, whole)
    for params, text in (
        (missing, r"router: nothing for float32"),
        (wrong, r"router: float32\[.*\] for float32\["),
        (added, r"bias: float32.* is not in the model"),
        (nan, "hold NaN"),
        (nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "is no array of a Policy"),
        ({"decoder": 1}, "params is a dict; push nnx.state"),
    ):
        with pytest.raises(WeightsMismatchError, match=text):
            rollout.update_params(params, (nnx.Param,))
    with pytest.raises(ConfigError, match="LoRA"):
        rollout.update_params(whole, (nnx.LoRAParam,))
    assert demo_engine.get_weight_version() == version and len(rollout.take()) == 2
    again = rollout.generate(PROMPTS[:2], rollout_config(temperature=0.0))
    assert answers(again) == answers(out)
    rollout.update_params(whole, (nnx.Param,))
    assert demo_engine.get_weight_version().label == "1", "what failed was no push"


def test_rows_of_other_samples_lengths_and_weights_are_refused(cluster):
    example, records = tunix_runs.make_example(cluster, [*PROMPTS])
    batch = {"policy": cluster.actor_trainer.model, "pad_id": cluster.rollout.pad_id()}
    tokens, count = (example.prompt_ids, example.completion_ids), cluster.rollout.update_count
    align_records(records, *tokens, **batch, update_count=count)
    with pytest.raises(RoutingAlignmentError, match="sample 0: the example has other tokens"):
        align_records([records[1], records[0], *records[2:]], *tokens, **batch, update_count=count)
    with pytest.raises(RoutingAlignmentError, match=r"3 answers were sampled.*the example has 4"):
        align_records(records[:3], *tokens, **batch, update_count=count)
    with pytest.raises(RoutingAlignmentError, match=r"sample 0.*version"):
        align_records(records, *tokens, **batch, update_count=count + 1)
    longest = int(np.argmax([record.output_ids.size for record in records]))
    cut = example.completion_ids.at[longest, 2:].set(cluster.rollout.pad_id())
    with pytest.raises(RoutingAlignmentError, match=f"sample {longest}: the example has other tokens"):
        align_records(records, tokens[0], cut, **batch, update_count=count)


def new_rollout(engine, *, tokenizer=None, actor=None, **config):
    actor = demo_policy() if actor is None else actor
    return RoutedExpertsRollout(actor, tokenizer or Tokenizer(), None, rollout_config(**config), engine=engine)


def test_what_cannot_work_is_refused_where_it_is_built(demo_engine):
    with pytest.raises(ConfigError, match="pads with its end token 9"):
        new_rollout(demo_engine, tokenizer=Tokenizer(pad=9, eos=9))
    with pytest.raises(ConfigError, match=r"120 and max_tokens_to_generate=20 are 140 tokens.*context is 128"):
        new_rollout(demo_engine, max_prompt_length=120)
    lora = demo_policy()
    lora.adapter = nnx.LoRAParam(jnp.zeros((2, 2)))
    with pytest.raises(ConfigError, match="LoRA"):
        new_rollout(demo_engine, actor=lora)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({}, CaptureDisabledError, "records no routed experts"),
        ({"enable_return_routed_experts": True, "logprobs_mode": "raw"}, ConfigError, "logprobs_mode='raw'"),
    ],
)
def test_an_engine_without_rows_or_with_other_logprobs_is_refused(settings, error, text):
    sizes = {"precompile_bs_paddings": (1,), "precompile_token_paddings": (32,), "context_length": 64}
    with Engine(str(tunix_runs.demo_model_path()), **sizes, **settings) as engine, pytest.raises(error, match=text):
        new_rollout(engine)


def test_a_prompt_that_holds_padding_is_refused(demo_engine):
    rollout = new_rollout(demo_engine, tokenizer=Tokenizer(pad=3 + ord("x") % 64))
    with pytest.raises(InvalidRequestError, match=r"'a fox' holds the padding token") as error:
        rollout.generate(["a cat", "a fox"], rollout_config())
    assert error.value.param == "prompts" and rollout.take() == []
    assert len(rollout.generate(["a cat"], rollout_config()).tokens) == 1


def test_more_equal_prompts_than_a_request_has_answers(demo_engine):
    rollout = new_rollout(demo_engine)
    drawn = answers(rollout.generate(["ab"] * 130, rollout_config(max_tokens_to_generate=8)))
    assert len(drawn) == 130 and drawn[0] != drawn[128] and len(set(drawn)) > 100
