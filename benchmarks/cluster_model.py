"""What ends first when a group has more hosts and a fleet more replicas: a model on paper, with measured constants.

    python benchmarks/cluster_model.py        reads results/cluster_host_time_cpu.json, measures nothing

A group: one model over the devices of 2 to 512 hosts, with 32 requests a host (as many as one host is given here).
    host        Python of a step on process 0: a line in the batch, measured without followers at 32 and 128 requests,
                times what one follower adds; more followers add nothing
    thread      of the sending thread on its core: a part an order and a part a follower, each with a part a byte
    delay       until an order has left to the last follower, of the same form; measured where followers take the same
                two cores, so an upper bound. A step hides it while it is shorter
    sums        two a layer over all devices; NCCL's own cost model (tree, low latency): 4.4 us, 0.94 us a device of a
                host and 5.0 us a doubling of hosts, both ways, and the bytes over the link of a device
    device      the bytes of a step from memory at 80 % of its bandwidth, and the sums
Steps overlap with the host's work, so a step takes the longest of host, thread and device. `ends first` is the largest
but for the device's own memory: what to change before more hosts pay. The sums of attention are taken over all devices,
too: data ranks take them over fewer.

A fleet: replicas of one host, 32 streams each, an event a stream at most every 25 ms.

Assumptions, beside the measured constants: hosts of 8 H100 (3.35 TB/s of memory, 450 GB/s a direction of NVLink, 400
Gb/s of network a device); Qwen3-235B-A22B in bfloat16, its experts drawn evenly; 2,048 tokens of context in pages of
16; process 0 has 100 Gb/s for orders; Ray's published envelope of 1,000 placement groups and 20,000 actors; 419
interruptions of 16,384 GPUs in 54 days (the report on Llama 3). The constants of the host are those of two shared cores
and of loopback, where process 0 pays for what the followers' kernels do: upper bounds. Sums are not measured here.

The small cases are checked: constants are fitted to 1 and 3 followers, and 7 followers are predicted within 25 %."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from common import print_table, write_result

from routed_experts.core.model_worker_batch import ForwardMode, SamplingMode
from routed_experts.execution.forward_batch import BatchShape, StepInputs
from routed_experts.execution.orders import MAX_HEAD_BYTES, Order, OrderKind, encode

HOSTS, REPLICAS = (2, 8, 64, 512), (10, 100, 1_000, 10_000)
BATCH_A_HOST, CONTEXT, PAGE = 32, 2048, 16
TOLERANCE = 0.25
STREAM_INTERVAL_S = 0.025


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """A host and its links; bytes a second, a direction."""

    devices: int = 8
    memory: float = 3.35e12 * 0.8
    local_link: float = 450e9
    network_link: float = 50e9  # of each device
    order_link: float = 12.5e9  # of process 0
    base_s: float = 4.4e-6
    local_s: float = 0.52e-6 * 1.8
    network_s: float = 5.0e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """Qwen3-235B-A22B."""

    layers: int = 94
    hidden: int = 4096
    heads: int = 64
    experts: int = 128
    top_k: int = 8
    expert_width: int = 1536
    total_params: float = 235e9
    bytes_a_param: int = 2

    def step_bytes(self, batch: int) -> float:
        """Bytes of the weights that a step reads: all but the experts that no token chooses."""
        experts = 3.0 * self.layers * self.experts * self.hidden * self.expert_width
        touched = 1.0 - (1.0 - self.top_k / self.experts) ** batch
        return self.bytes_a_param * (self.total_params - experts * (1.0 - touched))


@dataclasses.dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of process 0: a constant, and parts a request, an order's byte, a follower, a follower's byte."""

    step: tuple[float, float]  # without followers: constant, a request
    added: float  # ratio with followers
    thread: tuple[float, float, float, float]  # constant, a byte, a follower, a follower and byte
    delay: tuple[float, float, float, float]

    def step_s(self, batch: int) -> float:
        """The engine's thread, with followers."""
        return self.added * (self.step[0] + self.step[1] * batch)

    def thread_s(self, followers: int, order_bytes: int) -> float:
        """The sending thread, an order."""
        return _plane(self.thread, followers, order_bytes)

    def delay_s(self, followers: int, order_bytes: int) -> float:
        """Until the order has left to the last follower."""
        return _plane(self.delay, followers, order_bytes)


def _plane(terms: Sequence[float], followers: int, order_bytes: int) -> float:
    constant, byte, follower, both = terms
    return constant + byte * order_bytes + followers * (follower + both * order_bytes)


def order_bytes(batch: int, context: int = CONTEXT) -> int:
    """Bytes of the packed metadata of a decode step."""
    return int(decode_shape(batch, context).packed.shape[0]) * 4


def decode_shape(batch: int, context: int = CONTEXT) -> BatchShape:
    """The shape of a decode step with one token a request."""
    return BatchShape(
        mode=ForwardMode.DECODE, num_tokens=batch, num_requests=batch, table_width=math.ceil(context / PAGE)
    )


def frame_bytes(batch: int, context: int = CONTEXT) -> int:
    """Bytes of the whole order: header, head, arrays."""
    shape = decode_shape(batch, context)
    packed = np.zeros(shape.packed.shape, np.int32)
    inputs = StepInputs(shape, SamplingMode.GREEDY, packed, None, None)
    return sum(len(part) for part in encode(Order(kind=OrderKind.STEP, head=inputs.head, arrays=inputs.arrays)))


def fit(rows: Sequence[Mapping[str, float]]) -> HostTimes:
    """Constants from measured rows: of each, batch, followers, order bytes, and microseconds or milliseconds."""
    with_followers = [row for row in rows if row["followers"] in (1, 3)]
    points = [
        [1.0, row["order bytes"], row["followers"], row["followers"] * row["order bytes"]] for row in with_followers
    ]

    def plane(column: str) -> tuple[float, float, float, float]:
        values = [row[column] * 1e-6 for row in with_followers]
        constant, byte, follower, both = np.linalg.lstsq(np.array(points), np.array(values), rcond=None)[0].tolist()
        return constant, byte, follower, both

    alone = [row for row in rows if row["followers"] == 0]
    slope, constant = np.polyfit([row["batch"] for row in alone], [row["CPU ms"] * 1e-3 for row in alone], 1)
    added = float(np.median([row["CPU ratio"] for row in rows if row["followers"] == 1]))
    return HostTimes((float(constant), float(slope)), added, plane("thread us"), plane("left us"))


def small_cases(times: HostTimes, rows: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """What the model says of the measured cases that it was not fitted to, beside what was measured."""
    table: list[dict[str, object]] = []
    for row in rows:
        if row["followers"] != 7:
            continue
        batch, size = int(row["batch"]), int(row["order bytes"])
        cases = {
            "order bytes": (order_bytes(batch), row["order bytes"]),
            "host, ratio to none": (times.added, row["CPU ratio"]),
            "thread us": (times.thread_s(7, size) * 1e6, row["thread us"]),
            "delay us": (times.delay_s(7, size) * 1e6, row["left us"]),
        }
        table += [
            {"case": f"7 followers, batch {batch}: {name}", "model": ours, "measured": real, "ratio": ours / real}
            for name, (ours, real) in cases.items()
        ]
    return table


def sum_s(size: float, hosts: int, hardware: Hardware) -> float:
    """Seconds to add `size` bytes over all devices of so many hosts."""
    hops = hardware.devices - 1
    latency = hardware.base_s + 2 * (hops * hardware.local_s + math.ceil(math.log2(hosts)) * hardware.network_s)
    share = 2 * (hosts - 1) / hosts * size / hardware.devices / hardware.network_link  # each device has its part
    return latency + share + 2 * hops / hardware.devices * size / hardware.local_link


def gathered_sum_s(size: float, hosts: int, hardware: Hardware) -> float:
    """The same in deterministic mode: every device receives the parts of all, and adds them in their order."""
    devices = hosts * hardware.devices
    hops = hardware.devices - 1
    latency = hardware.base_s + hops * hardware.local_s + math.ceil(math.log2(hosts)) * hardware.network_s
    received = (devices - hardware.devices) * size / hardware.devices / hardware.network_link
    return latency + received + (devices - 1) * size / hardware.local_link


def group_row(hosts: int, times: HostTimes, hardware: Hardware, model: Model) -> dict[str, object]:
    """A group of so many hosts."""
    batch, followers = BATCH_A_HOST * hosts, hosts - 1
    size = order_bytes(batch)
    values = batch * model.hidden * model.bytes_a_param
    sums_s = 2 * model.layers * sum_s(values, hosts, hardware)
    memory_s = model.step_bytes(batch) / (hardware.memory * hardware.devices * hosts)
    parts = {
        "host": times.step_s(batch),
        "thread": times.thread_s(followers, size),
        "network of orders": followers * frame_bytes(batch) / hardware.order_link,
        "device": memory_s + sums_s,
    }
    step_s = max(parts.values())
    ends = max({**parts, "device": sums_s}.items(), key=lambda part: part[1])[0]
    return {
        "hosts": hosts,
        "batch": batch,
        "data ranks": max(1, math.ceil(hosts * hardware.devices / model.heads)),  # a device has a head at least
        "order kB": size / 1e3,
        "orders GB/s": followers * frame_bytes(batch) / step_s / 1e9,
        "host ms": parts["host"] * 1e3,
        "thread ms": parts["thread"] * 1e3,
        "delay ms": times.delay_s(followers, size) * 1e3,
        "memory ms": memory_s * 1e3,
        "sums ms": sums_s * 1e3,
        "ordered sums ms": 2 * model.layers * gathered_sum_s(values, hosts, hardware) * 1e3,
        "step ms": step_s * 1e3,
        "ends first": "sums" if ends == "device" else ends,
        "deaths a day": _deaths_a_day(hosts * hardware.devices),
    }


def _deaths_a_day(devices: int) -> float:
    """Interruptions: 419 of 16,384 GPUs in 54 days."""
    return 419 / 54 / 16_384 * devices


@dataclasses.dataclass(frozen=True, slots=True)
class FleetLimits:
    """What a fleet may use, from published figures and from the design's own measurements of Ray 2.60 on two cores."""

    placement_groups: int = 1_000
    actors: int = 20_000
    proxy_chunks_s: float = 21_000  # of one HAProxy
    calls_s: float = 1_700  # of one actor that calls others, an answer each
    hold_s: float = 10.0  # admission waits at most so long for a commit
    scrape_s: float = 10.0  # a scrape's usual timeout
    series_bytes: float = 30e3  # of a replica's metrics
    scrape_bytes_s: float = 20e6


def fleet_row(replicas: int, limits: FleetLimits, *, streams: int = BATCH_A_HOST) -> dict[str, object]:
    """A fleet of so many replicas: the share of each limit that it uses; above 1 it ends there."""
    chunks_s = replicas * streams / STREAM_INTERVAL_S
    shares = {
        "placement groups": replicas / limits.placement_groups,
        "actors": (2 * replicas + 2) / limits.actors,  # a replica and a proxy each, controller, coordinator
        "hold of an update": 2 * replicas / limits.calls_s / limits.hold_s,  # hold and commit
        "a scrape": replicas * limits.series_bytes / limits.scrape_bytes_s / limits.scrape_s,
    }
    ends = max(shares.items(), key=lambda share: share[1])
    return {
        "replicas": replicas,
        "chunks/s": chunks_s,
        "proxies": math.ceil(chunks_s / limits.proxy_chunks_s),
        "hold s": 2 * replicas / limits.calls_s,
        "aborts/s": limits.calls_s / replicas,  # of ids that the client made: all replicas are asked
        "scrape MB": replicas * limits.series_bytes / 1e6,
        "deaths a day": _deaths_a_day(8 * replicas),
        "uses most of": ends[0],
        "share": ends[1],
    }


def exchange_limit(value_bytes: int) -> int:
    """The most processes whose values of a phase, of so many bytes with a comma, fit into one order."""
    return MAX_HEAD_BYTES // value_bytes


def measured_rows() -> list[Mapping[str, float]]:
    """Measured rows of a device that takes time, with capture."""
    file = Path(__file__).parent / "results" / "cluster_host_time_cpu.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    return [MappingProxyType(row) for row in result["rows"] if row["rows"] == "on" and row["device ms"] > 0]


def main() -> None:
    """Fit, check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = measured_rows()
    times, hardware, model = fit(rows), Hardware(), Model()
    cases = small_cases(times, rows)
    groups = [group_row(hosts, times, hardware, model) for hosts in HOSTS]
    fleets = [fleet_row(replicas, FleetLimits()) for replicas in REPLICAS]
    for table in (cases, groups, fleets):
        print_table(table)
        print()
    constants = dataclasses.asdict(times)
    exchange = {"bytes a process": 19, "most processes": exchange_limit(19)}
    print(
        write_result("cluster_model", groups, constants=constants, small_cases=cases, fleets=fleets, exchange=exchange)
    )
    if wrong := [case["case"] for case in cases if abs(float(str(case["ratio"])) - 1) > TOLERANCE]:
        sys.exit(f"not within {TOLERANCE:.0%} of what was measured: {', '.join(map(str, wrong))}")


if __name__ == "__main__":
    main()
