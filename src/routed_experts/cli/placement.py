"""`routed-experts placement FILE...`: plans placements from recorded routing, and simulates them."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64

from routed_experts import placement
from routed_experts.analysis.metrics import known_rows
from routed_experts.cli.bootstrap import start_jax
from routed_experts.cli.flags import Parser
from routed_experts.cli.record_files import SUFFIXES, read_records
from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import ConfigError, RoutingAlignmentError
from routed_experts.core.load_metrics import load_imbalance
from routed_experts.core.placement import ExpertPlacement, ResidencyMap, default_max_replicas
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.placement.dispatch import DISPATCHES
from routed_experts.placement.simulate import STEP_TOKENS

Columns = dict[str, Float64[np.ndarray, " M"]]
_RESIDENCY_STEP = 8  # tokens of a decode step, unless --step-tokens says otherwise
_KEYWORD_FLAGS: Mapping[str, str] = MappingProxyType(  # of functions that plan
    {
        "per_layer": "--residents",
        "num_instances": "--instances",
        "num_devices": "--devices",
        "num_groups": "--groups",
        "num_nodes": "--nodes",
    }
)
_PICTURES = (".png", ".svg", ".pdf")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `placement`."""
    if isinstance(parser, Parser):
        parser.keyword_flags = _KEYWORD_FLAGS
    forms = ", ".join(SUFFIXES)
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help=f"recorded routing that plans are evaluated on: {forms}"
    )
    parser.add_argument(
        "--plan-from",
        type=Path,
        nargs="+",
        default=None,
        metavar="FILE",
        help="recorded routing, or RoutingStats (.npz), that plans are made from; default: FILE, the evaluated one",
    )
    parser.add_argument(
        "--instances",
        type=int,
        default=None,
        metavar="I",
        help="expert instances of a layer, to be placed on --devices",
    )
    parser.add_argument("--devices", type=int, default=None, metavar="V", help="devices that share the instances")
    parser.add_argument(
        "--groups", type=int, default=None, metavar="G", help="expert groups that stay on one node; default: 1"
    )
    parser.add_argument(
        "--nodes", type=int, default=None, metavar="N", help="nodes that the devices are on; default: 1"
    )
    parser.add_argument(
        "--dispatch", choices=DISPATCHES, default=None, help="how slots choose among instances; default: even"
    )
    parser.add_argument(
        "--residents",
        type=int,
        default=None,
        metavar="N",
        help="experts of a layer on the accelerator, the rest on host",
    )
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=None,
        metavar="T",
        help=f"tokens of one step; default: {STEP_TOKENS} for instances, {_RESIDENCY_STEP} for residents",
    )
    parser.add_argument(
        "--save", type=Path, default=None, metavar="FILE.npz", help="write the plan; serve --residency reads residents"
    )
    parser.add_argument("--plot", type=Path, default=None, metavar="PNG", help="draw it, too (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace, start_time: float) -> int:
    """Plan, simulate and print."""
    _check_flags(options)
    if options.dispatch not in (None, "even"):
        start_jax(default_platform="cpu")
    records = read_records(options.files)
    learned = RoutingStats.from_records(records) if options.plan_from is None else _read_stats(options.plan_from)
    learned.check_model(records[0].layer_ids, records[0].num_experts)
    num_tokens = len(known_rows(*records))
    if not num_tokens:
        files = ", ".join(map(str, options.files))
        raise RoutingAlignmentError(f"{files}: no row is known, so there is nothing to simulate; give other records")
    totals: dict[str, Any] = {"layers": list(learned.layer_ids), "experts": learned.num_experts, "top_k": learned.top_k}
    totals |= {"tokens": num_tokens, "plan_tokens": int(learned.num_tokens.sum())}
    tables: dict[str, Columns] = {}
    devices: dict[str, Float64[np.ndarray, "M V"]] = {}
    plan: ExpertPlacement | ResidencyMap | None = None
    if options.instances is not None:
        plan = _plan_instances(learned, options)
        tables["instances"], devices = _instances(records, learned, plan, options)
    if options.residents is not None:
        plan = placement.resident(learned, per_layer=options.residents)
        tables["residents"] = _residents(records, learned, plan, options)
    if options.plot is not None:
        from routed_experts.placement.figures import draw_plans

        draw_plans(options.plot, records, learned.load, devices=devices, residents=options.residents)
    if options.save is not None:  # last: a command that fails leaves the old plan
        assert plan is not None, "there is one, as checked above"
        plan.save(options.save)
    if options.json:
        lists = {
            name: {column: values.tolist() for column, values in columns.items()} for name, columns in tables.items()
        }
        print(json.dumps({**totals, **lists}))
        return 0
    model = f"{len(totals['layers'])} MoE layers x {totals['experts']} experts, top-{totals['top_k']}"
    print(f"{totals['tokens']:,} tokens, {model}")
    for name, columns in tables.items():
        _print_table(_title(name, options), learned.layer_ids, columns)
    if options.plan_from is None:
        print("\nThe plan was made from the same records that it is evaluated on: on other traffic it does less.")
        print("--plan-from FILE makes it from others.")
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Raise ConfigError for flags that do not fit each other, or have no effect."""
    if (options.instances is None) != (options.devices is None):
        raise ConfigError("--instances and --devices belong together; give both")
    if options.instances is None and options.residents is None:
        raise ConfigError("there is nothing to plan; give --instances and --devices, or --residents, or all three")
    for name in ("dispatch", "groups", "nodes"):
        if options.instances is None and (value := getattr(options, name)) is not None:
            text = f"--{name} {short_repr(value)} is of instances, and has no effect on --residents"
            raise ConfigError(f"{text}; give --instances and --devices too, or leave it out")
    if options.save is not None and (
        options.save.suffix != ".npz" or None not in (options.instances, options.residents)
    ):
        text = f"--save {options.save} writes one plan as .npz; name such a file"
        raise ConfigError(f"{text}, and give --instances or --residents, not both")
    if options.plot is not None and options.plot.suffix not in _PICTURES:
        raise ConfigError(f"--plot {options.plot} is none of {', '.join(_PICTURES)}; name such a file")


def _read_stats(files: list[Path]) -> RoutingStats:
    if len(files) == 1 and files[0].suffix == ".npz":
        return RoutingStats.read(files[0])
    return RoutingStats.from_records(read_records(files))


def _plan_instances(learned: RoutingStats, options: argparse.Namespace) -> ExpertPlacement:
    """The plan of --instances. Raises ConfigError for more than experts may have, PlacementError for other sizes."""
    num_experts = learned.num_experts
    per_expert = default_max_replicas(options.instances, num_experts)
    if options.instances > num_experts * max(per_expert, 1):
        limit = f"{num_experts * per_expert}, which is {per_expert} for each of {num_experts} experts"
        raise ConfigError(f"--instances {short_repr(options.instances)} is above {limit}; give fewer")
    return placement.eplb(
        learned,
        num_instances=options.instances,
        num_devices=options.devices,
        num_groups=1 if options.groups is None else options.groups,
        num_nodes=1 if options.nodes is None else options.nodes,
    )


def _instances(
    records: list[RoutedExperts], learned: RoutingStats, plan: ExpertPlacement, options: argparse.Namespace
) -> tuple[Columns, dict[str, Float64[np.ndarray, "M V"]]]:
    """Balance of each layer with the plan, and before it where the devices divide the experts; and the load of each
    device."""
    num_layers, num_experts = learned.load.shape
    step_tokens = STEP_TOKENS if options.step_tokens is None else options.step_tokens
    columns: Columns = {}
    devices: dict[str, Float64[np.ndarray, "M V"]] = {}
    if num_experts % options.devices == 0:
        before = placement.simulate(
            records, ExpertPlacement.identity(num_layers, num_experts, options.devices), step_tokens=step_tokens
        )
        columns["balancedness before"], devices["before"] = before.balancedness, before.device_load
    after = placement.simulate(records, plan, dispatch=options.dispatch or "even", step_tokens=step_tokens)
    columns["balancedness planned"], devices["planned"] = after.balancedness, after.device_load
    columns["max / mean device load"] = load_imbalance(after.device_load)
    columns["most replicas"] = plan.logical_replica_count.max(axis=1).astype(np.float64)
    if options.dispatch == "reroute":
        columns["rerouted share"] = after.rerouted_slots / max(after.num_tokens * learned.top_k, 1)
    return columns, devices


def _residents(
    records: list[RoutedExperts], learned: RoutingStats, static: ResidencyMap, options: argparse.Namespace
) -> Columns:
    """Hits of each policy by layer, and copies a token of those that copy."""
    per_layer, step_tokens = options.residents, _RESIDENCY_STEP if options.step_tokens is None else options.step_tokens
    first = ResidencyMap.first_n(len(learned.layer_ids), learned.num_experts, per_layer)
    prefix = placement.simulate(records, first, step_tokens=step_tokens)
    fixed = placement.simulate(records, static, step_tokens=step_tokens)
    adaptive = placement.simulate(
        records, placement.AdaptiveResidency.start(static, learned=learned), step_tokens=step_tokens
    )
    lru = placement.lru_coverage(*records)
    return {
        "first": prefix.hit_ratio,
        "static": fixed.hit_ratio,
        "adaptive": adaptive.hit_ratio,
        "copies a token, adaptive": adaptive.copies / max(adaptive.num_tokens, 1),
        "LRU": lru.hits[:, per_layer],
        "copies a token, LRU": lru.copies_per_token[:, per_layer],
        "concentration": placement.concentration(learned.load),
    }


def _title(name: str, options: argparse.Namespace) -> str:
    if name == "instances":
        return f"{options.instances} instances on {options.devices} devices, dispatch {options.dispatch or 'even'}"
    return f"{options.residents} resident experts a layer: share of slots on the accelerator"


def _print_table(title: str, layer_ids: tuple[int, ...], columns: Columns) -> None:
    """One row a layer, and their mean."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    for row, layer in enumerate(layer_ids):
        table.add_row(str(layer), *(f"{values[row]:.3f}" for values in columns.values()))
    table.add_row("mean", *(f"{values.mean():.3f}" for values in columns.values()))
    console = Console(file=sys.stdout, highlight=False)
    print()
    (console if console.is_terminal else Console(file=sys.stdout, highlight=False, width=120)).print(table)
