"""Two processes with a device each beside one process with both: the same engine, answers and tokens a second.

    python benchmarks/cluster_speed.py [--layers 24] [--batches 16 64] [--rounds 5]     # two GPUs
    JAX_PLATFORMS=cpu python benchmarks/cluster_speed.py --small                       # does it run

Qwen3-30B-A3B cut to --layers layers, bfloat16, random weights, `tp_size` 2, rows asked by all. The engine of one
process runs before and after that of two, each in processes of its own; `ratio` is over the mean of both. `equal`:
greedy answers, tokens and rows, that equal those of one process. CPU figures say nothing: sums between processes go
through gloo."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import print_table, progress, write_result
from step import QWEN3_30B_A3B

from routed_experts import DistConfig, Engine, extract_routed_experts_from_meta_info, follow

PORT = 23_456


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine in every process."""
    most = max(args.batches)
    return {
        "tp_size": 2,
        "load_format": "dummy",
        "dtype": "float32" if args.small else "bfloat16",
        "precompile_bs_paddings": tuple(sorted(args.batches)),
        "precompile_token_paddings": (most * args.prompt,),
        "context_length": 2 * (args.prompt + args.new),
        "max_total_tokens": most * (args.prompt + args.new + 32),
        "skip_tokenizer_init": True,
        "enable_return_routed_experts": True,
    }


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Answers to some prompts, and the median tokens a second of each batch; in a process of its own."""
    dist = None if args.role == "alone" else DistConfig(nnodes=2, node_rank=0, dist_init_addr=f"127.0.0.1:{PORT}")
    vocabulary, noise = json.loads((Path(folder) / "config.json").read_text())["vocab_size"], np.random.default_rng(0)
    with Engine(folder, **engine_options(args), **({} if dist is None else {"dist": dist})) as engine:

        def run(batch: int) -> tuple[float, list[Any]]:
            prompts = [noise.integers(0, vocabulary, args.prompt).tolist() for _ in range(batch)]
            sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": args.new}
            start = time.perf_counter()
            outs = engine.generate(input_ids=prompts, sampling_params=sampling, return_routed_experts=True)
            return batch * args.new / (time.perf_counter() - start), list(outs)

        first = run(min(args.batches))[1]
        speeds = dict[str, float]()
        for batch in args.batches:
            run(batch)
            speeds[str(batch)] = statistics.median(run(batch)[0] for _ in range(args.rounds))
    rows = [extract_routed_experts_from_meta_info(out).tolist() for out in first]
    return {"answers": [[out["output_ids"], ids] for out, ids in zip(first, rows, strict=True)], "speeds": speeds}


def start(args: argparse.Namespace, role: str, folder: str, **environment: str) -> subprocess.Popen[str]:
    """A process of an engine."""
    progress(f"{role}: building")
    command = [sys.executable, __file__, *sys.argv[1:], "--role", role, "--folder", folder]
    output = None if role == "follower" else subprocess.PIPE
    return subprocess.Popen(command, stdout=output, text=True, env=os.environ | environment)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a process has printed last."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"a process of the engine ended with exit code {process.returncode}; its error is above")
    return json.loads(output.splitlines()[-1])


def run_alone(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One process with both devices."""
    return result_of(start(args, "alone", folder, XLA_FLAGS="--xla_force_host_platform_device_count=2"))


def run_pair(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Two processes with one device each."""
    leader, follower = (
        start(args, role, folder, CUDA_VISIBLE_DEVICES=str(rank)) for rank, role in enumerate(("leader", "follower"))
    )
    try:
        return result_of(leader)
    finally:
        follower.wait(timeout=120)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=192)
    parser.add_argument("--small", action="store_true", help="one short round of a small model")
    parser.add_argument("--name", default="cluster_speed_h100", help="of the result")
    parser.add_argument("--role", choices=("alone", "leader", "follower"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.small:
        args.layers, args.batches, args.rounds, args.prompt, args.new = 2, [2], 1, 16, 8
    if args.role == "follower":
        dist = DistConfig(nnodes=2, node_rank=1, dist_init_addr=f"127.0.0.1:{PORT}")
        follow(args.folder, dist=dist, **engine_options(args))
        return
    if args.role is not None:
        print(json.dumps(measure(args, args.folder)))
        return
    keys = dict(QWEN3_30B_A3B) | {"num_hidden_layers": args.layers}
    if args.small:
        keys |= dict(vocab_size=256, hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
        keys |= dict(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(keys))
        before, pair, after = run_alone(args, folder), run_pair(args, folder), run_alone(args, folder)
    equal = sum(one == two for one, two in zip(before["answers"], pair["answers"], strict=True))
    rows = list[dict[str, object]]()
    for batch, speed in pair["speeds"].items():
        alone = before["speeds"][batch], after["speeds"][batch]
        rows.append(
            {
                "batch": int(batch),
                "one process tok/s": alone[0],
                "again tok/s": alone[1],
                "two processes tok/s": speed,
                "ratio": 2 * speed / sum(alone),
                "equal": f"{equal} of {len(pair['answers'])}",
            }
        )
    print_table(rows)
    print(write_result(args.name, rows, layers=args.layers))


if __name__ == "__main__":
    main()
