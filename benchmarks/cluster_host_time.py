"""Host time of a decode step on process 0 of a group: without followers, with one, and with seven, on loopback.

    python benchmarks/cluster_host_time.py [--batch 32] [--followers 0 1 7]

The device is a table of tokens and rows in NumPy, so that a step is host work alone: schedule, pack, send the order,
read, commit, file the rows of 48 layers with 8 experts a token. `rows` off: an engine that records none.
Followers are processes that receive each order and report it as done. Blocks of steps are interleaved. `CPU ms` is the
time of the engine's thread on its core; `wall ms` has what other processes take of the machine, too."""

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
from common import Prompts, print_table, write_result

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, StepResult
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.loop.core import EngineCore
from routed_experts.engine.process_group import FollowingGroup, LeadingGroup, StepDigests
from routed_experts.engine.rendezvous import Rendezvous, join
from routed_experts.execution.forward_batch import StepInputs, pack_ranks, to_batch_shape
from routed_experts.execution.model_runner import PendingStep
from routed_experts.execution.orders import NO_FOLLOWERS, OrderKind, OrderSender
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.scheduler import Scheduler

ROWS = CaptureSpec(num_hidden_layers=48, layer_ids=tuple(range(48)), num_experts=128, top_k=8)
CONTEXT, PAGE, VOCABULARY = 2048, 16, 8192
FIRST_PORT = 23_000


class TableDevice:
    """Stands in for a ModelRunner: sends the orders that it would, and its tokens come from a table."""

    def __init__(self, orders: OrderSender, *, rows: bool) -> None:
        self.orders, self.weight_version, self.exact = orders, 0, True
        self.send_s, self.order_bytes = list[float](), 0
        self._table = np.random.default_rng(0).integers(0, VOCABULARY, (256, 1024, 2)).astype(np.int32)
        ids = np.random.default_rng(1).integers(0, 128, (1024, ROWS.num_moe_layers * ROWS.top_k)).astype(np.uint8)
        self._rows, self._count = ids if rows else None, 0

    def dispatch(self, batches: Sequence[ModelWorkerBatch]) -> PendingStep:
        """Send the step's order, and look up its tokens."""
        inputs = StepInputs.from_batches(batches, to_batch_shape(batches[0]), pack_ranks(batches))
        with self.orders.in_order():
            if self.orders is not NO_FOLLOWERS:
                since = time.perf_counter()
                self.orders.send(OrderKind.STEP, inputs.head, inputs.arrays)
                self.send_s.append(time.perf_counter() - since)
                self.order_bytes = inputs.packed.nbytes
        self._count += 1
        sampled = self._table[self._count % 256, : inputs.shape.num_requests]
        rows = None if self._rows is None else self._rows[: inputs.shape.num_tokens]
        return PendingStep(batches=tuple(batches), sampled=sampled, scored=None, rows=rows, weight_version=0)

    def read(self, pending: PendingStep) -> list[StepResult]:
        """The tokens of a step, as ModelRunner returns them."""
        self.orders.begin_wait()
        sampled = np.asarray(pending.sampled)
        self.orders.end_wait(sampled)
        result = StepResult(
            tokens=sampled[:, 0],
            logprobs=np.ascontiguousarray(sampled[:, 1]).view(np.float32),
            top_logprobs=None,
            top_ids=None,
            prompt_logprobs=None,
            prompt_top_logprobs=None,
            prompt_top_ids=None,
            rows=pending.rows,
            weight_version=0,
        )
        return [result]


def new_core(device: TableDevice, batch: int, *, rows: bool) -> EngineCore:
    """A core without a prefix cache."""
    args = ServerArgs(
        precompile_bs_paddings=(batch,),
        precompile_token_paddings=(1024,),
        context_length=CONTEXT,
        page_size=PAGE,
        disable_radix_cache=True,
    )
    buckets = Buckets.from_args(args, context_length=CONTEXT)
    pages = batch * CONTEXT // PAGE + 1
    capturer = RoutedExpertsCapturer.create(ROWS, num_slots=pages * PAGE, page_size=PAGE, enable=rows)
    scheduler = Scheduler(args, buckets, num_pages=pages, vocab_size=VOCABULARY)
    return EngineCore(DataRanks([scheduler], args), device, [capturer])


def time_block(core: EngineCore, prompts: Prompts, batch: int, steps: int) -> tuple[list[float], list[float]]:
    """CPU and wall seconds of decode steps."""
    core.add(prompts.requests(batch, prompt=32, new=steps, ask=core.capturers[0].enabled))
    cpu, wall = list[float](), list[float]()
    while not core.is_idle:
        in_flight = core._pending
        start, since = time.thread_time(), time.perf_counter()
        core.step()
        if in_flight is not None and in_flight.batches[0].mode is ForwardMode.DECODE and core._pending is not None:
            cpu.append(time.thread_time() - start)
            wall.append(time.perf_counter() - since)
    return cpu, wall


@contextlib.contextmanager
def followers(count: int) -> Iterator[OrderSender]:
    """So many follower processes."""
    if not count:
        yield NO_FOLLOWERS
        return
    address = f"127.0.0.1:{FIRST_PORT + 2 * count}"
    rendezvous = Rendezvous(DistConfig(nnodes=count + 1, dist_init_addr=address), {})
    command = [sys.executable, __file__, "--follow", address, str(count + 1)]
    started = [subprocess.Popen([*command, str(rank)]) for rank in range(1, count + 1)]
    group = LeadingGroup(DistConfig(nnodes=count + 1, dist_init_addr=address), rendezvous.wait_for_all())
    group.refuse_late(rendezvous)
    group.start()
    yield group
    group.close()
    for process in started:
        process.wait()


def follow(address: str, nnodes: int, rank: int) -> None:
    """The life of a follower process: receive, digest, report."""
    dist = DistConfig(nnodes=nnodes, node_rank=rank, dist_init_addr=address)
    group, digests = FollowingGroup(dist, {0: join(dist, {})}), StepDigests()
    group.start()
    while (order := group.receive()).kind is not OrderKind.STOP:
        digests.run(order)
        group.done(order.seq)
    group.stopped(order.seq)


def measure(groups: dict[int, OrderSender], args: argparse.Namespace, *, rows: bool) -> list[dict[str, object]]:
    """A row of the table for each number of followers."""
    prompts = Prompts(vocabulary=VOCABULARY)
    devices = {count: TableDevice(group, rows=rows) for count, group in groups.items()}
    cores = {count: new_core(device, args.batch, rows=rows) for count, device in devices.items()}
    cpu: dict[int, list[float]] = {count: [] for count in cores}
    wall: dict[int, list[float]] = {count: [] for count in cores}
    for number in range(args.rounds + 1):
        for count, core in cores.items():
            block = time_block(core, prompts, args.batch, args.steps)
            if number:  # the first round warms up
                cpu[count].append(statistics.median(block[0]))
                wall[count].append(statistics.median(block[1]))
    first = args.followers[0]
    return [
        {
            "rows": "on" if rows else "off",
            "followers": count,
            "CPU ms": statistics.median(cpu[count]) * 1e3,
            "CPU ratio": statistics.median(ours / none for ours, none in zip(cpu[count], cpu[first], strict=True)),
            "wall ms": statistics.median(wall[count]) * 1e3,
            "wall ratio": statistics.median(ours / none for ours, none in zip(wall[count], wall[first], strict=True)),
            "send us": statistics.median(device.send_s) * 1e6 if device.send_s else 0.0,
            "order bytes": device.order_bytes,
        }
        for count, device in devices.items()
    ]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32, help="requests of a step")
    parser.add_argument("--followers", type=int, nargs="+", default=[0, 1, 7], help="processes beside process 0")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of a block")
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each number of followers")
    parser.add_argument("--follow", nargs=3, metavar=("ADDRESS", "NNODES", "RANK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        follow(args.follow[0], int(args.follow[1]), int(args.follow[2]))
        return
    with contextlib.ExitStack() as stack:
        groups = {count: stack.enter_context(followers(count)) for count in args.followers}
        rows = [row for with_rows in (True, False) for row in measure(groups, args, rows=with_rows)]
    print_table(rows)
    print(write_result("cluster_host_time_cpu", rows, batch=args.batch, steps=args.steps, rounds=args.rounds))


if __name__ == "__main__":
    main()
