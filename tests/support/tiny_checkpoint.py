"""The tiny MoE of all tests: 4 layers (layer 0 dense), E=16, K=4, D=64, vocabulary 313 with its own tokenizer.

`write_tiny_checkpoint` needs NumPy alone and writes config.json with the keys of published Qwen3-MoE checkpoints;
`write_hf_qwen3_moe` writes with transformers and returns its model as an oracle. Weights are wide, the router's wider,
so that routing differs by token and greedy text is not a constant."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from routed_experts.models.loading.checkpoint import save

VOCAB_SIZE = 313
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_ID = 2
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
_TEXT = (
    "A mixture of experts has many small networks and a router. The router scores every expert for every "
    "token and the\n"
    "token goes to the few that score best; the others rest. What the router chose is data: it can be "
    "kept, looked at, and played back.\n"
    "When a model is trained on text that it wrote itself, the training pass should send each token to "
    "the experts that wrote it. If it\n"
    "does not, the two passes disagree, and the gradient learns from the difference and not from the "
    "reward. Keeping the choice is cheap:\n"
    "one byte for each expert of each layer of each token. The cat sat on the mat and counted the "
    "experts: one, two, three, four."
)
_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "eos_token_id": EOS_ID,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "mlp_only_layers": [0],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}


def tiny_config(**overrides) -> dict[str, object]:
    """config.json of the tiny MoE; an unknown key is an error."""
    assert overrides.keys() <= _CONFIG.keys() | {"auto_map", "quantization_config"}, overrides
    return {**_CONFIG, **overrides}


def tiny_tensors(config, *, seed=0, dtype="float32") -> dict[str, np.ndarray]:
    """Random weights under the names of a Qwen3-MoE checkpoint, one tensor an expert."""
    rng = np.random.default_rng(seed)
    shapes = dict(_tensor_shapes(config))
    return {
        name: _random(rng, name, shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        for name, shape in shapes.items()
    }


def write_tiny_checkpoint(path, *, seed=0, dtype="float32", tokenizer=True, **overrides) -> Path:
    """Write a random Qwen3-MoE checkpoint; `overrides` are keys of config.json, such as num_experts=257."""
    config = tiny_config(**overrides) | {"torch_dtype": dtype}
    folder = save(path, config, tiny_tensors(config, seed=seed, dtype=dtype))
    if tokenizer:
        write_tiny_tokenizer(folder)
    return folder


def write_hf_qwen3_moe(path, seed=0, **config):
    """Write a Qwen3-MoE with transformers and return its torch model, the oracle. Keys are those of its config."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    own = {key: value for key, value in _CONFIG.items() if key not in {"architectures", "model_type", "rope_scaling"}}
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**own, **config})).to(torch.float32).eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(_random(rng, name, tuple(weight.shape))))
    model.save_pretrained(path)
    return model


def write_tiny_tokenizer(path) -> Path:
    """Train a byte-level BPE of exactly 313 entries and write it with its chat template; the result is the same each
    time."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(_TEXT, VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [EOS_ID], "pad_token_id": 0}) + "\n", encoding="utf-8"
    )
    return folder


def write_sentencepiece_tokenizer(path) -> Path:
    """Write a tokenizer of 313 entries as Llama-2 and Mixtral have it: words begin with a space mark, other characters
    are raw bytes, and the decoder strips the space before the first word of a text. A prompt of text begins with
    <s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    folder = Path(path)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abehopqrstu,.[]", "▁a", "▁ab"]
    words += ["▁p", "as", "▁pas", "▁t", "he", "▁the", "▁r", "ou", "te", "▁rou", "▁route", "▁router", "▁▁"]
    words += [f"<extra_{number}>" for number in range(VOCAB_SIZE - len(words))]
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "p"), ("a", "s"), ("▁p", "as"), ("▁", "t"), ("h", "e"), ("▁t", "he")]
    merges += [("▁", "r"), ("o", "u"), ("t", "e"), ("▁r", "ou"), ("▁rou", "te"), ("▁route", "r"), ("▁", "▁")]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}), encoding="utf-8")
    return folder


def train_tokenizer(text, vocab_size):
    """Train a byte-level BPE on `text`; all 256 bytes are in it, so it can encode anything."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # not on every machine with a GPU

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = {"special_tokens": list(SPECIAL_TOKENS), "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocab_size, **options))
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    return tokenizer


def _tensor_shapes(config):
    dim, vocab, c = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * c, config["num_key_value_heads"] * c
    yield "model.embed_tokens.weight", (vocab, dim)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (dim,)
        yield from (
            (f"{prefix}.self_attn.{x}_proj.weight", (rows, dim))
            for x, rows in (("q", queries), ("k", keys), ("v", keys))
        )
        yield f"{prefix}.self_attn.o_proj.weight", (dim, queries)
        yield from ((f"{prefix}.self_attn.{x}_norm.weight", (c,)) for x in "qk")
        yield f"{prefix}.post_attention_layernorm.weight", (dim,)
        sparse = layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
        width = config["moe_intermediate_size" if sparse else "intermediate_size"]
        if sparse:
            yield f"{prefix}.mlp.gate.weight", (config["num_experts"], dim)
        for mlp in (
            [f"{prefix}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
            if sparse
            else [f"{prefix}.mlp"]
        ):
            yield from ((f"{mlp}.{x}_proj.weight", (width, dim)) for x in ("gate", "up"))
            yield f"{mlp}.down_proj.weight", (dim, width)
    yield "model.norm.weight", (dim,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, dim)


def _random(rng, name, shape) -> np.ndarray:
    if "norm" in name:
        return (1.0 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    std = 0.25 if ".mlp.gate." in name else 1.0 if "embed" in name else 0.12
    return (std * rng.standard_normal(shape)).astype(np.float32)
