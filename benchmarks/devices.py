"""One model on one device and sharded over several: equality of tokens and routes, difference of logprobs, and speed.

    python benchmarks/devices.py [--tp 2] [--config CONFIG.json] [--layers N] [--dtype float32] [--batch 16] [--prompt
    128] [--new 64]
    python benchmarks/devices.py --small [--backends plain]     # float32, 3 layers of the small model, 4 x 16 tokens

Random weights of a config (Qwen3-30B-A3B's shapes with --layers of its layers, unless named); one device, then --tp
of them by width of each expert, by whole experts, and by whole experts of which the busiest have two instances
(`placed`). The answers of one device are scored by the others: `routes differ` is the share of (token, layer) whose
live choice is another, `logprob` the largest difference with the same routes forced. In float32, computed at the
highest precision, the script ends with 1 where more than 0.1 % of tokens or routes differ or a logprob by more than
1e-3; in bfloat16 rounding moves them all, and they are only reported. A line is printed as soon as its engine has
answered. --backends plain: array code on every platform, which compiles quickly. On a CPU:
XLA_FLAGS=--xla_force_host_platform_device_count=2, and a --config that suits it."""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import HF_CONFIG, Prompts, print_table, write_result
from step import QWEN3_30B_A3B

from routed_experts import Engine, SamplingParams
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.control.score import ScoreOutput
from routed_experts.placement.eplb import rebalance

MOST_ROUTES, MOST_LOGPROB = 1e-3, 1e-3


def serve(engine: Engine, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Greedy answers, and tokens a second of the second round."""
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    for _ in range(2):
        engine.flush_cache()
        start = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - start
    return [answer["output_ids"] for answer in answers], len(prompts) * new / seconds


def compare(mine: list[ScoreOutput], forced: list[ScoreOutput], first: list[ScoreOutput]) -> dict[str, float]:
    """What differs from the scores of one device."""
    pairs = [
        (np.sort(a.routed_experts.ids, -1), np.sort(b.routed_experts.ids, -1)) for a, b in zip(mine, first, strict=True)
    ]
    differ = np.concatenate([np.any(a != b, axis=-1).ravel() for a, b in pairs])
    apart = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(forced, first, strict=True))
    return {"routes differ": float(differ.mean()), "logprob": apart}


def spare_instances(records: list[RoutedExperts | None], devices: int) -> ExpertPlacement:
    """Experts by the load that was recorded, one more instance a device than there are experts."""
    recorded = [record for record in records if record is not None]
    experts, layers = recorded[0].num_experts, recorded[0].ids.shape[1]
    load = np.stack(
        [
            np.bincount(np.concatenate([entry.ids[:, at].ravel() for entry in recorded]), minlength=experts)
            for at in range(layers)
        ]
    )
    return rebalance(load.astype(np.float64), num_instances=experts + devices, num_devices=devices)


@dataclasses.dataclass(slots=True, kw_only=True)
class First:
    """Results of one device: the reference of the others."""

    answers: list[list[int]]
    sequences: list[list[int]]
    scores: list[ScoreOutput]

    @property
    def records(self) -> list[RoutedExperts | None]:
        """The routes to force."""
        return [score.routed_experts for score in self.scores]


def options() -> argparse.Namespace:
    """The command line; --small is a set of its other flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--config", help="config.json; 'small' is the benchmark model of the CPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--backends", default="auto", choices=("auto", "plain"))
    parser.add_argument(
        "--small", action="store_true", help="--config small --layers 3 --dtype float32 --batch 4 --prompt 16 --new 16"
    )
    parser.add_argument("--name", default="devices")
    args = parser.parse_args()
    if args.small:
        vars(args).update(config="small", layers=3, dtype="float32", batch=4, prompt=16, new=16)
    return args


def build_config(args: argparse.Namespace) -> dict[str, Any]:
    """The config with `--layers` layers."""
    config = (
        QWEN3_30B_A3B
        if args.config is None
        else HF_CONFIG
        if args.config == "small"
        else json.loads(Path(args.config).read_text())
    )
    return {**config, "num_hidden_layers": args.layers}


def look(engine: Engine, prompts: list[list[int]], new: int, first: First | None) -> tuple[First, dict[str, object]]:
    """Let an engine answer and score; its results, and a row that compares them (with itself, if it is the first)."""
    answers, rate = serve(engine, prompts, new)
    sequences = (
        [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        if first is None
        else first.sequences
    )
    live = engine.score(sequences)
    first = first or First(answers=answers, sequences=sequences, scores=live)
    same = np.mean(
        [a == b for left, right in zip(answers, first.answers, strict=True) for a, b in zip(left, right, strict=True)]
    )
    far = compare(live, engine.score(sequences, routed=first.records), first.scores)
    return first, {"tokens/s": rate, "same tokens": float(same), **far}


def main() -> int:
    """Measure, print, write."""
    args = options()
    if args.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    config = build_config(args)
    vocabulary, length = int(config["vocab_size"]), args.prompt + args.new
    prompts = [
        req.source.input_ids.tolist()
        for req in Prompts(0, vocabulary).requests(args.batch, prompt=args.prompt, new=1, ask=False)
    ]
    tokens = min(1024, 1 << (args.batch * args.prompt - 1).bit_length())
    sizes: dict[str, Any] = dict(
        context_length=length + 1, precompile_bs_paddings=(args.batch,), precompile_token_paddings=(tokens,)
    )
    sizes |= dict(dtype=args.dtype, load_format="dummy", skip_tokenizer_init=True, enable_return_routed_experts=True)
    if args.backends == "plain":
        sizes |= dict(moe_backend="tiled", attention_backend="paged")
    rows: list[dict[str, object]] = []
    first: First | None = None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for tp, ep, with_spares in (
            (1, 1, False),
            (args.tp, 1, False),
            (args.tp, args.tp, False),
            (args.tp, args.tp, True),
        ):
            start = time.perf_counter()
            placement = spare_instances(first.records, args.tp) if with_spares and first is not None else None
            with Engine(
                folder, tp_size=tp, ep_size=ep, placement=placement, mem_fraction_static=0.6, **sizes
            ) as engine:
                ready = time.perf_counter() - start
                first, row = look(engine, prompts, args.new, first)
            rows.append({"tp": tp, "ep": ep, "placed": with_spares, **row})
            print(f"{ready:.1f} s to ready, {time.perf_counter() - start:.1f} s in all: {rows[-1]}", flush=True)
    print_table(rows)
    print(write_result(args.name, rows))
    return 0 if args.dtype == "bfloat16" or all(is_alike(row) for row in rows) else 1


def is_alike(row: dict[str, Any]) -> bool:
    """Whether tokens, routes and logprobs are those of one device."""
    return (
        row["same tokens"] >= 1 - MOST_ROUTES and row["routes differ"] <= MOST_ROUTES and row["logprob"] <= MOST_LOGPROB
    )


if __name__ == "__main__":
    sys.exit(main())
