"""Weights of a checkpoint as GGUF, written by llama.cpp's own code: LLAMA_CPP=SOURCE names the folder of its source. It
needs torch and transformers."""

import os
import sys
from pathlib import Path

if "LLAMA_CPP" not in os.environ:
    sys.exit("LLAMA_CPP is not set; set it to the folder of llama.cpp's source")
SOURCE = Path(os.environ["LLAMA_CPP"])
sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]

import conversion  # noqa: E402  # of llama.cpp
import gguf  # noqa: E402
import torch  # noqa: E402

KINDS = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def write_gguf(folder: Path, file: Path, dtype: str, *, with_tokens: bool = False) -> None:
    """The checkpoint as llama.cpp converts it, without a tokenizer. `with_tokens`: each token has a text, which
    llama-server needs."""
    settings = conversion.ModelBase.load_hparams(folder, False)
    architecture = conversion.get_model_architecture(settings, conversion.ModelType.TEXT)
    converter = conversion.get_model_class(architecture)

    def set_vocab(self: conversion.TextModel) -> None:
        size = self.hparams["vocab_size"]
        if not with_tokens:
            self.gguf_writer.add_tokenizer_model("none")
            self.gguf_writer.add_vocab_size(size)
            return
        self.gguf_writer.add_tokenizer_model("gpt2")
        self.gguf_writer.add_tokenizer_pre("gpt-2")
        self.gguf_writer.add_token_list([f"t{token}" for token in range(size)])
        self.gguf_writer.add_token_types([gguf.TokenType.NORMAL] * size)
        self.gguf_writer.add_token_merges(["t 0"])

    converter.set_vocab = set_vocab
    with torch.inference_mode():
        converter(folder, KINDS[dtype], file).write()
