"""Random weights for a config alone: shapes, spread, finite values. What they are for: benchmarks/step.py."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay.forward import forward
from support.tiny_checkpoint import tiny_config

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    return tmp_path


def test_a_config_alone_makes_a_model_of_its_shapes(folder):
    opened = ModelFolder.open(folder, load_format="dummy")
    model = opened.load(opened.dtype("float32"))
    expected = nnx.state(
        nnx.eval_shape(lambda: FamilyDecoder(opened.config, rngs=nnx.Rngs(0), dtype=jnp.dtype("float32")))
    )
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), state) for state in (nnx.state(model), expected)]
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert opened.dtype("auto") == jnp.bfloat16


def test_its_values_are_finite_and_its_routing_spreads(folder):
    model = ModelFolder.open(folder, load_format="dummy").load(jnp.dtype("float32"))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, 256), jnp.int32)[None]
    out = nnx.jit(forward, static_argnames=("return_routed",))(model, tokens, return_routed=True)
    assert np.isfinite(np.asarray(out.logits)).all()
    ids = np.asarray(out.ids).reshape(256, model.config.capture_spec.num_moe_layers, -1)
    for layer in range(ids.shape[1]):
        counts = np.bincount(ids[:, layer].reshape(-1), minlength=model.config.capture_spec.num_experts)
        assert counts.min() > 0.25 * counts.mean(), (layer, counts)


def test_a_config_alone_is_no_checkpoint(folder):
    with pytest.raises(CheckpointError):
        ModelFolder.open(folder)


def test_an_unknown_format_is_refused(folder):
    with pytest.raises(ConfigError, match="load_format='zeros' is unknown; choose one of auto, dummy"):
        ModelFolder.open(folder, load_format="zeros")
