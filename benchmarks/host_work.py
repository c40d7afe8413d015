"""Host work of a decode step: all Python between two dispatches, as CPU time of the engine thread.

    python benchmarks/host_work.py [--batch 32]

Waiting for the device is left out: it is no work, and on a CPU backend it is the model itself. So is the time inside
the compiled programs' calls, which are the dispatches themselves and on CPU may run a part of the model; it is given
beside."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from common import Prompts, benchmark_model, build, print_table, write_result

from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, StepResult
from routed_experts.execution.model_runner import ModelRunner, PendingStep


class TimedRunner:
    """A runner whose calls are timed; stands in for it in the core."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self.weight_version, self.exact = runner, runner.weight_version, runner.exact
        self.dispatching = self.reading = self.calling = 0.0
        self.mode: ForwardMode | None = None
        runner._programs = {key: self._timed(program) for key, program in runner._programs.items()}

    def dispatch(self, batches: Sequence[ModelWorkerBatch]) -> PendingStep:
        """Pack, put, start; `calling` is what the programs took of it."""
        start = time.thread_time()
        pending = self._runner.dispatch(batches)
        self.dispatching += time.thread_time() - start
        self.mode = batches[0].mode
        return pending

    def read(self, pending: PendingStep) -> list[StepResult]:
        """Wait for the device."""
        start = time.thread_time()
        results = self._runner.read(pending)
        self.reading += time.thread_time() - start
        return results

    def _timed(self, program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.thread_time()
            out = program(*args)
            self.calling += time.thread_time() - start
            return out

        return call


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=200)
    args = parser.parse_args()
    core = build(benchmark_model(jnp.dtype("float32")), capture=True).core
    timed = TimedRunner(core.runner)
    core.runner = timed
    core.add(Prompts().requests(args.batch, prompt=32, new=args.new, ask=True))
    host, dispatch, read, calls, python = [], [], [], [], []
    while not core.is_idle:
        timed.dispatching = timed.reading = timed.calling = 0.0
        timed.mode = None
        start = time.thread_time()
        core.step()
        total = time.thread_time() - start
        if timed.mode is ForwardMode.DECODE:
            host.append((total - timed.dispatching - timed.reading) * 1e3)
            dispatch.append((timed.dispatching - timed.calling) * 1e3)
            read.append(timed.reading * 1e3)
            python.append((total - timed.calling) * 1e3)
            calls.append(timed.calling * 1e3)
    rows: list[dict[str, object]] = [
        {
            "part": name,
            "median ms": statistics.median(values),
            "p90 ms": sorted(values)[len(values) * 9 // 10],
            "steps": len(values),
        }
        for name, values in (
            ("schedule, file rows, commit", host),
            ("pack, put", dispatch),
            ("read-back", read),
            ("these three: Python between two dispatches", python),
            ("beside: calls of two programs", calls),
        )
    ]
    print_table(rows)
    print(write_result("host_work_cpu", rows, batch=args.batch))


if __name__ == "__main__":
    main()
