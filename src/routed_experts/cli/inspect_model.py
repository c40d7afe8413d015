"""`routed-experts inspect MODEL`: shapes and memory plan of a checkpoint. No weight is loaded."""

import argparse
import dataclasses
import json

from routed_experts.cli.bootstrap import start_jax
from routed_experts.cli.flags import MODEL_HELP, add_engine_flags, engine_args, load_format, log_ignored_flags
from routed_experts.core.server_args import ServerArgs


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `inspect`."""
    parser.add_argument("model_path", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--config-only", action="store_true", help="read config.json alone: plan with bfloat16, open no weights"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_engine_flags(parser, leave_out=("model_path",))


def run(options: argparse.Namespace, start_time: float) -> int:
    """Print the shapes and the memory plan of the model with these flags."""
    log_ignored_flags(options)
    args = ServerArgs(**engine_args(options))
    start_jax(default_platform="cpu")
    from routed_experts.engine.build.inspection import inspect_model

    model = inspect_model(args, load_format="dummy" if options.config_only else load_format(options))
    if options.json:
        print(json.dumps(dataclasses.asdict(model)))
        return 0
    layers = f"{len(model.moe_layer_ids)} MoE ({_ranges(model.moe_layer_ids)})"
    moe = f"{layers} × {model.num_experts} experts top-{model.top_k}"
    print(f"{model.architecture}  {model.num_parameters / 1e9:.3f} billion parameters, {model.dtype}")
    print(f"layers          {model.num_layers}, {moe if model.moe_layer_ids else 'none with experts'}")
    context = f"context {model.context_length:,} tokens"
    ranks = f" in each of {args.dp_size} data ranks" if args.dp_size > 1 else ""
    print(f"vocabulary      {model.vocab_size:,}   {context}   KV {model.kv_tokens:,} tokens{ranks}")
    if model.moe_layer_ids:
        off = "" if args.enable_return_routed_experts else "; capture is off (--enable-return-routed-experts)"
        print(f"routed experts  {model.row_bytes:,} bytes a token{off}")
    print(f"layers run      {'; '.join(f'{platform}: {path}' for platform, path in model.layer_paths.items())}")
    for line in model.memory_plan:
        print(line)
    return 0


def _ranges(numbers: tuple[int, ...]) -> str:
    """Ranges of numbers: 3-5,7 for (3, 4, 5, 7)."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
