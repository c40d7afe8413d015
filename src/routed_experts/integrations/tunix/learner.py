"""Tunix's learner and cluster with rows: each example gets those of its rollout, and so do the old logprobs.

Dims: B sequences, P tokens of a padded prompt, C of a padded answer."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int

from routed_experts.core.errors import ConfigError
from routed_experts.integrations.tunix.libraries import common, grpo_learner, rl_utils, sharding_utils
from routed_experts.integrations.tunix.libraries import rl_cluster as rl_cluster_lib
from routed_experts.integrations.tunix.loss import REPLAY_SUFFIX, ReplayExample
from routed_experts.integrations.tunix.policy import Policy, Replayed
from routed_experts.integrations.tunix.records import RolloutRecord, align_records, pad_logprobs
from routed_experts.integrations.tunix.report import routing_report
from routed_experts.integrations.tunix.rollout import RoutedExpertsRollout
from routed_experts.replay import CanaryGate


class ReplayGRPOLearner(grpo_learner.GRPOLearner):
    """Tunix's GRPOLearner, whose examples carry the rows of their rollout. DrGRPO and DAPO are its configs:
    DrGRPOConfig and DAPOConfig with `policy_loss_fn="grpo_replay"`.

    Logs `routing/canary`, `routing/flipped`, `routing/valid`, `routing/k3` and `routing/f_1_1` (RoutingReport) of
    every `measure_every`-th example, before the update that it is for; each costs one forward. With `compare_live` also
    `routing/k3_live` and `routing/f_1_1_live`, of the same example routed live, for another forward."""

    def __init__(
        self,
        rl_cluster: Any = None,
        algo_config: Any = None,
        reward_fns: Any = None,
        metric_fns: Sequence[Any] | None = None,
        data_shuffle_seed: int | None = None,
        *,
        rl_engine: Any = None,
        gate: CanaryGate | None = None,
        measure_every: int = 8,
        compare_live: bool = False,
    ) -> None:
        """Arguments are Tunix's (`rl_engine`: newer releases' name of `rl_cluster`), but for three. `gate` judges the
        canary; None: CanaryGate(), which raises RoutingReplayError above 0.05. `measure_every`: 0 never measures.

        Raises ConfigError unless the rollout is a RoutedExpertsRollout, the actor a Policy, the loss one of
        `with_replay`, and sequences are not packed."""
        cluster = rl_cluster if rl_engine is None else rl_engine
        check_cluster(cluster)
        if not str(algo_config.policy_loss_fn).endswith(REPLAY_SUFFIX):
            loss = algo_config.policy_loss_fn
            raise ConfigError(f"policy_loss_fn={loss!r} replays nothing; give {loss + REPLAY_SUFFIX!r}")
        if measure_every < 0:
            raise ConfigError(f"measure_every={measure_every} must be at least 0, which measures nothing")
        self._cluster, self._gate, self._measure_every = cluster, gate or CanaryGate(), measure_every
        self._compare_live, self._num_examples = compare_live, 0
        super().__init__(cluster, algo_config, reward_fns, metric_fns, data_shuffle_seed)

    def _generate_and_compute_advantage(
        self, training_input: Any, mode: Any = rl_cluster_lib.Mode.TRAIN
    ) -> ReplayExample:
        """Tunix's, with the rows of the answers. Raises RoutingAlignmentError for rows of other tokens or weights, and
        RoutingReplayError as the gate does."""
        rollout: RoutedExpertsRollout = self._cluster.rollout
        rollout.take()  # of calls that no example was made of
        example = super()._generate_and_compute_advantage(training_input, mode)
        records, policy = rollout.take(), self._cluster.actor_trainer.model
        routed = align_records(
            records,
            example.prompt_ids,
            example.completion_ids,
            policy=policy,
            pad_id=rollout.pad_id(),
            update_count=rollout.update_count,
        )
        fields = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
        example = ReplayExample(**fields, routed_ids=jnp.asarray(routed.ids), routed_valid=jnp.asarray(routed.valid))
        if self._measure_every and self._num_examples % self._measure_every == 0:
            self._measure(example, records, mode)
        self._num_examples += 1
        return example

    def _measure(self, example: ReplayExample, records: Sequence[RolloutRecord], mode: Any) -> None:
        """Log a report of an example; then judge its canary."""
        measure = functools.partial(
            routing_report,
            self._cluster.actor_trainer.model,
            example,
            pad_logprobs(records, example.completion_ids.shape[1]),
            pad_id=self._cluster.rollout.pad_id(),
            temperature=self._cluster.get_rollout_config(mode=mode).temperature,
        )
        report = measure()
        values = dataclasses.asdict(report)
        if self._compare_live:
            live = measure(replayed=False)
            values |= {"k3_live": live.k3, "f_1_1_live": live.f_1_1}
        metrics = {f"routing/{name}": (value, np.mean) for name, value in values.items()}
        self._cluster.buffer_metrics(metrics, mode=mode)
        self._gate(report.canary)


class ReplayCluster(rl_cluster_lib.RLCluster):
    """Tunix's RLCluster, whose trainer-side logprobs of the old policy (`sampler_is="token"`,
    `use_rollout_logps=False`) are computed on the rollout's rows; those of the reference policy never are. With
    `RoutedExpertsRollout(colocated=True)` the engine's KV pages are free while the actor trains. Refuses
    `offload_to_cpu`."""

    def get_actor_per_token_logps(
        self,
        prompt_tokens: Int[Array, "B P"],
        completion_tokens: Int[Array, "B C"],
        pad_id: int,
        eos_id: int,
        micro_batch_size: int | None = None,
        temperature: float | None = None,
    ) -> Float32[Array, "B C"]:
        """Logprobs of sampled answers under the actor as it was at the last push. Raises RoutingAlignmentError for
        answers that were not sampled since then, and ConfigError as ReplayGRPOLearner."""
        check_cluster(self)
        rollout: RoutedExpertsRollout = self.rollout
        if temperature is None:
            temperature = self.get_rollout_config(mode=rl_cluster_lib.Mode.TRAIN).temperature
        graphdef, _ = nnx.split(self.actor_trainer.model)
        policy: Policy = nnx.merge(graphdef, self._anchor_on_device())
        routed = align_records(
            rollout.find(prompt_tokens, completion_tokens),
            np.asarray(prompt_tokens),
            np.asarray(completion_tokens),
            policy=policy,
            pad_id=pad_id,
            update_count=rollout.update_count,
        )
        size = micro_batch_size or prompt_tokens.shape[0]
        with self._get_mesh_and_logical_axis_rules_cm(rl_cluster_lib.Role.ACTOR):
            axes = self.cluster_config.training_config.data_sharding_axis
            batch = (prompt_tokens, completion_tokens, jnp.asarray(routed.ids), jnp.asarray(routed.valid))
            prompts, answers, ids, valid = (sharding_utils.shard_input(array, axes) for array in batch)
            parts: list[Array] = []
            for part in rl_utils.chunk_slices_by_size(stop=prompts.shape[0], step=size):
                module, state = nnx.split(Replayed(policy, ids[part], valid[part]))
                logprobs = common.compute_per_token_logps(
                    module,
                    state,
                    prompt_tokens=prompts[part],
                    completion_tokens=answers[part],
                    pad_id=pad_id,
                    eos_id=eos_id,
                    stop_gradient=True,
                    temperature=temperature,
                )
                parts.append(logprobs[0] if isinstance(logprobs, tuple) else logprobs)
        return jnp.concatenate(parts, axis=0)

    def update_actor(self, train_ds: Any, eval_ds: Any, skip_jit: bool = False) -> None:
        """Train, while a colocated engine holds no KV pages."""
        if isinstance(self.rollout, RoutedExpertsRollout) and self.rollout.colocated:
            self.rollout.release()
        super().update_actor(train_ds, eval_ds, skip_jit)

    def _anchor_on_device(self) -> Any:
        """The actor's weights of the last push, which Tunix keeps on the host where the device has memory of its
        own."""
        state = self._anchor_policy_state
        if self._is_state_on_device(state):
            return state
        return rl_utils.put_params_on_memory_kind(state, self._default_memory_kind)


def check_cluster(cluster: Any) -> None:
    """Raise ConfigError unless a cluster can replay."""
    if not isinstance(cluster.rollout, RoutedExpertsRollout):
        kind = type(cluster.rollout).__name__
        raise ConfigError(
            f"the rollout is a {kind}, which has no rows; give ClusterConfig(rollout_engine=functools.partial("
            "RoutedExpertsRollout, engine=engine))"
        )
    if not isinstance(cluster.actor_trainer.model, Policy):
        kind = type(cluster.actor_trainer.model).__name__
        raise ConfigError(f"the actor is a {kind}; rows are replayed by routed_experts.integrations.tunix.Policy")
    config = cluster.cluster_config
    if config.training_config.max_seq_token_per_tpu is not None:
        raise ConfigError(
            f"max_seq_token_per_tpu={config.training_config.max_seq_token_per_tpu}: Tunix's packing drops the rows; "
            "leave it unset"
        )
    if config.offload_to_cpu:
        raise ConfigError(
            "offload_to_cpu=True: the engine's weights are its own and stay where they are; leave it False"
        )
