"""DeepSeek-V2 (2024) and DeepSeek-V3 (2024), and those built like the latter: Kimi-K2, Moonlight. Latent attention,
dense layers first, shared experts beside the routed ones. V2 ranks by softmax and groups by their best score; V3 by
sigmoid plus a bias that moves the choice alone, and groups by the sum of their two best."""

import dataclasses
from collections.abc import Collection

from routed_experts.layers.routing import RouterSpec
from routed_experts.models.base.config_reader import MAX_HEAD_DIM, ConfigReader
from routed_experts.models.base.rotary_reader import Rotary, read_rotary
from routed_experts.models.decoder.family_config import MAX_NEXTN_LAYERS, FamilyConfig, LayerSpec, PredictorSpec
from routed_experts.models.decoder.feed_forward import Dense, Sparse
from routed_experts.models.decoder.latent_attention import LatentAttention
from routed_experts.models.families.common_config import Sizes, read_experts, read_sizes, refuse

_V2_METHODS = ("greedy", "group_limited_greedy")


def read_deepseek_v2(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of DeepSeek-V2 or V2-Lite."""
    sizes = read_sizes(reader, latent=True)
    experts, top_k = read_experts(reader, key="n_routed_experts", methods=_V2_METHODS, grouped=True)
    refuse(reader, "norm_topk_prob")
    grouped = reader.str("topk_method", default=_V2_METHODS[0]) == "group_limited_greedy"
    num_groups, topk_group = read_groups(reader, experts, top_k, default=1) if grouped else (1, 1)
    scale = reader.float("routed_scaling_factor", default=1.0)
    router = RouterSpec(
        num_experts=experts, top_k=top_k, renormalize=False, scale=scale, num_groups=num_groups, topk_group=topk_group
    )
    first = reader.int("first_k_dense_replace", minimum=0, default=0)
    return latent_decoder(reader, sizes, router, interleaved=True, dense=range(first), shared=2)


def read_deepseek_v3(reader: ConfigReader) -> FamilyConfig:
    """Read config.json of DeepSeek-V3, Kimi-K2 or Moonlight. transformers takes null of the two switches as false."""
    reader = reader.with_null(False, "norm_topk_prob", "rope_interleave")
    sizes = read_rotating_sizes(reader)
    router = read_biased_router(reader, num_groups=8, topk_group=4, scale=2.5)
    first = reader.int("first_k_dense_replace", minimum=0, default=3)
    return latent_decoder(reader, sizes, router, interleaved=read_interleaved(reader), dense=range(first), shared=1)


def read_rotating_sizes(reader: ConfigReader, *, eps: float = 1e-6) -> Sizes:
    """Sizes of a model of which transformers rotates `head_dim` dims where the file has it: they must be those of
    `qk_rope_head_dim`."""
    sizes = read_sizes(reader, eps=eps, latent=True)
    rotary_dim = reader.int("qk_rope_head_dim", minimum=2, maximum=MAX_HEAD_DIM)
    holds = not reader.has("head_dim") or sizes.head_dim == rotary_dim
    reader.require(holds, "head_dim", f"qk_rope_head_dim={rotary_dim}, or no such key")
    return sizes


def read_biased_router(
    reader: ConfigReader,
    *,
    num_groups: int,
    topk_group: int,
    scale: float,
    renormalize: bool = True,
    key: str = "n_routed_experts",
) -> RouterSpec:
    """The router of V3, which other families share; arguments are the family's defaults."""
    experts, top_k = read_experts(reader, key=key, scoring="sigmoid", methods=("noaux_tc",), grouped=True)
    num_groups, topk_group = read_groups(reader, experts, top_k, default=num_groups, default_topk_group=topk_group)
    reader.require(num_groups == topk_group or experts // num_groups >= 2, "n_group", "groups of at least 2 experts")
    return RouterSpec(
        num_experts=experts,
        top_k=top_k,
        renormalize=reader.bool("norm_topk_prob", default=renormalize),
        scoring_func="sigmoid",
        scale=reader.float("routed_scaling_factor", default=scale),
        epsilon=1e-20,
        num_groups=num_groups,
        topk_group=topk_group,
        group_score_topk=2,
        biased=True,
    )


def read_groups(
    reader: ConfigReader, experts: int, top_k: int, *, default: int, default_topk_group: int = 1
) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may choose from."""
    num_groups = reader.int("n_group", minimum=1, default=default)
    reader.require(experts % num_groups == 0, "n_group", f"a divisor of {experts} experts")
    topk_group = reader.int("topk_group", minimum=1, maximum=num_groups, default=min(default_topk_group, num_groups))
    reader.require(
        topk_group * experts // num_groups >= top_k, "topk_group", f"groups that hold {top_k} experts together"
    )
    return num_groups, topk_group


def read_interleaved(reader: ConfigReader) -> bool:
    """Whether neighbouring dims are rotated together; V3's default."""
    return reader.bool("rope_interleave", default=True)


def num_predicting(reader: ConfigReader) -> int:
    """Layers that predict further tokens; they come after the last one and are not run."""
    return reader.int("num_nextn_predict_layers", minimum=0, maximum=MAX_NEXTN_LAYERS, default=0)


def predicting(
    reader: ConfigReader, config: FamilyConfig, layer: LayerSpec, *, output_norm: str = "shared_head.norm"
) -> FamilyConfig:
    """The decoder with V3's layers that predict further tokens: each has the prefix of a layer behind the last one, and
    may hold copies of the embeddings and of the head. `output_norm` is the family's name."""
    count, prefix = num_predicting(reader), f"{config.stem}layers.{{}}."
    if not count:
        return config
    predictor = PredictorSpec(
        num_modules=count,
        layer=layer,
        first=config.num_layers,
        tensors=f"{prefix}*",
        layer_prefix=prefix,
        projection=f"{prefix}eh_proj",
        embedding_norm=f"{prefix}enorm",
        hidden_norm=f"{prefix}hnorm",
        output_norm=f"{prefix}{output_norm}",
        ignored=(f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"),
    )
    return dataclasses.replace(config, num_predicting=count, predictor=predictor)


def shared_width(reader: ConfigReader, width: int, *, default: int) -> int:
    """Concatenated shared experts are one network."""
    return width * reader.int("n_shared_experts", minimum=0, default=default)


def latent_decoder(
    reader: ConfigReader,
    sizes: Sizes,
    router: RouterSpec,
    *,
    interleaved: bool,
    dense: Collection[int],
    shared: int,
) -> FamilyConfig:
    """Latent attention in every layer, and experts in all but the `dense` layers; `shared` is the default of shared
    experts."""
    attention, rotary = read_latent(reader, sizes, interleaved=interleaved)
    refuse(reader, "mlp_bias")
    reader.require(reader.int("moe_layer_freq", minimum=1, default=1) == 1, "moe_layer_freq", "1")
    width, network = (
        reader.int("moe_intermediate_size", minimum=1),
        Dense(width=reader.int("intermediate_size", minimum=1)),
    )
    sparse = Sparse(router=router, width=width, shared_width=shared_width(reader, width, default=shared))
    layers = [
        LayerSpec(mixer=attention, feed=network if index in dense else sparse) for index in range(sizes.num_layers)
    ]
    return predicting(reader, sizes.within(rotary).decoder(layers), LayerSpec(mixer=attention, feed=sparse))


def read_latent(
    reader: ConfigReader, sizes: Sizes, *, interleaved: bool, theta: float = 10_000.0
) -> tuple[LatentAttention, Rotary]:
    """Latent attention and its positions; `theta` is the family's default."""
    refuse(reader, "attention_bias")
    expected = f"num_attention_heads={sizes.num_heads}: every head has keys of its own"
    reader.require(sizes.num_kv_heads == sizes.num_heads, "num_key_value_heads", expected)
    key_dim = reader.int("qk_nope_head_dim", minimum=1)
    rotary_dim = reader.int("qk_rope_head_dim", minimum=2, maximum=MAX_HEAD_DIM)
    rotary = read_rotary(reader, rotary_dim, interleaved=interleaved, theta=theta)
    attention = LatentAttention(
        num_heads=sizes.num_heads,
        query_rank=reader.int("q_lora_rank", minimum=0, default=0),
        rank=reader.int("kv_lora_rank", minimum=1),
        key_dim=key_dim,
        value_dim=reader.int("v_head_dim", minimum=1),
        rotary_dim=rotary_dim,
        rotary=rotary.spec,
        scale=(key_dim + rotary_dim) ** -0.5 * rotary.score_scale,
    )
    return attention, rotary
