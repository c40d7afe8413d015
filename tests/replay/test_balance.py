"""Balance statistics against loops in NumPy: every routing law, executed and native choice, padding left out; the loss
and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.test_scoring_funcs import inputs, live_ids
from replay.test_laws import ALL_SPECS
from routed_experts import InvalidRequestError
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.layers.kernels import Kernels
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.layers.routing import LayerRouting
from routed_experts.models.decoder.sparse_block import route
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import RoutedBatch, balance_loss, forward
from routed_experts.replay.recorder import BalanceRecorder, RoutingRecorder
from support.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("fast_compilation")

SHAPE = (2, 12)


def spread(z, spec):
    """A token's scores as a distribution, in float64."""
    powers = 1 / (1 + np.exp(-z)) if spec.scoring_func == "sigmoid" else np.exp(z - z.max())
    return powers / powers.sum()


@pytest.mark.parametrize("on", ["executed", "native"])
@pytest.mark.parametrize("law", ALL_SPECS)
def test_a_layer_counts_what_a_loop_counts(law, on):
    spec = ALL_SPECS[law]
    logits, bias, replayed, valid = inputs(spec)
    counted = np.random.default_rng(1).random(len(logits)) < 0.7
    capture = CaptureSpec(num_hidden_layers=2, layer_ids=(0, 1), num_experts=spec.num_experts, top_k=spec.top_k)

    def run(logits, bias, replayed, valid, counted):
        recorder = RoutingRecorder.start(len(logits), capture, BalanceRecorder.start(counted, capture, on))
        kwargs = {
            "spec": spec,
            "kernels": Kernels(moe=MOE_BACKENDS["reference"]),
            "bias": bias if spec.biased else None,
        }
        return route(logits, LayerRouting(replayed, valid), jnp.int32(1), recorder, **kwargs)[1].balance.result()

    actual = jax.jit(run)(logits, bias.astype(np.float32), replayed, valid, counted)
    counts, sums = np.zeros(spec.num_experts, int), np.zeros(spec.num_experts)
    for n in np.flatnonzero(counted):
        for expert in (
            replayed[n]
            if valid[n] and on == "executed"
            else live_ids(logits[n].astype(np.float64).tolist(), bias, spec)[1]
        ):
            counts[expert] += 1
        sums += spread(logits[n].astype(np.float64), spec)
    np.testing.assert_array_equal(actual.counts, [0 * counts, counts])
    np.testing.assert_allclose(actual.probabilities, [0 * sums, sums / counted.sum()], atol=1e-6)
    assert int(actual.num_tokens) == counted.sum()
    loss = spec.num_experts * sum(counts[e] / counts.sum() * sums[e] / counted.sum() for e in range(spec.num_experts))
    np.testing.assert_allclose(balance_loss(actual), [0, loss], atol=1e-5)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    opened = ModelFolder.open(
        write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3, tokenizer=False)
    )
    return opened.config.capture_spec, *nnx.split(opened.load(jnp.dtype("float32")))


def test_a_forward_counts_its_own_ids_without_padding_and_the_loss_reaches_routers_alone(parts):
    spec, graphdef, state = parts
    rng = np.random.default_rng(2)
    tokens, pad = (
        jnp.asarray(rng.integers(0, VOCAB_SIZE, SHAPE), jnp.int32),
        np.arange(SHAPE[1]) >= np.array([[12], [7]]),
    )
    ids = rng.permuted(np.tile(np.arange(spec.num_experts, dtype=np.uint8), (*SHAPE, spec.num_moe_layers, 1)), axis=-1)[
        ..., : spec.top_k
    ]
    routed = RoutedBatch(jnp.asarray(ids), jnp.asarray(~pad & (rng.random(SHAPE) < 0.5)), jnp.asarray(pad))

    def loss(state, on, remat):
        out = forward(nnx.merge(graphdef, state), tokens, routed=routed, return_routed=True, balance_on=on, remat=remat)
        return jnp.sum(balance_loss(out.balance)), out

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=(1, 2))
    ((_, out), plain), (_, remat) = (gradient(state, "executed", remat) for remat in (False, True))
    _, live = jax.jit(loss, static_argnums=(1, 2))(state, "native", False)
    for layer in range(spec.num_moe_layers):
        counts = np.bincount(np.asarray(out.ids)[~pad][:, layer].ravel(), minlength=spec.num_experts)
        np.testing.assert_array_equal(out.balance.counts[layer], counts)
    assert not np.array_equal(live.balance.counts, out.balance.counts) and int(out.balance.num_tokens) == np.sum(~pad)
    np.testing.assert_array_equal(live.balance.counts.sum(axis=1), [np.sum(~pad) * spec.top_k] * spec.num_moe_layers)
    np.testing.assert_allclose(live.balance.probabilities, out.balance.probabilities, atol=1e-6)
    assert np.all(np.isfinite(plain["blocks"][1][0]["router"][...])) and np.all(
        np.any(plain["blocks"][1][0]["router"][...] != 0, axis=(1, 2))
    )
    assert not np.any(plain["head"][...]), "nothing of the logits is in it"
    for left, right in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_another_choice_of_what_is_counted_is_refused(parts):
    _, graphdef, state = parts
    with pytest.raises(
        InvalidRequestError, match="balance_on='both' is unknown; choose executed, native or None"
    ) as caught:
        forward(nnx.merge(graphdef, state), jnp.zeros(SHAPE, jnp.int32), balance_on="both")
    assert caught.value.param == "balance_on"
