"""The whole step at full size with random weights: prefill and decode by batch, capture off, on and asked by none or by
all.

    python benchmarks/step.py [--batches 1 16 64 256] [--new 128] [--rounds 2] [--config CONFIG.json] [--layers N]
    [--profile 1 16 64 256]

Two engine cores share the weights, one with capture and one without; whole runs of each variant take turns in one
process. A decode step is the time from one return of `core.step()` to the next while the next step is in flight, its
median over a run's steps; ratios are medians over neighbouring runs. Experts read in a step are counted from the
recorded rows. The floor is the bytes that a step must read (weights of the experts that were chosen, all other
matrices, keys and values) over --bandwidth. A run whose logprobs are not finite fails: the residual stream would carry
a NaN of any layer to the end."""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from common import Prompts, print_table, write_result

from routed_experts.core.io_struct import TokenIDOut
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import PhaseClock, build_engine
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.loop.core import EngineCore
from routed_experts.models.model_folder import ModelFolder

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
VARIANTS = ("off", "on, unasked", "on, asked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One batch from its prompts to its last tokens."""

    prefill: float  # seconds
    steps: list[float]  # seconds
    outs: list[TokenIDOut]


def drive(
    core: EngineCore,
    prompts: Prompts,
    batch: int,
    *,
    prompt: int,
    new: int,
    ask: bool,
    logprobs: bool = False,
    on_prefilled: Callable[[], None] | None = None,
) -> Run:
    """Run a batch. Steps at both ends of the decode phase, which start and end requests, are left out."""
    core.flush_cache()
    reqs, outs, steps = prompts.requests(batch, prompt=prompt, new=new, ask=ask, logprobs=logprobs), [], []
    start = time.perf_counter()
    core.add(reqs)
    while not all(req.is_prefilled for req in reqs):
        outs += core.step().outs
    if on_prefilled is not None:
        on_prefilled()
    last = time.perf_counter()
    prefill = last - start
    while not core.is_idle:
        outs += core.step().outs
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    return Run(prefill=prefill, steps=steps[3:-3] or steps, outs=outs)


def experts_a_step(run: Run, prompt: int) -> np.ndarray:
    """Distinct experts of each decode step and layer, from the rows of requests that asked."""
    rows = np.stack(
        [out.routed_experts.ids[prompt:] for out in run.outs if out.routed_experts is not None]
    )  # [B, steps, M, K]
    steps = np.moveaxis(rows, 0, 2).reshape(rows.shape[1], rows.shape[2], -1)  # [steps, M, B*K]
    return np.array([[len(np.unique(layer)) for layer in step] for step in steps])


def floor_bytes(config: dict[str, object], layers: int, batch: int, context: float, experts: float) -> float:
    """What one decode step must read, in bytes of bfloat16."""
    dim, heads, groups, c = (
        int(config[name]) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    width, count, vocabulary = (int(config[name]) for name in ("moe_intermediate_size", "num_experts", "vocab_size"))
    layer = (
        dim * (2 * heads + 2 * groups) * c + dim * count + experts * 3 * dim * width + batch * context * 2 * groups * c
    )
    return 2.0 * (layers * layer + dim * vocabulary)


def kernel_times(core: EngineCore, prompts: Prompts, batch: int, prompt: int) -> list[dict[str, object]]:
    """Time of each kernel in a decode step, from the profiler."""
    reqs = prompts.requests(batch, prompt=prompt, new=40, ask=False)
    core.flush_cache()
    core.add(reqs)
    while not all(req.is_prefilled for req in reqs):
        core.step()
    steps = 8
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(4):
            core.step()
        with jax.profiler.trace(folder):
            for _ in range(steps):
                core.step()
        while not core.is_idle:
            core.step()
        file = next(Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        spent: dict[str, list[float]] = defaultdict(list)
        for plane in planes:
            for line in plane.lines if "/device:GPU" in plane.name else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    spent[event.name].append(event.duration_ns)
    rows = [
        {
            "kernel": name[:60],
            "a step": len(times) / steps,
            "median us": statistics.median(times) / 1e3,
            "us a step": sum(times) / steps / 1e3,
        }
        for name, times in spent.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["us a step"])))[:24]


def build(folder: Path, args: argparse.Namespace) -> tuple[dict[str, EngineComponents], list[dict[str, object]]]:
    """Two cores over the same random weights, and the phases of start-up."""
    phases: list[dict[str, object]] = []

    def clock(name: str) -> PhaseClock:
        return PhaseClock(
            lambda phase: phases.append({"core": name, "phase": phase.name, "s": phase.seconds, "detail": phase.detail})
        )

    longest = args.prompt + args.new + 16
    server = {
        "model_path": str(folder),
        "context_length": longest,
        "max_total_tokens": max(max(args.batches), args.prefill_batch) * (longest + 16),
        "precompile_bs_paddings": tuple(sorted({*args.batches, args.prefill_batch})),
        "precompile_token_paddings": tuple(sorted({max(512, max(args.batches)), args.prefill_tokens})),
        "mem_fraction_static": 0.95,
        "skip_tokenizer_init": True,
    }
    start = time.perf_counter()
    model = ModelFolder.open(folder, load_format="dummy").load(jax.numpy.dtype(args.dtype))
    jax.block_until_ready(jax.tree.leaves(model))
    phases.append(
        {"core": "both", "phase": "weights", "s": time.perf_counter() - start, "detail": "made on the device"}
    )
    cores = {
        "on": build_engine(ServerArgs(**server, enable_return_routed_experts=True), model=model, clock=clock("on")),
        "off": build_engine(ServerArgs(**server), model=model, clock=clock("off")),
    }
    return cores, phases


def measure(
    cores: dict[str, EngineCore], config: dict[str, object], args: argparse.Namespace, batch: int
) -> list[dict[str, object]]:
    """All variants at one batch."""
    prompt = min(args.prompt, 128) if batch == 1 else args.prompt
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    for turn in range(-1, args.rounds * (4 if batch <= 16 else 1)):  # a run of few requests is short, and noisier
        for name in VARIANTS[turn % 3 :] + VARIANTS[: turn % 3]:
            core = cores["off" if name == "off" else "on"]
            new = args.new if turn >= 0 else 8
            run = drive(
                core,
                Prompts(turn + 7, int(config["vocab_size"])),
                batch,
                prompt=prompt,
                new=new,
                ask=name == "on, asked",
                logprobs=turn < 0,
            )
            finite = all(np.isfinite(out.output_logprobs.values).all() for out in run.outs)
            assert finite, f"{name}, batch {batch}: a logprob is not finite"
            if turn >= 0:
                runs[name].append(run)
    experts = np.mean([experts_a_step(run, prompt) for run in runs["on, asked"]], axis=0)
    context, layers = prompt + args.new / 2, int(config["num_hidden_layers"])
    floor = floor_bytes(config, layers, batch, context, float(experts.mean())) / args.bandwidth
    base = [statistics.median(run.steps) for run in runs["off"]]
    rows = []
    for name in VARIANTS:
        mine = [statistics.median(run.steps) for run in runs[name]]
        rows.append(
            {
                "batch": batch,
                "capture": name,
                "step ms": statistics.median(mine) * 1e3,
                "floor ms": floor * 1e3,
                "step/floor": statistics.median(mine) / floor,
                "to off": statistics.median(a / b for a, b in zip(mine, base, strict=True)),
                "prefill tok/s": batch * prompt / statistics.median(run.prefill for run in runs[name]),
                "experts": float(experts.mean()),
                "fewest": float(experts.mean(axis=0).min()),
            }
        )
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefill-batch", type=int, default=16)
    parser.add_argument("--prefill-tokens", type=int, default=16_384)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second that a copy on the card moves")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches whose kernels are timed one by one")
    parser.add_argument("--build-only", action="store_true", help="print the phases of start-up and end")
    parser.add_argument("--name", default="step_h200")
    args = parser.parse_args()
    config = dict(QWEN3_30B_A3B) if args.config is None else json.loads(args.config.read_text())
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        built, phases = build(Path(folder), args)
    print_table(phases)
    if args.build_only:
        return
    cores = {name: assembly.core for name, assembly in built.items()}
    rows, kernels = [], {}
    for batch in args.batches:
        rows += measure(cores, config, args, batch)
        write_result(
            args.name, rows, phases=phases, kernels=kernels, prompt=args.prompt, new=args.new, rounds=args.rounds
        )
        print_table(rows[-len(VARIANTS) :])
        if batch in args.profile:
            for name, core in cores.items():
                prompts = Prompts(99, int(config["vocab_size"]))
                told = kernels[f"{batch} {name}"] = kernel_times(
                    core, prompts, batch, args.prompt if batch > 1 else 128
                )
                print_table(told)
    print_table(rows)
    print(
        write_result(
            args.name, rows, phases=phases, kernels=kernels, prompt=args.prompt, new=args.new, rounds=args.rounds
        )
    )


if __name__ == "__main__":
    main()
