"""Policy and Replayed inside Tunix's own loss: which experts run, and what the gradient sees."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl import common, function_registry

from routed_experts.core.errors import ConfigError, InvalidRequestError, RoutingAlignmentError
from routed_experts.integrations.tunix import Policy, Replayed, ReplayExample, with_replay
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay import RoutedBatch, forward
from support import tunix_runs
from support.tunix_runs import PROMPTS, WIDTH, demo_policy, make_cluster, make_example

pytestmark = [pytest.mark.tunix, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PPO = types.SimpleNamespace(epsilon_low=0.2, epsilon_high=0.2, entropy_coef=None)


@pytest.fixture(scope="module")
def cluster(demo_engine):
    return make_cluster(demo_engine)


@pytest.fixture(scope="module")
def example(cluster):
    """Prompts of unequal length, the third one too long, and one of them twice."""
    return make_example(cluster, [*PROMPTS, PROMPTS[0]])


def grpo():
    config = tunix_runs.grpo_config()
    config.temperature = 1.0
    return config


def tokens_of(example, pad):
    """What Tunix passes to a model: tokens, positions, attention mask, segments."""
    return common.process_ids(example.prompt_ids, example.completion_ids, pad, 0)


@functools.cache
def loss_of(name):
    """Tunix's loss `name` of (model, example); PPO's config has other fields."""
    tokenizer, config = tunix_runs.demo_tokenizer(), PPO if name.startswith("ppo") else grpo()
    ends = {"pad_id": tokenizer.pad_token_id, "eos_id": tokenizer.eos_token_id}
    loss = function_registry.get_policy_loss_fn(name)
    return lambda model, batch: tunix_runs.loss_value(loss(model, batch, algo_config=config, **ends))


@functools.cache
def gradients_of(name):
    """Loss and gradients, as Tunix's trainer takes them: one program."""

    @nnx.jit
    def step(model, batch):
        value, grads = nnx.value_and_grad(loss_of(name))(model, batch)
        return value, nnx.to_pure_dict(grads)

    return step


call = nnx.jit(lambda policy, *inputs, **named: policy(*inputs, **named))  # a cache is refused as it is traced


def test_executed_ids_are_the_recorded_ones_in_every_valid_row(cluster, example):
    batch, records = example
    tokens, positions, mask, segments = tokens_of(batch, cluster.rollout.pad_id())
    policy = cluster.actor_trainer.model
    out = policy.run(
        tokens,
        positions,
        None,
        mask,
        segments,
        ids=batch.routed_ids,
        valid=batch.routed_valid,
        return_routed=True,
    )
    rows = 0
    for index, record in enumerate(records):
        first = WIDTH - record.prompt_ids.size
        for token, ids in enumerate(record.routed.ids, start=record.routed.start):
            assert batch.routed_valid[index, first + token]
            np.testing.assert_array_equal(out.ids[index, first + token], ids)
            rows += 1
    assert rows == int(batch.routed_valid.sum()) == sum(record.num_tokens - 1 for record in records)


def test_the_loss_runs_the_rows_that_it_is_given(cluster, example):
    """Tunix's logprobs are those of the rollout; on the rows of another sample they are others."""
    batch, _ = example
    policy, pad = cluster.actor_trainer.model, cluster.rollout.pad_id()

    def logprobs(ids, valid):
        graphdef, state = nnx.split(Replayed(policy, ids, valid))
        inputs = {"prompt_tokens": batch.prompt_ids, "completion_tokens": batch.completion_ids}
        result = common.compute_per_token_logps(graphdef, state, **inputs, pad_id=pad, eos_id=0)
        return jnp.where(batch.completion_mask, result[0] if isinstance(result, tuple) else result, 0.0)

    own = logprobs(batch.routed_ids, batch.routed_valid)
    np.testing.assert_allclose(own, batch.old_per_token_logps, atol=2e-5)
    other = logprobs(jnp.roll(batch.routed_ids, 1, axis=0), jnp.roll(batch.routed_valid, 1, axis=0))
    assert float(jnp.abs(other - own).max()) > 0.1


def test_rows_of_which_none_is_valid_are_the_live_policy_by_the_bit(example):
    batch, _ = example
    invalid = dataclasses.replace(batch, routed_valid=jnp.zeros_like(batch.routed_valid))
    live, live_grads = gradients_of("grpo")(demo_policy(), invalid)
    loss, grads = gradients_of("grpo_replay")(demo_policy(), invalid)
    assert float(loss) == float(live) and np.isfinite(float(loss))
    jax.tree.map(np.testing.assert_array_equal, grads, live_grads)


def test_ppo_runs_the_rows_too(example):
    batch, _ = example
    batch = dataclasses.replace(batch, advantages=batch.advantages[:, None])
    invalid = dataclasses.replace(batch, routed_valid=jnp.zeros_like(batch.routed_valid))
    other = dataclasses.replace(batch, routed_ids=jnp.roll(batch.routed_ids, 1, axis=0))
    live, replayed = nnx.jit(loss_of("ppo")), nnx.jit(loss_of("ppo_replay"))
    assert float(replayed(demo_policy(), invalid)) == float(live(demo_policy(), invalid))
    assert float(replayed(demo_policy(), other)) != pytest.approx(float(live(demo_policy(), invalid)), rel=1e-3)


def test_the_routers_gradient_is_finite_and_not_zero_also_on_other_ids(example):
    batch, _ = example
    other = dataclasses.replace(batch, routed_ids=(batch.routed_ids + 1) % 32)
    for given in (batch, other):
        _, grads = gradients_of("grpo_replay")(demo_policy(), given)
        routers = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(grads) if "router" in str(path)]
        assert routers
        for leaf in routers:
            assert np.isfinite(leaf).all() and (np.abs(leaf).max(axis=tuple(range(1, leaf.ndim))) > 0).all()


def test_a_policy_is_the_forward_and_masks_are_segments(cluster, example):
    batch, _ = example
    tokens, positions, mask, segments = tokens_of(batch, cluster.rollout.pad_id())
    policy = cluster.actor_trainer.model
    by_segments, none = call(policy, tokens, positions, None, mask, segments)
    by_mask, _ = call(policy, tokens, positions, None, mask)
    assert none is None
    np.testing.assert_array_equal(by_segments, by_mask)
    pad = segments == 0
    spec = policy.config.capture_spec
    nothing = RoutedBatch(
        jnp.zeros((*tokens.shape, spec.num_moe_layers, spec.top_k), spec.dtype), jnp.zeros_like(pad), pad
    )
    direct = nnx.jit(forward)(policy.decoder, tokens, positions=positions, routed=nothing)
    np.testing.assert_allclose(by_segments[~pad], direct.logits[~pad], atol=1e-5)
    unpadded, _ = call(policy, tokens[:1, -25:])
    assert unpadded.shape == (1, 25, policy.config.vocab_size)


def test_forced_experts_are_replayed_and_minus_one_is_live(cluster, example):
    batch, _ = example
    tokens, positions, mask, segments = tokens_of(batch, cluster.rollout.pad_id())
    policy = cluster.actor_trainer.model
    valid = batch.routed_valid[..., None, None]
    shifted = jnp.where(valid, (batch.routed_ids.astype(jnp.int32) + 1) % 32, -1)
    forced, _ = call(policy, tokens, positions, None, mask, segments, forced_routed_experts=shifted)
    replayed, _ = call(
        Replayed(policy, shifted.astype(jnp.uint8), batch.routed_valid), tokens, positions, None, mask, segments
    )
    np.testing.assert_array_equal(forced, replayed)
    live, _ = call(policy, tokens, positions, None, mask, segments)
    unforced, _ = call(
        policy, tokens, positions, None, mask, segments, forced_routed_experts=jnp.full_like(shifted, -1)
    )
    np.testing.assert_array_equal(unforced, live)
    assert float(jnp.abs(forced - live).max()) > 0.1


def test_packed_segments_do_not_see_each_other():
    policy, tokens = demo_policy(), jnp.arange(1, 13, dtype=jnp.int32)[None]
    segments = jnp.array([[1] * 6 + [2] * 6])
    positions = jnp.array([[*range(6), *range(6)]])
    packed, _ = call(policy, tokens, positions, segment_ids=segments)
    for part in (slice(0, 6), slice(6, 12)):
        alone, _ = call(policy, tokens[:, part])
        np.testing.assert_allclose(packed[:, part], alone, atol=2e-5)


def test_a_compute_dtype_is_the_model_that_an_engine_of_it_serves():
    """And the gradient goes to the float32 weights."""
    tokens = jnp.arange(1, 13, dtype=jnp.int32)[None]
    served = Policy(ModelFolder.open(tunix_runs.demo_model_path()).load(jnp.dtype("bfloat16")))
    policy = demo_policy(compute_dtype="bfloat16")
    np.testing.assert_array_equal(call(policy, tokens)[0], call(served, tokens)[0])
    grads = nnx.jit(nnx.grad(lambda model: jnp.sum(model(tokens)[0] ** 2)))(policy)
    for leaf in jax.tree.leaves(grads):
        assert leaf.dtype == jnp.float32 and float(jnp.abs(leaf).max()) > 0


def test_a_cache_is_refused_so_tunix_cannot_sample_by_itself():
    with pytest.raises(InvalidRequestError, match=r"cache is given.*RoutedExpertsRollout") as error:
        demo_policy()(jnp.zeros((1, 4), jnp.int32), cache={"layer_0": {}})
    assert error.value.param == "cache"


def test_a_model_without_experts_is_refused():
    with pytest.raises(ConfigError, match="no MoE layer"):
        Policy(types.SimpleNamespace(config=types.SimpleNamespace(capture_spec=None)))


def test_packed_and_bare_examples_and_foreign_models_are_refused(cluster, example):
    batch, _ = example
    loss = function_registry.get_policy_loss_fn("grpo_replay")
    inputs = {"algo_config": grpo(), "pad_id": cluster.rollout.pad_id(), "eos_id": cluster.rollout.eos_id()}
    packed = dataclasses.replace(batch, segment_ids=jnp.ones((1, 4), jnp.int32))
    with pytest.raises(ConfigError, match="max_seq_token_per_tpu"):
        loss(demo_policy(), packed, **inputs)
    bare = {field.name: getattr(batch, field.name) for field in dataclasses.fields(common.TrainExample)}
    with pytest.raises(RoutingAlignmentError, match=r"TrainExample without rows.*ReplayGRPOLearner"):
        loss(demo_policy(), common.TrainExample(**bare), **inputs)
    with pytest.raises(RoutingAlignmentError, match="ReplayExample without rows"):
        loss(demo_policy(), ReplayExample(**bare), **inputs)
    with pytest.raises(ConfigError, match="the actor is a Linear"):
        loss(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), batch, **inputs)
    with pytest.raises(RoutingAlignmentError, match=r"routed\.ids is"):
        loss(demo_policy(), dataclasses.replace(batch, routed_ids=batch.routed_ids[:, :-1]), **inputs)


def test_an_unknown_loss_names_those_that_there_are():
    with pytest.raises(ConfigError, match=r"'gropo' is not registered; Tunix has .*grpo, .*ppo"):
        with_replay("gropo")
