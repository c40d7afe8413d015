"""Replay on an accelerator's own kernels: its laws, the rows of whatever can happen to a request, and what it gains on a trained model.

    python benchmarks/replay_gpu.py [--parts laws rows mismatch] [--seconds 420] [--weights FILE.npz] [--schedules 30] [--small]

laws: C1 executed == forced, C2 self-replay, C3 no valid row is live, by the serving kernels (`score`) and by the training forward.
rows: every kind of event and random schedules, each row against a tap on the array that enters the kernels.
mismatch: a byte model is trained for --seconds (byte_model.py); rollout in bfloat16 by the serving kernels, training forward in bfloat16
by the training kernels, live and replayed: k3, F(2), F(1.1), with 95 % intervals over sequences, also of the ratio.
--small is for a machine without one: the same kernels interpreted, tiny sizes. What is done is written as it is done.
Dims: B sequences, S tokens of a sequence, G tokens of an answer, M MoE layers, K experts per token."""

import argparse
import collections
import dataclasses
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import byte_model
import jax
import jax.numpy as jnp
import numpy as np
from common import machine, print_table
from flax import nnx
from rollouts import compared, judged, roll_out

from oracles.driver import Bench
from oracles.schedules import EVENTS, Stage, run_event, run_schedule
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.score import Scorer
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.permuted_moe import PERMUTED
from routed_experts.models.dummy_weights import dummy_model
from routed_experts.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from routed_experts.replay import RoutedBatch, forward, mismatch_report

Rows = list[dict[str, object]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is run: models by name, paddings of the engine, sequences of a measurement."""

    models: dict[str, Qwen3MoeConfig]
    requests: int
    tokens: int
    page: int
    dtype: str = "bfloat16"
    sequences: int
    prompt: int
    new: int


def sizes_of(small: bool) -> Sizes:
    """Full sizes, or such as a CPU interprets."""
    if small:
        tiny = byte_model.config_of(hidden=32, layers=2, experts=8, top_k=2, width=16, head=16)
        return Sizes(models={"tiny": tiny}, requests=4, tokens=16, page=16, dtype="float32", sequences=4, prompt=8, new=8)
    wide = byte_model.config_of(hidden=2048, layers=4, experts=128, width=768, head=128)
    models = {"12 layers of 64 experts, D 512": byte_model.config_of(), "4 layers of 128 experts, D 2048": wide}
    return Sizes(models=models, requests=256, tokens=1024, page=16, sequences=512, prompt=32, new=224)


def bench_of(model: Any, sizes: Sizes, *, tapped: bool, context: int = 256) -> Bench:
    """An engine core on the accelerator's kernels, with a tap before the experts or without."""
    interpret = jax.default_backend() != "gpu"
    return Bench(
        model, gpu_kernels(interpret=interpret), gpu_attention_backend(interpret=interpret),
        moe_backend="tapped" if tapped else "untapped", attention_backend="gpu", context_length=context, page_size=sizes.page,
        max_total_tokens=sizes.requests * (context + 16), precompile_bs_paddings=(sizes.requests,),
        precompile_token_paddings=(sizes.tokens,), mem_fraction_static=0.9,
    )  # fmt: skip


def random_model(config: Qwen3MoeConfig, dtype: str, seed: int = 0) -> Qwen3Moe:
    """Random weights that spread tokens over all experts."""
    return dummy_model(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)), seed=seed)


def law(name: str, holds: bool, one: Any, other: Any) -> dict[str, object]:
    """A row of the table, with the largest distance of what was compared."""
    return {"law": name, "holds": bool(holds), "max |d|": float(np.max(np.abs(np.asarray(one) - np.asarray(other))))}


def drifted(rng: np.random.Generator, shape: tuple[int, ...], experts: int) -> np.ndarray:
    """Distinct ids [..., K] that no router would take."""
    return np.ascontiguousarray(rng.permuted(np.tile(np.arange(experts, dtype=np.uint8), (*shape[:-1], 1)), axis=-1)[..., : shape[-1]])


def serving_laws(config: Qwen3MoeConfig, sizes: Sizes) -> Rows:
    """C1 to C3 by the serving kernels, which are one program live and replayed; and how far what requests were told lies from a score,
    which takes other shapes and so other sums: that is told and not judged."""
    rng, model = np.random.default_rng(0), random_model(config, sizes.dtype)
    tokens = rng.integers(0, 256, (4, min(64, sizes.tokens))).astype(np.int32)
    bench = bench_of(model, sizes, tapped=False)

    def score(bench: Bench, tokens: np.ndarray, records: list[RoutedExperts] | None) -> tuple[np.ndarray, list[RoutedExperts]]:
        scorer = Scorer(bench.args, bench.assembly.buckets, bench.runner)
        outputs = scorer.run([*tokens], records, lambda: (bench.runner.state, 0))
        return np.stack([out.logprobs for out in outputs]), [out.routed_experts for out in outputs if out.routed_experts is not None]

    live, records = score(bench, tokens, None)
    twice, _ = score(bench, tokens, None)
    forced = [dataclasses.replace(record, ids=drifted(rng, record.ids.shape, record.num_experts)) for record in records]
    nobody = np.zeros(tokens.shape[1], bool)
    none, _ = score(bench, tokens, [dataclasses.replace(record, valid=nobody) for record in forced])
    again, same = score(bench, tokens, records)
    drift, executed = score(bench, tokens, forced)
    tapped = bench_of(model, sizes, tapped=True)
    tapped.tap.clear()
    score(tapped, tokens[:1], forced[:1])
    seen = tapped.tap.step(0)[: tokens.shape[1]]
    new = sizes.new // 4
    spoken, said, rows, _ = roll_out(bench.assembly.core, tokens[:, : sizes.prompt], new)
    scored = [score(bench, spoken, given)[0][:, -new:] for given in (None, rows)]
    return [
        law("one score twice, by the bit", np.array_equal(live, twice), live, twice),
        law("C1 executed == forced", executed == forced, drift, drift),
        law("C1 forced == at the kernel", np.array_equal(seen, forced[0].ids), seen, forced[0].ids),
        law("C2 self-replay == live, by the bit", np.array_equal(again, live) and same == records, again, live),
        law("C3 no valid row == live, by the bit", np.array_equal(none, live), none, live),
        {"law": "told by generate, scored live: no law", "max |d|": float(np.max(np.abs(said - scored[0])))},
        {"law": "told by generate, scored on its rows: no law", "max |d|": float(np.max(np.abs(said - scored[1])))},
    ]


def fused_parts(compiled: Any) -> collections.Counter[str]:
    """The computations of a compiled program, without names: what is fused with what, and how often."""
    text = re.sub(r", metadata=\{[^}]*\}|%[\w.-]+|, backend_config=.*", "", compiled.as_text())
    parts = [part.partition("{\n") for part in text.split("\n\n") if not part.startswith("ENTRY")]
    return collections.Counter(body for _, _, body in parts if " = " in body)


def training_laws(config: Qwen3MoeConfig, sizes: Sizes) -> Rows:
    """C1 to C6 by the training forward and its kernels, and whether live and replayed are fused alike."""
    rng, traces = np.random.default_rng(1), list[int]()
    graphdef, state = nnx.split(random_model(config, sizes.dtype))
    tokens = jnp.asarray(rng.integers(0, 256, (4, 64)), jnp.int32)

    def run(state: Any, routed: RoutedBatch | None, remat: bool = False) -> Any:
        traces.append(1)
        out = forward(nnx.merge(graphdef, state), tokens, routed=routed, return_routed=True, backend=PERMUTED, remat=remat)
        return jnp.mean(jnp.square(jax.nn.log_softmax(out.logits))), out

    step = jax.jit(run)
    flags = lambda value: jnp.full(tokens.shape, value)  # noqa: E731
    live, twice = step(state, None)[1], step(state, None)[1]
    ids = jnp.asarray(drifted(rng, live.ids.shape, config.router.num_experts))
    batches = [RoutedBatch(*batch, flags(False)) for batch in ((live.ids, flags(True)), (ids, flags(False)), (ids, flags(True)))]
    same, none, forced = (step(state, batch)[1] for batch in batches)
    num_traces = len(traces)
    parts = [fused_parts(step.lower(state, routed).compile()) for routed in (None, batches[0])]
    differ = (parts[0] - parts[1]) + (parts[1] - parts[0])
    for part in differ:
        print("only live" if part in parts[0] else "only replayed", part, sep="\n", file=sys.stderr)
    return [
        law("one forward twice, by the bit", np.array_equal(twice.logits, live.logits), twice.logits, live.logits),
        law("C1 executed == forced", np.array_equal(forced.ids, ids), forced.ids, ids),
        law("C2 self-replay == live, by the bit", np.array_equal(same.logits, live.logits), same.logits, live.logits),
        law("C3 no valid row == live, by the bit", np.array_equal(none.logits, live.logits), none.logits, live.logits),
        law("C2 == C3, one program, by the bit", np.array_equal(none.logits, same.logits), none.logits, same.logits),
        {"law": f"parts that differ, live and replayed, of {parts[0].total()}: no law", "max |d|": float(differ.total())},
        *gradient_laws(run, state, RoutedBatch(ids, flags(True), flags(False))),
        {"law": "C6 traces: live, replayed", "holds": num_traces == 2, "max |d|": 0.0},
    ]


def gradient_laws(run: Callable[..., Any], state: Any, routed: RoutedBatch) -> Rows:
    """C4 and C5 of the gradients on drifted ids."""
    gradient = jax.jit(jax.grad(lambda state, routed, remat: run(state, routed, remat)[0]), static_argnums=2)
    plain, saved = (gradient(state, routed, remat) for remat in (False, True))
    router = np.asarray(plain["runs"][0]["router"][...], np.float32)
    apart = jax.jit(lambda a, b: jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.maximum(jnp.linalg.norm(a.astype(jnp.float32)), 1e-30))
    far = max(float(apart(a.reshape(-1), b.reshape(-1))) for a, b in zip(*map(jax.tree.leaves, (plain, saved)), strict=True))
    finite = bool(np.isfinite(router).all() and np.any(router))
    return [
        {"law": "C4 remat: relative distance of gradients", "holds": far < 1e-2, "max |d|": float(far)},
        {"law": "C5 router gradient, drifted ids: finite, not 0", "holds": finite, "max |d|": 0.0},
    ]


def laws(sizes: Sizes, args: argparse.Namespace, tell: Callable[[dict[str, object]], None]) -> None:
    """Both sets of laws for each model."""
    for name, config in sizes.models.items():
        for side, judge in (("serving", serving_laws), ("training", training_laws)):
            for row in judge(config, sizes):
                tell({"model": name, "kernels": side, **row})


def rows(sizes: Sizes, args: argparse.Namespace, tell: Callable[[dict[str, object]], None]) -> None:
    """Every event once, then random schedules; a wrong row ends its line with what was found."""
    name, config = next(iter(sizes.models.items()))
    states = [nnx.split(random_model(config, sizes.dtype, seed))[1] for seed in (1, 2)]
    small = dataclasses.replace(sizes, requests=8, tokens=32)
    stage = Stage(bench_of(random_model(config, sizes.dtype), small, tapped=True, context=96), 256, lambda index: states[index % 2])
    jobs = {event: lambda event=event: run_event(stage, event) for event in EVENTS}
    jobs |= {f"schedule {seed}": lambda seed=seed: run_schedule(stage, seed) for seed in range(args.schedules)}
    for job, run in jobs.items():
        start = time.perf_counter()
        try:
            told: dict[str, object] = {"rows compared": run(), "wrong": ""}
        except AssertionError as error:
            told = {"rows compared": 0, "wrong": f"{type(error).__name__}: {error}"[:300] or "an assertion"}
        tell({"model": name, "what": job, **told, "s": round(time.perf_counter() - start, 2)})


def mismatch(sizes: Sizes, args: argparse.Namespace, tell: Callable[[dict[str, object]], None]) -> None:
    """Train, roll out, judge; the untrained model first, because it is there."""
    config = next(iter(sizes.models.values()))
    text, held_out = byte_model.read_text(200_000 if args.small else 60_000_000)
    tell({"what": "text", "bytes": text.size, "held out": held_out.size})
    small = {"batch": 2, "length": 32, "block": 2} if args.small else {"batch": args.batch}
    plan = byte_model.Plan(seconds=args.seconds, **small)
    graphdef, params = byte_model.start(config, args.weights)
    if args.seconds > 0:
        params = byte_model.train(graphdef, params, text, plan, lambda row: tell({"what": "training", **row}))
    if args.weights is not None:
        byte_model.keep(params, args.weights)
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(sizes.dtype), params))
    del params
    bench = bench_of(model, sizes, tapped=False, context=sizes.prompt + sizes.new)
    starts = np.random.default_rng(2).integers(0, held_out.size - sizes.prompt, (sizes.sequences, 1))
    tokens, said, records, spent = roll_out(bench.assembly.core, held_out[starts + np.arange(sizes.prompt)].astype(np.int32), sizes.new)
    tell({"what": "rollout", "tokens": said.size, "tokens a second": said.size / spent, "nats a byte": -said.mean()})
    told, missed = judged(model, tokens, records, sizes.prompt, PERMUTED)
    mask = np.ones(said.shape, bool)
    for name, logprobs in told.items():
        report = dataclasses.asdict(mismatch_report(said, logprobs, mask))
        tell({"what": f"report, {name}", "canary": missed[name], **report})
    for line in compared(told["live"] - said, told["replayed"] - said):
        tell(line)


PARTS = {"laws": laws, "rows": rows, "mismatch": mismatch}


def main() -> int:
    """Run the parts in their order, print each line as it comes, and write all lines after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=420.0, help="of training, compilation not counted")
    parser.add_argument("--weights", type=Path, help="an .npz: training starts from it where it is there, and leaves its weights in it")
    parser.add_argument("--batch", type=int, default=128, help="sequences of a training step")
    parser.add_argument("--schedules", type=int, default=30)
    parser.add_argument("--small", action="store_true", help="tiny sizes: does it run")
    parser.add_argument("--out", type=Path, default=Path("replay_gpu.json"))
    args = parser.parse_args()
    head = {"command": " ".join(["python", "benchmarks/replay_gpu.py", *sys.argv[1:]]), "machine": machine()}
    sizes, told, failed = sizes_of(args.small), dict[str, Rows](), list[str]()
    for part in args.parts:
        told[part] = []

        def tell(row: dict[str, object], part: str = part) -> None:
            told[part].append(row)
            print(part, json.dumps(row, default=np.generic.item), flush=True)
            fresh = args.out.with_suffix(".part")
            fresh.write_text(json.dumps({**head, "failed": failed, **told}, indent=1, default=np.generic.item) + "\n")
            os.replace(fresh, args.out)

        try:
            PARTS[part](sizes, args, tell)
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
