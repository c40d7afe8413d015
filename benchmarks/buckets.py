"""What a step costs in each padded size, and which sizes are worth a program: `routed-experts bench buckets` on a
benchmark's model.

    python benchmarks/buckets.py [--most 3] [--decode 1 2 4 8 16 32] [--extend 16 64 256 1024] [--dummy]

Without --dummy the benchmark model in float32; with it Qwen3-30B-A3B with random weights (benchmarks/step.py), for a
GPU:

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python benchmarks/buckets.py --dummy --most 6 --name buckets_h200 \\
        --decode 1 2 4 8 16 32 64 96 128 192 256 --extend 64 256 1024 4096 16384

The lists that ServerArgs has by default stand beside the best ones as "given"; on a GPU, those of --given-decode and
--given-extend."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
from common import benchmark_model, print_table, write_result
from step import QWEN3_30B_A3B

from routed_experts.cli.bench_buckets import bucket_rows, read_load
from routed_experts.core.bucket_tuning import LOADS
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.build.step_cost import measure_step_costs


def main() -> None:
    """Measure, choose, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = ServerArgs()
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32])
    parser.add_argument("--extend", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 768, 1024])
    parser.add_argument("--given-decode", type=int, nargs="+", default=list(default.batch_paddings))
    parser.add_argument("--given-extend", type=int, nargs="+", default=list(default.token_paddings))
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--name", default="buckets_cpu")
    options = parser.parse_args()
    given = {"decode": tuple(options.given_decode), "extend": tuple(options.given_extend)}
    args = ServerArgs(
        precompile_bs_paddings=tuple(options.decode),
        precompile_token_paddings=tuple(options.extend),
        enable_return_routed_experts=True,
        context_length=1024,
    )
    with tempfile.TemporaryDirectory() as folder:
        if options.dummy:
            (Path(folder) / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
            args = dataclasses.replace(args, model_path=folder)
            assembly = build_engine(args, load_format="dummy")
        else:
            assembly = build_engine(args, model=benchmark_model(jnp.dtype("float32")))
    decode, extend = measure_step_costs(assembly, args, rounds=options.rounds)
    loads = [read_load(name, given) for name in LOADS]
    rows = bucket_rows({"decode": decode, "extend": extend}, given, loads, most=options.most)
    print_table(rows)
    print(write_result(options.name, rows, rounds=options.rounds))


if __name__ == "__main__":
    main()
