"""`routed-experts inspect MODEL`: shapes and memory plan of a checkpoint. No weight is loaded."""

import argparse
import dataclasses
import json

from routed_experts.cli.bootstrap import start_jax
from routed_experts.cli.flags import MODEL_HELP, add_engine_flags, engine_args
from routed_experts.core.server_args import ServerArgs


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `inspect`."""
    parser.add_argument("model_path", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--config-only", action="store_true", help="config.json alone is there: plan with bfloat16, look at no tensors"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_engine_flags(parser, leave_out=("model_path",))


def run(options: argparse.Namespace, start_time: float) -> int:
    """Print what serving the model with these flags would take."""
    args = ServerArgs(**engine_args(options))
    start_jax(default_platform="cpu")
    from routed_experts.engine.build.inspection import inspect_model

    found = inspect_model(args, load_format="dummy" if options.config_only else "auto")
    if options.json:
        print(json.dumps(dataclasses.asdict(found)))
        return 0
    moe = f"{len(found.moe_layer_ids)} MoE ({_ranges(found.moe_layer_ids)}) × {found.num_experts} experts top-{found.top_k}"
    print(f"{found.architecture}  {found.num_parameters / 1e9:.3f} billion parameters, {found.dtype}")
    print(f"layers          {found.num_layers}, {moe if found.moe_layer_ids else 'none with experts'}")
    print(
        f"vocabulary      {found.vocab_size:,}   context {found.context_length:,} tokens   KV {found.kv_tokens:,} tokens"
    )
    if found.moe_layer_ids:
        print(f"routed experts  {found.row_bytes:,} bytes a token")
    for line in found.memory_plan:
        print(line)
    return 0


def _ranges(numbers: tuple[int, ...]) -> str:
    """3-5,7 for (3, 4, 5, 7)."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
