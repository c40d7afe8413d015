"""What capture costs: off, on and asked by none, on and asked by all; interleaved in one process.

    python benchmarks/capture.py [--rounds 15] [--batches 8 32]

Prefill and decode are timed apart. A ratio is that of one round, whose three runs are neighbours in time; medians are given.
Each round turns the order, so that drift of the machine falls on all alike."""

import argparse
import statistics

import jax.numpy as jnp
from common import Prompts, benchmark_model, build, print_table, run, write_result


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    model = benchmark_model(jnp.dtype("float32"))
    off, on = build(model, capture=False).core, build(model, capture=True).core
    variants = {"off": (off, False), "on, unasked": (on, False), "on, asked": (on, True)}
    prompts, rows = Prompts(), []
    for batch in args.batches:
        timings = {name: [] for name in variants}
        for turn in range(-1, args.rounds):  # the first round warms up
            names = list(variants)
            for name in names[turn % 3 :] + names[: turn % 3]:
                core, ask = variants[name]
                timing = run(core, prompts.requests(batch, prompt=args.prompt, new=args.new, ask=ask))
                if turn >= 0:
                    timings[name].append(timing)
        for phase in ("prefill", "decode"):
            base = [getattr(timing, phase) for timing in timings["off"]]
            for name in variants:
                speeds = [getattr(timing, phase) for timing in timings[name]]
                ratios = sorted(a / b for a, b in zip(speeds, base, strict=True))
                quarter = len(ratios) // 4
                rows.append(
                    {
                        "batch": batch,
                        "phase": phase,
                        "capture": name,
                        "tok/s median": statistics.median(speeds),
                        "ratio to off": statistics.median(ratios),
                        "quartiles": f"{ratios[quarter]:.3f}..{ratios[-1 - quarter]:.3f}",
                        "best tok/s": max(speeds),
                    }
                )
    print_table(rows)
    print(write_result("capture_cpu", rows, rounds=args.rounds, prompt=args.prompt, new=args.new))


if __name__ == "__main__":
    main()
