"""Qwen3-MoE's config.json, read and checked: as the config of its own decoder, and as a FamilyConfig."""

import dataclasses

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.layers.cache_layout import CacheLayout
from routed_experts.layers.rotary import RotarySpec
from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.base.interface import PLAIN, RequiredFeatures
from routed_experts.models.base.partitioning import (
    AxisPartition,
    ParallelConfig,
    Segment,
    column_parallel,
    embedding_partition,
    expert_parallel,
    row_parallel,
)
from routed_experts.models.base.rotary_reader import read_rotary
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.families.common_config import check_routing, read_sizes, refuse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig:
    """Shapes and constants of config.json; hashable, so that it can be static under jit."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_width: int
    expert_width: int
    router: RouterSpec
    moe_layers: tuple[int, ...]
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    context_length: int
    scaled_rotary: RotarySpec | None = None  # in place of rope_theta
    needs: RequiredFeatures = PLAIN

    @property
    def capture_spec(self) -> CaptureSpec | None:
        """Sizes of this model's routed experts; None for a model without MoE layers."""
        if not self.moe_layers:
            return None
        experts, top_k = self.router.num_experts, self.router.top_k
        return CaptureSpec(
            num_hidden_layers=self.num_layers, layer_ids=self.moe_layers, num_experts=experts, top_k=top_k
        )

    @property
    def cache(self) -> CacheLayout:
        return CacheLayout(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Maximal runs [first, end) of layers that are all dense or all MoE."""
        moe = [layer in self.moe_layers for layer in range(self.num_layers)]
        starts = [layer for layer in range(self.num_layers) if layer == 0 or moe[layer] != moe[layer - 1]]
        return tuple(zip(starts, [*starts[1:], self.num_layers], strict=True))

    def shard(self, parallel: ParallelConfig) -> "Qwen3MoeConfig":
        """One device's heads and widths; the residual stream and the routers are unchanged."""
        n = parallel.devices
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // n,
            num_kv_heads=max(1, self.num_kv_heads // n),  # a head that several devices need is on each of them
            dense_width=self.dense_width // n,
            expert_width=self.expert_width if parallel.expert_parallel else self.expert_width // n,
        )

    def partitions(self, *, by_expert: bool) -> dict[str, AxisPartition]:
        """How arrays are sharded, by dotted path; arrays that are not named are replicated."""
        partitions_by_path = embedding_partition(self.hidden_size, tied=self.tie_embeddings)
        query = Segment(self.num_heads * self.head_dim, self.num_heads, "query heads")
        key = Segment(self.num_kv_heads * self.head_dim, self.num_kv_heads, "kv heads", repeated=True)
        for number, (first, end) in enumerate(self.blocks):
            moe = first in self.moe_layers
            width, what = (
                (self.expert_width, "columns of an expert") if moe else (self.dense_width, "columns of a dense layer")
            )
            half, experts = Segment(width, width, what), expert_parallel(self.router.num_experts, end - first)
            partitions_by_path |= {
                f"blocks.{number}.qkv": column_parallel(query, key, key),
                f"blocks.{number}.out": row_parallel(query.size, query.units, query.what),
                f"blocks.{number}.gate_up": experts if moe and by_expert else column_parallel(half, half),
                f"blocks.{number}.down": experts if moe and by_expert else row_parallel(width, width, what),
            }
        return partitions_by_path

    @staticmethod
    def from_reader(reader: ConfigReader) -> "Qwen3MoeConfig":
        """Read config.json; every missing or invalid key is named in a ConfigError."""
        sizes, experts = read_sizes(reader), reader.int("num_experts", minimum=0)
        rotary = read_rotary(reader, sizes.head_dim)
        reader.require(2 * len(rotary.spec.inverse) == sizes.head_dim, "partial_rotary_factor", "1.0")
        step, only = reader.int("decoder_sparse_step", minimum=1, default=1), reader.ints("mlp_only_layers", default=())
        moe_layers = tuple(i for i in range(sizes.num_layers) if i not in only and experts > 0 and (i + 1) % step == 0)
        top_k = reader.int("num_experts_per_tok", minimum=1)
        reader.require(not moe_layers or top_k <= experts, "num_experts_per_tok", f"at most num_experts={experts}")
        check_routing(reader)
        refuse(reader, "attention_bias")
        refuse(reader, "use_sliding_window")
        return Qwen3MoeConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            num_layers=sizes.num_layers,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dense_width=reader.int("intermediate_size", minimum=1),
            expert_width=reader.int("moe_intermediate_size", minimum=1),
            router=RouterSpec(
                num_experts=experts, top_k=top_k, renormalize=reader.bool("norm_topk_prob", default=False)
            ),
            moe_layers=moe_layers,
            rope_theta=rotary.theta,
            norm_eps=sizes.norm_eps,
            tie_embeddings=sizes.tie_embeddings,
            context_length=sizes.within(rotary).context_length,
            scaled_rotary=None if rotary.kind == "default" else rotary.spec,
        )


def read_qwen3_moe_parts(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of Qwen3-MoE as the parts of a FamilyDecoder: for offloaded and placed
    experts. Refuses what `Qwen3MoeConfig.from_reader` refuses."""
    config, sizes = Qwen3MoeConfig.from_reader(reader), read_sizes(reader)
    rotary = read_rotary(reader, sizes.head_dim)
    attention = dataclasses.replace(sizes.attention(rotary.spec), qk_norm="head")
    dense, sparse = Dense(width=config.dense_width), Sparse(router=config.router, width=config.expert_width)
    layers = [
        LayerSpec(mixer=attention, feed=sparse if at in config.moe_layers else dense) for at in range(config.num_layers)
    ]
    return sizes.within(rotary).decoder(layers)
