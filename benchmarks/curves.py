"""How a decode step grows: against context (1k to 32k tokens at batch 16) and against layers (12 to 48), beside its
floor.

    python benchmarks/curves.py [--contexts 1024 4096 16384 32768] [--layers 12 24 36 48] [--batch 16] [--new 32]

Qwen3-30B-A3B shapes, random weights, capture on and asked for by all; the floor is step.py's. Curves against batch are
step.py's own. A step is timed while all requests of the batch decode: each generates --new tokens more than the batch
has prefill steps, so that the first is still there when the last prompt has been read. A point whose batch did not run
together is an error."""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
from common import Prompts, print_table, write_result
from step import QWEN3_30B_A3B, drive, experts_a_step, floor_bytes

from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.loop.core import EngineCore
from routed_experts.models.model_folder import ModelFolder

VOCABULARY = int(str(QWEN3_30B_A3B["vocab_size"]))


def core_of(layers: int, args: argparse.Namespace, longest: int) -> EngineCore:
    """An engine core of that many layers, whose pool holds a whole batch of `longest` tokens each."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_30B_A3B | {"num_hidden_layers": layers}))
        model = ModelFolder.open(Path(folder), load_format="dummy").load(jax.numpy.dtype("bfloat16"))
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


def longest_of(context: int, args: argparse.Namespace) -> int:
    """Tokens of a request at its end."""
    return context + args.new + -(-args.batch * context // args.chunk) + 16


def point(core: EngineCore, layers: int, context: int, args: argparse.Namespace) -> dict[str, object]:
    """One measured step time."""
    prefill_steps = -(-args.batch * context // args.chunk)
    new = args.new + prefill_steps
    for turn in range(2):  # the first warms up
        start = time.perf_counter()
        run = drive(core, Prompts(turn + context, VOCABULARY), args.batch, prompt=context, new=new, ask=True)
        seconds = time.perf_counter() - start
    assert len(run.outs) == args.batch and core.scheduler.num_retracted == 0, (
        len(run.outs),
        core.scheduler.num_retracted,
    )
    together = len(run.steps) - prefill_steps  # the first to decode ends so many steps before the last
    assert together > args.new // 2, (
        f"{len(run.steps)} steps after the last prompt, {prefill_steps} of prefill: too few ran together"
    )
    experts = float(experts_a_step(run, context).mean())
    floor = floor_bytes(QWEN3_30B_A3B, layers, args.batch, context + new / 2, experts) / args.bandwidth
    step = statistics.median(run.steps[:together])
    return {
        "layers": layers,
        "context": context,
        "step ms": step * 1e3,
        "floor ms": floor * 1e3,
        "step/floor": step / floor,
        "prefill tok/s": args.batch * context / run.prefill,
        "s in all": seconds,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 24, 36, 48])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--bandwidth", type=float, default=4.3e12)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for layers in args.layers:
        core = core_of(layers, args, longest_of(1024, args))
        rows.append(point(core, layers, 1024, args))
        print_table(rows[-1:])
        del core
        gc.collect()  # the next one needs the memory
    if args.contexts:
        core = core_of(48, args, longest_of(max(args.contexts), args))
        for context in args.contexts:
            rows.append(point(core, 48, context, args))
            print_table(rows[-1:])
            write_result("curves_h200", rows, batch=args.batch, new=args.new)  # long ones come last
    print_table(rows)
    print(write_result("curves_h200", rows, batch=args.batch, new=args.new))


if __name__ == "__main__":
    main()
