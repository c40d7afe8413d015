"""Tiny random EAGLE heads as folders, and what they compute, written in torch from the published equations alone.

Dims: S tokens of a sequence, D width of the head, T width of the target, V vocabulary, W draft vocabulary."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.loading.checkpoint import save
from support.qwen3_configs import qwen3_config

D, HEADS, KV_HEADS, HEAD_DIM, FFW, V, LAYERS = 16, 4, 2, 8, 20, 40, 8
EAGLE3_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFW,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "draft_vocab_size": V,
    "max_position_embeddings": 64,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
}
EAGLE_CONFIG = {
    key: value for key, value in EAGLE3_CONFIG.items() if key not in ("draft_vocab_size", "eagle_config")
} | {"architectures": ["LlamaForCausalLMEagle"]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def target_config(hidden_size: int = D, vocab_size: int = V, num_layers: int = LAYERS) -> FamilyConfig:
    """Sizes of the served model."""
    return qwen3_config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        mlp_only_layers=[],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        moe_intermediate_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
    )


@dataclass
class HeadCase:
    """A head: its config, and its tensors by their plain names."""

    config: dict
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def is_eagle3(self) -> bool:
        return "Eagle3" in self.config["architectures"][0]

    def write(self, folder: Path, *, prefix: str = "", layer: str = "midlayer.", speculators: bool = False) -> Path:
        """Write the folder in one of its spellings."""
        config = self.config
        if speculators:
            own = ("eagle_config", "draft_vocab_size", "target_hidden_size", "norm_before_residual")
            config = {key: value for key, value in config.items() if key in own} | {
                "architectures": ["Eagle3Speculator"],
                "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
                "speculators_model_type": "eagle3",
                "speculators_config": {"algorithm": "eagle3"},
                "transformer_layer_config": {
                    key: value for key, value in config.items() if key not in (*own, "architectures")
                },
            }
        named = {prefix + name.replace("midlayer.", layer): tensor for name, tensor in self.tensors.items()}
        return save(folder, config, named)


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Numbers that keep the size of what is multiplied."""
    return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)


def random_vector(rng: np.random.Generator, size: int, centre: float = 1.0) -> np.ndarray:
    return (centre + 0.4 * rng.standard_normal(size)).astype(np.float32)


def _layer(rng: np.random.Generator, config: dict, at: str, width: int, norms: tuple[str, ...]) -> dict:
    sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    tensors = {f"{at}{name}.weight": random_vector(rng, D) for name in (*norms, "post_attention_layernorm")}
    tensors |= {f"{at}self_attn.{name}.weight": random_matrix(rng, rows, width) for name, rows in sizes.items()}
    tensors[f"{at}self_attn.o_proj.weight"] = random_matrix(rng, D, HEADS * HEAD_DIM)
    if config.get("attention_bias"):
        sizes["o_proj"] = D
        tensors |= {f"{at}self_attn.{name}.bias": random_vector(rng, rows, 0.0) for name, rows in sizes.items()}
    for name, shape in {"gate_proj": (FFW, D), "up_proj": (FFW, D), "down_proj": (D, FFW)}.items():
        tensors[f"{at}mlp.{name}.weight"] = random_matrix(rng, *shape)
    return tensors


def eagle3_case(
    *, own_head: bool = True, own_embedding: bool = False, streams: int = 3, seed: int = 0, **changes
) -> HeadCase:
    """A random EAGLE-3 head; `changes` are of config.json."""
    rng, config = np.random.default_rng(seed), EAGLE3_CONFIG | changes
    target, small = config.get("target_hidden_size", D), config["draft_vocab_size"]
    tensors = {"fc.weight": random_matrix(rng, D, streams * target)}
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": random_vector(rng, target) for index in range(streams)}
    tensors |= _layer(rng, config, "midlayer.", 2 * D, ("input_layernorm", "hidden_norm"))
    if config.get("norm_output", True):
        tensors["norm.weight"] = random_vector(rng, D)
    if own_head:
        tensors["lm_head.weight"] = random_matrix(rng, small, D)
    if own_embedding:
        tensors["embed_tokens.weight"] = rng.standard_normal((V, D)).astype(np.float32)
    if small < V:
        ids = np.sort(rng.permutation(V)[:small])
        tensors["d2t"], tensors["t2d"] = ids - np.arange(small), np.isin(np.arange(V), ids)
    return HeadCase(config, tensors)


def eagle_case(*, seed: int = 0, copied_embedding: bool = True, **changes) -> HeadCase:
    """A random EAGLE-1 head; `changes` are of config.json."""
    rng, config = np.random.default_rng(seed), EAGLE_CONFIG | changes
    tensors = {"fc.weight": random_matrix(rng, D, 2 * D)}
    if config.get("bias", True):
        tensors["fc.bias"] = random_vector(rng, D, 0.0)
    for index in range(config["num_hidden_layers"]):
        tensors |= _layer(rng, config, f"layers.{index}.", D, ("input_layernorm",) if index else ())
    if copied_embedding:
        tensors["embed_tokens.weight"] = np.zeros((V, D), np.float32)  # a wrong copy: it must not be read
    return HeadCase(config, tensors)


class TorchHead:
    """A head over one sequence, in float64. The lists of keys and values grow with each call. `embed` [V, T] and `head`
    [V, T] are the target's."""

    def __init__(self, case: HeadCase, embed: np.ndarray, head: np.ndarray) -> None:
        self.case, self.config = case, case.config
        self.tensors = {name: torch.tensor(tensor).double() for name, tensor in case.tensors.items()}
        target = torch.tensor(embed).double()
        self.embed = self.tensors.get("embed_tokens.weight", target) if case.is_eagle3 else target
        self.head = self.tensors.get("lm_head.weight", torch.tensor(head).double())
        self.kept = [([], []) for _ in range(self.config["num_hidden_layers"])]

    def features(self, hidden: np.ndarray, streams: list[np.ndarray]) -> torch.Tensor:
        if not self.case.is_eagle3:
            return torch.tensor(hidden).double()
        chunks = [torch.tensor(stream).double() for stream in streams]
        if self.config.get("fc_norm"):
            chunks = [self._rms(chunk, f"fc_norm.{index}.weight") for index, chunk in enumerate(chunks)]
        return torch.cat(chunks, dim=1) @ self.tensors["fc.weight"].T

    def call(self, features: torch.Tensor, tokens: np.ndarray, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and recycled features of rows at positions first, first + 1, .."""
        e = self.embed[torch.tensor(tokens)]
        if self.case.is_eagle3:
            u = self._rms(features, "midlayer.hidden_norm.weight")
            v = self._rms(e, "midlayer.input_layernorm.weight")
            residual = u if self.config.get("norm_before_residual") else features
            g = self._rest(residual, torch.cat([v, u], dim=1), "midlayer.", 0, first)
            out = self._rms(g, "norm.weight") if self.config.get("norm_output", True) else g
            return out @ self.head.T, g
        x = torch.cat([e, features], dim=1) @ self.tensors["fc.weight"].T
        if self.config.get("bias", True):
            x = x + self.tensors["fc.bias"]
        for index in range(self.config["num_hidden_layers"]):
            at = f"layers.{index}."
            x = self._rest(x, self._rms(x, f"{at}input_layernorm.weight") if index else x, at, index, first)
        return x @ self.head.T, x

    def target_id(self, draft_id: int) -> int:
        return draft_id + int(self.tensors["d2t"][draft_id]) if "d2t" in self.tensors else draft_id

    def _rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.tensors[name] * x / torch.sqrt((x * x).mean(1, keepdim=True) + self.config["rms_norm_eps"])

    def _rest(self, residual: torch.Tensor, x: torch.Tensor, at: str, layer: int, first: int) -> torch.Tensor:
        stream = residual + self._attend(x, f"{at}self_attn.", layer, first)
        normed = self._rms(stream, f"{at}post_attention_layernorm.weight")
        gate, up, down = (self.tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return stream + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if self.config.get("attention_bias") else y

    def _attend(self, x: torch.Tensor, at: str, layer: int, first: int) -> torch.Tensor:
        keys, values = self.kept[layer]
        rows = []
        for index, row in enumerate(x):
            query, key, value = (self._project(row[None], f"{at}{name}_proj")[0] for name in ("q", "k", "v"))
            query, key = query.view(HEADS, HEAD_DIM), key.view(KV_HEADS, HEAD_DIM)
            keys.append(self._rotate(key, first + index))
            values.append(value.view(KV_HEADS, HEAD_DIM))
            query, mixed = self._rotate(query, first + index), []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = torch.stack([query[head] @ retained[group] for retained in keys]) / math.sqrt(HEAD_DIM)
                weights = torch.softmax(scores, 0)
                mixed.append(sum(weight * retained[group] for weight, retained in zip(weights, values, strict=True)))
            rows.append(torch.cat(mixed))
        return self._project(torch.stack(rows), f"{at}o_proj")

    def _rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = HEAD_DIM // 2
        angles = torch.tensor([position * self._frequency(index) for index in range(half)], dtype=torch.float64)
        low, high = x[:, :half], x[:, half:]
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=1)

    def _frequency(self, index: int) -> float:
        frequency = self.config["rope_theta"] ** (-2 * index / HEAD_DIM)
        scaling = self.config.get("rope_scaling")
        if scaling is None:
            return frequency
        length, wave = scaling["original_max_position_embeddings"], 2 * math.pi / frequency
        if wave < length / scaling["high_freq_factor"]:
            return frequency
        if wave > length / scaling["low_freq_factor"]:
            return frequency / scaling["factor"]
        span = scaling["high_freq_factor"] - scaling["low_freq_factor"]
        smooth = (length / wave - scaling["low_freq_factor"]) / span
        return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
