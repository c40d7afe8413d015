"""Tunix: RL in JAX whose rollouts come from an Engine, and which trains on the experts that the rollout ran on.

    rollout   prompts -> RoutedExpertsRollout.generate -> Engine: tokens, logprobs, rows (RolloutRecord)
    learner   ReplayGRPOLearner: Tunix's example, and the rows aligned with its tokens (ReplayExample)
    loss      with_replay("grpo"): Tunix's own loss, with the policy wrapped (Replayed)
    push      Tunix's sync_weights -> RoutedExpertsRollout.update_params -> Engine.update_weights

Nothing of Tunix is changed. Invariants: rows are of the weights of the last push and of the tokens of their example,
or an error is raised; the reference policy routes live. Importing this module needs the extra tunix.
Dims: B sequences, P tokens of a padded prompt, C of a padded answer, S = P + C, V vocabulary, M MoE layers, K experts
per token."""

from routed_experts.integrations.tunix.learner import ReplayCluster, ReplayGRPOLearner
from routed_experts.integrations.tunix.loss import ReplayExample, replay_loss, with_replay
from routed_experts.integrations.tunix.policy import Policy, Replayed, Rows
from routed_experts.integrations.tunix.records import RolloutRecord, align_records, pad_logprobs
from routed_experts.integrations.tunix.report import RoutingReport, routing_pass, routing_report
from routed_experts.integrations.tunix.rollout import RoutedExpertsRollout

__all__ = [
    "Policy",
    "ReplayCluster",
    "ReplayExample",
    "ReplayGRPOLearner",
    "Replayed",
    "RolloutRecord",
    "RoutedExpertsRollout",
    "RoutingReport",
    "Rows",
    "align_records",
    "pad_logprobs",
    "replay_loss",
    "routing_pass",
    "routing_report",
    "with_replay",
]
