"""Decode speed with experts on the host, by the share of experts that are resident, and by which they are.

    python benchmarks/expert_offload.py [--layers 4] [--batches 1 4 16 64] [--fractions 0.95 0.3 0.1 0.5 0.7 1]
    JAX_NUM_CPU_DEVICES=2 python benchmarks/expert_offload.py --small      # CPU

The model and its prompts are those of domains.py; tokens are drawn at temperature 1, so that requests do not all
repeat one loop. `first`: experts 0 to N-1. `static`: the most used experts of an earlier run with other prompts,
swapped in while the engine runs. Residents that follow the load: residency.py. Rows are measured in turns of complete
runs; the figure is the median decode step.

Columns. `serial`: the same step, but the device waits for the host's experts where they are submitted. `overlap`:
serial over the step, the gain of running both at once. `host`: ms of the host's threads in a serial step. `device`: ms
to read the residents of a step at --bandwidth, less than they take. `bound`: the serial step over itself without the
shorter of host and device. `of bound`: overlap over it. `plain`: without experts=. Hits are counted by the runner;
bytes are those of the arrays on the device, and what the device reports. Results are written after every engine."""

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from common import print_table, write_result
from domains import Domain, build_domains, skewed_checkpoint
from flax import nnx
from step import Run, drive

from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.builder import build_engine
from routed_experts.engine.control.resident_expert_updater import ResidentExpertUpdater
from routed_experts.engine.loop.core import EngineCore
from routed_experts.execution.offload.offload_runner import OffloadRunner
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.placement.residency import most_used


def on_accelerator(model: FamilyDecoder) -> FamilyDecoder:
    """The same weights, all on the accelerator."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(state, jax.devices()[0]))


def by_frequency(run: Run, residency: ResidencyMap) -> ResidencyMap:
    """The experts that a run used most become resident."""
    stats = RoutingStats.from_records(out.routed_experts for out in run.outs)
    return most_used(stats.load, residency.num_resident, residency)


@contextlib.contextmanager
def serial(runner: OffloadRunner) -> Iterator[None]:
    """Let the device wait for each host job where it is submitted."""
    queue = runner.host.queue
    callbacks = queue.stats().uses_callbacks
    queue.set_signals(serial=True, callbacks=callbacks)
    try:
        yield
    finally:
        queue.set_signals(serial=False, callbacks=callbacks)


def step_ms(run: Run) -> float:
    return statistics.median(run.steps) * 1e3


@dataclasses.dataclass(kw_only=True)
class Bench:
    """One engine core and how it is driven."""

    core: EngineCore
    args: argparse.Namespace
    domains: tuple[Domain, Domain]
    host_s: float = 0.0

    def run(self, batch: int, *, domain: int = 0, ask: bool = False, new: int | None = None) -> Run:
        """A batch of new prompts; `host_s` becomes the seconds of the host's threads in its decode steps."""
        options = {"prompt": self.args.prompt, "new": new or self.args.new, "ask": ask, "logprobs": True}
        host, before = getattr(self.core.runner, "host", None), []

        def prefilled() -> None:
            before.append(0.0 if host is None else host.queue.stats().busy_s)

        run = drive(self.core, self.domains[domain], batch, **options, on_prefilled=prefilled)
        self.host_s = 0.0 if host is None else host.queue.stats().busy_s - before[0]
        return run

    def measured(self, batch: int, *, domain: int = 0) -> dict[str, float]:
        """Decode, both ways where experts are on the host, and the share of slots that the residents ran."""
        runner, offloaded = self.core.runner, isinstance(self.core.runner, OffloadRunner)
        has_host = offloaded and runner.host is not None
        before = runner.slot_counts() if offloaded else np.zeros((1, 2))
        self.run(batch, domain=domain, new=4)
        together, in_turn, host_s = [], [], []
        for _ in range(self.args.rounds):
            run = self.run(batch, domain=domain)
            assert all(np.isfinite(out.output_logprobs.values).all() for out in run.outs), "a logprob is not finite"
            together.append(step_ms(run))
            if has_host:
                with serial(runner):
                    in_turn.append(step_ms(self.run(batch, domain=domain)))
                    host_s.append(self.host_s)
        on_host, slots = (runner.slot_counts() - before).sum(axis=0) if offloaded else (0, 1)
        row = {"step ms": statistics.median(together), "hits": 1.0 - on_host / slots}
        row["tok/s"] = batch * 1e3 / row["step ms"]
        if not has_host:
            return row | dict.fromkeys(
                ("serial ms", "host ms", "device ms", "overlap", "bound", "of bound"), float("nan")
            )
        wall, host = statistics.median(in_turn), statistics.mean(host_s) * 1e3 / (self.args.new - 1)
        device = self.residents_ms(batch, domain)
        overlap, bound = wall / row["step ms"], wall / (wall - min(device, host))
        sides = {"serial ms": wall, "host ms": host, "device ms": device}
        return {**row, **sides, "overlap": overlap, "bound": bound, "of bound": overlap / bound}

    def residents_ms(self, batch: int, domain: int) -> float:
        """Milliseconds to read the residents that a decode step runs, all layers, from the accelerator's memory."""
        runner, run = self.core.runner, self.run(batch, domain=domain, ask=True, new=8)
        rows = np.stack([out.routed_experts.ids[self.args.prompt :] for out in run.outs])  # [B, steps, M, K]
        slots = runner.residency.slot_of[np.arange(rows.shape[2])[:, None], rows]
        read = [
            len(np.unique(layer[layer >= 0])) for step in np.moveaxis(slots, 1, 0) for layer in np.moveaxis(step, 1, 0)
        ]
        (table, *_) = runner.model.host.values()
        expert_bytes = sum(array.nbytes for array in (table.gate_up, table.down)) / table.down.shape[0]
        return sum(read) / rows.shape[1] * expert_bytes / self.args.bandwidth * 1e3

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Let the residents follow the load meanwhile."""
        core, spec = self.core, self.core.runner.model.config.capture_spec
        core.after_step = ResidentExpertUpdater(core.capturers[0], core.runner, top_k=spec.top_k).after_step
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
    """Bytes of all arrays on the accelerator, each buffer once, and as the device counts."""
    device = jax.devices()[0]
    buffers = {a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays() if a.devices() == {device}}
    stats = device.memory_stats() or {}
    return {"arrays MB": sum(buffers.values()) / 1e6, "in use MB": stats.get("bytes_in_use", float("nan")) / 1e6}


def rows_of_engine(
    model: FamilyDecoder, args: argparse.Namespace, folder: Path, fraction: float
) -> Iterator[dict[str, object]]:
    """All rows of one number of residents; a fraction of 1.0 has one row a batch, because `first` has all experts."""
    config = json.loads((folder / "config.json").read_text())
    gc.collect()  # the tables of the last engine
    experts = ExpertOffloadConfig(
        kt_num_gpu_experts=round(fraction * int(config["num_experts"])),
        kt_max_deferred_experts_per_token=args.deferred,
        kt_cpuinfer=args.threads,
    )
    core = build_engine(server_args(args, folder), model=model, experts=experts).core
    runner, memory = core.runner, accelerator_bytes(core)
    bench = Bench(core=core, args=args, domains=build_domains(config))
    if runner.host is not None:
        runner.host.queue.set_signals(callbacks=args.callbacks)
    start = runner.residency
    for batch in args.batches:
        for name in ("first", "static") if fraction < 1 else ("all",):
            if name == "static":
                runner.apply_residency(by_frequency(bench.run(batch, ask=True), runner.residency))
            yield {"resident": fraction, "batch": batch, "who": name, **bench.measured(batch), **memory}
        runner.apply_residency(dataclasses.replace(start, slot_of=start.slot_of.copy()))
    if runner.host is not None:
        print(f"signals by callbacks of the driver: {runner.host.queue.stats().uses_callbacks}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.95, 0.3, 0.1, 0.5, 0.7, 1.0])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skew", type=float, default=0.4)
    parser.add_argument("--deferred", type=int, default=0, help="experts of a token that may come a layer late")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second of the accelerator's memory")
    parser.add_argument("--threads", type=int, help="threads of the host's experts")
    parser.add_argument("--callbacks", action="store_true", help="let the device signal by callbacks of its driver")
    parser.add_argument("--small", action="store_true", help="a small model in float32, for CPU")
    parser.add_argument("--name", default="expert_offload")
    args = parser.parse_args()
    args.dtype = "float32" if args.small else args.dtype
    return args


def main() -> None:
    """Run, print, write."""
    args, rows = parsed(), list[dict[str, object]]()
    settings = {name: vars(args)[name] for name in ("layers", "skew", "prompt", "new")}
    settings["accelerator"] = str(jax.devices()[0])
    with skewed_checkpoint(args) as (config, folder, model):
        for fraction in args.fractions:
            begin = time.perf_counter()
            rows += rows_of_engine(model, args, folder, fraction)
            print_table(rows)
            print(f"{write_result(args.name, rows, **settings)}, {time.perf_counter() - begin:.0f} s", flush=True)
        gc.collect()
        core = build_engine(server_args(args, folder), model=on_accelerator(model)).core
        bench, memory = Bench(core=core, args=args, domains=build_domains(config)), accelerator_bytes(core)
        for batch in args.batches:
            plain = {"resident": 1.0, "batch": batch, "who": "plain"}
            rows.append({**plain, **bench.measured(batch), **memory})
    print_table(rows)
    print(write_result(args.name, rows, **settings))


if __name__ == "__main__":
    main()
