"""Tunix's policy losses on the rows of a rollout: the example that carries them, and the loss that wraps the policy.

Dims: B sequences, P tokens of a padded prompt, S of a padded prompt and answer, M MoE layers, K experts per token."""

from collections.abc import Callable
from typing import Any

from flax import struct
from jaxtyping import Array, Bool, UInt

from routed_experts.core.errors import ConfigError, RoutingAlignmentError
from routed_experts.integrations.tunix.libraries import function_registry, grpo_learner
from routed_experts.integrations.tunix.policy import Policy, Replayed

REPLAY_SUFFIX = "_replay"


@struct.dataclass(frozen=True)
class ReplayExample(grpo_learner.TrainExample):
    """Tunix's example, and the rows of its tokens: prompts end, and answers begin, at column P. Tunix slices it along B
    as it does the other fields."""

    routed_ids: UInt[Array, "B S M K"] | None = None
    routed_valid: Bool[Array, "B S"] | None = None


def with_replay(name: str) -> Callable[..., Any]:
    """Register Tunix's policy loss `name` once more, on the rows of a ReplayExample, as `name + "_replay"`; returns
    it. "grpo_replay", which is also the loss of DrGRPO and DAPO, and "ppo_replay" are registered by this module.

    The loss raises ConfigError for packed sequences and for a model that is no Policy, and RoutingAlignmentError for
    an example without rows. Raises ConfigError for a loss that Tunix does not have."""
    try:
        function_registry.get_policy_loss_fn(name)
    except LookupError as error:
        known = function_registry.default_registry.list_functions("policy_loss_fn")
        raise ConfigError(f"policy loss {name!r} is not registered; Tunix has {', '.join(sorted(known))}") from error

    def loss(model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **options: Any) -> Any:
        """Tunix's loss with the policy wrapped. `options` are Tunix's own, which differ between its releases."""
        ids, valid = read_rows(train_example)
        if not isinstance(model, Policy):
            kind = type(model).__name__
            raise ConfigError(f"the actor is a {kind}; rows are replayed by routed_experts.integrations.tunix.Policy")
        wrapped = Replayed(model, ids, valid)
        live_loss = function_registry.get_policy_loss_fn(name)
        return live_loss(wrapped, train_example, algo_config=algo_config, pad_id=pad_id, eos_id=eos_id, **options)

    return function_registry.register_policy_loss_fn(name + REPLAY_SUFFIX)(loss)


def read_rows(example: Any) -> tuple[Any, Any]:
    """The rows of an example, at trace time. Raises ConfigError and RoutingAlignmentError."""
    if getattr(example, "segment_ids", None) is not None:
        raise ConfigError(
            "the example holds packed sequences, and Tunix's packing drops the rows; leave "
            "RLTrainingConfig.max_seq_token_per_tpu unset"
        )
    ids, valid = getattr(example, "routed_ids", None), getattr(example, "routed_valid", None)
    if ids is None or valid is None:
        raise RoutingAlignmentError(
            f"a {type(example).__name__} without rows reached a loss with replay; make examples with ReplayGRPOLearner"
        )
    return ids, valid


replay_loss = with_replay("grpo")
with_replay("ppo")
