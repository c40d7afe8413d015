"""Prefill and decode of this processor's ways to multiply rows by weights of bfloat16: in floats, in pairs of
neighbours, in tiles (AMX).

    python benchmarks/bf16_ways.py [--batches 1 8 32] [--rounds 5]
    python benchmarks/bf16_ways.py --small     # does it run

One engine answers the same prompts with each way in turn, through Engine.generate with the rows of every request, as in
peers.py; a ratio to floats is that of one round, and medians are given. A way that this processor does not have is left
out. An engine takes the way of the largest `gain`: that of a product in the cache, measured when the library
was first loaded."""

import argparse
import statistics

import jax.numpy as jnp
import numpy as np
from common import VOCABULARY, benchmark_model, print_table, write_result
from peers import measure_engine

from routed_experts import Engine
from routed_experts.layers.native import toolchain
from routed_experts.layers.native.toolchain import Bf16Gains

WAYS = {"floats": Bf16Gains(0.0, 0.0), "pairs": Bf16Gains(2.0, 0.0), "tiles": Bf16Gains(0.0, 2.0)}  # as if measured


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--small", action="store_true", help="one short round: does it run")
    args = parser.parse_args()
    if args.small:
        vars(args).update(batches=[1], rounds=1, prompt=16, new=4)
    library = toolchain.library()
    gains = toolchain.own_bf16_gains(library)
    ways = [way for way in WAYS if way != "tiles" or gains.tiles > 0]
    rows: list[dict[str, object]] = []
    noise = np.random.default_rng(0)
    with Engine(model=benchmark_model(jnp.bfloat16), enable_return_routed_experts=True) as engine:
        for batch in args.batches:
            timings = {way: [] for way in ways}
            for turn in range(args.rounds + 1):  # the first one warms up
                prompts = noise.integers(3, VOCABULARY, (batch, args.prompt)).tolist()
                for way in ways if turn % 2 else reversed(ways):
                    toolchain.use_bf16(library, WAYS[way])
                    timing, _ = measure_engine(engine, prompts, args.new)
                    if turn > 0:
                        timings[way].append(timing)
            for phase in ("prefill", "decode"):
                speeds = {way: [getattr(timing, phase) for timing in timings[way]] for way in ways}
                for way in ways:
                    ratios = [ours / floats for ours, floats in zip(speeds[way], speeds["floats"], strict=True)]
                    rows.append(
                        {
                            "batch": batch,
                            "phase": phase,
                            "way": way,
                            "gain": 1.0 if way == "floats" else getattr(gains, way),
                            "tok/s": statistics.median(speeds[way]),
                            "over floats": statistics.median(ratios),
                            "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
                        }
                    )
            print_table(rows[-2 * len(ways) :])
    toolchain.use_bf16(library, gains)
    print(write_result("bf16_ways_cpu", rows, rounds=args.rounds, prompt=args.prompt, new=args.new))


if __name__ == "__main__":
    main()
