"""How checkpoints name the tensors of a sparse block: one tensor an expert and matrix, or stacks of all experts.
Dims: D hidden, E experts, F expert width."""

import dataclasses
from collections.abc import Iterator

from routed_experts.models.base.weight_source import StoredEntries, WeightSource
from routed_experts.models.decoder.layer_parts import CheckpointScope


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """A tensor of all experts of a layer, for our array `to`: [E, D, 2F], [E, F, D], [E, 2F] or [E, D].
    `transposed`: the last two axes are swapped. `half`: "gate" or "up" alone. `stored`: what it is in the file, with a
    name below the layer, where loading computes it from another tensor."""

    name: str
    to: str
    transposed: bool = False
    half: str = ""
    stored: StoredEntries | None = None

    def source(self, scope: CheckpointScope, experts: int, hidden: int, width: int) -> WeightSource:
        """Its place behind the experts of the layers before."""
        outputs = hidden if self.to.startswith("down") else width * (1 if self.half else 2)
        inputs = () if self.to.endswith("bias") else (width if self.to == "down" else hidden,)
        shape = (experts, outputs, *inputs) if self.transposed else (experts, *inputs, outputs)
        stored = self.stored and dataclasses.replace(self.stored, name=scope.prefix + self.stored.name)
        return WeightSource(
            name=scope.prefix + self.name,
            shape=shape,
            target=f"{scope.target}.{self.to}",
            first=scope.row * experts,
            transpose=self.transposed,
            offset=width if self.half == "up" else 0,
            stored=stored,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names below the layer; "{}" in `expert` is the expert's number, and `stacked` replaces all single experts where
    it is given. `selection_bias_rows`: the selection bias is [1, E]."""

    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.bias"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    selection_bias_rows: bool = False
    expert: str = "mlp.experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: tuple[Stacked, ...] = ()
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate.weight"

    def expert_sources(self, scope: CheckpointScope, experts: int, hidden: int, width: int) -> Iterator[WeightSource]:
        """All experts of a layer. Fused tensors of the usual names take their place where a checkpoint has those
        (models/loading/fused_experts.py)."""
        if self.stacked:
            yield from (stack.source(scope, experts, hidden, width) for stack in self.stacked)
            return
        for expert in range(experts):
            row, at = scope.row * experts + expert, self.expert.format(expert)
            yield scope.source(f"{at}.{self.gate}.weight", (width, hidden), "gate_up", row=row)
            yield scope.source(f"{at}.{self.up}.weight", (width, hidden), "gate_up", row=row, offset=width)
            yield scope.source(f"{at}.{self.down}.weight", (hidden, width), "down", row=row)

    def router_sources(
        self, scope: CheckpointScope, experts: int, hidden: int, *, bias: bool, selection: bool
    ) -> Iterator[WeightSource]:
        """The router's matrix and biases."""
        yield scope.source(self.router, (experts, hidden), "router")
        if bias:
            yield scope.source(self.router_bias, (experts,), "router_bias")
        if selection and self.selection_bias_rows:
            at, to = scope.prefix + self.selection_bias, f"{scope.target}.selection_bias"
            yield WeightSource(name=at, shape=(1, experts), target=to, first=scope.row)
        elif selection:
            yield scope.source(self.selection_bias, (experts,), "selection_bias")


USUAL_NAMES = ExpertNames()
