"""The decode step of Qwen3-30B-A3B's shapes on a GPU, with random weights, beside the bytes that it must read.

    python benchmarks/step.py [--batches 1 16 64 256] [--new 128] [--rounds 2] [--profile 1 16] [--config CONFIG.json]
    python benchmarks/step.py --against context layers [--contexts 1024 32768] [--depths 12 48] [--batch 16]
    python benchmarks/step.py --small      # a CPU, a small model: does it run

By batch: two engine cores share the weights, one with capture and one without; whole runs of "off", "on, unasked"
and "on, asked" take turns. A decode step is the time from one return of `core.step()` to the next while the next
step is in flight; the figure is the median over a run's steps, and a ratio is a median over neighbouring runs.
Against context and layers: capture is on and asked, and a step is timed while all requests of the batch decode. The
floor is the bytes that a step must read (weights of the chosen experts, counted from the recorded rows, all other
matrices, keys and values) over --bandwidth. A run whose logprobs are not finite fails. A card of 141 GB needs
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."""

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from common import HF_CONFIG, Prompts, print_table, progress, write_result

from routed_experts.core.io_struct import TokenIDOut
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.build.startup_phases import PhaseClock
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
SMALL = {
    "batches": [2],
    "prompt": 8,
    "new": 16,
    "rounds": 1,
    "prefill_batch": 2,
    "prefill_tokens": 64,
    "dtype": "float32",
}
SMALL |= {"contexts": [64], "depths": [2], "batch": 2, "chunk": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One batch from its prompts to its last tokens."""

    prefill: float  # seconds
    steps: list[float]  # seconds
    outs: list[TokenIDOut]
    ended: int = 0  # requests, before the last prompt was done: then no step decoded the whole batch

    def check(self) -> None:
        """Refuse a run whose batch never decoded as a whole."""
        assert not self.ended, f"{self.ended} requests ended before the last prompt was done: longer chunks or answers"


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
    ended = len(outs)
    if on_prefilled is not None:
        on_prefilled()
    last = time.perf_counter()
    prefill = last - start
    while not core.is_idle:
        outs += core.step().outs
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    return Run(prefill=prefill, steps=steps[3:-3] or steps, outs=outs, ended=ended)


def experts_a_step(run: Run, prompt: int) -> np.ndarray:
    """Distinct experts of each decode step and layer, from the rows of requests with routing."""
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
    for _ in range(4):
        core.step()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                core.step()
        while not core.is_idle:
            core.step()
        return read_kernel_times(Path(folder), steps)


def read_kernel_times(folder: Path, steps: int) -> list[dict[str, object]]:
    """The slowest kernels of a profile of so many steps."""
    file = next(folder.rglob("*.xplane.pb"))
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
    cores: dict[str, EngineCore],
    config: dict[str, object],
    args: argparse.Namespace,
    batch: int,
    *,
    read_bytes: Callable[[int, float, float], float] | None = None,
) -> list[dict[str, object]]:
    """All variants at one batch. `read_bytes`: what a step must read, by batch, context and experts a layer; by default
    of the layers of Qwen3-MoE."""
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
                run.check()
                runs[name].append(run)
    experts = np.mean([experts_a_step(run, prompt) for run in runs["on, asked"]], axis=0)
    context, layers = prompt + args.new / 2, int(config["num_hidden_layers"])
    read_bytes = read_bytes or functools.partial(floor_bytes, config, layers)
    floor = read_bytes(batch, context, float(experts.mean())) / args.bandwidth
    base = [statistics.median(run.steps) for run in runs["off"]]
    rows = []
    for name in VARIANTS:
        medians = [statistics.median(run.steps) for run in runs[name]]
        rows.append(
            {
                "batch": batch,
                "capture": name,
                "step ms": statistics.median(medians) * 1e3,
                "floor ms": floor * 1e3,
                "step/floor": statistics.median(medians) / floor,
                "to off": statistics.median(a / b for a, b in zip(medians, base, strict=True)),
                "prefill tok/s": batch * prompt / statistics.median(run.prefill for run in runs[name]),
                "experts": float(experts.mean()),
                "fewest": float(experts.mean(axis=0).min()),
            }
        )
    return rows


def build_core(config: dict[str, object], layers: int, args: argparse.Namespace, longest: int) -> EngineCore:
    """An engine core of that many layers, whose pool holds a whole batch of `longest` tokens each."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        model = ModelFolder.open(Path(folder), load_format="dummy").load(jax.numpy.dtype(args.dtype))
        server = ServerArgs(
            model_path=folder,
            context_length=longest,
            max_total_tokens=args.batch * (longest + 64),
            precompile_bs_paddings=(args.batch,),
            precompile_token_paddings=(args.chunk,),
            mem_fraction_static=0.95,
            skip_tokenizer_init=True,
            enable_return_routed_experts=True,
        )
        return build_engine(server, model=model).core


def max_request_len(context: int, args: argparse.Namespace) -> int:
    """Tokens of a request at its end."""
    return context + args.new + -(-args.batch * context // args.chunk) + 16


def measure_point(
    core: EngineCore, config: dict[str, object], layers: int, context: int, args: argparse.Namespace
) -> dict[str, object]:
    """The step time at one context and depth, after one run that warms up."""
    prefill_steps = -(-args.batch * context // args.chunk)
    new, vocabulary = args.new + prefill_steps, int(str(config["vocab_size"]))
    for turn in range(2):
        run = drive(core, Prompts(turn + context, vocabulary), args.batch, prompt=context, new=new, ask=True)
    assert len(run.outs) == args.batch and core.ranks[0].num_retracted == 0
    together = len(run.steps) - prefill_steps  # the first request to decode ends so many steps before the last
    assert together > args.new // 2, f"{len(run.steps)} steps after the last prompt, {prefill_steps} of prefill"
    experts = float(experts_a_step(run, context).mean())
    floor = floor_bytes(config, layers, args.batch, context + new / 2, experts) / args.bandwidth
    step = statistics.median(run.steps[:together])
    return {
        "layers": layers,
        "context": context,
        "step ms": step * 1e3,
        "floor ms": floor * 1e3,
        "step/floor": step / floor,
        "prefill tok/s": args.batch * context / run.prefill,
    }


def measure_curves(config: dict[str, object], args: argparse.Namespace, shortest: int = 1024) -> None:
    """Step times against layers (at the shortest context) and against context (at the deepest model)."""
    rows: list[dict[str, object]] = []
    shortest = min(shortest, *args.contexts)
    points = [(layers, [shortest]) for layers in args.depths] if "layers" in args.against else []
    points += [(max(args.depths), args.contexts)] if "context" in args.against else []
    for layers, contexts in points:
        core = build_core(config, layers, args, max_request_len(max(contexts), args))
        for context in contexts:
            progress(f"{layers} layers, context {context}")
            rows.append(measure_point(core, config, layers, context, args))
            print_table(rows[-1:])
        del core
        gc.collect()  # the next engine needs the memory
    print_table(rows)
    print(write_result(args.name or "step_curves_h200", rows, batch=args.batch, new=args.new))


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", nargs="+", choices=["context", "layers"], default=[])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 36, 48], help="numbers of layers")
    parser.add_argument("--batch", type=int, default=16, help="batch of --against")
    parser.add_argument("--chunk", type=int, default=8192, help="prefill tokens a step of --against")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, help="tokens of an answer (128; with --against 32)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prefill-batch", type=int, default=16)
    parser.add_argument("--prefill-tokens", type=int, default=16_384)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second that a copy on the card moves")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches whose kernels are timed one by one")
    parser.add_argument("--small", action="store_true", help="a small model on any machine")
    parser.add_argument("--name", help="of the result (step_h200; with --against step_curves_h200)")
    args = parser.parse_args()
    config = dict(QWEN3_30B_A3B) if args.config is None else json.loads(args.config.read_text())
    if args.small:
        config = HF_CONFIG | {"num_hidden_layers": 2}
        vars(args).update(SMALL)
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    args.new = args.new or (32 if args.against else 128)
    if args.against:
        measure_curves(config, args)
    else:
        measure_batches(config, args)


def measure_batches(config: dict[str, object], args: argparse.Namespace) -> None:
    """All variants at every batch; the result is written after each."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        progress("building two engines")
        components, phases = build(Path(folder), args)
    print_table(phases)
    cores = {name: part.core for name, part in components.items()}
    rows, kernels = [], {}
    for batch in args.batches:
        progress(f"batch {batch}")
        rows += measure(cores, config, args, batch)
        print_table(rows[-len(VARIANTS) :])
        if batch in args.profile:
            for name, core in cores.items():
                prompts = Prompts(99, int(config["vocab_size"]))
                kernels[f"{batch} {name}"] = kernel_times(core, prompts, batch, args.prompt if batch > 1 else 128)
                print_table(kernels[f"{batch} {name}"])
        sizes = {"prompt": args.prompt, "new": args.new, "rounds": args.rounds}
        path = write_result(args.name or "step_h200", rows, phases=phases, kernels=kernels, **sizes)
    print_table(rows)
    print(path)


if __name__ == "__main__":
    main()
