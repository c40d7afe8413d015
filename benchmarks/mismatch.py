"""What replay gains: k3 and shares beyond a ratio of a rollout in bfloat16 against a training forward, live and
replayed, on the ids alone and on the combine weights too.

    python benchmarks/mismatch.py trained [--forwards jax transformers] [--seconds 410] [--weights FILE.npz]   # GPU
    python benchmarks/mismatch.py demo [--sequences 768] [--rounded 96]                                        # CPU
    python benchmarks/mismatch.py demo --small                    # does it run; so does trained --small

trained: a byte model is trained for --seconds (training/byte_model.py), rolled out in bfloat16 by the GPU kernels
and judged by this package's training forward (jax) and by transformers (training/hf_trainer.py), both in bfloat16.
Intervals are 95 % over sequences, also of the ratio. JAX and PyTorch share the card:
XLA_PYTHON_CLIENT_MEM_FRACTION=0.5. Lines are written as they are measured.

demo: the demo model, rolled out in bfloat16, judged in float32; and k3 of rounding to bfloat16 at each site of a
layer (training/demo_model.py). Dims: B sequences, S tokens of a sequence, G tokens of an answer."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import jax
import numpy as np
from common import print_table, progress, write_result
from flax import nnx
from training import byte_model, demo_model
from training.rollouts import compare, roll_out, training_logprobs

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.layers.permuted_moe import PERMUTED
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.replay import mismatch_report
from support import gpu_replay

Report = Callable[[dict[str, object]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The engine and model, sequences of the rollout, tokens of a prompt and of an answer, bytes of text."""

    engine: gpu_replay.Sizes
    sequences: int
    prompt: int
    new: int
    text_bytes: int
    plan: dict[str, int]


def parse_sizes(args: argparse.Namespace) -> Sizes:
    """Full sizes, or such as a CPU interprets."""
    if args.small:
        plan = {"batch": 2, "length": 32, "block": 2}
        return Sizes(engine=gpu_replay.SMALL, sequences=4, prompt=8, new=8, text_bytes=200_000, plan=plan)
    engine = gpu_replay.Sizes(config=gpu_replay.byte_config())
    return Sizes(engine=engine, sequences=512, prompt=32, new=224, text_bytes=60_000_000, plan={"batch": args.batch})


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A trained model in the served dtype; tokens [B S], logprobs [B G] and a record a sequence of its engine."""

    model: FamilyDecoder
    tokens: np.ndarray
    logprobs: np.ndarray
    records: list[RoutedExperts]


def train_and_roll_out(sizes: Sizes, args: argparse.Namespace, report: Report) -> Rollout:
    """Train for --seconds, then roll out in the served dtype."""
    text, held_out = byte_model.read_text(sizes.text_bytes)
    report({"what": "text", "bytes": text.size, "held out": held_out.size})
    plan = byte_model.Plan(seconds=args.seconds, **sizes.plan)
    graphdef, params = byte_model.init(sizes.engine.config, args.weights)
    if args.seconds > 0:
        params = byte_model.train(graphdef, params, text, plan, lambda row: report({"what": "training", **row}))
    if args.weights is not None:
        byte_model.save_weights(params, args.weights)
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(sizes.engine.dtype), params))
    del params
    context = sizes.prompt + sizes.new
    bench = gpu_replay.gpu_bench(model, sizes.engine, probed=False, context=context, weights=True)
    starts = np.random.default_rng(2).integers(0, held_out.size - sizes.prompt, (sizes.sequences, 1))
    prompts = held_out[starts + np.arange(sizes.prompt)].astype(np.int32)
    tokens, logprobs, records, seconds = roll_out(bench.assembly.core, prompts, sizes.new, bench.spec)
    report(
        {
            "what": "rollout",
            "tokens": logprobs.size,
            "tokens a second": logprobs.size / seconds,
            "nats a byte": -logprobs.mean(),
        }
    )
    return Rollout(model, tokens, logprobs, records)


def judge(forward: str, rollout: Rollout, prompt: int, report: Report) -> None:
    """Report logprobs [B G] of a training forward, live and replayed, against those of the engine."""
    if forward == "jax":
        logprobs, misses = training_logprobs(rollout.model, rollout.tokens, rollout.records, prompt, PERMUTED)
    else:
        from training import hf_trainer

        report({"what": "trainer", **hf_trainer.versions()})
        logprobs, misses = hf_trainer.training_logprobs(rollout.model, rollout.tokens, rollout.records, prompt)
        without_rows = logprobs.pop("no valid row")
        own = logprobs["live"][: len(without_rows)]
        distance = float(np.abs(without_rows - own).max())
        report({"what": "no valid row == its own routers", "holds": distance == 0.0, "max |d|": distance})
    mask = np.ones(rollout.logprobs.shape, bool)
    for name, values in logprobs.items():
        row = dataclasses.asdict(mismatch_report(rollout.logprobs, values, mask))
        report({"what": f"report, {name}", "canary": float(np.mean(misses[name])), **row})
    for line in compare(logprobs["live"] - rollout.logprobs, logprobs["replayed"] - rollout.logprobs):
        report(line)
    if "with weights" in logprobs:
        sides = logprobs["replayed"] - rollout.logprobs, logprobs["with weights"] - rollout.logprobs
        for line in compare(*sides, names=("replayed", "with weights")):
            report(line)


def measure_trained(args: argparse.Namespace) -> int:
    """Train, roll out, judge by each forward; the result is written after every line. 1 where a check does not hold."""
    sizes, rows = parse_sizes(args), list[dict[str, object]]()

    def report(row: dict[str, object], forward: str = "-") -> None:
        rows.append(json.loads(json.dumps({"forward": forward, **row}, default=np.generic.item)))
        progress(json.dumps(rows[-1]))
        write_result(args.name or "mismatch_trained_h200", rows)

    rollout = train_and_roll_out(sizes, args, report)
    for forward in args.forwards:
        judge(forward, rollout, sizes.prompt, lambda row, forward=forward: report(row, forward))
    for row in rows:
        if "ratio" in row or "replayed" in row:
            print_table([row])
    print(write_result(args.name or "mismatch_trained_h200", rows))
    return 1 if any(row.get("holds") is False for row in rows) else 0


def measure_demo(args: argparse.Namespace) -> int:
    """The demo model; both tables."""
    sequences, rounded, new = (8, 2, 8) if args.small else (args.sequences, args.rounded, demo_model.NEW)
    gains, rows, tokens = demo_model.measure(sequences, rounded, new)
    for row in gains:
        print_table([row])
    print_table(rows)
    print(write_result(args.name or "mismatch_demo_cpu", rows, sequences=sequences, tokens=tokens, engine=gains))
    return 0


def main() -> int:
    """Measure one of the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["trained", "demo"])
    parser.add_argument("--forwards", nargs="+", choices=["jax", "transformers"], default=["jax", "transformers"])
    parser.add_argument("--seconds", type=float, default=420.0, help="of training, compilation not counted")
    parser.add_argument("--weights", type=Path, help="an .npz: training starts from it if it exists, and writes it")
    parser.add_argument("--batch", type=int, default=128, help="sequences of a training step")
    parser.add_argument("--sequences", type=int, default=768, help="answers of the demo model")
    parser.add_argument("--rounded", type=int, default=128, help="answers whose rounding is taken apart by site")
    parser.add_argument("--name", help="of the result, after the machine")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run")
    args = parser.parse_args()
    if args.small:
        args.seconds = min(args.seconds, 2.0)
    return measure_trained(args) if args.model == "trained" else measure_demo(args)


if __name__ == "__main__":
    sys.exit(main())
