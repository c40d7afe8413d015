"""The modules of Tunix that this package uses. Importing it needs the extra tunix: else a ConfigError says so."""

from typing import Any

from routed_experts.core.installation import import_optional


def _tunix(module: str) -> Any:
    return import_optional(f"tunix.{module}", purpose="routed_experts.integrations.tunix", extra="tunix")


base_rollout = _tunix("rl.rollout.base_rollout")
common = _tunix("rl.common")
function_registry = _tunix("rl.function_registry")
grpo_learner = _tunix("rl.grpo.grpo_learner")
rl_cluster = _tunix("rl.rl_cluster")
rl_utils = _tunix("rl.utils")
sft_utils = _tunix("sft.utils")
sharding_utils = _tunix("sft.sharding_utils")
