"""One model on one device and dealt out to several: are tokens and routes the same, how far apart are logprobs, how fast is it.

    python benchmarks/devices.py [--tp 2] [--config CONFIG.json] [--layers N] [--dtype float32] [--batch 16] [--prompt 128] [--new 64]

Random weights of a config (Qwen3-30B-A3B's shapes with --layers of its layers, unless named); one device, then --tp of them by width
of each expert, by whole experts, and by whole experts of which the busiest have two instances (`placed`). The answers of one device
are scored by the others: `routes differ` is the share of (token, layer) whose live choice is another, `logprob` the largest difference
with the same routes forced. In float32 the script ends with 1 where more than 0.1 % of routes differ or a logprob by more than 1e-3;
in bfloat16 rounding moves both, and they are only told.
On a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=2, and a --config that suits it."""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from common import HF_CONFIG, Prompts, print_table, write_result
from step import QWEN3_30B_A3B

from routed_experts import Engine, SamplingParams
from routed_experts.core.placement import Placement
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.engine.score import ScoreOutput
from routed_experts.placement.eplb import rebalance

MOST_ROUTES, MOST_LOGPROB = 1e-3, 1e-3


def serve(engine: Engine, prompts: list[list[int]], new: int) -> tuple[list[list[int]], float]:
    """Greedy answers, and tokens a second of the second round."""
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    for _ in range(2):
        engine.flush_cache()
        start = time.perf_counter()
        told = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - start
    return [one["output_ids"] for one in told], len(prompts) * new / seconds


def compare(mine: list[ScoreOutput], forced: list[ScoreOutput], first: list[ScoreOutput]) -> dict[str, float]:
    """What differs from the scores of one device."""
    pairs = [(np.sort(a.routed_experts.ids, -1), np.sort(b.routed_experts.ids, -1)) for a, b in zip(mine, first, strict=True)]
    differ = np.concatenate([np.any(a != b, axis=-1).ravel() for a, b in pairs])
    apart = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in zip(forced, first, strict=True))
    return {"routes differ": float(differ.mean()), "logprob": apart}


def spare_instances(records: list[RoutedExperts | None], devices: int) -> Placement:
    """Experts by the load that was recorded, one more instance a device than there are experts."""
    held = [record for record in records if record is not None]
    experts, layers = held[0].num_experts, held[0].ids.shape[1]
    load = np.stack([np.bincount(np.concatenate([one.ids[:, at].ravel() for one in held]), minlength=experts) for at in range(layers)])
    return rebalance(load.astype(np.float64), num_instances=experts + devices, num_devices=devices)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--config", type=Path, help="config.json; 'small' is the benchmark model of the CPU")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--name", default="devices")
    args = parser.parse_args()
    if args.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    config = QWEN3_30B_A3B | {"num_hidden_layers": args.layers}
    if args.config is not None:
        config = HF_CONFIG if str(args.config) == "small" else json.loads(args.config.read_text())
    vocabulary, length = int(config["vocab_size"]), args.prompt + args.new
    prompts = [req.source.input_ids.tolist() for req in Prompts(0, vocabulary).requests(args.batch, prompt=args.prompt, new=1, ask=False)]
    sizes = dict(context_length=length + 1, precompile_bs_paddings=(args.batch,), precompile_token_paddings=(256, 1024), dtype=args.dtype)
    rows: list[dict[str, object]] = []
    first: list[ScoreOutput] = []
    records: list[RoutedExperts | None] = []
    sequences: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for tp, ep, placed in ((1, 1, False), (args.tp, 1, False), (args.tp, args.tp, False), (args.tp, args.tp, True)):
            shared = dict(load_format="dummy", skip_tokenizer_init=True, enable_return_routed_experts=True, mem_fraction_static=0.6)
            placement = spare_instances(records, args.tp) if placed else None
            with Engine(folder, tp_size=tp, ep_size=ep, placement=placement, **shared, **sizes) as engine:
                answers, rate = serve(engine, prompts, args.new)
                if not first:
                    wanted, sequences = answers, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
                live = engine.score(sequences)
                if not first:
                    first, records = live, [score.routed_experts for score in live]
                same = np.mean([a == b for one, other in zip(answers, wanted, strict=True) for a, b in zip(one, other, strict=True)])
                far = compare(live, engine.score(sequences, routed=records), first)
            rows.append({"tp": tp, "ep": ep, "placed": placed, "tokens/s": rate, "same tokens": float(same), **far})
    print_table(rows)
    print(write_result(args.name, rows))
    good = all(row["routes differ"] <= MOST_ROUTES and row["logprob"] <= MOST_LOGPROB for row in rows)
    return 0 if good or args.dtype == "bfloat16" else 1


if __name__ == "__main__":
    sys.exit(main())
