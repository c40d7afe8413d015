"""Replay beside an independent trainer: transformers, its routers made to run the same rows, gives this package's
logprobs."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from routed_experts.replay import RoutedBatch, forward
from support.model_steps import tiny_model

pytestmark = pytest.mark.usefixtures("fast_compilation")

SHAPE, VOCAB = (3, 24), 50
FORWARD = nnx.jit(forward)  # one program takes less time than its operations one by one


def build_trainer(model):
    """The trainer of benchmarks/training/hf_trainer.py, loaded by its path: its folder is not on the search path."""
    spec = importlib.util.spec_from_file_location(
        "hf_trainer", Path(__file__).parents[2] / "benchmarks" / "training" / "hf_trainer.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Trainer(model, torch.float32)


@pytest.mark.parametrize("renormalize", [True, False])
def test_forced_rows_give_the_same_logprobs_and_misses(renormalize):
    """Random experts on half of the tokens, float32 both; the weights are such as bfloat16 holds."""
    model, rng = tiny_model("bfloat16", renormalize=renormalize), np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, SHAPE)
    ids = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (*SHAPE, 2, 1)), axis=-1)[..., :2]
    valid = rng.random(SHAPE) < 0.5
    trainer = build_trainer(model)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    for flags in (valid, np.zeros(SHAPE, bool)):
        missed = trainer.replay(ids, flags)
        expected = trainer.logprobs(tokens)
        batch = RoutedBatch(jnp.asarray(ids), jnp.asarray(flags), jnp.zeros(SHAPE, bool))
        out = FORWARD(wide, jnp.asarray(tokens, jnp.int32), routed=batch)
        actual = np.take_along_axis(np.asarray(jax.nn.log_softmax(out.logits[:, :-1])), tokens[:, 1:, None], axis=-1)[
            ..., 0
        ]
        np.testing.assert_allclose(actual, expected, atol=2e-5)
        share = np.asarray(out.slot_miss)[flags].mean(axis=0) / 2 if flags.any() else np.zeros(2)
        np.testing.assert_allclose([float(value) for value in missed], share, atol=1e-6)
    assert np.max(np.abs(expected - trainer_of_all(trainer, tokens, ids))) > 1e-3, "rows change what is computed"


def trainer_of_all(trainer, tokens, ids):
    trainer.replay(ids, np.ones(SHAPE, bool))
    return trainer.logprobs(tokens)
