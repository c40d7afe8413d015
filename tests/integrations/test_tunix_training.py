"""GRPO by Tunix's own loop: rows and weights in each of its steps, and what its other settings do to them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix.rl import common
from tunix.rl import rl_cluster as tunix_cluster
from tunix.rl.grpo import dapo_learner, drgrpo_learner, grpo_learner

from routed_experts.core.errors import ConfigError, RoutingAlignmentError, RoutingReplayError
from routed_experts.integrations.tunix import (
    ReplayCluster,
    ReplayExample,
    ReplayGRPOLearner,
    RoutedExpertsRollout,
    routing_report,
)
from routed_experts.replay import CanaryGate
from support import tunix_runs
from support.tunix_runs import (
    GROUP,
    PROMPTS,
    WatchedLearner,
    batches,
    demo_policy,
    grpo_config,
    make_cluster,
    see,
    vowel_share,
)

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("fast_compilation"),
]
STEPS = 4
# Two float32 forwards of a sample may differ by this. Rounding each matrix product once moves the most sensitive token
# of these samples by up to 1.7e-5 (60 trials around the float64 forward of transformers); there Tunix's forward is off
# by 2.4e-5, the rollout by 0.4e-5 (Xeon with AMX).
FLOAT32_LOGPROBS = 1e-4
CONFIGS = {"DrGRPOConfig": drgrpo_learner, "DAPOConfig": dapo_learner}


class WatchedCluster(ReplayCluster):
    """Keeps what its trainer is given, and what the engine has released meanwhile."""

    def update_actor(self, train_ds, eval_ds, skip_jit=False):
        vars(self).setdefault("trained", []).extend(train_ds)
        super().update_actor(train_ds, eval_ds, skip_jit)
        vars(self).setdefault("released", []).append(self.rollout.engine.released)


class CountingRollout(RoutedExpertsRollout):
    """Counts programs that are compiled while the engine generates and takes weights. The first push is done before."""

    def generate(self, prompts, rollout_config):
        before = self.engine.compiles.serving
        out = super().generate(prompts, rollout_config)
        self.compiled = [*vars(self).get("compiled", []), self.engine.compiles.serving - before]
        return out


class PlainLearner(grpo_learner.GRPOLearner):
    """Tunix's own learner, without rows; only looked at."""

    def _generate_and_compute_advantage(self, training_input, mode=tunix_cluster.Mode.TRAIN):
        cluster = vars(self).get("rl_engine") or self.rl_cluster
        example = super()._generate_and_compute_advantage(training_input, mode)
        records = cluster.rollout.take()
        fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
        like, _ = tunix_runs.example_of(
            cluster, np.asarray(example.prompt_ids), np.asarray(example.completion_ids), records
        )
        rows = {"routed_ids": like.routed_ids, "routed_valid": like.routed_valid}
        seen = see(cluster, ReplayExample(**(fields | rows)), records, cluster.rollout.update_count)
        self.seen = [*vars(self).get("seen", []), seen]
        return example


@dataclasses.dataclass(frozen=True)
class Run:
    cluster: object
    learner: object
    first_count: int
    metrics: list
    traces: int


@pytest.fixture(scope="module")
def run():
    """Four steps with rows on an engine of its own, which is shut down at their end."""
    engine = tunix_runs.demo_engine()
    cluster = make_cluster(engine, cluster=WatchedCluster, rollout=CountingRollout)
    cluster.rollout.update_params(nnx.state(cluster.actor_trainer.model, nnx.Param))
    first_count, metrics = cluster.rollout.update_count, []
    cluster.with_external_metrics_logger(metrics.append)
    learner = WatchedLearner(cluster)
    learner.train(batches(STEPS))
    engine.shutdown()  # Tunix has removed the listeners of all by now
    traces = cluster.actor_trainer.jit_train_and_eval_step(False, True)[0].func.jitted_fn._cache_size()
    return Run(cluster, learner, first_count, metrics, traces)


def test_each_step_trains_on_the_rollouts_logprobs_rows_and_weights(run):
    assert len(run.learner.seen) == STEPS == run.cluster.global_steps
    for step, seen in enumerate(run.learner.seen):
        assert seen.is_exact(), (step, seen.replayed, seen.live)
        assert seen.replayed.valid > 0.9 and seen.replayed.f_1_1 == 0.0
        assert seen.update_count == run.first_count + step
        for record in seen.records:
            assert {count for _, _, count in record.routed.version_spans} == {seen.update_count}
    assert run.cluster.rollout.update_count == run.first_count + STEPS


def test_one_trace_serves_all_steps_and_the_engine_compiles_nothing(run):
    assert run.traces == 1
    assert run.cluster.rollout.compiled == [0] * STEPS


def test_the_weights_change_and_the_answers_of_a_group_differ(run):
    first, last = (nnx.state(policy, nnx.Param) for policy in (demo_policy(), run.cluster.actor_trainer.model))
    moved = jax.tree.map(lambda old, new: float(jnp.abs(old - new).max()), first, last)
    assert all(value > 0 for value in jax.tree.leaves(moved))
    for seen in run.learner.seen:
        for group in range(2):
            records = seen.records[group * GROUP : (group + 1) * GROUP]
            assert len({record.output_ids.tobytes() for record in records}) == GROUP


def test_metrics_are_logged_for_each_step(run):
    logged = [buffer.metrics for buffer in run.metrics if "routing/k3" in buffer.metrics]
    assert len(logged) == STEPS
    for metrics in logged:
        names = {f"routing/{name}" for name in ("canary", "flipped", "valid", "k3", "f_1_1", "k3_live", "f_1_1_live")}
        assert names <= set(metrics) and metrics["routing/valid"][0][0] > 0.9


def test_the_trainer_is_given_the_rows_of_the_learner(run):
    assert len(run.cluster.trained) == STEPS
    for trained, seen in zip(run.cluster.trained, run.learner.seen, strict=True):
        np.testing.assert_array_equal(trained.routed_ids, seen.example.routed_ids)
        np.testing.assert_array_equal(trained.routed_valid, seen.example.routed_valid)


def test_shifted_rows_and_those_of_another_sample_trip_the_canary(run):
    seen, policy = run.learner.seen[-1], demo_policy()
    logprobs = tunix_runs.padded_logprobs(seen.records, tunix_runs.NEW)
    example = seen.example
    order = jnp.argsort(jnp.arange(2 * GROUP) % GROUP, stable=True)  # the other prompt's
    for ids in (jnp.roll(example.routed_ids, 1, axis=1), example.routed_ids[order], example.routed_ids[:, :, ::-1]):
        wrong = dataclasses.replace(example, routed_ids=ids)
        report = routing_report(policy, wrong, logprobs, pad_id=run.cluster.rollout.pad_id())
        assert report.canary > 0.3 and report.k3 > 0.05


class WrongRows(RoutedExpertsRollout):
    """Rows of the token before, under the right tokens: what no check of lengths can see."""

    def take(self):
        def shifted(record):
            routed = dataclasses.replace(record.routed, ids=np.roll(record.routed.ids, 1, axis=0))
            return dataclasses.replace(record, routed=routed)

        return [shifted(record) for record in super().take()]

    def find(self, prompt_tokens, completion_tokens):
        retained, self._records = self._records, self.take()
        actual = super().find(prompt_tokens, completion_tokens)
        self._records = retained
        return actual


class StaleRows(RoutedExpertsRollout):
    """From the second step on, the records of the step before."""

    def take(self):
        records, before = super().take(), vars(self).get("before", [])
        if records:
            self.before = records
        return before if records and before else records


class MixedRows(RoutedExpertsRollout):
    """The records of a call in another order."""

    def take(self):
        return super().take()[::-1]


@pytest.mark.parametrize(
    ("rollout", "error", "text"),
    [
        (WrongRows, RoutingReplayError, r"canary=0\.\d+"),
        (StaleRows, RoutingAlignmentError, "other tokens"),
        (MixedRows, RoutingAlignmentError, "sample 0: the example has other tokens"),
    ],
)
def test_a_learner_ends_on_wrong_rows(demo_engine, rollout, error, text):
    learner = ReplayGRPOLearner(make_cluster(demo_engine, rollout=rollout), grpo_config(), vowel_share)
    with pytest.raises(error, match=text):
        learner.train(batches(2))


def test_rows_of_the_step_before_are_refused_by_their_version(run):
    """Also where the tokens are the same, as greedy answers may be."""
    seen = run.learner.seen[0]
    tokens = np.asarray(seen.example.prompt_ids), np.asarray(seen.example.completion_ids)
    with pytest.raises(RoutingAlignmentError, match=f"sample 0.*version.*{seen.update_count}"):
        tunix_runs.example_of(run.cluster, *tokens, seen.records)


def test_without_rows_a_float32_rollout_has_the_trainers_logprobs_too(demo_engine):
    """k3 alone cannot show that rows are replayed; the controls above do."""
    learner = PlainLearner(make_cluster(demo_engine), grpo_config(policy_loss_fn="grpo"), vowel_share)
    learner.train(batches(STEPS))
    assert len(learner.seen) == STEPS and all(seen.is_exact() for seen in learner.seen)


def test_micro_batches_and_iterations_carry_the_rows_of_their_samples(demo_engine):
    """beta > 0 with a reference, 2 iterations, 2 micro-batches an update, prompts of unequal length, one too long."""
    sizes = {"mini_batch_size": 4, "train_micro_batch_size": 2, "rollout_micro_batch_size": 1}
    cluster = make_cluster(demo_engine, cluster=WatchedCluster, reference=demo_policy(), **sizes)
    learner = WatchedLearner(cluster, grpo_config(num_iterations=2, beta=0.1))
    learner.train(batches(1, PROMPTS))
    assert len(cluster.trained) == 2 * 2 and cluster.actor_trainer.train_steps == 2
    whole = [seen.example for seen in learner.seen]
    assert sum(example.prompt_ids.shape[0] for example in whole) == 4 * GROUP
    for trained in cluster.trained:
        assert trained.prompt_ids.shape[0] == 2 * GROUP
        source, first = find_slice(whole, trained)
        for name in ("routed_ids", "routed_valid", "old_per_token_logps"):
            part = getattr(source, name)[first : first + 2 * GROUP]
            np.testing.assert_array_equal(getattr(trained, name), part)
    for seen in learner.seen:
        assert seen.is_exact()
        logprobs = tunix_runs.padded_logprobs(seen.records, tunix_runs.NEW)
        np.testing.assert_array_equal(seen.example.old_per_token_logps, logprobs)
        reference = np.where(seen.example.completion_mask, seen.example.ref_per_token_logps, 0)
        np.testing.assert_allclose(reference, logprobs, atol=FLOAT32_LOGPROBS)
        assert np.abs(reference - np.roll(logprobs, 1, axis=0)).max() > 100 * FLOAT32_LOGPROBS, "of other samples"


@pytest.mark.parametrize("config", ["DrGRPOConfig", "DAPOConfig"])
def test_configs_of_other_learners_train_on_the_rows(demo_engine, config):
    """DAPO's beta is None, for which Tunix computes the logprobs of a reference all the same."""
    values = {"num_generations": GROUP, "policy_loss_fn": "grpo_replay"}
    if config == "DrGRPOConfig":
        values |= {"beta": 0.0}
    else:
        values |= {"overlong_buffer": None}
    cluster = make_cluster(demo_engine, cluster=WatchedCluster, reference=demo_policy())
    learner = WatchedLearner(cluster, getattr(CONFIGS[config], config)(**values))
    learner.train(batches(2))
    assert [seen.is_exact() for seen in learner.seen] == [True, True]
    assert all(isinstance(trained, ReplayExample) for trained in cluster.trained)


def find_slice(examples, part):
    """The example that a micro-batch is cut from, and its first row there."""
    size = part.prompt_ids.shape[0]
    for example in examples:
        for first in range(0, example.prompt_ids.shape[0], size):
            if np.array_equal(example.completion_ids[first : first + size], part.completion_ids):
                return example, first
    raise AssertionError("the trainer was given what no learner made")


def live_logprobs(model, example, cluster):
    graphdef, state = nnx.split(model)
    ends = {"pad_id": cluster.rollout.pad_id(), "eos_id": cluster.rollout.eos_id()}
    inputs = {"prompt_tokens": example.prompt_ids, "completion_tokens": example.completion_ids}
    logprobs = common.compute_per_token_logps(graphdef, state, **inputs, **ends)
    return jnp.where(example.completion_mask, logprobs[0] if isinstance(logprobs, tuple) else logprobs, 0.0)


def test_old_logprobs_of_the_trainer_take_the_rows_and_the_reference_never_does(demo_engine):
    """`sampler_is="token"` and `use_rollout_logps=False` call this. Wrong rows show which forward has them."""
    cluster = make_cluster(demo_engine, rollout=WrongRows, reference=demo_policy())
    learner = WatchedLearner(cluster, grpo_config(beta=0.1, **sampler_is()), gate=CanaryGate(limit=1.0))
    learner._rollout_micro_batch_size = learner._compute_logps_micro_batch_size = 2  # as Tunix's training begins
    example = learner._generate_and_compute_advantage({"prompts": np.repeat(PROMPTS[:2], GROUP)})
    live = live_logprobs(demo_policy(), example, cluster)
    reference = jnp.where(example.completion_mask, example.ref_per_token_logps, 0.0)
    np.testing.assert_allclose(reference, live, atol=1e-6)
    inputs = {"pad_id": cluster.rollout.pad_id(), "eos_id": cluster.rollout.eos_id()}
    tokens = example.prompt_ids, example.completion_ids
    cluster.rollout._records = learner.seen[0].records  # as they were while the example was made
    with pytest.raises(RoutingAlignmentError, match="sample 0 is none of the 8 sequences"):
        cluster.get_actor_per_token_logps(tokens[0], jnp.roll(tokens[1], 1, axis=1), **inputs)


def sampler_is():
    """The setting by which newer releases weigh tokens by importance, where there is one."""
    names = {field.name for field in dataclasses.fields(grpo_learner.GRPOConfig)}
    return {"sampler_is": "token"} if "sampler_is" in names else {}


@pytest.mark.parametrize("wrong", [False, True])
def test_the_trainers_old_logprobs_are_of_the_rows(demo_engine, wrong):
    cluster = make_cluster(demo_engine, rollout=WrongRows if wrong else RoutedExpertsRollout)
    out = cluster.rollout.generate(PROMPTS, tunix_runs.rollout_config())
    answers = np.full((4, tunix_runs.NEW), cluster.rollout.pad_id(), np.int32)
    logprobs = np.zeros(answers.shape, np.float32)
    for index, (tokens, values) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        answers[index, : tokens.size], logprobs[index, : tokens.size] = tokens, values
    inputs = {"pad_id": cluster.rollout.pad_id(), "eos_id": cluster.rollout.eos_id()}
    tokens = jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(answers)
    whole = cluster.get_actor_per_token_logps(*tokens, **inputs)
    parts = cluster.get_actor_per_token_logps(*tokens, **inputs, micro_batch_size=2)
    mask = answers != cluster.rollout.pad_id()
    np.testing.assert_allclose(np.where(mask, parts, 0), np.where(mask, whole, 0), atol=1e-5)
    distance = float(np.abs(np.where(mask, whole, 0) - np.where(mask, logprobs, 0)).max())
    assert (distance > 0.1) == wrong and (wrong or distance < 2e-5)
    hot = cluster.get_actor_per_token_logps(*tokens, **inputs, temperature=2.0)
    assert float(jnp.abs(hot - whole).max()) > 0.1


def test_importance_weights_of_the_sampler_reach_the_loss(run):
    """Weights of 0 leave no gradient of the policy: the fields of Tunix's example stay what they were."""
    example = dataclasses.replace(
        run.learner.seen[0].example, sampler_is_weights=jnp.zeros((2 * GROUP, tunix_runs.NEW))
    )
    loss = run.cluster.actor_trainer.loss_fn
    value = nnx.jit(lambda model, batch: tunix_runs.loss_value(loss(model, batch, algo_config=None)))
    assert float(value(demo_policy(), example)) == 0.0


def test_a_colocated_engine_has_no_kv_pages_while_the_actor_trains(demo_engine):
    cluster = make_cluster(demo_engine, cluster=WatchedCluster, colocated=True)
    learner = WatchedLearner(cluster)
    learner.train(batches(2))
    assert cluster.released == [("kv_cache",)] * 2
    assert all(seen.is_exact() for seen in learner.seen)
    demo_engine.resume_memory_occupation()


def test_settings_that_cannot_replay_are_refused(demo_engine):
    cluster = make_cluster(demo_engine)
    with pytest.raises(ConfigError, match=r"policy_loss_fn='grpo' replays nothing; give 'grpo_replay'"):
        ReplayGRPOLearner(rl_cluster=cluster, algo_config=grpo_config(policy_loss_fn="grpo"), reward_fns=vowel_share)
    with pytest.raises(ConfigError, match="measure_every=-1"):
        ReplayGRPOLearner(cluster, grpo_config(), vowel_share, measure_every=-1)
    packed = make_cluster(demo_engine, max_seq_token_per_tpu=64)
    with pytest.raises(ConfigError, match="max_seq_token_per_tpu=64"):
        ReplayGRPOLearner(rl_engine=packed, algo_config=grpo_config(), reward_fns=vowel_share)
    cluster.cluster_config = dataclasses.replace(cluster.cluster_config, offload_to_cpu=True)
    with pytest.raises(ConfigError, match="offload_to_cpu=True"):
        ReplayGRPOLearner(cluster, grpo_config(), vowel_share)
