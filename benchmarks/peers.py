"""Decode and prefill beside Hugging Face `transformers` generate, on the same weights and prompts, fp32, in one process.

    python benchmarks/peers.py [--rounds 3] [--batches 1 8 32]

Ours runs with capture on and asked for by every request. Rounds alternate; a ratio is that of one round; medians are given."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import torch
from common import Prompts, benchmark_model, build, print_table, run, write_checkpoint, write_result
from transformers import AutoModelForCausalLM


def hf_timing(model: torch.nn.Module, ids: torch.Tensor, new: int) -> tuple[float, float]:
    """(prefill, decode) tokens per second of `generate`."""

    def generate(count: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
        return time.perf_counter() - start

    first, whole = generate(1), generate(new)
    return ids.numel() / first, ids.shape[0] * (new - 1) / (whole - first)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()
    model = benchmark_model(jnp.dtype("float32"))
    core = build(model, capture=True).core
    with tempfile.TemporaryDirectory() as folder:
        peer = AutoModelForCausalLM.from_pretrained(write_checkpoint(model, Path(folder)), dtype=torch.float32).eval()
    prompts, rows = Prompts(), []
    for batch in args.batches:
        ours, theirs = [], []
        for turn in range(-1, args.rounds):
            reqs = prompts.requests(batch, prompt=args.prompt, new=args.new if turn >= 0 else 8, ask=True)
            ids = torch.tensor([req.source.input_ids.tolist() for req in reqs])
            timing, peer_timing = run(core, reqs), hf_timing(peer, ids, args.new if turn >= 0 else 8)
            if turn >= 0:
                ours.append((timing.prefill, timing.decode))
                theirs.append(peer_timing)
        for index, phase in enumerate(("prefill", "decode")):
            mine, other = [pair[index] for pair in ours], [pair[index] for pair in theirs]
            ratios = [a / b for a, b in zip(mine, other, strict=True)]
            rows.append(
                {
                    "batch": batch,
                    "phase": phase,
                    "ours tok/s": statistics.median(mine),
                    "transformers tok/s": statistics.median(other),
                    "ratio": statistics.median(ratios),
                    "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
                }
            )
    print_table(rows)
    print(write_result("peers_cpu", rows, rounds=args.rounds, prompt=args.prompt, new=args.new))


if __name__ == "__main__":
    main()
