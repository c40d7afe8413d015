"""llama.cpp as a peer, through llama-cpp-python: LLAMA_CPP=SOURCE python peer_llama_cpp.py FOLDER DTYPE. SOURCE is
the source of llama.cpp (vendor/llama.cpp in that of llama-cpp-python), whose own code writes the weights as GGUF first;
it needs torch and transformers. Prompts are fed as one batch, then one token of each sequence a step; argmax is taken
in NumPy."""

import os
import sys
import tempfile
import time
from pathlib import Path

import llama_cpp
import numpy as np
from protocol import serve

if "LLAMA_CPP" not in os.environ:
    sys.exit("LLAMA_CPP is not set; set it to the folder of llama.cpp's source")
SOURCE = Path(os.environ["LLAMA_CPP"])
sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]

import conversion  # noqa: E402  # of llama.cpp
import gguf  # noqa: E402
import torch  # noqa: E402

KINDS = {"float32": gguf.LlamaFileType.ALL_F32, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}


def write_gguf(folder: Path, file: Path, dtype: str) -> None:
    """The checkpoint as llama.cpp converts it, without a tokenizer."""
    settings = conversion.ModelBase.load_hparams(folder, False)
    architecture = conversion.get_model_architecture(settings, conversion.ModelType.TEXT)
    converter = conversion.get_model_class(architecture)

    def set_vocab(self: conversion.TextModel) -> None:
        self.gguf_writer.add_tokenizer_model("none")
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    converter.set_vocab = set_vocab
    with torch.inference_mode():
        converter(folder, KINDS[dtype], file).write()


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
