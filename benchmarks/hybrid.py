"""Experts shared out between accelerator and host: decode by the share of experts that are resident, and by who they
are.

    python benchmarks/hybrid.py [--layers 4] [--batches 1 4 16 64] [--backends ffi dispatch] [--fractions 0.95 0.3 0.1
    0.5 0.7 1]
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/hybrid.py --small      # CPU: device 1 plays the host

The model and its prompts are those of domains.py; tokens are drawn at temperature 1, so that requests do not fall into
one loop. `first` are experts 0..N-1; `static` are the most used of a run before it, with other prompts, exchanged live.
What follows the load when the domain changes is residency.py's. Rows take turns: whole runs, of which the median decode
step counts. `in turn` is the same step with one side waiting for the other: layer by layer the residents end before the
host begins, and it ends before anything follows (in one program: the host's experts end before the residents begin).
Over it, `overlap` is what running both sides at once gains. `home`, `host`: ms of each side in a step in turn (of
residents with ffi: the bytes of those that a step reads, over --bandwidth, which is less than they take). `sum/max`:
all that is not the host's, and the host's, over the longer of both: nothing gains more. `bound`: the step in turn over
itself without the shorter of home and host, since a layer waits for the sum of the one before, and only residents can
run beside the host. `of bound`: overlap over it. `plain`: without experts=. Slots on the accelerator are counted by the
runner; bytes are those of the arrays there, and what the device says it uses. What is done is written after every
engine. Programs are kept for the next engine: most of them are the same."""

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from common import print_table, write_result
from domains import SMALL, Domain, domains_of, skewed_model
from flax import nnx
from step import QWEN3_30B_A3B, Run, drive

from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.control.resident_expert_updater import ResidentExpertUpdater
from routed_experts.engine.loop.core import EngineCore
from routed_experts.execution.offload.fused_offload_runner import FusedOffloadRunner
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.placement.residency import most_used


def on_accelerator(model: FamilyDecoder) -> FamilyDecoder:
    """The same weights, all there."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(state, jax.devices()[0]))


def by_frequency(run: Run, residency: ResidencyMap) -> ResidencyMap:
    """The experts that a run used most become resident."""
    stats = RoutingStats.from_records(out.routed_experts for out in run.outs)
    return most_used(stats.load, residency.num_resident, residency)


@contextlib.contextmanager
def in_turn(runner: OffloadRunner, spent: dict[str, float]) -> Iterator[None]:
    """Let one side end before the other begins, and both before anything follows; adds up seconds of each side, where
    they are seen from here."""
    if isinstance(runner, FusedOffloadRunner):
        lane = runner.host_side.lane
        calls = lane.counts().calls_back
        lane.set_signals(in_turn=True, calls_back=calls)
        yield
        lane.set_signals(in_turn=False, calls_back=calls)
        return
    kept = dict(runner._programs)

    def waited(name, program):
        def start(*args):
            jax.block_until_ready(args)
            begin = time.perf_counter()
            out = jax.block_until_ready(program(*args))
            spent[name] += time.perf_counter() - begin
            return out

        return start

    runner._programs.update(
        {key: waited(key[0], program) for key, program in kept.items() if key[0] in ("home", "host")}
    )
    try:
        yield
    finally:
        runner._programs.clear()
        runner._programs.update(kept)


def step_ms(run: Run) -> float:
    return statistics.median(run.steps) * 1e3


@dataclasses.dataclass(kw_only=True)
class Bench:
    """One engine core and how it is driven."""

    core: EngineCore
    args: argparse.Namespace
    domains: tuple[Domain, Domain]

    def run(
        self,
        batch: int,
        *,
        domain: int = 0,
        ask: bool = False,
        new: int | None = None,
        spent: dict[str, float] | None = None,
    ) -> Run:
        """A batch of new prompts; into `spent` go the seconds of the sides in decode steps."""
        how = {"prompt": self.args.prompt, "new": new or self.args.new, "ask": ask, "logprobs": True}
        runner, spent = self.core.runner, {} if spent is None else spent
        lane = (
            runner.host_side.lane if isinstance(runner, FusedOffloadRunner) and runner.host_side is not None else None
        )
        before = []

        def prefilled() -> None:
            spent.update(home=0.0, host=0.0)
            before.append(0.0 if lane is None else lane.counts().busy_s)

        run = drive(self.core, self.domains[domain], batch, **how, on_prefilled=prefilled)
        if lane is not None:
            spent.update(home=float("nan"), host=lane.counts().busy_s - before[0])
        return run

    def measured(self, batch: int, *, domain: int = 0) -> dict[str, float]:
        """Decode, both ways where there are two sides, and the share of slots that the residents ran."""
        runner, split = self.core.runner, isinstance(self.core.runner, OffloadRunner)
        turns_too = split and runner.residency.num_resident < runner.residency.num_experts
        before = runner.slot_counts() if split else np.zeros((1, 2))
        self.run(batch, domain=domain, new=4)
        together, turns, sides = [], [], []
        for _ in range(self.args.rounds):
            run = self.run(batch, domain=domain)
            assert all(np.isfinite(out.output_logprobs.values).all() for out in run.outs), "a logprob is not finite"
            together.append(step_ms(run))
            if turns_too:
                sides.append({"home": 0.0, "host": 0.0})
                with in_turn(runner, sides[-1]):
                    turns.append(step_ms(self.run(batch, domain=domain, spent=sides[-1])))
        away, slots = (runner.slot_counts() - before).sum(axis=0) if split else (0, 1)
        wall, serial = statistics.median(together), statistics.median(turns) if turns else float("nan")
        steps = max(len(sides), 1) * (self.args.new - 1) / 1e3
        home, host = (sum(spent[side] for spent in sides) / steps for side in ("home", "host"))
        if turns and np.isnan(home):
            home = self.residents_ms(batch, domain)
        bound = serial / (serial - min(home, host)) if turns else float("nan")
        return {
            "tok/s": batch * 1e3 / wall,
            "step ms": wall,
            "hits": 1.0 - away / slots,
            "in turn ms": serial,
            "overlap": serial / wall,
            "sum/max": serial / max(host, serial - host) if turns else float("nan"),
            "bound": bound,
            "of bound": serial / wall / bound,
            "home ms": home,
            "host ms": host,
        }

    def residents_ms(self, batch: int, domain: int) -> float:
        """Of reading the residents that a decode step runs, all layers, from the accelerator's memory."""
        runner, run = self.core.runner, self.run(batch, domain=domain, ask=True, new=8)
        rows = np.stack([out.routed_experts.ids[self.args.prompt :] for out in run.outs])  # [B, steps, M, K]
        slots = runner.residency.slot_of[np.arange(rows.shape[2])[:, None], rows]
        read = [
            len(np.unique(layer[layer >= 0])) for step in np.moveaxis(slots, 1, 0) for layer in np.moveaxis(step, 1, 0)
        ]
        (table, *_) = runner.model.host.values()
        one = sum(array.nbytes for array in (table.gate_up, table.down)) / table.down.shape[0]
        return sum(read) / rows.shape[1] * one / self.args.bandwidth * 1e3

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Let the residents follow the load meanwhile."""
        core, spec = self.core, self.core.runner.model.config.capture_spec
        core.after_step = ResidentExpertUpdater(core.capturer, core.runner, top_k=spec.top_k).after_step
        try:
            yield
        finally:
            core.after_step = None


def server_args(args: argparse.Namespace, folder: Path) -> ServerArgs:
    longest, widest = args.prompt + args.new + 16, max(args.batches)
    return ServerArgs(
        model_path=str(folder),
        skip_tokenizer_init=True,
        context_length=longest,
        max_total_tokens=widest * (longest + 16),
        precompile_bs_paddings=tuple(sorted(args.batches)),
        precompile_token_paddings=(max(256, widest),),
        mem_fraction_static=0.9,
        enable_return_routed_experts=True,
    )


def accelerator_bytes(core: EngineCore) -> dict[str, float]:
    """Of all arrays that are there, each buffer once, and as the device counts."""
    device = jax.devices()[0]
    here = {a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays() if a.devices() == {device}}
    said = device.memory_stats() or {}
    return {"arrays MB": sum(here.values()) / 1e6, "in use MB": said.get("bytes_in_use", float("nan")) / 1e6}


def of_engine(
    model: FamilyDecoder, args: argparse.Namespace, folder: Path, backend: str, fraction: float
) -> Iterator[dict[str, object]]:
    """All rows of one number of residents; 1.0 once, for there `first` is everybody."""
    config = json.loads((folder / "config.json").read_text())
    experts, batch = int(config["num_experts"]), max(args.batches)
    gc.collect()  # the tables of the last engine
    resident, late = round(fraction * experts), args.deferred
    threads = args.threads if backend == "ffi" else None
    shared = ExpertOffloadConfig(
        kt_num_gpu_experts=resident, kt_max_deferred_experts_per_token=late, host_backend=backend, kt_cpuinfer=threads
    )
    core = build_engine(server_args(args, folder), model=model, experts=shared).core
    runner, bench, memory = (
        core.runner,
        Bench(core=core, args=args, domains=domains_of(config)),
        accelerator_bytes(core),
    )
    if isinstance(runner, FusedOffloadRunner) and runner.host_side is not None:
        runner.host_side.lane.set_signals(calls_back=args.calls)
    start = runner.residency
    row = {"backend": backend, "resident": fraction}
    for batch in args.batches:
        for name in ("first", "static") if fraction < 1 else ("all",):
            if name == "static":
                runner.apply_residency(by_frequency(bench.run(batch, ask=True), runner.residency))
            yield {**row, "batch": batch, "who": name, "copied": 0, **bench.measured(batch), **memory}
        runner.apply_residency(dataclasses.replace(start, slot_of=start.slot_of.copy()))
    if isinstance(runner, FusedOffloadRunner) and runner.host_side is not None:
        print(f"signals by calls of the driver: {runner.host_side.lane.counts().calls_back}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--backends", nargs="+", default=["ffi", "dispatch"])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.95, 0.3, 0.1, 0.5, 0.7, 1.0])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skew", type=float, default=0.4)
    parser.add_argument("--deferred", type=int, default=0, help="experts of a token that may come a layer late")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second of the accelerator's memory")
    parser.add_argument("--threads", type=int, help="ffi: threads of the host's experts")
    parser.add_argument("--calls", action="store_true", help="ffi: let the accelerator signal by calls of the driver")
    parser.add_argument("--small", action="store_true", help="a small model in float32, for CPU")
    parser.add_argument("--name", default="hybrid")
    args = parser.parse_args()
    args.dtype = "float32" if args.small else args.dtype
    return args


def main() -> None:
    """Run, print, write."""
    args, rows = parsed(), list[dict[str, object]]()
    config = QWEN3_30B_A3B | {"num_hidden_layers": args.layers} | (SMALL if args.small else {})
    chosen = DEFAULT_BACKENDS.choose(ServerArgs(), platform="cpu")[0].moe.name
    sides = {"accelerator": str(jax.devices()[0]), "host experts": chosen}
    told = {"sides": sides, "layers": args.layers, "skew": args.skew, "prompt": args.prompt, "new": args.new}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        (folder / "config.json").write_text(json.dumps(config))
        model = skewed_model(folder, args.dtype, args.skew)
        for backend in args.backends:
            for fraction in args.fractions:
                begin = time.perf_counter()
                rows += of_engine(model, args, folder, backend, fraction)
                print_table(rows)
                print(f"{write_result(args.name, rows, **told)}, {time.perf_counter() - begin:.0f} s", flush=True)
        gc.collect()
        core = build_engine(server_args(args, folder), model=on_accelerator(model)).core
        bench, memory = Bench(core=core, args=args, domains=domains_of(config)), accelerator_bytes(core)
        for batch in args.batches:
            plain = {"backend": "none", "resident": 1.0, "batch": batch, "who": "plain", "copied": 0}
            rows.append({**plain, **bench.measured(batch), **memory})
    print_table(rows)
    print(write_result(args.name, rows, **told))


if __name__ == "__main__":
    main()
