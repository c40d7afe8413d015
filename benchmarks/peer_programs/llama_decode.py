"""Decode with llama-cpp-python, without drafts: prompts are fed as one batch, then one token of each sequence a step;
argmax is taken in NumPy."""

import tempfile
import time
from pathlib import Path

import llama_cpp
import numpy as np
from llama_gguf import write_gguf
from protocol import serve


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


def serve_decoding(folder: Path, dtype: str) -> None:
    """Convert, load, then serve."""
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        write_gguf(folder, file, dtype)
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
