"""EngineComponents: the parts of an engine that is ready to step, made by the builder."""

import dataclasses

from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.engine.control.expert_load_monitor import ExpertLoadMonitor
from routed_experts.engine.control.rebalancer import Rebalancer
from routed_experts.engine.control.served_model import ServedModel
from routed_experts.engine.group.process_group import LeadingGroup
from routed_experts.engine.loop.core import EngineCore
from routed_experts.execution.memory_plan import MemoryPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineComponents:
    """A core that is ready to step, and the parts it was built from."""

    core: EngineCore
    plan: MemoryPlan
    buckets: Buckets
    context_length: int
    capture: CaptureSpec | None
    vocab_size: int
    prefix_cache: bool
    served: ServedModel
    rebalancer: Rebalancer | None  # None: experts move only by apply_placement
    load_monitor: ExpertLoadMonitor | None = None  # None: experts are not placed
    group: LeadingGroup | None = None  # None: one process

    @property
    def kv_tokens(self) -> int:
        """KV slots that requests can fill: the padding page is excluded."""
        return self.core.runner.config.pool.num_slots - self.core.runner.config.pool.page_size
