"""Tiny checkpoints with layers that predict further tokens, and an implementation of them from their equations:
transformers runs the decoder layer, NumPy all around it. Shares no code with the package.

    x_t = P [RMS(e_{t+1}); RMS(h_t)]        y = layer(x)        o = RMS(y)        scores = head(o)

A chain goes on with o_t for h, the embedding of the drafted token, and the next position. Dims: S tokens, D hidden, V
vocabulary."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from oracles.families import CASES, Oracle


@dataclasses.dataclass(frozen=True)
class Names:
    """How a family names the tensors of module i, which "{}" stands for; `first` is added to i, None for the number of
    the target's layers. `norm`: "" for the target's own. `count`: the key of config.json."""

    layer: str = "model.layers.{}."
    projection: str = "model.layers.{}.eh_proj.weight"
    embedding: str = "model.layers.{}.enorm.weight"
    hidden: str = "model.layers.{}.hnorm.weight"
    norm: str = "model.layers.{}.shared_head.norm.weight"
    first: int | None = None
    count: str = "num_nextn_predict_layers"


QWEN = Names(
    layer="mtp.layers.{}.",
    projection="mtp.fc.weight",
    embedding="mtp.pre_fc_norm_embedding.weight",
    hidden="mtp.pre_fc_norm_hidden.weight",
    norm="mtp.norm.weight",
    first=0,
    count="mtp_num_hidden_layers",
)
ERNIE = Names(
    layer="model.mtp_block.{}.",
    projection="model.mtp_linear_proj.{}.weight",
    embedding="model.mtp_emb_norm.{}.weight",
    hidden="model.mtp_hidden_norm.{}.weight",
    norm="",
    first=0,
)
NAMES = {
    "DeepseekV3": Names(),
    "Glm4Moe": Names(),
    "Glm4MoeLite": Names(),
    "BailingMoeV2": Names(norm="model.layers.{}.final_layernorm.weight"),
    "Ernie4_5_Moe": ERNIE,
    "Qwen3Next": QWEN,
    "Qwen3_5Moe": QWEN,
}
ONE_LAYER = {  # what makes a model of the family's one draft layer
    "DeepseekV3": dict(first_k_dense_replace=0),
    "Glm4Moe": dict(first_k_dense_replace=0),
    "Glm4MoeLite": dict(mlp_layer_types=["sparse"]),
    "BailingMoeV2": dict(first_k_dense_replace=0),
    "Ernie4_5_Moe": {},  # its layer 0 is dense
    "Qwen3Next": dict(layer_types=["full_attention"], mlp_only_layers=[]),
    "Qwen3_5Moe": dict(layer_types=["full_attention"]),
}
OFFSET = ("Qwen3Next", "Qwen3_5Moe")  # norms scale by 1 + w


class PredictorOracle:
    """A target with prediction modules, written to `folder`."""

    def __init__(self, name, folder, *, modules=1):
        case, names, self.name = dataclasses.replace(CASES[name], rewrite=None), NAMES[name], name
        self.target = Oracle(case, folder).model
        layers = self.target.config.num_hidden_layers
        self.numbers = [index + (layers if names.first is None else names.first) for index in range(modules)]
        rng, dim = np.random.default_rng(7), self.target.config.hidden_size
        self.tensors, self.layers = {}, []
        for index, number in enumerate(self.numbers):
            layer = dataclasses.replace(
                case,
                config=case.config | dict(num_hidden_layers=1) | ONE_LAYER[name],
                layer_ids=() if name.startswith("Ernie") else (0,),
                seed=case.seed + 1 + index,
            )
            own = Path(folder) / f"layer{index}"
            self.layers.append(Oracle(layer, own).model.model)
            for at, tensor in load_file(own / "model.safetensors").items():
                if at.startswith("model.layers.0."):
                    self.tensors[names.layer.format(number) + at.removeprefix("model.layers.0.")] = tensor
            drawn = {
                names.projection: 0.12 * rng.standard_normal((dim, 2 * dim)),
                **{
                    at: 1.0 + 0.2 * rng.standard_normal(dim) for at in (names.embedding, names.hidden, names.norm) if at
                },
            }
            shift = 1.0 if name in OFFSET else 0.0
            for at, tensor in drawn.items():
                value = (tensor - (shift if tensor.ndim == 1 else 0.0)).astype(np.float32)
                self.tensors.setdefault(at.format(number), value)
        self.names = names
        self.write(Path(folder), modules)

    def write(self, folder, modules):
        """The target's folder with the modules' tensors, in the layout of the family's published files."""
        tensors = load_file(folder / "model.safetensors") | self.tensors
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        values.pop("num_mtp_layers", None)
        if self.name != "Qwen3Next" or modules > 1:
            values[self.names.count] = modules
        (folder / "config.json").write_text(json.dumps(values))
        if CASES[self.name].rewrite is not None:
            CASES[self.name].rewrite(folder)

    def hidden(self, tokens, *, raw=False):
        """[S, D] behind the last layer, normed unless `raw`."""
        import torch

        seen = []
        hook = self.target.model.norm.register_forward_hook(lambda module, inputs, output: seen.extend(inputs))
        with torch.no_grad():
            normed = self.target.model(torch.tensor([list(tokens)])).last_hidden_state[0].numpy()
        hook.remove()
        return seen[0][0].numpy() if raw else normed

    def pairs(self, hidden, successors, *, module=0, hidden_first=False):
        """[S, D] inputs of the layer."""
        names, number = self.names, self.numbers[module]
        embedding = self.norm(self.embeddings(successors), self.tensors[names.embedding.format(number)])
        normed = self.norm(np.asarray(hidden, np.float64), self.tensors[names.hidden.format(number)])
        both = (normed, embedding) if hidden_first else (embedding, normed)
        return np.concatenate(both, axis=-1) @ self.tensors[names.projection.format(number)].astype(np.float64).T

    def outputs(self, pairs, *, module=0):
        """The raw [S, D] and the normed [S, D] outputs of a sequence of pairs, at positions 0 .. S - 1."""
        import torch

        model, seen = self.layers[module], []
        hook = model.norm.register_forward_hook(lambda module, inputs, output: seen.extend(inputs))
        with torch.no_grad():
            model(inputs_embeds=torch.from_numpy(np.asarray(pairs, np.float32))[None])
        hook.remove()
        raw = seen[0][0].numpy().astype(np.float64)
        own, shared = self.names.norm.format(self.numbers[module]), self.target.model.norm.weight.detach().numpy()
        return raw, self.norm(raw, self.tensors[own] if own else shared)

    def scores(self, normed):
        """[S, V]."""
        return normed @ self.target.lm_head.weight.detach().numpy().astype(np.float64).T

    def embeddings(self, tokens):
        return self.target.model.embed_tokens.weight.detach().numpy().astype(np.float64)[np.asarray(tokens)]

    def norm(self, x, scale):
        shift = 1.0 if self.name in OFFSET else 0.0
        wide = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.target.config.rms_norm_eps)
        return wide * (scale.astype(np.float64) + shift)

    def chain(self, pairs, steps, *, raw_out=False, **order):
        """Draft by module 0 after these pairs: scores [steps + 1, V] and the best token of each row."""
        scores, drafts = [], []
        for _ in range(steps + 1):
            raw, normed = self.outputs(pairs)
            scores.append(self.scores(normed[-1]))
            drafts.append(int(np.argmax(scores[-1])))
            recycled = raw if raw_out else normed
            pairs = np.concatenate([pairs, self.pairs(recycled[-1:], drafts[-1:], **order)])
        return np.stack(scores), drafts
