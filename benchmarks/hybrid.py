"""Experts shared out between accelerator and host: decode by the share of experts that are resident, and by who they are.

    python benchmarks/hybrid.py [--layers 4] [--batches 16] [--fractions 0.1 0.3 0.5 0.7 0.95 1.0] [--new 40] [--skew 0.4] [--deferred 0]
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/hybrid.py --small      # CPU: device 1 plays the host

Random weights under Qwen3-30B-A3B's config at a few layers. Experts differ in popularity: all embeddings share a direction, and along it
each router scores its experts by normal noise times --skew, so what is captured is real routing, of skewed frequencies (0.4 is near
what is published of Qwen3-30B-A3B: the most used 30 % of the experts of a layer run 70 % of its slots). `first` are
experts 0..N-1; `static` are the most used of a run before it, with other prompts, exchanged live. Rows take turns: whole runs, of
which the median decode step counts. `in turn` is the same step with the residents waited for before the host begins: over it, `overlap`
is what running both sides at once gains (`home`, `host`: ms of each side in such a step, alone): most where the sides take equally
long, which on a fast card is near 0.95. `plain` is the engine without experts=.
Slots on the accelerator are counted by the runner; bytes are those of the arrays there, and what the device says it uses. Programs
are kept for the next fraction: most of them are the same."""

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import Prompts, print_table, write_result
from flax import nnx
from step import QWEN3_30B_A3B, Run, drive

from routed_experts.core.experts_config import ExpertsConfig
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.assembly import assemble
from routed_experts.engine.backends import DEFAULT_BACKENDS
from routed_experts.engine.core import EngineCore
from routed_experts.execution.split_runner import SplitRunner
from routed_experts.models.decoder import FamilyDecoder
from routed_experts.models.expert_store import is_expert
from routed_experts.models.registry import ModelFolder
from routed_experts.placement.residency import most_used

SMALL = {
    "vocab_size": 4096, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}  # fmt: skip


def skewed_model(folder: Path, dtype: str, skew: float) -> FamilyDecoder:
    """Random weights, experts on the host; a router's score of expert e is moved by noise[layer, e] * skew for every token."""
    host = jax.devices("cpu")[-1]
    opened = ModelFolder.open(folder, load_format="dummy", in_parts=True)
    model = opened.load(jnp.dtype(dtype), place=lambda target: host if is_expert(target) else jax.devices()[0])
    assert isinstance(model, FamilyDecoder)
    model.embed[...] = model.embed[...] + jnp.ones((), model.embed[...].dtype)
    router, noise = model.runs[0][0]["router"], np.random.default_rng(11)
    num_layers, dim, experts = router[...].shape  # a normed token has 1 / sqrt 2 in each dim beside its own noise
    along = noise.standard_normal((num_layers, 1, experts)) * skew * 2**0.5 / dim
    across = router[...] - jnp.mean(router[...], axis=1, keepdims=True)  # its own share along that direction would be a popularity, too
    router[...] = across + jnp.asarray(along, router[...].dtype)
    return model


def on_accelerator(model: FamilyDecoder) -> FamilyDecoder:
    """The same weights, all there."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(state, jax.devices()[0]))


def by_frequency(run: Run, residency: ResidencyMap) -> ResidencyMap:
    """The experts that a run used most become resident."""
    stats = RoutingStats.from_records(out.routed_experts for out in run.outs)
    return most_used(stats.load, residency.num_resident, residency)


@contextlib.contextmanager
def in_turn(runner: SplitRunner) -> Iterator[dict[str, float]]:
    """Let the residents end before the host begins, and the host before anything follows; seconds of each side, summed."""
    kept, spent = dict(runner._programs), defaultdict(float)

    def waited(name, program):
        def start(*args):
            jax.block_until_ready(args)
            begin = time.perf_counter()
            out = jax.block_until_ready(program(*args))
            spent[name] += time.perf_counter() - begin
            return out

        return start

    runner._programs.update({key: waited(key[0], program) for key, program in kept.items() if key[0] in ("home", "host")})
    try:
        yield spent
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
    vocabulary: int
    seed: int = 0

    def run(self, batch: int, *, ask: bool = False, new: int | None = None) -> Run:
        """A batch of prompts that were never seen."""
        self.seed += 1
        prompts = Prompts(self.seed, self.vocabulary)
        return drive(self.core, prompts, batch, prompt=self.args.prompt, new=new or self.args.new, ask=ask, logprobs=True)

    def measured(self, batch: int) -> dict[str, float]:
        """Decode, both ways where there are two sides, and the share of slots that the residents ran."""
        runner, split = self.core.runner, isinstance(self.core.runner, SplitRunner)
        before = runner.slot_counts() if split else np.zeros((1, 2))
        self.run(batch, new=4)
        together, turns, spent, steps = [], [], defaultdict(float), 0
        for _ in range(self.args.rounds):
            run = self.run(batch)
            assert all(np.isfinite(out.output_logprobs.values).all() for out in run.outs), "a logprob is not finite"
            together.append(step_ms(run))
            if split:
                with in_turn(runner) as seconds:
                    turns.append(step_ms(self.run(batch)))
                for name, value in seconds.items():
                    spent[name] += value
                steps += self.args.new
        away, slots = (runner.slot_counts() - before).sum(axis=0) if split else (0, 1)
        wall, serial = statistics.median(together), statistics.median(turns) if turns else float("nan")
        return {
            "tok/s": batch * 1e3 / wall, "step ms": wall, "hits": 1.0 - away / slots, "in turn ms": serial, "overlap": serial / wall,
            "home ms": spent["home"] * 1e3 / max(steps, 1), "host ms": spent["host"] * 1e3 / max(steps, 1),
        }  # fmt: skip


def server_args(args: argparse.Namespace, folder: Path) -> ServerArgs:
    longest, widest = args.prompt + args.new + 16, max(args.batches)
    return ServerArgs(
        model_path=str(folder), skip_tokenizer_init=True, context_length=longest, max_total_tokens=widest * (longest + 16),
        precompile_bs_paddings=tuple(sorted(args.batches)), precompile_token_paddings=(max(256, widest),), mem_fraction_static=0.9,
        enable_return_routed_experts=True,
    )  # fmt: skip


def accelerator_bytes(core: EngineCore) -> dict[str, float]:
    """Of all arrays that are there, each buffer once, and as the device counts."""
    device = jax.devices()[0]
    here = {a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays() if a.devices() == {device}}
    said = device.memory_stats() or {}
    return {"arrays MB": sum(here.values()) / 1e6, "in use MB": said.get("bytes_in_use", float("nan")) / 1e6}


def of_fraction(model: FamilyDecoder, args: argparse.Namespace, folder: Path, config: dict, fraction: float) -> list[dict[str, object]]:
    """All rows of one number of residents; 1.0 once, for there `first` is everybody."""
    experts = int(config["num_experts"])
    resident = round(fraction * experts)
    gc.collect()  # the tables of the last fraction
    shared = ExpertsConfig(kt_num_gpu_experts=resident, kt_max_deferred_experts_per_token=args.deferred)
    core = assemble(server_args(args, folder), model=model, experts=shared).core
    bench, rows, memory = Bench(core=core, args=args, vocabulary=int(config["vocab_size"])), [], accelerator_bytes(core)
    start = core.runner.residency
    for batch in args.batches:
        for name in ("first", "static") if resident < experts else ("all",):
            if name == "static":
                core.runner.apply_residency(by_frequency(bench.run(batch, ask=True), core.runner.residency))
            rows.append({"batch": batch, "resident": fraction, "who": name, **bench.measured(batch), **memory})
        core.runner.apply_residency(dataclasses.replace(start, slot_of=start.slot_of.copy()))
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[16])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.95, 1.0])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skew", type=float, default=0.4)
    parser.add_argument("--deferred", type=int, default=0, help="experts of a token that may come a layer late")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a small model in float32, for CPU")
    parser.add_argument("--name", default="hybrid")
    args = parser.parse_args()
    config = QWEN3_30B_A3B | {"num_hidden_layers": args.layers} | (SMALL if args.small else {})
    args.dtype = "float32" if args.small else args.dtype
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        (folder / "config.json").write_text(json.dumps(config))
        model = skewed_model(folder, args.dtype, args.skew)
        rows: list[dict[str, object]] = []
        for fraction in args.fractions:
            rows += of_fraction(model, args, folder, config, fraction)
            print_table(rows)
        gc.collect()
        core = assemble(server_args(args, folder), model=on_accelerator(model)).core
        bench, memory = Bench(core=core, args=args, vocabulary=int(config["vocab_size"])), accelerator_bytes(core)
        for batch in args.batches:
            rows.append({"batch": batch, "resident": 1.0, "who": "plain", **bench.measured(batch), **memory})
    print_table(rows)
    auto = ServerArgs()
    sides = {"accelerator": str(jax.devices()[0]), "host experts": DEFAULT_BACKENDS.choose(auto, platform="cpu")[0].moe.name}
    print(write_result(args.name, rows, sides=sides, layers=args.layers, skew=args.skew, prompt=args.prompt, new=args.new))


if __name__ == "__main__":
    main()
