"""PlacementStats: what became of the experts that an engine placed, from any thread. Knows no request."""

import dataclasses
from collections.abc import Mapping

from routed_experts.engine.build.builder import EngineComponents
from routed_experts.engine.control.expert_load_monitor import Balance
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner
from routed_experts.placement.cost_model import MoveEstimate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementStats:
    """Counts since the engine's start. `rebalances`: plans that the experts moved for; `skipped`: plans that were not
    worth it; `failed`: plans or moves that ended in an error; `copies`: instances that came from another device,
    whoever moved them; `rerouted_slots`, `dropped_slots`: see Departed. `balance`: by window of steps, without the last
    ten to twenty. `move_estimate`: what the gate said of the last plan; `last_move_s`: seconds that the last move took, steps
    between its layers included."""

    epoch: int
    rebalances: int = 0
    skipped: int = 0
    failed: int = 0
    copies: int = 0
    rerouted_slots: int = 0
    dropped_slots: int = 0
    balance: Mapping[int, Balance] = dataclasses.field(default_factory=dict[int, Balance])
    layer_ids: tuple[int, ...] = ()  # hidden layers that a Balance tells of
    move_estimate: MoveEstimate | None = None
    last_move_s: float | None = None

    @staticmethod
    def of(assembly: EngineComponents, runner: ReplicatedExpertRunner) -> "PlacementStats":
        """The counts of now."""
        follows, rerouting, watch = assembly.rebalancer, assembly.core.rerouting, assembly.watch
        spec = assembly.served.config.capture_spec
        told = PlacementStats(epoch=runner.placement.epoch, copies=runner.num_copied)
        if follows is not None:
            told = dataclasses.replace(
                told,
                rebalances=follows.num_rebalanced,
                skipped=follows.num_skipped,
                failed=follows.num_failed,
                move_estimate=follows.move_estimate,
                last_move_s=follows.last_move_s,
            )
        if watch is not None and spec is not None:
            told = dataclasses.replace(told, balance=watch.balance(), layer_ids=tuple(spec.layer_ids))
        return told if rerouting is None else dataclasses.replace(told, **dataclasses.asdict(rerouting.total))
