"""Published shapes of MoE families, as their config.json has them, cut in depth where a card asks for it."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.family_config import FamilyConfig, LayerSpec
from routed_experts.models.decoder.grouped_attention import GroupedAttention
from routed_experts.models.decoder.layer_params import ParamKind
from routed_experts.models.registry import FAMILIES

BFLOAT16 = 2  # bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """`config`: the keys of config.json. `pattern`: layers after which kinds of layers repeat."""

    config: Mapping[str, object]
    pattern: int = 1

    @property
    def layers(self) -> int:
        """As published."""
        return int(str(self.config["num_hidden_layers"]))

    @property
    def dense_layers(self) -> int:
        """Layers without experts, before the others."""
        return int(str(self.config.get("first_k_dense_replace", 0)))

    def cut(self, layers: int, **changes: object) -> dict[str, object]:
        """The keys of so many layers, with other changes."""
        keys = {**self.config, "num_hidden_layers": layers, **changes}
        kinds = keys.get("layer_types")
        return {**keys, "layer_types": kinds[:layers]} if isinstance(kinds, list) else keys

    def depth(self, num_bytes: float, cached_tokens: int) -> int:
        """The most layers whose weights and cache of so many tokens take no more bytes; whole patterns."""
        for layers in range(self.layers, self.dense_layers, -self.pattern):
            config = read_family(self.cut(layers))
            if weight_bytes(config) + cached_tokens * cached_bytes(config) <= num_bytes:
                return layers
        raise ValueError(f"{num_bytes / 1e9:.0f} GB hold no layer of {self.config['architectures']}")


def layer_bytes(layer: LayerSpec, config: FamilyConfig, experts: float | None = None) -> float:
    """Bytes of a layer's weights, in bfloat16; with `experts`, of so many of the routed ones."""
    total = 0.0
    for weight in layer.weights(config):
        count = weight.shape[0] if weight.kind is ParamKind.EXPERTS else 1
        share = count if experts is None or weight.kind is not ParamKind.EXPERTS else experts
        total += math.prod(weight.shape) / count * share * (4 if weight.wide else BFLOAT16)
    return total


def weight_bytes(config: FamilyConfig) -> float:
    """Bytes of all weights."""
    ends = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size * BFLOAT16
    return ends + sum(layer_bytes(layer, config) for layer in config.layers)


def cached_bytes(config: FamilyConfig) -> float:
    """Bytes of one token in the cache."""
    cache = config.cache
    return cache.num_layers * (1 if cache.latent else 2 * cache.num_kv_heads) * cache.head_dim * BFLOAT16


def step_bytes(config: FamilyConfig, batch: int, context: float, experts: float) -> float:
    """What a decode step must read: `experts` distinct ones in each MoE layer, all other matrices, the head, and keys
    and values that a layer sees. States of linear attention are read and written, and count twice."""
    total = float(config.vocab_size * config.hidden_size * BFLOAT16)
    cache, seen = config.cache, 0.0
    for layer in config.layers:
        total += layer_bytes(layer, config, experts)
        mixer = layer.mixer
        window = mixer.window if isinstance(mixer, GroupedAttention) and mixer.window else context
        seen += min(window, context)
    attending = cache.num_layers / config.num_layers  # layers with a state see no keys
    total += batch * seen * attending * cached_bytes(config) / cache.num_layers
    return total + 2 * batch * state_bytes(config)


def state_bytes(config: FamilyConfig) -> float:
    """Bytes of one request's states of linear attention, which are float32."""
    cache = config.cache
    if cache.recurrent is None:
        return 0.0
    shape = cache.recurrent
    return 4.0 * cache.num_recurrent * shape.value_heads * shape.key_dim * shape.value_dim


def _config(architecture: str, **keys: object) -> Mapping[str, object]:
    shared = {"architectures": [architecture], "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    return MappingProxyType({**shared, "hidden_act": "silu", "attention_bias": False, **keys})


_OLMOE = _config(
    "OlmoeForCausalLM",
    model_type="olmoe",
    vocab_size=50_304,
    hidden_size=2048,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
    norm_topk_prob=False,
    max_position_embeddings=4096,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
)
_MIXTRAL = _config(
    "MixtralForCausalLM",
    model_type="mixtral",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=None,
    max_position_embeddings=32_768,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
)
_DEEPSEEK_V2_LITE = _config(
    "DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    vocab_size=102_400,
    hidden_size=2048,
    intermediate_size=10_944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_group=1,
    topk_group=1,
    topk_method="greedy",
    scoring_func="softmax",
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    max_position_embeddings=163_840,
    rope_theta=10_000.0,
    rope_scaling={
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    rms_norm_eps=1e-6,
)
_GLM_4_5_AIR = {
    **_config(
        "Glm4MoeForCausalLM",
        model_type="glm4_moe",
        vocab_size=151_552,
        hidden_size=4096,
        intermediate_size=10_944,
        moe_intermediate_size=1408,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        partial_rotary_factor=0.5,
        use_qk_norm=False,
        max_position_embeddings=131_072,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
    ),
    "attention_bias": True,
}
_MINIMAX_M2 = _config(
    "MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    vocab_size=200_064,
    hidden_size=3072,
    intermediate_size=1536,
    num_hidden_layers=62,
    num_attention_heads=48,
    num_key_value_heads=8,
    head_dim=128,
    num_local_experts=256,
    num_experts_per_tok=8,
    scoring_func="sigmoid",
    use_routing_bias=True,
    use_qk_norm=True,
    rotary_dim=64,
    max_position_embeddings=196_608,
    rope_theta=5e6,
    rms_norm_eps=1e-6,
)
_GPT_OSS_20B = {
    **_config(
        "GptOssForCausalLM",
        model_type="gpt_oss",
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12,
        swiglu_limit=7.0,
        max_position_embeddings=131_072,
        rope_theta=150_000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rms_norm_eps=1e-5,
    ),
    "attention_bias": True,
}
_QWEN3_NEXT = _config(
    "Qwen3NextForCausalLM",
    model_type="qwen3_next",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=5120,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_hidden_layers=48,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    num_experts=512,
    num_experts_per_tok=10,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    partial_rotary_factor=0.25,
    max_position_embeddings=262_144,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
)
PUBLISHED: Mapping[str, PublishedModel] = MappingProxyType(
    {
        "OLMoE-1B-7B": PublishedModel(config=_OLMOE),
        "Mixtral-8x7B": PublishedModel(config=_MIXTRAL),
        "DeepSeek-V2-Lite": PublishedModel(config=_DEEPSEEK_V2_LITE),
        "GLM-4.5-Air": PublishedModel(config=_GLM_4_5_AIR),
        "MiniMax-M2": PublishedModel(config=_MINIMAX_M2),
        "GPT-OSS-20b": PublishedModel(config=_GPT_OSS_20B, pattern=2),
        "Qwen3-Next-80B-A3B": PublishedModel(config=_QWEN3_NEXT, pattern=4),
    }
)
_SMALL: Mapping[str, object] = MappingProxyType(
    {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "rotary_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_scaling": None,
    }
)


def small_keys(model: PublishedModel) -> dict[str, object]:
    """The same family at a size that a CPU runs in seconds: one pattern of layers behind the dense ones."""
    changes = {key: value for key, value in _SMALL.items() if key in model.config}
    if model.config["num_key_value_heads"] == model.config["num_attention_heads"]:
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    return model.cut(model.dense_layers + 2 * model.pattern, **changes)


def read_family(keys: Mapping[str, object]) -> FamilyConfig:
    """A config.json of any family, as the module takes it."""
    architectures = keys["architectures"]
    assert isinstance(architectures, list), architectures
    return FAMILIES[architectures[0]].read_config(ConfigReader(dict(keys), "config.json"))
