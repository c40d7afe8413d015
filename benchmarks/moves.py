"""Placed experts on several devices: what a step costs under each way of choosing instances, and what moving experts
costs.

    python benchmarks/moves.py [--devices 2] [--layers 4] [--batches 16 64] [--parts steps moves follow]
    JAX_NUM_CPU_DEVICES=2 python benchmarks/moves.py --small      # CPU, a small model in float32

Random weights under Qwen3-30B-A3B's config at a few layers, with routers that prefer some experts in each of two
domains of tokens (domains.py); tokens are drawn at temperature 1. One expert in eight has a second instance, at
first by chance. `steps`: decode steps by whole experts without a placement, with replicas (water-filled), and with
capacities (1.25 of the mean, and without bound); the engines take turns, ratios are over `replicas`. `rerouted`:
share of slots that capacities led to another expert. `moves`: between decode steps a plan for this very load is
moved to, a layer at a time. `move ms` is from draining the step in flight until the layer's arrays are there, GB/s
what its copies carried in that time; step times with a move and without; `same` are tokens equal to those of a run
without moves (and of a run after all moves): 1 in float32, but for a sum whose order tips a draw; balancedness
(weighted) is of all steps of a run, before and after. `follow`: an engine that rebalances by itself while the domain
changes half way: what the gate did, how long its moves took, balancedness before the change, after it, and at the
end."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from common import print_table, write_result
from domains import Domain, build_domains, skewed_checkpoint

from routed_experts import Engine, PlacementConfig
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.control.components import EngineComponents
from routed_experts.engine.control.expert_load_monitor import ExpertLoadMonitor
from routed_experts.execution.replicated_expert_runner import ReplicatedExpertRunner
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.placement import eplb, rebalance

Row = dict[str, object]
WAYS = {
    "no placement": None,
    "replicas": {},
    "reroute 5/4": {"mode": "reroute", "capacity_factor": "5/4"},
    "reroute inf": {"mode": "reroute", "capacity_factor": "inf"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A model, and how it is served."""

    args: argparse.Namespace
    config: dict[str, object]
    folder: Path
    model: FamilyDecoder

    @property
    def first(self) -> ExpertPlacement:
        """One expert in eight twice, those of an arbitrary load."""
        experts, layers, devices = (
            int(self.config["num_experts"]),
            int(self.config["num_hidden_layers"]),
            self.args.devices,
        )
        load = np.random.default_rng(1).gamma(2.0, size=(layers, experts))
        return rebalance(
            load, num_instances=experts + max(devices, experts // 8 // devices * devices), num_devices=devices
        )

    def how(self) -> dict[str, object]:
        """Arguments of an engine."""
        args, longest, widest = self.args, self.args.prompt + self.args.new + 16, max(self.args.batches)
        return dict(
            model_path=str(self.folder),
            skip_tokenizer_init=True,
            context_length=longest,
            max_total_tokens=widest * (longest + 16),
            precompile_bs_paddings=tuple(sorted(args.batches)),
            precompile_token_paddings=(max(256, widest),),
            mem_fraction_static=0.9,
            tp_size=args.devices,
            ep_size=args.devices,
        )

    def assembled(self, way: dict[str, object] | None) -> EngineComponents:
        """An engine core without a thread, so that steps can be timed."""
        placement = None if way is None else PlacementConfig(plan=self.first, **way)
        return build_engine(ServerArgs(**self.how()), model=self.model, placement=placement)

    def domain(self, number: int, seed: int) -> Domain:
        """Prompts of a domain; the same for the same seed."""
        return dataclasses.replace(build_domains(self.config)[number], seed=seed)


def decode(
    built: EngineComponents,
    domain: Domain,
    batch: int,
    args: argparse.Namespace,
    *,
    between: Callable[[], float] = lambda: 0.0,
) -> tuple[list[float], list[float], list[tuple[int, ...]]]:
    """Seconds of the decode steps of a batch, what `between` took before each (its part of the step), and the
    tokens."""
    core, steps, parts, outs = built.core, [], [], []
    core.flush_cache()
    reqs = domain.requests(batch, prompt=args.prompt, new=args.new, ask=False)
    core.add(reqs)
    while not all(req.is_prefilled for req in reqs):
        outs += core.step().outs
    last = time.perf_counter()
    while not core.is_idle:
        parts.append(between())
        outs += core.step().outs
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    tokens = {out.rid: tuple(out.new_token_ids) for out in outs if out.finish_reason is not None}
    return steps, parts, [tokens[rid] for rid in sorted(tokens, key=int)]


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3 if seconds else float("nan")


def ways(bench: Bench) -> list[Row]:
    """Step times of all ways, which take turns."""
    args, built = bench.args, {name: bench.assembled(options) for name, options in WAYS.items()}
    rows: list[Row] = []
    slots = int(bench.config["num_hidden_layers"]) * int(bench.config["num_experts_per_tok"])
    for batch in args.batches:
        step_times, rerouted = {name: list[float]() for name in built}, dict[str, float]()
        for turn in range(args.rounds + 1):
            for name, engine in built.items():
                before = 0 if engine.core.rerouting is None else engine.core.rerouting.total.rerouted_slots
                steps, _, tokens = decode(engine, bench.domain(0, 100 + turn), batch, args)
                step_times[name] += steps[3:-3] if turn else []  # the first one warms up
                after = 0 if engine.core.rerouting is None else engine.core.rerouting.total.rerouted_slots
                rerouted[name] = (after - before) / (slots * batch * (args.prompt + len(tokens[0]) - 1))
        for name, engine in built.items():
            balance = engine.load_monitor.balance().get(100) if engine.load_monitor is not None else None
            even = float("nan") if balance is None else balance.weighted
            ratio = median_ms(step_times[name]) / median_ms(step_times["replicas"])
            row = {"way": name, "batch": batch, "step ms": median_ms(step_times[name]), "ratio": ratio}
            rows.append({**row, "rerouted": rerouted[name], "balance": even})
    print_table(rows)
    return rows


def moving(
    runner: ReplicatedExpertRunner, built: EngineComponents, plan: ExpertPlacement, layers: list[tuple[int, int]]
) -> Callable[[], float]:
    """What moves the next of `layers` each time, once no step is in flight; gives its seconds."""

    def move() -> float:
        if not layers:
            return 0.0
        begin = time.perf_counter()
        built.core.drain()
        runner.move_layer(*layers.pop(0), plan)
        jax.block_until_ready(runner.state)
        return time.perf_counter() - begin

    return move


def equal(left: list[tuple[int, ...]], right: list[tuple[int, ...]]) -> float:
    return float(
        np.mean([a == b for mine, theirs in zip(left, right, strict=True) for a, b in zip(mine, theirs, strict=True)])
    )


def weighted(watch: ExpertLoadMonitor) -> float:
    """Balancedness of all steps since the watch was started."""
    for _ in range(2):
        watch.close_window()  # what is taken is read when something is taken after it
    return watch.balance()[1000].weighted


def moves(bench: Bench) -> list[Row]:
    """A move to a plan for this load, and back, while a batch is decoded."""
    args, built, rows = bench.args, bench.assembled({}), list[Row]()
    runner, watch = built.core.runner, built.load_monitor
    assert isinstance(runner, ReplicatedExpertRunner) and watch is not None
    for batch in args.batches:
        decode(built, bench.domain(0, 7), batch, args)
        watch.restart()
        still, _, expected = decode(built, bench.domain(0, 8), batch, args)
        load, before = watch.close_window()().sum(axis=0), weighted(watch)
        current = runner.placement
        plan = eplb(
            load.astype(np.float64),
            num_instances=current.num_instances,
            num_devices=current.num_devices,
            previous=current,
        )
        copied, left = runner.num_copied, runner.layers()
        steps, parts, tokens = decode(built, bench.domain(0, 8), batch, args, between=moving(runner, built, plan, left))
        assert not left, f"{len(left)} layers were not moved: give --new more than --layers"
        runner.placement, copied = plan, runner.num_copied - copied
        watch.restart()
        after_steps, _, after_tokens = decode(built, bench.domain(0, 8), batch, args)
        after, spent = weighted(watch), [part for part in parts if part]
        with_move = [step for step, part in zip(steps, parts, strict=True) if part]
        rows.append(
            {
                "batch": batch,
                "copies": copied,
                "move ms": median_ms(spent),
                "GB/s": copied * runner.expert_bytes / sum(spent) / 1e9,
                "step ms": median_ms(still[3:-3]),
                "with move ms": median_ms(with_move),
                "after ms": median_ms(after_steps[3:-3]),
                "same": equal(tokens, expected),
                "same after": equal(after_tokens, expected),
                "before": before,
                "after": after,
            }
        )
        for layer in runner.layers():
            runner.move_layer(*layer, current)
        runner.placement = current
    print_table(rows)
    return rows


def follow(bench: Bench) -> list[Row]:
    """An engine that follows the load by itself, over a change of domain."""
    args, rows, batch = bench.args, list[Row](), max(bench.args.batches)
    config = PlacementConfig(
        plan=bench.first, rebalance_every=args.every, layers_per_step=1, link_bytes_per_s=args.link
    )
    with Engine(model=bench.model, placement=config, **bench.how()) as engine:
        for number in (0, 1):
            for turn in range(args.follow):
                reqs = bench.domain(number, 20 + turn).requests(batch, prompt=args.prompt, new=1, ask=False)
                prompts = [req.source.input_ids.tolist() for req in reqs]
                begin = time.perf_counter()
                engine.generate(
                    input_ids=prompts, sampling_params={"temperature": 1.0, "ignore_eos": True}, max_new_tokens=args.new
                )
                seconds = time.perf_counter() - begin
                if engine.components.rebalancer is not None:
                    engine.components.rebalancer.join()
                stats = engine.placement_stats()
                move_estimate, balance = stats.move_estimate, stats.balance.get(10)
                rows.append(
                    {
                        "domain": number,
                        "run": turn,
                        "tok/s": batch * args.new / seconds,
                        "moved": stats.rebalances,
                        "skipped": stats.skipped,
                        "failed": stats.failed,
                        "copies": stats.copies,
                        "last move ms": (stats.last_move_s or 0.0) * 1e3,
                        "gain ms": 1e3 * move_estimate.gain_s if move_estimate else float("nan"),
                        "cost ms": 1e3 * move_estimate.cost_s if move_estimate else float("nan"),
                        "balance 10": balance.weighted if balance else float("nan"),
                    }
                )
    print_table(rows)
    return rows


PARTS: dict[str, Callable[[Bench], list[Row]]] = {"steps": ways, "moves": moves, "follow": follow}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=64, help="steps of a window of rebalancing")
    parser.add_argument("--follow", type=int, default=3, help="runs of each domain")
    parser.add_argument("--link", type=float, default=100e9, help="bytes a second between devices, as the gate assumes")
    parser.add_argument("--skew", type=float, default=0.4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a small model in float32, short runs")
    parser.add_argument("--name", default="moves")
    args = parser.parse_args()
    if args.small:
        vars(args).update(dtype="float32", layers=2, batches=[4], new=32, rounds=1, every=16, follow=2, link=1e12)
    return args


def main() -> None:
    """Run the parts, print, write."""
    args = parsed()
    if args.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    results = dict[str, list[Row]]()
    with skewed_checkpoint(args) as (config, folder, model):
        bench = Bench(args=args, config=config, folder=folder, model=model)
        for part in args.parts:
            begin = time.perf_counter()
            results[part] = PARTS[part](bench)
            print(f"{part}: {time.perf_counter() - begin:.0f} s; {write_result(args.name, [], **results)}", flush=True)
    for part, rows in results.items():
        print(part)
        print_table(rows)


if __name__ == "__main__":
    main()
