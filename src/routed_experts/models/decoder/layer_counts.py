"""How many layers precede a block, and the numbers of its own layers: where they are in the cache and in the record."""

import collections
import dataclasses

from routed_experts.models.decoder.family_config import RECURRENT, FamilyConfig, LayerBlock
from routed_experts.models.decoder.feed_forward import Sparse

Progression = tuple[int, int]  # first and step: the number of a layer in repeat r is first + r * step


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCounts:
    """Layers before a block: of each cache group, and MoE layers."""

    by_group: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter[int])
    moe: int = 0

    @property
    def attending(self) -> int:
        """Layers that attend."""
        return self.by_group.total() - self.by_group[RECURRENT]

    def after(self, config: FamilyConfig, block: LayerBlock) -> "LayerCounts":
        """The counts before the next block."""
        own = collections.Counter([config.cache_group(layer.mixer) for layer in block.pattern] * block.repeats)
        return LayerCounts(self.by_group + own, self.moe + block.num_moe * block.repeats)

    def cache_layers(self, config: FamilyConfig, block: LayerBlock) -> tuple[Progression, ...]:
        """The number of each layer of the pattern among the layers of its cache group."""
        groups = [config.cache_group(layer.mixer) for layer in block.pattern]
        return tuple(
            (self.by_group[group] + groups[:index].count(group), groups.count(group))
            for index, group in enumerate(groups)
        )

    def moe_layers(self, block: LayerBlock) -> tuple[Progression, ...]:
        """The MoE layer of each layer of the pattern, or that of the next one that has experts."""
        is_moe = [isinstance(layer.feed, Sparse) for layer in block.pattern]
        return tuple((self.moe + sum(is_moe[:index]), block.num_moe) for index in range(len(is_moe)))
