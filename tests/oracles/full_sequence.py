"""Qwen3-MoE over a whole sequence in NumPy float64, from the tensors of a checkpoint.

Shares no code with the package. Rows can be forced, so that a run can be compared teacher-forced: what one near tie
changed is then not counted against the tokens that follow. Dims: S tokens, M MoE layers, K experts per token, E
experts, D hidden, H heads, C head dim."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Judged:
    """ids and combine weights [S, M, K] as executed, scores [S, M, E] that the live router chose by, logits [S, V]."""

    ids: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    logits: np.ndarray

    @property
    def logprobs(self):
        """[S, V]."""
        wide = self.logits - self.logits.max(-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


class FullSequence:
    """The model of these tensors, under the names of a checkpoint, and its config.json."""

    def __init__(self, config, tensors):
        self.config = config
        self.tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
        layers = range(self.config["num_hidden_layers"])
        self.moe_layers = tuple(layer for layer in layers if f"model.layers.{layer}.mlp.gate.weight" in self.tensors)
        self._experts = {layer: self._stacked(layer) for layer in self.moe_layers}

    def run(self, tokens, forced=None):
        """Score a sequence; row t of `forced` [F, M, K] replaces what the router chooses for token t < F."""
        tokens = np.asarray(tokens)
        forced = (
            np.zeros((0, len(self.moe_layers), self.config["num_experts_per_tok"]), int) if forced is None else forced
        )
        x = self.tensors["model.embed_tokens.weight"][tokens]
        ids, combined, scores = [], [], []
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self._attention(layer, self._norm(x, f"model.layers.{layer}.input_layernorm"))
            normed = self._norm(x, f"model.layers.{layer}.post_attention_layernorm")
            if layer not in self.moe_layers:
                prefix = f"model.layers.{layer}.mlp"
                gate, up, down = (self.tensors[f"{prefix}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
                x = x + (_silu(normed @ gate) * (normed @ up)) @ down
                continue
            chosen, weights, router_scores = self._route(layer, normed, np.asarray(forced, int)[:, len(ids)])
            x = x + self._mix(layer, normed, chosen, weights)
            ids.append(chosen)
            combined.append(weights)
            scores.append(router_scores)
        head = self.tensors["model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"]
        logits = self._norm(x, "model.norm") @ head.T
        return Judged(*(np.stack(parts, axis=1) for parts in (ids, combined, scores)), logits)

    def _route(self, layer, x, forced):
        logits = x @ self.tensors[f"model.layers.{layer}.mlp.gate.weight"].T
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : self.config["num_experts_per_tok"]]
        chosen[: len(forced)] = forced
        weights = np.take_along_axis(scores, chosen, axis=-1)
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdims=True)
        return chosen, weights, scores

    def _mix(self, layer, x, chosen, weights):
        gate, up, down = self._experts[layer]
        mixed = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, slots = np.nonzero(chosen == expert)
            out = (_silu(x[rows] @ gate[expert].T) * (x[rows] @ up[expert].T)) @ down[expert].T
            np.add.at(mixed, rows, out * weights[rows, slots][:, None])
        return mixed

    def _stored(self, layer, k, v):
        """Keys and values as a pool has them: as they are."""
        return k, v

    def _attention(self, layer, x):
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        heads, groups, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        q, k, v = (x @ self.tensors[f"{prefix}.{part}_proj.weight"].T for part in "qkv")
        q, k, v = (part.reshape(len(x), -1, width) for part in (q, k, v))
        q, k = self._rotate(self._norm(q, f"{prefix}.q_norm")), self._rotate(self._norm(k, f"{prefix}.k_norm"))
        k, v = self._stored(layer, k, v)
        k, v = np.repeat(k, heads // groups, axis=1), np.repeat(v, heads // groups, axis=1)
        scores = np.einsum("shc,thc->hst", q, k) * width**-0.5
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hst,thc->shc", weights, v).reshape(len(x), -1) @ self.tensors[f"{prefix}.o_proj.weight"].T

    def _rotate(self, x):
        half = self.config["head_dim"] // 2
        angles = np.arange(len(x))[:, None] * self.config["rope_theta"] ** -(np.arange(half) / half)
        cos, sin = (np.concatenate([wave(angles)] * 2, axis=-1)[:, None] for wave in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin

    def _norm(self, x, name):
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]
        )

    def _stacked(self, layer):
        prefix = f"model.layers.{layer}.mlp.experts"
        experts = range(self.config["num_experts"])
        return tuple(
            np.stack([self.tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in experts])
            for part in ("gate", "up", "down")
        )


def _silu(x):
    return x / (1 + np.exp(-x))
