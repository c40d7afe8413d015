"""llama.cpp as a peer, through llama-cpp-python: python peer_llama_cpp.py FOLDER DTYPE. The weights are written as GGUF
first. Prompts are fed as one batch, then one token of each sequence a step; argmax is taken in NumPy."""

import json
import sys
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp
import ml_dtypes  # noqa: F401  # makes bfloat16 known to NumPy, and so to safetensors
import numpy as np
from protocol import serve
from safetensors.numpy import load_file

KINDS = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}


def write_gguf(folder: Path, file: Path, dtype: str) -> None:
    """The checkpoint's tensors under llama.cpp's names (architecture qwen3moe), each layer's experts as one array."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(KINDS[dtype])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])

    def add(name: str, array: np.ndarray) -> None:
        wide = array.astype(np.float32)
        if dtype == "bfloat16" and wide.ndim > 1 and "ffn_gate_inp" not in name:
            packed = gguf.quants.quantize(wide, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, wide)

    add("token_embd.weight", tensors["model.embed_tokens.weight"])
    add("output_norm.weight", tensors["model.norm.weight"])
    add("output.weight", tensors["lm_head.weight"])
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate": "ffn_gate_inp",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for theirs, mine in names.items():
            add(f"blk.{layer}.{mine}.weight", tensors[f"{at}{theirs}.weight"])
        for part in ("gate", "up", "down"):
            experts = [tensors[f"{at}mlp.experts.{e}.{part}_proj.weight"] for e in range(config["num_experts"])]
            add(f"blk.{layer}.ffn_{part}_exps.weight", np.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Batch:
    """Tokens of many sequences, for one decode of llama.cpp."""

    def __init__(self, size: int) -> None:
        self.raw = llama_cpp.llama_batch_init(size, 0, 1)

    def fill(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, with logits) each."""
        self.raw.n_tokens = len(entries)
        for i, (token, position, sequence, with_logits) in enumerate(entries):
            self.raw.token[i], self.raw.pos[i], self.raw.n_seq_id[i] = token, position, 1
            self.raw.seq_id[i][0], self.raw.logits[i] = sequence, with_logits


def main() -> None:
    """Convert, load, then serve."""
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        write_gguf(Path(sys.argv[1]), file, sys.argv[2])
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 32 * 512, 32 * 128, 512, 32
    params.n_threads = params.n_threads_batch = 2
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    batch = Batch(32 * 128)

    def best(rows: list[int]) -> list[int]:
        logits = (
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(vocabulary,)) for row in rows
        )
        return [int(row.argmax()) for row in logits]

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        batch.fill(entries)
        if llama_cpp.llama_decode(context, batch.raw) != 0:
            raise RuntimeError("llama_decode failed")
        return best([i for i, entry in enumerate(entries) if entry[3]])

    def run(prompts: list[list[int]], new: int) -> tuple[float, float, list[list[int]]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        start = time.perf_counter()
        fed = [(token, t, s, t == len(ids) - 1) for s, ids in enumerate(prompts) for t, token in enumerate(ids)]
        tokens = [[token] for token in decode(fed)]
        first = time.perf_counter()
        for step in range(new - 1):
            fed = [
                (generated[-1], len(ids) + step, s, True)
                for s, (ids, generated) in enumerate(zip(prompts, tokens, strict=True))
            ]
            for generated, token in zip(tokens, decode(fed), strict=True):
                generated.append(token)
        return first - start, time.perf_counter() - first, tokens

    serve("llama.cpp", f"llama-cpp-python {llama_cpp.__version__}", run)


if __name__ == "__main__":
    main()
