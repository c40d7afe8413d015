"""A decode step of Qwen3-30B-A3B's shapes on a GPU by how its programs are compiled and launched, capture on and asked.

    python benchmarks/launches.py [--variants "as is" early ...] [--batches 1 16] [--new 96] [--rounds 3] [--limit 300]
        [--profile]
    python benchmarks/launches.py --small      # a CPU, a small model: does it run

Engines share the weights, and whole runs of all variants take turns. `to first` is the median over runs of a step over
that of the first variant; `tokens equal` is the share of greedy tokens that equal those of the first. --limit: seconds
after which no further run starts. --profile: time of each kernel of the first variant at batch 1, from the profiler,
which runs kernels one by one. Runs of batch 1 are four times as many.

as is: XLA's own choice. On Hopper its launches wait for the kernel before them inside of the kernel (programmatic
dependent launch). Loops of layers are graphs of one repeat each. no pdl: plain launches. loop: the loop is part of a
graph. unroll: and its repeats are the graph's nodes. early, and the variants named for some kernels: each kernel lets
the next one start as soon as all of its own blocks run; XLA's wait holds the next one's first load. This is
an experiment: a next kernel that XLA made could load too early. Kernels of Mosaic GPU, which steps of many rows have,
are as they are in all variants."""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from common import HF_CONFIG, Prompts, print_table, progress, write_result
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from step import QWEN3_30B_A3B, Run, drive, kernel_times

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.loop.core import EngineCore
from routed_experts.models.model_folder import ModelFolder

EXPERTS = {"experts_gate_up", "experts_down"}
OTHERS = {"linear", "prepare", "decode_attention", "combine_splits", "add_parts_and_multiply", "route", "sort_slots"}
OTHERS |= {"add_slots", "add_parts"}
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
LOOP = {"xla_gpu_enable_command_buffer": IN_GRAPHS}
UNROLL = LOOP | {"xla_gpu_command_buffer_unroll_loops": True}
Options = dict[str, Any]
VARIANTS: dict[str, tuple[Options, set[str]]] = {  # options of the compiler, kernels that let the next one start early
    "as is": ({}, set()),
    "no pdl": ({"xla_gpu_enable_pdl": False, "xla_gpu_enable_pdl_launch": False}, set()),
    "loop": (LOOP, set()),
    "unroll": (UNROLL, set()),
    "early": ({}, OTHERS | EXPERTS),
    "early, unroll": (UNROLL, OTHERS | EXPERTS),
    "early, not experts": ({}, OTHERS),
    "early, not experts, linear": ({}, OTHERS - {"linear"}),
    "early, not experts, route": ({}, OTHERS - {"route"}),
    "early, not experts, route, add_slots": ({}, OTHERS - {"route", "add_slots"}),
    "early, not down": ({}, OTHERS | {"experts_gate_up"}),
    "early, not gate_up": ({}, OTHERS | {"experts_down"}),
}


def start_next(out: Any) -> None:
    """Inside a kernel: let the next one start. The instruction's result, 0, is the mask of a store that is never made,
    so that the compiler keeps it."""
    (zero,) = plgpu.elementwise_inline_asm(
        "{ griddepcontrol.launch_dependents; mov.b32 $0, 0; }",
        args=[jnp.arange(1) + pl.program_id(0)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    first = (*(0,) * (len(out.shape) - 1), zero)
    plgpu.store(out.at[first], jnp.zeros((1,), out.dtype), mask=zero != 0)


@contextlib.contextmanager
def compiled_as(options: Options, early: set[str]) -> Iterator[None]:
    """Programs that are made inside: their compiler's options, and kernels that let the next one start early."""
    compile_program, pallas_call = jax.stages.Lowered.compile, pl.pallas_call

    def call(kernel: Callable[..., None], *args: Any, name: str | None = None, **others: Any) -> Any:
        def body(*refs: Any) -> None:
            start_next(jax.tree.leaves(refs)[-1])
            kernel(*refs)

        return pallas_call(body if name in early else kernel, *args, name=name, **others)

    def compile_with(lowered: Any, *args: Any, **others: Any) -> Any:
        return compile_program(lowered, *args, compiler_options=options or None, **others)

    jax.clear_caches()
    with mock.patch.object(jax.stages.Lowered, "compile", compile_with), mock.patch.object(pl, "pallas_call", call):
        yield


def build_cores(config: dict[str, object], args: argparse.Namespace) -> dict[str, EngineCore]:
    """An engine of each variant over the same random weights."""
    cores, longest = {}, args.prompt + args.new + 16
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelFolder.open(Path(folder), load_format="dummy").load(jnp.dtype(args.dtype))
        server = ServerArgs(
            model_path=folder,
            context_length=longest,
            max_total_tokens=max(args.batches) * (longest + 16),
            precompile_bs_paddings=tuple(sorted(set(args.batches))),
            precompile_token_paddings=(512, 4096),
            mem_fraction_static=0.95,
            skip_tokenizer_init=True,
            enable_return_routed_experts=True,
        )
        for name in args.variants:
            start = time.perf_counter()
            with compiled_as(*VARIANTS[name]):
                cores[name] = build_engine(server, model=model).core
            progress(f"{name}: built in {time.perf_counter() - start:.1f} s")
    return cores


def tokens_of(run: Run) -> list[list[int]]:
    """The tokens of each request, in order of the requests."""
    tokens: dict[int, list[int]] = defaultdict(list)
    for out in run.outs:
        tokens[int(out.rid)] += out.new_token_ids
    return [tokens[rid] for rid in sorted(tokens)]


def measure(
    cores: dict[str, EngineCore], vocabulary: int, args: argparse.Namespace, batch: int, deadline: float
) -> list[dict[str, object]]:
    """All variants at one batch."""
    runs: dict[str, list[Run]] = defaultdict(list)
    equal: dict[str, list[float]] = defaultdict(list)
    prompt, names = min(args.prompt, 128) if batch == 1 else args.prompt, list(cores)
    for turn in range(-1, args.rounds * (4 if batch == 1 else 1)):
        if turn > 0 and time.perf_counter() > deadline:
            break
        first = None
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            prompts = Prompts(turn + 7, vocabulary)
            run = drive(cores[name], prompts, batch, prompt=prompt, new=args.new, ask=True, logprobs=turn < 0)
            tokens = np.array(tokens_of(run))
            first = tokens if first is None else first
            equal[name].append(float(np.mean(tokens == first)))
            if turn >= 0:
                runs[name].append(run)
            else:
                finite = all(np.isfinite(out.output_logprobs.values).all() for out in run.outs)
                assert finite, f"{name}, batch {batch}: a logprob is not finite"
    steps = {name: [statistics.median(run.steps) for run in own] for name, own in runs.items()}
    return [
        {
            "batch": batch,
            "variant": name,
            "step ms": statistics.median(own) * 1e3,
            "to first": statistics.median(a / b for a, b in zip(own, steps[names[0]], strict=True)),
            "least ms": min(own) * 1e3,
            "runs": len(own),
            "tokens equal": float(np.mean(equal[name])),
            "prefill tok/s": batch * prompt / statistics.median(run.prefill for run in runs[name]),
        }
        for name, own in steps.items()
    ]


def main() -> None:
    """Build, run, print, write after each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a small model on any machine, two variants")
    parser.add_argument("--name", default="launches_h200", help="of the result")
    args = parser.parse_args()
    config, deadline = dict(QWEN3_30B_A3B), time.perf_counter() + args.limit
    if args.small:
        config = HF_CONFIG | {"num_hidden_layers": 2}
        small = {"variants": ["as is", "unroll"], "batches": [2], "prompt": 8, "new": 16, "rounds": 1}
        vars(args).update(small | {"dtype": "float32", "name": "launches_small"})
    vocabulary = int(str(config["vocab_size"]))
    cores = build_cores(config, args)
    rows: list[dict[str, object]] = []
    profile: list[dict[str, object]] = []
    if args.profile:
        name = args.variants[0]
        profile = kernel_times(cores[name], Prompts(99, vocabulary), 1, min(128, args.prompt))
        print_table(profile)
    path: Path | str = ""
    for batch in args.batches:
        progress(f"batch {batch}")
        rows += measure(cores, vocabulary, args, batch, deadline)
        print_table(rows)
        path = write_result(args.name, rows, profile=profile, prompt=args.prompt, new=args.new, rounds=args.rounds)
    print(path)


if __name__ == "__main__":
    main()
