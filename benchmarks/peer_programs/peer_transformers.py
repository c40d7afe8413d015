"""Hugging Face transformers `generate` as a peer: python peer_transformers.py FOLDER DTYPE. Prefill is a run of one new
token."""

import sys
import time

import torch
import transformers
from protocol import serve


def main() -> None:
    """Load, then serve."""
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()

    def generate(ids: torch.Tensor, count: int) -> tuple[float, torch.Tensor]:
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
            )
        return time.perf_counter() - start, out[:, ids.shape[1] :]

    def run(prompts: list[list[int]], new: int) -> tuple[float, float, list[list[int]]]:
        ids = torch.tensor(prompts)
        first, _ = generate(ids, 1)
        whole, tokens = generate(ids, new)
        return first, whole - first, tokens.tolist()

    serve("transformers", f"{transformers.__version__}, torch {torch.__version__}", run)


if __name__ == "__main__":
    main()
