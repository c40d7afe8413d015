"""What a job of the host's experts costs by itself: a scan of layers that do next to nothing, with and without one in
each.

    python benchmarks/expert_offload_latency.py

Rows: no job; a job without slots (copies and signals alone), signalled by words in memory and by callbacks of the
driver; one slot, and sixteen, of experts of Qwen3-30B-A3B's shape in bfloat16. us a layer, the median of runs of 48
layers; `busy`: of the host's threads."""

import argparse
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import print_table, write_result

from routed_experts.layers.expert_slots import ExpertTable
from routed_experts.layers.native.host_expert_queue import HostExpertQueue

LAYERS, TOKENS, TOP_K, HIDDEN, WIDTH, EXPERTS = 48, 16, 8, 2048, 768, 64
RUNS = 12


def main() -> None:
    """Run, print, write."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    host = jax.devices("cpu")[0]
    shapes = (EXPERTS, HIDDEN, 2 * WIDTH), (EXPERTS, WIDTH, HIDDEN)
    with jax.default_device(host):
        store = ExpertTable(*(jnp.full(shape, 1e-3, jnp.bfloat16) for shape in shapes))
    queue = HostExpertQueue([store], num_experts=EXPERTS, num_threads=max(1, len(os.sched_getaffinity(0)) - 1))
    weights, x = jnp.ones((TOKENS, TOP_K), jnp.float32), jnp.ones((TOKENS, HIDDEN), jnp.bfloat16)

    def timed(name: str, slots: int | None, *, callbacks: bool = False) -> dict[str, object]:
        ids = np.full((LAYERS, TOKENS * TOP_K), -1, np.int32)
        noise = np.random.default_rng(0)
        for row in ids:
            row[: slots or 0] = noise.permutation(EXPERTS)[: slots or 0]

        def layer(x, ids):
            y = x * 0.5
            if slots is not None:
                y, out = queue.wait(queue.submit(y, jnp.int32(0), ids, weights, store=0))
                y = y + out.astype(y.dtype)
            return y, None

        run = (
            jax.jit(lambda x, ids: jax.lax.scan(layer, x, ids.reshape(LAYERS, TOKENS, TOP_K))[0])
            .lower(x, ids)
            .compile()
        )
        queue.set_signals(callbacks=callbacks)
        on_device, spent = jax.device_put(ids), []
        for _ in range(RUNS):
            before, begin = queue.stats().busy_s, time.perf_counter()
            jax.block_until_ready(run(x, on_device))
            spent.append(((time.perf_counter() - begin) * 1e6 / LAYERS, (queue.stats().busy_s - before) * 1e6 / LAYERS))
        took, busy = (statistics.median(column) for column in zip(*spent, strict=True))
        row = {
            "layers": name,
            "us": took,
            "busy us": busy,
            "signals": "callbacks" if queue.stats().uses_callbacks else "words",
        }
        print(row, flush=True)
        return row

    rows = [timed("nothing", None), timed("no slot", 0), timed("no slot", 0, callbacks=True)]
    rows += [timed(f"{slots} slots", slots, callbacks=callbacks) for slots in (1, 16) for callbacks in (False, True)]
    print_table(rows)
    print(write_result("expert_offload_latency", rows))


if __name__ == "__main__":
    main()
