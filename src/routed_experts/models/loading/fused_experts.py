"""Fused expert tensors: one tensor holds all experts of a layer, where other checkpoints have one tensor an expert.
Rewrites a table of names for the layout that the headers show.

<at>.experts.gate_up_proj [E, 2F, D] replaces gate_proj and up_proj [F, D] of every expert, <at>.experts.down_proj
[E, D, F] for down_proj [D, F]. Where the table has stacks [E, D, 2F] and [E, F, D] of these names (Llama 4), and the
checkpoint a tensor an expert, as quantised ones do, it is the other way round. Dims: E experts of a layer, D hidden, F
expert width."""

import re
from collections.abc import Collection, Iterable, Iterator

from routed_experts.models.base.weight_source import WeightSource

_EXPERT = re.compile(r"(?P<at>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_STACK = re.compile(r"(?P<at>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")


def fuse_experts(sources: Iterable[WeightSource], names: Collection[str]) -> Iterator[WeightSource]:
    """Replace the tensors of single experts by fused tensors where `names` has them, and stacks by single ones."""
    table = tuple(row for source in sources for row in _split(source, names))
    experts: dict[str, int] = {}
    for source in table:
        if match := _EXPERT.fullmatch(source.name):
            experts[match["at"]] = max(experts.get(match["at"], 0), int(match["expert"]) + 1)
    for source in table:
        match = _EXPERT.fullmatch(source.name)
        fused = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
        if match is None or f"{match['at']}.{fused[match['part']]}" not in names:
            yield source
        elif int(match["expert"]) == 0 and match["part"] != "up_proj":
            rows, columns = source.shape
            shape = (experts[match["at"]], rows * (1 if match["part"] == "down_proj" else 2), columns)
            name = f"{match['at']}.{fused[match['part']]}"
            yield WeightSource(name=name, shape=shape, target=source.target, first=source.index[0], transpose=True)


def _split(source: WeightSource, names: Collection[str]) -> Iterator[WeightSource]:
    """The tensors of single experts, if `names` has them in place of the stack; else the source as it is."""
    match = None if source.transpose or source.stored else _STACK.fullmatch(source.name)
    if match is None or source.name in names or f"{match['at']}.0.down_proj.weight" not in names:
        yield source
        return
    experts, inputs, outputs = source.shape
    parts = ("down_proj",) if match["part"] == "down_proj" else ("gate_proj", "up_proj")
    shape = (outputs // len(parts), inputs)
    for expert in range(experts):
        for number, part in enumerate(parts):
            yield WeightSource(
                name=f"{match['at']}.{expert}.{part}.weight",
                shape=shape,
                target=source.target,
                index=(source.first + expert,),
                transpose=True,
                offset=number * shape[0],
            )
