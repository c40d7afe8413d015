"""Are the numbers of experts shared out those of an undivided engine, on this machine's accelerator.

    python benchmarks/hybrid_check.py [--dtype float32]

One small model, the same prompts: undivided, then with the host's experts as one program (signals by words in memory,
and by calls of the driver) and layer by layer, for few residents and for none. Of each it prints the largest difference
of a token's logprob, the share of tokens and of expert ids that are equal, and how the accelerator signalled. In
float32 on a CPU all ids are equal."""

import argparse
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from common import print_table, write_result
from domains import SMALL, domains_of, skewed_model
from hybrid import Bench, on_accelerator, server_args
from step import QWEN3_30B_A3B, Run

from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.engine.build.builder import build_engine
from routed_experts.execution.offload.fused_offload_runner import FusedOffloadRunner


def compared(run: Run, wanted: Run) -> dict[str, float]:
    """Of the tokens up to the first that differs, request by request; then the streams part, and nothing is alike."""
    worst, tokens, ids, known = 0.0, [], [], {out.rid: out for out in wanted.outs}
    for out in run.outs:
        other = known[out.rid]
        same = np.array(out.new_token_ids) == np.array(other.new_token_ids)
        first = len(same) if same.all() else int(np.argmin(same))
        apart = np.abs(np.array(out.output_logprobs.values) - np.array(other.output_logprobs.values))
        worst = max(worst, float(apart[:first].max(initial=0.0)))
        tokens.append(same.mean())
        rows = out.prompt_tokens + max(first - 1, 0)
        ids.append((out.routed_experts.ids[:rows] == other.routed_experts.ids[:rows]).mean())
    return {"logprob": worst, "tokens": float(np.mean(tokens)), "ids": float(np.mean(ids))}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    args.batches, args.prompt, args.new = [4], 16, 24
    config, rows = QWEN3_30B_A3B | {"num_hidden_layers": 3} | SMALL, list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        model = skewed_model(folder, args.dtype, 0.4)

        def run(experts: ExpertOffloadConfig | None, *, calls: bool = False) -> tuple[Run, str]:
            core = build_engine(
                server_args(args, folder), model=on_accelerator(model) if experts is None else model, experts=experts
            ).core
            bench, runner, how = Bench(core=core, args=args, domains=domains_of(config)), core.runner, "none"
            if isinstance(runner, FusedOffloadRunner):
                runner.host_side.lane.set_signals(calls_back=calls)
            outs = bench.run(4, ask=True)
            if isinstance(runner, FusedOffloadRunner):
                how = "calls" if runner.host_side.lane.counts().calls_back else "words"
            return outs, how

        wanted, _ = run(None)
        for residents in (10, 0):
            for backend, calls in (("ffi", False), ("ffi", True), ("dispatch", False)):
                got, how = run(ExpertOffloadConfig(kt_num_gpu_experts=residents, host_backend=backend), calls=calls)
                rows.append({"backend": backend, "residents": residents, "signals": how, **compared(got, wanted)})
                print(rows[-1], flush=True)
    print_table(rows)
    print(write_result("hybrid_check", rows, accelerator=str(jax.devices()[0]), dtype=args.dtype))


if __name__ == "__main__":
    main()
