"""Where a step on the CPU spends its time: each part of the native kernels beside what memory and arithmetic allow
it.

    python benchmarks/cpu_parts.py [--batches 1 8 32] [--dtypes float32 bfloat16] [--rounds 3]
    python benchmarks/cpu_parts.py --small      # one short batch: does it run

The engine runs its own kernels, compiled here with a clock at each part (cpu_parts.cpp includes the sources as they
are), so buffers and threads are those of a normal step. Steps run one at a time, from scheduling to tokens and rows on
the host, without overlap; `overlapped` is a decode step with overlap.

A part's floor is the longer of two times: its bytes (weights that are read, of the chosen experts only; keys and
values) over this machine's memory bandwidth, and its operations over the rate at which the cores multiply and add in
registers, in float32 or, with weights of bfloat16, the fastest way: in floats, in pairs of bfloat16, or in tiles. All
rates are measured first, beside a float32 product of NumPy. Data in the caches can be read faster than the floor.

Columns: `norms` is the rest of the layers' kernel; `programs` the rest between dispatch and read-back (packing,
starting two programs, embedding, angles, gathering); `host` all other Python; `sum / step` the sum of the parts'
medians over the median step."""

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import HF_CONFIG, VOCABULARY, Prompts, benchmark_config, benchmark_model, build, print_table, write_result

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, StepResult
from routed_experts.engine.loop.core import EngineCore
from routed_experts.execution.model_runner import ModelRunner, PendingStep
from routed_experts.layers.native import toolchain

PARTS = ("experts", "attention", "projections", "router", "head", "sampler", "run")
MATRICES = ("experts", "projections", "head")  # multiplied in the weights' dtype; the rest is float32
COLUMNS = ("experts", "attention", "projections", "router", "norms", "head", "sampler", "programs", "host")


def clocked_library(*, optimized: bool) -> ctypes.CDLL:
    """The native kernels with clocks, in place of the engine's own; call it before an engine is built. Without
    optimisations they compile in seconds, and no figure is of use."""
    command = toolchain.compiler()
    assert command is not None, "no C++ compiler"
    file = Path(tempfile.mkdtemp()) / "clocked.so"
    level = () if optimized else ("-O0",)
    include = (f"-I{jax.ffi.include_dir()}", f"-I{toolchain.HERE}")
    source = str(Path(__file__).with_suffix(".cpp"))
    flags = (*toolchain.FLAGS, *toolchain.simd_flags(), *level, *include)
    subprocess.run([*command, *flags, source, "-o", str(file)], check=True)
    library = ctypes.CDLL(str(file))
    library.rex_part_seconds.restype, library.rex_read_rate.restype = ctypes.POINTER(ctypes.c_double), ctypes.c_double
    library.rex_read_rate.argtypes, library.rex_multiply_rate.restype = (
        (ctypes.c_int64, ctypes.c_int, ctypes.c_int),
        ctypes.c_double,
    )
    library.rex_multiply_rate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_bool)
    library.rex_tile_rate.argtypes, library.rex_tile_rate.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_double
    toolchain.use_bf16(library, toolchain.own_bf16_gains(library))
    toolchain.library = lambda: library
    return library


def product_rate(size: int = 1536, rounds: int = 8) -> float:
    """Operations a second of a float32 product, the best of some."""
    a, b = np.ones((size, size), np.float32), np.ones((size, size), np.float32)
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)


class ClockedRunner:
    """Wraps a runner and notes when its steps begin and end, and their batches and rows."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.weight_version, self.exact = runner, runner.weight_version, runner.exact
        self.start = self.ended = 0.0
        self.batch: ModelWorkerBatch | None = None
        self.rows: np.ndarray | None = None

    def dispatch(self, batches: Sequence[ModelWorkerBatch]) -> PendingStep:
        """Pack, put, start."""
        self.batch, self.start = batches[0], time.perf_counter()
        return self._runner.dispatch(batches)

    def read(self, pending: PendingStep) -> list[StepResult]:
        """Wait for the device."""
        results = self._runner.read(pending)
        jax.block_until_ready(results[0].rows)
        self.ended, self.rows = time.perf_counter(), np.asarray(results[0].rows)
        return results


def unpack_rows(rows: np.ndarray, tokens: int, spec: CaptureSpec) -> np.ndarray:
    """Ids [N, layers, top_k] of a step's tokens; `rows` are ids or, in int32, end with packed words."""
    if rows.dtype == np.int32:
        rows = np.ascontiguousarray(rows[:tokens, -spec.row_words :]).view(spec.dtype)[:, : spec.row_ids]
    return rows[:tokens].reshape(tokens, spec.num_moe_layers, spec.top_k)


def required_work(
    batch: ModelWorkerBatch, rows: np.ndarray, itemsize: int, pool_itemsize: int
) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of each part that one step cannot do without."""
    config, tokens = benchmark_config(), batch.kv_slots.size
    layers, hidden, spec, mixed = (
        config.num_layers,
        config.hidden_size,
        config.capture_spec,
        config.num_heads * config.head_dim,
    )
    projected, key_row = mixed + 2 * config.num_kv_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    ids = unpack_rows(rows, tokens, config.capture_spec)
    chosen = sum(np.unique(ids[:, layer]).size for layer in range(layers))
    requests, expert = int((np.diff(batch.query_starts) > 0).sum()), 3 * hidden * HF_CONFIG["moe_intermediate_size"]
    looked_at = int((np.asarray(batch.positions)[:tokens] + 1).sum())
    matrices, router = hidden * projected + mixed * hidden, hidden * spec.num_experts
    return {
        "experts": (chosen * expert * itemsize, 2.0 * layers * tokens * spec.top_k * expert),
        "attention": (
            layers * (int(batch.seq_lens.sum()) + tokens) * key_row * pool_itemsize,
            4.0 * layers * looked_at * mixed,
        ),
        "projections": (layers * matrices * itemsize, 2.0 * layers * tokens * matrices),
        "router": (layers * router * itemsize, 2.0 * layers * tokens * router),
        "head": (hidden * VOCABULARY * itemsize, 2.0 * requests * hidden * VOCABULARY),
    }


def measure_steps(
    core: EngineCore, clock: ClockedRunner, seconds: np.ndarray, batch: int, turn: int, itemsize: int
) -> list[dict[str, object]]:
    """One batch, step by step: milliseconds of its parts, and their work."""
    core.flush_cache()
    core.add(Prompts(turn).requests(batch, prompt=128, new=40, ask=True))
    steps = []
    while not core.is_idle:
        seconds[:] = 0.0
        start = time.perf_counter()
        core.step()
        core.drain()
        total = time.perf_counter() - start
        if clock.batch is None:
            continue
        part = dict(zip(PARTS, seconds.tolist(), strict=True))
        layers = sum(part[name] for name in COLUMNS[:4])
        span = clock.ended - clock.start
        part |= {
            "norms": part["run"] - layers,
            "programs": span - part["run"] - part["head"] - part["sampler"],
            "host": total - span,
        }
        phase = "decode" if clock.batch.mode is ForwardMode.DECODE else "prefill"
        work = required_work(clock.batch, clock.rows, itemsize, clock._runner.config.pool.dtype.itemsize)
        steps.append({"phase": phase, "tokens": clock.batch.kv_slots.size, "step": total, "work": work} | part)
        clock.batch = None
    return steps


def overlapped(core: EngineCore, batch: int, turn: int) -> float:
    """Seconds of a decode step while the next step is in flight."""
    core.flush_cache()
    reqs = Prompts(1000 + turn).requests(batch, prompt=128, new=40, ask=True)
    core.add(reqs)
    while not all(req.is_prefilled for req in reqs):
        core.step()
    seconds, last = [], time.perf_counter()
    while not core.is_idle:
        core.step()
        seconds.append(time.perf_counter() - last)
        last = time.perf_counter()
    return statistics.median(seconds)


def table_rows(steps: list[dict[str, object]], rates: dict[str, float], **labels: object) -> list[dict[str, object]]:
    """A row of milliseconds, one of floors, one of ratios, from the medians of steps of the same phase and size."""
    step = statistics.median(step_times["step"] for step_times in steps)
    times = {name: statistics.median(step_times[name] for step_times in steps) * 1e3 for name in COLUMNS}
    floors = {}
    for name in steps[0]["work"]:
        num_bytes, operations = (statistics.median(step["work"][name][index] for step in steps) for index in (0, 1))
        multiplied = rates[labels["dtype"] if name in MATRICES else "float32"]
        floors[name] = max(num_bytes / rates["read"], operations / multiplied) * 1e3
    sum_of_parts = sum(times[name] for name in COLUMNS)
    columns = {
        "ms": times,
        "floor": floors,
        "ms / floor": {name: times[name] / floor for name, floor in floors.items()},
    }
    of_step = {"ms": step * 1e3, "floor": sum(floors.values()), "ms / floor": step * 1e3 / sum(floors.values())}
    dashes = ("-",) * len(COLUMNS)
    return [
        {
            **labels,
            "of": kind,
            **dict(zip(COLUMNS, dashes, strict=True)),
            **values,
            "step": of_step[kind],
            "sum / step": sum_of_parts / step / 1e3,
        }
        for kind, values in columns.items()
    ]


def main() -> None:
    """Probe, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--small", action="store_true", help="one short batch of kernels without optimisations: does it run"
    )
    args = parser.parse_args()
    if args.small:
        vars(args).update(batches=[1], dtypes=["float32"], rounds=1)
    library = clocked_library(optimized=not args.small)
    threads = os.cpu_count() or 1
    probes = 1 if args.small else 20
    rates = {"read": library.rex_read_rate(1 << 29, threads, min(6, probes))}
    ways = {way: library.rex_multiply_rate(threads, probes, way == "pairs") for way in ("floats", "pairs")}
    ways["tiles"] = library.rex_tile_rate(threads, probes)
    rates |= {"float32": ways["floats"], "bfloat16": max(ways.values())}
    probe = {
        "read GB/s": rates["read"] / 1e9,
        **{f"{way} Gop/s": rate / 1e9 for way, rate in ways.items()},
        "NumPy's product of floats, Gop/s": product_rate() / 1e9,
    }
    print(probe)
    seconds = np.ctypeslib.as_array(library.rex_part_seconds(), (len(PARTS),))
    table: list[dict[str, object]] = []
    for dtype in args.dtypes:
        core = build(benchmark_model(jnp.dtype(dtype)), capture=True).core
        clock = ClockedRunner(core.runner)
        for batch in args.batches:
            core.runner = clock
            runs = [
                measure_steps(core, clock, seconds, batch, turn, jnp.dtype(dtype).itemsize)
                for turn in range(args.rounds + 1)
            ]
            core.runner = clock._runner
            overlapped_ms = statistics.median(overlapped(core, batch, turn) for turn in range(args.rounds)) * 1e3
            steps = [step for run in runs[1:] for step in run]  # the first one warms up
            for phase in ("decode", "prefill"):
                most = max(step["tokens"] for step in steps if step["phase"] == phase)
                selected = [step for step in steps if step["phase"] == phase and step["tokens"] == most]
                labels = {"dtype": dtype, "batch": batch, "phase": phase, "tokens": most}
                table += table_rows(selected, rates, **labels, overlapped=overlapped_ms if phase == "decode" else "-")
            print_table(table[-6:])
    print(write_result("cpu_parts", table, probe=probe, rounds=args.rounds))


if __name__ == "__main__":
    main()
