"""Qwen3-MoE configs of given sizes, for tests and benchmarks that need no folder."""

from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.families.qwen3_moe import read_qwen3_moe


def qwen3_keys(**keys: object) -> dict[str, object]:
    """A config.json with these keys; norms and positions have defaults."""
    defaults = {"norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
    return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **defaults, **keys}


def qwen3_config(**keys: object) -> FamilyConfig:
    """The config of `qwen3_keys`."""
    return read_qwen3_moe(ConfigReader(qwen3_keys(**keys), "qwen3_config"))
