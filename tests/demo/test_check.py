"""The check of the demo: it passes for answers that the model gave, and fails for each way in which they can be
wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.demo.check import check_replay
from routed_experts.demo.outputs import DemoOutput
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay.forward import RoutedBatch, forward
from support.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")

LENGTHS = ((20, 7), (9, 8))  # tokens of the sequence, tokens of the prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelFolder.open(write_tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=False)).load(
        jnp.dtype("float32")
    )


@nnx.jit
def score(model, tokens, routed):
    out = forward(model, tokens, routed=routed, return_routed=True)
    return jax.nn.log_softmax(out.logits[0], axis=-1), out.ids[0]


def demo_output(model, tokens, length, prompt, *, ids=None):
    """The engine's output for the first `prompt` of `tokens`: causal, so a longer pass gives the values of a shorter
    one."""
    known = np.full((1, len(tokens)), ids is not None)
    forced = np.zeros((1, len(tokens), 3, 4), np.uint8) if ids is None else ids[None]
    logprobs, live = score(
        model,
        jnp.asarray(tokens[None]),
        RoutedBatch(jnp.asarray(forced), jnp.asarray(known), jnp.zeros(known.shape, bool)),
    )
    record = RoutedExperts(
        ids=np.array(live[: length - 1]),
        start=0,
        num_tokens=length,
        num_prompt_tokens=prompt,
        layer_ids=(1, 2, 3),
        num_hidden_layers=4,
        num_experts=16,
        version_spans=((0, length - 1, 0),),
    )
    chosen = np.asarray(logprobs)[np.arange(prompt - 1, length - 1), tokens[prompt:length]]
    return DemoOutput(
        title="",
        token_ids=tuple(tokens[:length].tolist()),
        logprobs=tuple(chosen.tolist()),
        record=record,
        wire_shape=(length - 1, 4, 4),
        cached_tokens=0,
        seconds=0.0,
        pieces=("",) * length,
    )


@pytest.fixture(scope="module")
def answers(model):
    rng = np.random.default_rng(0)
    return [demo_output(model, rng.integers(3, 313, 20), length, prompt) for length, prompt in LENGTHS]


def test_answers_of_the_model_pass(model, answers):
    check = check_replay(model, answers)
    assert check.faults == ()
    assert (check.num_rows, check.num_logprobs) == (19 + 8, 13 + 1)
    assert (check.executed, check.live_agreement, check.live_logit) == (1.0, 1.0, 0.0)
    assert check.replay_logprob < 1e-4
    assert check.shifted_logprob > 0.1


def test_ids_of_other_experts_fail_and_the_live_router_disagrees(model, answers):
    record = answers[0].record
    ids = np.array(record.ids)
    ids[10, 1] = [expert for expert in range(16) if expert not in ids[10, 1]][:4]
    wrong = dataclasses.replace(answers[0], record=dataclasses.replace(record, ids=ids))
    check = check_replay(model, [wrong, answers[1]])
    assert check.faults == ("the replay differs from the engine",)
    assert check.live_agreement == pytest.approx(1 - (1 + 0) / (27 * 3))
    assert check.executed == 1.0
    assert check.live_logit == 0.0, "rows from the first difference on are left out"


def test_a_wrong_logprob_fails(model, answers):
    wrong = dataclasses.replace(answers[1], logprobs=(answers[1].logprobs[0] + 0.01,))
    check = check_replay(model, [answers[0], wrong])
    assert check.faults == ("the replay differs from the engine",)
    assert check.replay_logprob == pytest.approx(0.01, rel=0.05)


def test_a_logprob_that_is_no_number_fails(model, answers):
    wrong = dataclasses.replace(answers[1], logprobs=(float("nan"),))
    assert "the replay differs from the engine" in check_replay(model, [answers[0], wrong]).faults


def test_a_shift_that_changes_nothing_is_noticed(model):
    rng = np.random.default_rng(1)
    constant_ids = np.tile(
        np.arange(4, dtype=np.uint8), (20, 3, 1)
    )  # the rows of all tokens are one, so a shift must go unseen
    check = check_replay(model, [demo_output(model, rng.integers(3, 313, 20), 20, 7, ids=constant_ids)])
    assert check.faults == (
        "no live logits are known to be the replayed ones",
        "rows of the wrong tokens passed the check",
    )
    assert check.live_agreement < 0.1
    assert np.isnan(check.live_logit), "no row was left to compare, and that is no agreement"
