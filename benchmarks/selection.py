"""Balanced expert selection at 512 tokens, 256 experts, top-8, 384 instances: beside `lax.top_k(8)` and beside the
sequential loop.

    python benchmarks/selection.py [--repeats 30]

Experts have lognormal popularity of the given spread, and the replicas are placed by it. "choice" is the choice of
experts alone, in parallel rounds; "native" is the CPU kernel, experts and instances at once; "whole" is the public
operation as it comes, weights and counts included. All pairs are interleaved; medians. Second table: water-filling
beside the linear programme's lowest load of the fullest device (1 is the optimum). The cases and the linear
programme are those of tests/oracles."""

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, write_result

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from oracles.replica_loads import best_max_load, device_loads
from oracles.selection import popular
from routed_experts.layers.balanced_selection.admission import SelectionInputs, choose_by_rounds
from routed_experts.layers.balanced_selection.checks import check_replica_order, expert_capacity
from routed_experts.layers.balanced_selection.reference import sequential_selection
from routed_experts.layers.balanced_selection.selection import balanced_expert_selection, native_selection
from routed_experts.layers.balanced_selection.waterfill import waterfill_replicas
from routed_experts.layers.native.toolchain import unavailable_reason

TOKENS, TOP_K, INSTANCES, DEVICES = 512, 8, 384, 32
REGIMES = [(0.5, 4), (0.5, 2), (0.5, 1.25), (1, 2), (1, 1.25), (2, 2), (2, 1.25)]  # spread, capacity factor
WATERFILL_SIZES = [(288, 32), (384, 128)]

top_k = jax.jit(lambda inputs: jax.lax.top_k(inputs.scores, TOP_K))
targets = jax.jit(lambda inputs, room: choose_by_rounds(inputs.scores, room, inputs.valid, TOP_K))
native = jax.jit(lambda inputs: native_selection(inputs, TOP_K, overflows=True))
select = jax.jit(
    lambda inputs: balanced_expert_selection(
        inputs.scores,
        inputs.scores,
        inputs.replica_order[0],
        inputs.capacity,
        k=TOP_K,
        valid=inputs.valid,
        mode="reroute",
    )
)
replicas = jax.jit(waterfill_replicas, static_argnames=("num_devices", "num_instances"))


def medians(calls: dict, repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, one after another in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def selection_row(spread: float, factor: float, repeats: int) -> dict[str, object]:
    """One regime: how many slots are rerouted, in how many rounds, and what it costs."""
    scores, table = popular(0, spread, INSTANCES, DEVICES)
    order, capacity = check_replica_order(table, INSTANCES), expert_capacity(TOKENS, TOP_K, INSTANCES, factor)
    inputs = jax.device_put(
        SelectionInputs(scores, order[None], capacity, np.zeros(TOKENS, np.int32), np.ones(TOKENS, bool))
    )
    room = jnp.asarray(np.where(order >= 0, capacity[order], 0).sum(axis=1), jnp.int32)
    calls = {
        "top_k": functools.partial(top_k, inputs),
        "choice": functools.partial(targets, inputs, room),
        "whole": functools.partial(select, inputs),
    }
    if jax.default_backend() == "cpu" and unavailable_reason() is None:
        calls["native"] = functools.partial(native, inputs)
    ms = medians(calls, repeats)
    loop_ms = []
    for _ in range(3):
        start = time.perf_counter()
        law = sequential_selection(scores, scores, order, capacity, k=TOP_K)
        loop_ms.append((time.perf_counter() - start) * 1e3)
    assert np.array_equal(select(inputs).instance_ids, law.instance_ids), "a benchmark of another result"
    return {
        "spread": spread,
        "factor": factor,
        "rerouted": law.num_rerouted / (TOKENS * TOP_K),
        "overflowed": law.num_overflowed,
        "rounds": int(targets(inputs, room).rounds),
        **{f"{name} ms": value for name, value in ms.items()},
        "choice/top_k": ms["choice"] / ms["top_k"],
        **({"native/top_k": ms["native"] / ms["top_k"]} if "native" in ms else {}),
        "whole/top_k": ms["whole"] / ms["top_k"],
        "loop ms": statistics.median(loop_ms),
        "loop/whole": statistics.median(loop_ms) / ms["whole"],
    }


def waterfill_row(num_instances: int, num_devices: int, repeats: int, seeds: int = 5) -> dict[str, object]:
    """How near the fullest device is to the optimum, over some batches; the lowest and the mean."""
    shares, balance = [], []
    for seed in range(seeds):
        scores, table = popular(seed, 1.0, num_instances, num_devices)
        ids = jnp.asarray(np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32))
        fill = functools.partial(replicas, ids, table, num_devices=num_devices, num_instances=num_instances)
        load = device_loads(np.asarray(fill()), num_devices, num_instances)
        best = best_max_load(
            np.bincount(np.asarray(ids).ravel(), minlength=len(table)), table, num_devices, num_instances
        )
        shares.append(best / load.max())
        balance.append(load.mean() / load.max())
    ms = medians(
        {"fill": fill, "top_k": lambda: jax.block_until_ready(jax.lax.top_k(jnp.asarray(scores), TOP_K))}, repeats
    )
    return {
        "instances": num_instances,
        "devices": num_devices,
        "mean/max load": statistics.mean(balance),
        "of the optimum, mean": statistics.mean(shares),
        "of the optimum, lowest": min(shares),
        "ms": ms["fill"],
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    rows = [selection_row(spread, factor, args.repeats) for spread, factor in REGIMES]
    print_table(rows)
    fills = [waterfill_row(instances, devices, args.repeats) for instances, devices in WATERFILL_SIZES]
    print_table(fills)
    print(write_result(f"selection_{jax.default_backend()}", rows, waterfill=fills, repeats=args.repeats))


if __name__ == "__main__":
    main()
