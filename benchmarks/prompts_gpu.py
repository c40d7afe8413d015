"""Prompts by the warpgroups of a Hopper GPU beside the Triton kernels, by family.

    python benchmarks/prompts_gpu.py [--families Qwen3-30B-A3B GPT-OSS-20b ...] [--layers N] [--rounds 5]
        [--batch 16] [--prompt 1024]
    python benchmarks/prompts_gpu.py --small            # a CPU, a small model, its own kernels twice: does it run

Two engine cores with capture share random weights: `warpgroups` has the kernels that a Hopper GPU is given, `triton`
those of every other one. All prompts run in one step, with routing asked by all; cores take turns and change places.
A run is timed from the first prompt's arrival to the last first token. `ratio` is a median over rounds, with
quartiles. `same` is the share of requests whose tokens are the same: sums of attention are rounded in another order.
Families are those of family_configs.py, cut to --layers layers, and Qwen3-30B-A3B."""

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path

import jax
import numpy as np
from common import Prompts, print_table, progress, write_result
from family_configs import PUBLISHED, PublishedModel, small_keys
from step import QWEN3_30B_A3B, SMALL, drive

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS, BackendEntry, BackendRegistry
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.loop.core import EngineCore
from routed_experts.layers.gpu.attention import gpu_attention_backend
from routed_experts.layers.gpu.backends import gpu_kernels
from routed_experts.layers.gpu.warpgroups import find_warpgroups
from routed_experts.models.model_folder import ModelFolder

MODELS = {"Qwen3-30B-A3B": PublishedModel(config=QWEN3_30B_A3B), **PUBLISHED}
NEW = 4  # tokens of an answer
TRITON = BackendRegistry(
    moe={**DEFAULT_BACKENDS.moe, "gpu": BackendEntry(load=lambda: gpu_kernels(interpret=False), platform="gpu")},
    attention={
        **DEFAULT_BACKENDS.attention,
        "gpu": BackendEntry(load=lambda: gpu_attention_backend(interpret=False), platform="gpu"),
    },
)


def build(folder: Path, args: argparse.Namespace) -> dict[str, EngineCore]:
    """Both cores, over the same random weights."""
    length = args.prompt + NEW + 16
    server = ServerArgs(
        model_path=str(folder),
        context_length=length,
        max_total_tokens=args.batch * (length + 16),
        precompile_bs_paddings=(args.batch,),
        precompile_token_paddings=tuple(sorted({max(64, args.batch), args.batch * args.prompt})),
        mem_fraction_static=0.95,
        skip_tokenizer_init=True,
        enable_return_routed_experts=True,
    )
    model = ModelFolder.open(folder, load_format="dummy").load(jax.numpy.dtype(args.dtype))
    registries = {"triton": TRITON, "warpgroups": DEFAULT_BACKENDS}
    return {name: build_engine(server, model=model, registry=registry).core for name, registry in registries.items()}


def measure(cores: dict[str, EngineCore], args: argparse.Namespace, vocabulary: int) -> dict[str, object]:
    """Rounds of both cores over the same prompts, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cores}
    same: list[bool] = []
    for turn in range(args.rounds + 1):
        answers: dict[str, list[tuple[int, ...]]] = {}
        for name in list(cores)[:: 1 if turn % 2 else -1]:
            prompts = Prompts(turn, vocabulary)  # the same for both
            run = drive(cores[name], prompts, args.batch, prompt=args.prompt, new=NEW, ask=True, logprobs=True)
            for out in run.outs:
                assert out.output_logprobs is not None and np.isfinite(out.output_logprobs.values).all(), name
            answers[name] = [out.new_token_ids for out in run.outs]
            if turn:
                seconds[name].append(run.prefill)
        same += [pair[0] == pair[1] for pair in zip(*answers.values(), strict=True)]
    rates = {f"{name} tok/s": args.batch * args.prompt / statistics.median(took) for name, took in seconds.items()}
    ratios = [old / new for old, new in zip(seconds["triton"], seconds["warpgroups"], strict=True)]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return {**rates, "ratio": middle, "quartiles": f"{low:.3f}..{high:.3f}", "same": statistics.mean(same)}


def main() -> None:
    """Run, print, write after each family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(MODELS), help="all; with --small GPT-OSS-20b")
    parser.add_argument("--layers", type=int, help="at most so many; at least one pattern")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a small model on any machine")
    parser.add_argument("--name", default="prompts_gpu", help="of the result")
    args = parser.parse_args()
    if args.small:
        args.batch, args.prompt, args.rounds, args.dtype = 2, 32, SMALL["rounds"], SMALL["dtype"]
    elif (warpgroups := find_warpgroups()) is None or not warpgroups.can_mask:
        parser.error("needs a Hopper GPU, and a JAX whose CUDA is not 12.8 or 12.9")
    rows: list[dict[str, object]] = []
    path: Path | str = ""
    for name in args.families or (["GPT-OSS-20b"] if args.small else list(MODELS)):
        progress(name)
        model = MODELS[name]
        cut = max(1, (args.layers or model.layers) // model.pattern) * model.pattern
        keys = small_keys(model) if args.small else model.cut(min(model.layers, cut))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(keys))
            cores = build(Path(folder), args)
        row = measure(cores, args, int(str(keys["vocab_size"])))
        rows.append({"family": name, "layers": f"{keys['num_hidden_layers']} of {model.layers}", **row})
        path = write_result(args.name, rows, batch=args.batch, prompt=args.prompt, rounds=args.rounds)
        del cores
        gc.collect()  # the next family needs the memory
    print_table(rows)
    print(path)


if __name__ == "__main__":
    main()
