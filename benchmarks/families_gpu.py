"""Decode steps and prefill of seven MoE families at their published shapes on a GPU, with random weights, beside the
bytes that a step must read.

    python benchmarks/families_gpu.py [--families GPT-OSS-20b ...] [--batches 1 16 64 256] [--new 128] [--rounds 2]
        [--memory GB] [--layers N] [--bandwidth 4.3e12]
    python benchmarks/families_gpu.py --small [--families ...]      # a CPU, a small model of a family: does it run

A family is one of family_configs.py. Where its weights and the caches of two engines do not fit into --memory (the
card's own, unless given), or where --layers asks for it, it has fewer layers, and `layers` says how many of how many.
Runs are those of step.py: two engine cores share the weights, one with capture and one without, and whole runs of
"off", "on, unasked" and "on, asked" take turns. Prompts have 1,024 tokens, for batch 1 128; prefill of batch 16 is 16 x
1,024 tokens in one step.

`floor` is the bytes that a step must read (of experts those that the recorded rows name) over --bandwidth, unless
given the rate at which this device copies an array, measured first; `prefill tok/s` has no floor. A run whose logprobs
are not finite fails."""

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from common import print_table, progress, write_result
from family_configs import PUBLISHED, read_family, small_keys, step_bytes
from step import SMALL, build, measure

SHARE = 0.85  # of the memory for weights and caches; programs and their temporaries take the rest
TOKENS_MORE = 32  # that a request reserves beyond its prompt and answer


def copy_rate(num_bytes: int, rounds: int = 5, copies: int = 20) -> float:
    """Bytes a second that copies, one after another, read and write on the default device; the best of some rounds."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    seconds = []
    for _ in range(rounds):
        array = copy(array).block_until_ready()
        start = time.perf_counter()
        for _ in range(copies):
            array = copy(array)
        array.block_until_ready()
        seconds.append((time.perf_counter() - start) / copies)
    return 2 * array.nbytes / min(seconds)


def device_bytes() -> float:
    """Memory of the default device; 80 GB where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", 80e9))


def measure_family(name: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """All batches of one family, and where its depth was cut."""
    model = PUBLISHED[name]
    if args.small:
        keys = small_keys(model)
    else:
        cached = max(max(args.batches), args.prefill_batch) * (args.prompt + args.new + TOKENS_MORE)
        most = model.depth(SHARE * args.memory * 1e9, 2 * cached)
        asked = max(1, args.layers // model.pattern) * model.pattern if args.layers else most
        keys = model.cut(min(most, asked))
    config = read_family(keys)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(keys))
        components, phases = build(Path(folder), args)
    print_table(phases)
    cores = {variant: part.core for variant, part in components.items()}
    rows: list[dict[str, object]] = []
    for batch in args.batches:
        progress(f"{name}, batch {batch}")
        measured = measure(cores, keys, args, batch, read_bytes=lambda *sizes: step_bytes(config, *sizes))
        rows += [{"family": name, "layers": f"{config.num_layers} of {model.layers}", **row} for row in measured]
        print_table(rows[-len(measured) :])
    return rows


def main() -> None:
    """Run, print, write after each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(PUBLISHED), help="all; with --small GPT-OSS-20b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefill-batch", type=int, default=16)
    parser.add_argument("--prefill-tokens", type=int, default=16_384)
    parser.add_argument("--memory", type=float, help="GB of the card")
    parser.add_argument("--layers", type=int, help="at most so many, for a shorter run; at least one pattern")
    parser.add_argument("--bandwidth", type=float, help="bytes a second of the floor; measured, unless given")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a small model on any machine")
    parser.add_argument("--name", default="families_gpu", help="of the result")
    args = parser.parse_args()
    if args.small:
        vars(args).update(SMALL)
    args.memory = args.memory or device_bytes() / 1e9
    args.bandwidth = args.bandwidth or copy_rate(1 << (24 if args.small else 31))
    families = args.families or (["GPT-OSS-20b"] if args.small else list(PUBLISHED))
    rows: list[dict[str, object]] = []
    path: Path | str = ""
    for name in families:
        rows += measure_family(name, args)
        sizes = {"prompt": args.prompt, "new": args.new, "rounds": args.rounds}
        path = write_result(args.name, rows, bandwidth=args.bandwidth, memory_gb=args.memory, **sizes)
        gc.collect()  # the next family needs the memory
    print_table(rows)
    print(path)


if __name__ == "__main__":
    main()
