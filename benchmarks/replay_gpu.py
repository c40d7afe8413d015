"""Replay on an accelerator's own kernels: its laws, the rows of whatever can happen to a request, and what it gains on
a trained model.

    python benchmarks/replay_gpu.py [--parts laws rows mismatch transformers] [--seconds 420] [--weights FILE.npz]
    [--small]

laws: C1 executed == forced, C2 self-replay, C3 no valid row is live, by the serving kernels (`score`) and by the
training forward.
rows: every kind of event and random schedules, each row against a tap on the array that enters the kernels.
mismatch: a byte model is trained for --seconds (byte_model.py); rollout in bfloat16 by the serving kernels, training
forward in bfloat16
by the training kernels, live and replayed: k3, F(2), F(1.1), with 95 % intervals over sequences, also of the ratio.
transformers: the same model and rollout, judged by Hugging Face's transformers in bfloat16 (hf_trainer.py), live and
replayed. JAX and
PyTorch share the card: XLA_PYTHON_CLIENT_MEM_FRACTION=0.5.
--small is for a machine without one: the same kernels interpreted, tiny sizes. What is done is written as it is done.
Dims: B sequences, S tokens of a sequence, G tokens of an answer, M MoE layers, K experts per token."""

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import numpy as np
from common import machine, print_table
from flax import nnx
from replay_laws import law, serving_laws, training_laws
from replay_stage import Rollout, Stage, Tell, bench_of, random_model, sizes_of
from rollouts import compared, judged

from oracles.schedules import EVENTS, run_event, run_schedule
from oracles.schedules import Stage as Schedules
from routed_experts.layers.permuted_moe import PERMUTED
from routed_experts.replay import mismatch_report

Rows = list[dict[str, object]]


def laws(stage: Stage, tell: Tell) -> None:
    """Both sets of laws for each model."""
    for name, config in stage.sizes.models.items():
        for side, judge in (("serving", serving_laws), ("training", training_laws)):
            for row in judge(config, stage.sizes):
                tell({"model": name, "kernels": side, **row})


def rows(stage: Stage, tell: Tell) -> None:
    """Every event once, then random schedules; a wrong row ends its line with what was found."""
    sizes = stage.sizes
    name, config = next(iter(sizes.models.items()))
    states = [nnx.split(random_model(config, sizes.dtype, seed))[1] for seed in (1, 2)]
    small = dataclasses.replace(sizes, requests=8, tokens=32)
    world = Schedules(
        bench_of(random_model(config, sizes.dtype), small, tapped=True, context=96),
        256,
        lambda index: states[index % 2],
    )
    jobs = {event: lambda event=event: run_event(world, event) for event in EVENTS}
    jobs |= {f"schedule {seed}": lambda seed=seed: run_schedule(world, seed) for seed in range(stage.args.schedules)}
    for job, run in jobs.items():
        start = time.perf_counter()
        try:
            told: dict[str, object] = {"rows compared": run(), "wrong": ""}
        except AssertionError as error:
            told = {"rows compared": 0, "wrong": f"{type(error).__name__}: {error}"[:300] or "an assertion"}
        tell({"model": name, "what": job, **told, "s": round(time.perf_counter() - start, 2)})


def mismatch(stage: Stage, tell: Tell) -> None:
    """This package's training forward against the rollout."""
    rolled = stage.rollout(tell)
    told, missed = judged(rolled.model, rolled.tokens, rolled.records, stage.sizes.prompt, PERMUTED)
    report(rolled, told, missed, tell)


def transformers(stage: Stage, tell: Tell) -> None:
    """The forward of transformers against the rollout."""
    import hf_trainer

    rolled = stage.rollout(tell)
    tell({"what": "trainer", **hf_trainer.versions()})
    told, missed = hf_trainer.judged(rolled.model, rolled.tokens, rolled.records, stage.sizes.prompt)
    nothing = told.pop("nothing")
    own = told["live"][: len(nothing)]
    tell(law("no valid row == its own routers", np.array_equal(nothing, own), nothing, own))
    report(rolled, told, missed, tell)


def report(rolled: Rollout, told: dict[str, np.ndarray], missed: dict[str, float], tell: Tell) -> None:
    """Logprobs [B G] live and replayed against what the engine said."""
    mask = np.ones(rolled.said.shape, bool)
    for name, logprobs in told.items():
        found = dataclasses.asdict(mismatch_report(rolled.said, logprobs, mask))
        tell({"what": f"report, {name}", "canary": missed[name], **found})
    for line in compared(told["live"] - rolled.said, told["replayed"] - rolled.said):
        tell(line)


PARTS = {"laws": laws, "rows": rows, "mismatch": mismatch, "transformers": transformers}


def main() -> int:
    """Run the parts in their order, print each line as it comes, and write all lines after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=420.0, help="of training, compilation not counted")
    parser.add_argument(
        "--weights", type=Path, help="an .npz: training starts from it where it is there, and leaves its weights in it"
    )
    parser.add_argument("--batch", type=int, default=128, help="sequences of a training step")
    parser.add_argument("--schedules", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run")
    parser.add_argument("--out", type=Path, default=Path("replay_gpu.json"))
    args = parser.parse_args()
    head = {"command": " ".join(["python", "benchmarks/replay_gpu.py", *sys.argv[1:]]), "machine": machine()}
    stage, told, failed = Stage(sizes_of(args.small), args), dict[str, Rows](), list[str]()
    for part in args.parts:
        told[part] = []

        def tell(row: dict[str, object], part: str = part) -> None:
            told[part].append(row)
            print(part, json.dumps(row, default=np.generic.item), flush=True)
            fresh = args.out.with_suffix(".part")
            fresh.write_text(json.dumps({**head, "failed": failed, **told}, indent=1, default=np.generic.item) + "\n")
            os.replace(fresh, args.out)

        try:
            PARTS[part](stage, tell)
        except Exception:
            failed.append(traceback.format_exc())
            print(failed[-1], flush=True)
            tell({"what": "failed"})
    for part, lines in told.items():
        bad = [row for row in lines if row.get("holds") is False or row.get("wrong")]
        print(f"{part}: {len(lines)} lines, {len(bad)} bad")
        for row in bad:
            print_table([row])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
