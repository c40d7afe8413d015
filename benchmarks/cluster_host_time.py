"""Host time of a decode step on process 0 of a group: without followers, with one, and with seven, on loopback.

    python benchmarks/cluster_host_time.py [--batch 32 128] [--followers 0 1 3 7] [--device-ms 0 4]

The device is a table of tokens and rows in NumPy, so that a step is host work alone: schedule, pack, hand over the
order, read, commit, file the rows of 48 layers with 8 experts a token. `rows` off: an engine that records none.
Followers are processes that receive each order and report it as done. Blocks of steps are interleaved.

    device ms   how long a step of the device takes, which is slept; 0: the engine's thread never waits, and competes
                for the interpreter with the thread that sends
    CPU ms      time of the engine's thread on its core
    wall ms     time of a step without its wait; has what other processes take of the machine, too
    ratio       to the first number of followers: median of the pairs of blocks, with the interval that holds the median
                of all such pairs with 95 %
    send us     of the engine's thread: to hand the order over
    left us     from handing the order over until it has left to the last follower
    thread us   of the sending thread on its core, an order to all followers"""

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from common import Prompts, print_table, write_result

from routed_experts.capture.routed_experts_capturer import RoutedExpertsCapturer
from routed_experts.core.buckets import Buckets
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.model_worker_batch import ForwardMode, ModelWorkerBatch, StepResult
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.group import process_group
from routed_experts.engine.group.process_group import FollowingGroup, StepDigests
from routed_experts.engine.group.rendezvous import Rendezvous, join
from routed_experts.engine.loop.core import EngineCore
from routed_experts.execution.forward_batch import StepInputs, pack_ranks, to_batch_shape
from routed_experts.execution.model_runner import PendingStep
from routed_experts.execution.order_channel import OrderChannel
from routed_experts.execution.orders import NO_FOLLOWERS, Order, OrderKind, OrderSender
from routed_experts.scheduling.data_ranks import DataRanks
from routed_experts.scheduling.scheduler import Scheduler

ROWS = CaptureSpec(num_hidden_layers=48, layer_ids=tuple(range(48)), num_experts=128, top_k=8)
CONTEXT, PAGE, VOCABULARY = 2048, 16, 8192
FIRST_PORT = 23_000
LONGEST_S = 60.0  # that the last order of a block may take to leave


class TimedChannel(OrderChannel):
    """Notes when each order has left to all followers, and the time of the sending thread on its core."""

    def __init__(self, *args: object, **options: object) -> None:
        self.left_at, self.cpu_s = dict[int, float](), dict[int, float]()
        self._left = threading.Condition()
        super().__init__(*args, **options)

    def _send_now(self, orders: Sequence[Order]) -> None:
        since = time.thread_time()
        super()._send_now(orders)
        seqs = [order.seq for order in orders]
        self.cpu_s |= dict.fromkeys(seqs, (time.thread_time() - since) / max(1, len(seqs)))
        with self._left:
            self.left_at |= dict.fromkeys(seqs, time.perf_counter())
            self._left.notify_all()

    def wait_for(self, seq: int) -> None:
        """Wait until that order has left. Raises TimeoutError."""
        with self._left:
            if not self._left.wait_for(lambda: seq in self.left_at, LONGEST_S):
                raise TimeoutError(f"order {seq} has not left within {LONGEST_S:.0f} s")


class TableDevice:
    """Stands in for a ModelRunner: sends the orders that it would, and its tokens come from a table."""

    def __init__(self, orders: OrderSender, *, rows: bool, step_s: float) -> None:
        self.orders, self.weight_version, self.exact = orders, 0, True
        self.send_s, self.sent_at, self.order_bytes = list[float](), dict[int, float](), 0
        self.waited_s = self.waited_cpu_s = 0.0  # in the last `read`
        self._step_s, self._free_at, self._ends = step_s, 0.0, deque[float]()
        self._table = np.random.default_rng(0).integers(0, VOCABULARY, (256, 1024, 2)).astype(np.int32)
        ids = np.random.default_rng(1).integers(0, 128, (1024, ROWS.num_moe_layers * ROWS.top_k)).astype(np.uint8)
        self._rows, self._count = ids if rows else None, 0

    def dispatch(self, batches: Sequence[ModelWorkerBatch]) -> PendingStep:
        """Send the step's order, and look up its tokens."""
        inputs = StepInputs.from_batches(batches, to_batch_shape(batches[0]), pack_ranks(batches))
        with self.orders.in_order():
            if self.orders is not NO_FOLLOWERS:
                since = time.perf_counter()
                seq = self.orders.send(OrderKind.STEP, inputs.head, inputs.arrays)
                self.send_s.append(time.perf_counter() - since)
                self.sent_at[seq], self.order_bytes = since, inputs.packed.nbytes
        if self._step_s:
            self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
            self._ends.append(self._free_at)
        self._count += 1
        sampled = self._table[self._count % 256, : inputs.shape.num_requests]
        rows = None if self._rows is None else self._rows[: inputs.shape.num_tokens]
        return PendingStep(batches=tuple(batches), sampled=sampled, scored=None, rows=rows, weight_version=0)

    def read(self, pending: PendingStep) -> list[StepResult]:
        """The tokens of a step, as ModelRunner returns them."""
        self.orders.begin_wait()
        if self._step_s:
            self._wait()
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

    def _wait(self) -> None:
        """Sleep until the step ends; the time of that is no host time."""
        cpu, since = time.thread_time(), time.perf_counter()
        time.sleep(max(0.0, self._ends.popleft() - since))
        self.waited_s, self.waited_cpu_s = time.perf_counter() - since, time.thread_time() - cpu


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
            device = core.runner
            cpu.append(time.thread_time() - start - device.waited_cpu_s)
            wall.append(time.perf_counter() - since - device.waited_s)
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
    group = process_group.LeadingGroup(DistConfig(nnodes=count + 1, dist_init_addr=address), rendezvous.wait_for_all())
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
        digests.add_order(order)
        group.done(order.seq)
    group.stopped(order.seq)


def ratio(ours: list[float], first: list[float]) -> tuple[float, float, float]:
    """Median of the ratios of pairs, and the order statistics that hold the true one with at least 95 %."""
    ratios = sorted(our / one for our, one in zip(ours, first, strict=True))
    count, below, rank = len(ratios), 0.0, 0
    while rank < count // 2 and (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    low, high = ratios[max(0, rank - 1)], ratios[count - max(1, rank)]
    return statistics.median(ratios), low, high


def measure(
    groups: dict[int, OrderSender], args: argparse.Namespace, batch: int, *, rows: bool, device_ms: float
) -> list[dict[str, object]]:
    """A row of the table for each number of followers."""
    prompts = Prompts(vocabulary=VOCABULARY)
    devices = {count: TableDevice(group, rows=rows, step_s=device_ms / 1e3) for count, group in groups.items()}
    cores = {count: new_core(device, batch, rows=rows) for count, device in devices.items()}
    cpu: dict[int, list[float]] = {count: [] for count in cores}
    wall: dict[int, list[float]] = {count: [] for count in cores}
    for number in range(args.rounds + 1):
        for count, core in cores.items():
            block = time_block(core, prompts, batch, args.steps)
            if number:  # the first round warms up
                cpu[count].append(statistics.median(block[0]))
                wall[count].append(statistics.median(block[1]))
    first = args.followers[0]
    table = list[dict[str, object]]()
    for count, device in devices.items():
        row: dict[str, object] = {"batch": batch, "rows": "on" if rows else "off"}
        row |= {"device ms": device_ms, "followers": count}
        for name, found in (("CPU", cpu), ("wall", wall)):
            middle, low, high = ratio(found[count], found[first])
            row |= {f"{name} ms": statistics.median(found[count]) * 1e3, f"{name} ratio": middle}
            row[f"{name} 95 %"] = f"{low:.2f}-{high:.2f}"
        found = {"send us": 0.0, "left us": 0.0, "thread us": 0.0}
        if isinstance(group := groups[count], process_group.LeadingGroup):
            channel = group._channel
            assert isinstance(channel, TimedChannel)
            channel.wait_for(max(device.sent_at))
            left = [channel.left_at[seq] - sent for seq, sent in device.sent_at.items()]
            times = device.send_s, left, [channel.cpu_s[seq] for seq in device.sent_at]
            found = {name: statistics.median(values) * 1e6 for name, values in zip(found, times, strict=True)}
        table.append(row | found | {"order bytes": device.order_bytes})
    return table


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128], help="requests of a step")
    parser.add_argument("--followers", type=int, nargs="+", default=[0, 1, 3, 7], help="processes beside process 0")
    parser.add_argument("--steps", type=int, default=400, help="decode steps of a block")
    parser.add_argument("--device-ms", type=float, nargs="+", default=[0.0, 4.0], help="times of a step of the device")
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each number of followers")
    parser.add_argument("--follow", nargs=3, metavar=("ADDRESS", "NNODES", "RANK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        follow(args.follow[0], int(args.follow[1]), int(args.follow[2]))
        return
    process_group.OrderChannel = TimedChannel
    with contextlib.ExitStack() as stack:
        groups = {count: stack.enter_context(followers(count)) for count in args.followers}
        rows = [
            row
            for batch in args.batch
            for device_ms in args.device_ms
            for with_rows in (True, False)
            for row in measure(groups, args, batch, rows=with_rows, device_ms=device_ms)
        ]
    print_table(rows)
    print(write_result("cluster_host_time_cpu", rows, steps=args.steps, rounds=args.rounds))


if __name__ == "__main__":
    main()
