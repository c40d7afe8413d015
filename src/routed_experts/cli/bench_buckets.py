"""`routed-experts bench buckets MODEL`: what steps cost by their padded size, and which sizes are worth compiling.

Every candidate is measured full and partly filled. Of all lists of at most `--most` sizes, the table shows the one of
least expected cost next to the current list; its last column holds the values for the flags of serve."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from routed_experts.cli.bootstrap import start_jax
from routed_experts.cli.flags import add_engine_flags, engine_args, load_format, log_ignored_flags
from routed_experts.core.bucket_tuning import LOADS, StepCosts, choose_buckets, expected_cost, parse_load
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError
from routed_experts.core.server_args import ServerArgs

Row = dict[str, object]


def add_flags(kind: argparse.ArgumentParser) -> None:
    """The flags of `bench buckets`."""
    kind.add_argument("--most", type=int, default=3, metavar="K", help="sizes in a list; default: 3")
    kind.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="measurements of each pair of sizes, after a warm-up; default: 3",
    )
    kind.add_argument(
        "--load",
        default=None,
        metavar="|".join((*LOADS, "FILE.json")),
        help='frequency of sizes; FILE holds {"decode": {"SIZE": COUNT, ...}, "extend": ...}; default: both names',
    )
    kind.add_argument("--config-only", action="store_true", help="read config.json alone: random weights")
    add_engine_flags(kind, leave_out=("model_path", "deterministic"))


def run_buckets(options: argparse.Namespace) -> list[Row]:
    """Measure, choose; the rows of the table."""
    if options.most < 1:
        raise ConfigError(f"--most {short_repr(options.most)} must be at least 1")
    log_ignored_flags(options)
    args = ServerArgs(**engine_args(options))
    current = {"decode": args.batch_paddings, "extend": args.token_paddings}
    loads = [read_load(name, current) for name in (LOADS if options.load is None else (options.load,))]
    start_jax(default_platform=None)
    from routed_experts.engine.build.builder import build_engine
    from routed_experts.engine.build.step_cost import candidates, measure_step_costs
    from routed_experts.models.loading.model_source import with_local_model

    weights = "dummy" if options.config_only else load_format(options)
    wide = dataclasses.replace(
        with_local_model(args, weights=weights != "dummy"),
        precompile_bs_paddings=candidates(current["decode"], least=1),
        precompile_token_paddings=candidates(current["extend"], least=16),
        max_running_requests=None,
        chunked_prefill_size=None,
        max_prefill_tokens=None,
    )
    components = build_engine(wide, load_format=weights)
    decode, extend = measure_step_costs(components, wide, rounds=options.rounds)
    return bucket_rows({"decode": decode, "extend": extend}, current, loads, most=options.most)


def bucket_rows(
    costs: Mapping[str, StepCosts],
    current: Mapping[str, tuple[int, ...]],
    loads: Sequence[tuple[str, Mapping[str, Mapping[int, float]]]],
    *,
    most: int,
) -> list[Row]:
    """The measured costs, and for every load the mean cost of a step with the current and with the best list.

    `to unpadded` is the ratio to the cost with all candidates as one list."""
    rows: list[Row] = []
    for step, measured in costs.items():
        for bucket in measured.buckets:
            for size, seconds in sorted(measured.seconds[bucket].items()):
                unpadded = measured.estimate_seconds(
                    size, next(candidate for candidate in measured.buckets if candidate >= size)
                )
                rows.append(_row(step, "measured", f"{size} in", (bucket,), seconds, unpadded))
    for name, by_step in loads:
        for step, measured in costs.items():
            load = {size: share for size, share in by_step[step].items() if size <= measured.buckets[-1]}
            unpadded = expected_cost(measured.buckets, measured, load)
            best = choose_buckets(measured, load, most=most)
            usable = tuple(size for size in current[step] if size in measured.seconds)  # one token is no extend step
            for source, buckets in (("given", usable), (f"best of {most}", best)):
                rows.append(_row(step, source, name, buckets, expected_cost(buckets, measured, load), unpadded))
    return rows


def read_load(name: str, current: Mapping[str, tuple[int, ...]]) -> tuple[str, Mapping[str, Mapping[int, float]]]:
    """A load by its name or from its file, up to the largest current sizes. Raises ConfigError."""
    if not name.endswith(".json"):
        return name, {step: parse_load(name, sizes[-1]) for step, sizes in current.items()}
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
        counts: dict[str, dict[int, float]] = {
            step: _counts(content[step], sizes[-1]) for step, sizes in current.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"--load {name} holds no load ({type(error).__name__}: {error})"
        form = '{"decode": {"SIZE": COUNT, ...}, "extend": {"SIZE": COUNT, ...}}'
        raise ConfigError(f"{text}; expected {form} with sizes of at least 1 and positive counts") from error
    return name, counts


def _counts(table: Any, largest: int) -> dict[int, float]:
    counts = {int(size): float(count) for size, count in cast("dict[str, float]", table).items()}
    if not counts or min(counts) < 1 or max(counts) > largest or not all(count > 0 for count in counts.values()):
        raise ValueError(f"sizes {sorted(counts)} and counts {list(counts.values())}, sizes allowed up to {largest}")
    return counts


def _row(step: str, name: str, load: str, buckets: Sequence[int], seconds: float, unpadded: float) -> Row:
    return {
        "step": step,
        "list": name,
        "load": load,
        "ms": 1e3 * seconds,
        "to unpadded": seconds / unpadded,
        "buckets": " ".join(map(str, buckets)),
    }
