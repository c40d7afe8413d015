"""The model of large groups and fleets: its arithmetic against counting, its constants against rows of known ones, its
committed result against the code, and the page's table against the result."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from routed_experts.core.errors import OrderFormatError
from routed_experts.execution.orders import Order, OrderKind, encode

ROOT = Path(__file__).parents[1]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "cluster_model.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model():
    """benchmarks/cluster_model.py as a module."""
    path = ROOT / "benchmarks"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        spec = importlib.util.spec_from_file_location("cluster_model", path / "cluster_model.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "cluster_model", module)
        spec.loader.exec_module(module)
        sys.modules.pop("common", None)
        yield module


@pytest.mark.parametrize(("batch", "context"), [(1, 16), (32, 2048), (100, 2050)])
def test_the_bytes_of_an_order_are_those_of_its_fields(model, batch, context):
    pages = -(-context // 16)
    words = batch * (12 + 3 + 3) + 2  # the sampler's, three a token, three a request; two ends
    words = -(-words // 64) * 64 + batch * pages  # tables begin at a multiple of 256 bytes
    assert model.order_bytes(batch, context) == 4 * words
    assert 4 * words + 32 < model.frame_bytes(batch, context) < 4 * words + 200


def bytes_of_a_ring(parts):
    """Bytes that one device sends in an all-reduce over a ring, counted by doing it; checks the sums."""
    count = len(parts)
    held = [[part.copy() for part in np.array_split(values, count)] for values in parts]
    sent = 0
    for step in range(2 * (count - 1)):
        moving = [((rank - step) % count, held[rank][(rank - step) % count].copy()) for rank in range(count)]
        sent += moving[0][1].nbytes
        for rank, (chunk, values) in enumerate(moving):
            after = held[(rank + 1) % count]
            after[chunk] = after[chunk] + values if step < count - 1 else values
    for own in held:
        np.testing.assert_array_equal(np.concatenate(own), sum(parts))
    return sent


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_a_sum_takes_the_bytes_that_a_ring_sends(model, hosts):
    size = 8 * hosts * 64
    free = model.Hardware(base_s=0.0, local_s=0.0, network_s=0.0)
    devices, noise = free.devices, np.random.default_rng(0)

    def ring(count, words):
        return bytes_of_a_ring([noise.integers(0, 9, words).astype(np.int64) for _ in range(count)])

    local, network = ring(devices, size // 8), ring(hosts, size // devices // 8)  # each device has its part
    seconds = model.sum_s(size, hosts, free)
    assert seconds == pytest.approx(local / free.local_link + network / free.network_link)


def test_latencies_grow_with_doublings_of_hosts_and_ordered_sums_with_devices(model):
    hardware = model.Hardware()
    times = [model.sum_s(0.0, hosts, hardware) for hosts in (1, 2, 4, 512)]
    assert np.diff(times) == pytest.approx([2 * 5e-6, 2 * 5e-6, 2 * 7 * 5e-6])
    assert times[0] == pytest.approx(4.4e-6 + 2 * 7 * 0.936e-6)
    few, many = (model.gathered_sum_s(1e6, hosts, hardware) for hosts in (8, 64))
    assert 7 < many / few < 10


def rows(model, *, thread=(20e-6, 1e-9, 10e-6, 2e-10), factor=1.0):
    """Rows as they would be measured with these constants; `factor` on those with 7 followers."""
    times = model.HostTimes((50e-6, 2e-6), 1.1, thread, (100e-6, 1e-9, 30e-6, 5e-10))
    actual = []
    for batch in (32, 128):
        for followers in (0, 1, 3, 7):
            size, scale = model.order_bytes(batch), factor if followers == 7 else 1.0
            row = {"batch": batch, "followers": followers, "order bytes": size, "CPU ratio": 1.1 * scale}
            row["CPU ms"] = (50e-6 + 2e-6 * batch) * 1e3 * (1.1 if followers else 1.0)
            row["thread us"] = times.thread_s(followers, size) * 1e6 * scale
            actual.append(row | {"left us": times.delay_s(followers, size) * 1e6 * scale})
    return times, actual


def test_constants_come_back_from_rows_of_known_ones_and_a_wrong_case_is_seen(model):
    times, measured = rows(model)
    actual = model.fit(measured)
    assert actual.step == pytest.approx(times.step) and actual.added == times.added
    assert actual.thread == pytest.approx(times.thread, rel=1e-6) and actual.delay == pytest.approx(
        times.delay, rel=1e-6
    )
    assert [case["ratio"] for case in model.small_cases(actual, measured)] == pytest.approx([1.0] * 8)
    _, wrong = rows(model, factor=1.5)
    ratios = {case["case"].partition(": ")[2]: case["ratio"] for case in model.small_cases(model.fit(wrong), wrong)}
    assert ratios.pop("order bytes") == 1.0 and all(ratio == pytest.approx(1 / 1.5) for ratio in ratios.values())


def test_what_ends_first_is_the_longest_part(model):
    times, _ = rows(model)

    def ends(hosts, times=times, **changed):
        return model.group_row(hosts, times, model.Hardware(**changed), model.Model())["ends first"]

    assert ends(8, network_link=1e6) == "sums"
    assert ends(8, order_link=1e3) == "network of orders"
    assert ends(8, rows(model, thread=(0.0, 0.0, 1.0, 0.0))[0]) == "thread"
    assert ends(2, network_s=0.0, local_s=0.0, base_s=0.0, network_link=1e15, local_link=1e15) == "host"


def test_a_fleet_ends_at_the_limit_that_it_uses_most(model):
    limits = model.FleetLimits(placement_groups=10**9, actors=10**9, series_bytes=1.0)
    row = model.fleet_row(10_000, limits)
    assert row["uses most of"] == "hold of an update" and row["share"] == pytest.approx(20_000 / 1_700 / 10)
    assert model.fleet_row(1_000, model.FleetLimits())["uses most of"] == "placement groups"


def test_the_most_values_that_an_order_carries(model):
    most = model.exchange_limit(19)

    def exchange(count):
        return encode(Order(kind=OrderKind.EXCHANGE, head={"name": "compile", "value": ["0" * 16] * count}))

    assert most > 10_000 and exchange(most - 10)
    with pytest.raises(OrderFormatError):
        exchange(most + 10)


def test_the_committed_result_is_what_the_model_says_and_its_small_cases_agree(model):
    measured = model.measured_rows()
    times = model.fit(measured)
    for ours, saved in zip(model.small_cases(times, measured), RESULT["small_cases"], strict=True):
        assert ours == pytest.approx(saved), ours["case"]
        assert abs(ours["ratio"] - 1) <= model.TOLERANCE, ours
    for hosts, saved in zip(model.HOSTS, RESULT["rows"], strict=True):
        assert model.group_row(hosts, times, model.Hardware(), model.Model()) == pytest.approx(saved)
    for replicas, saved in zip(model.REPLICAS, RESULT["fleets"], strict=True):
        assert model.fleet_row(replicas, model.FleetLimits()) == pytest.approx(saved)


def test_the_tables_of_the_pages_are_the_result():
    text, of_fleet = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("cluster.md", "fleet.md"))
    for row in RESULT["rows"]:
        figures = [f"{row['batch']:,}", f"{row['order kB']:,.0f} kB"]
        figures += [f"{row[f'{name} ms']:,.1f}" for name in ("host", "thread", "memory", "sums", "step")]
        assert f"| {row['hosts']} | {' | '.join(figures)} | {row['ends first']} |" in text, row
    for row in RESULT["fleets"]:
        figures = [f"{row['proxies']:,}", f"{row['hold s']:.2f} s", f"{row['aborts/s']:,.1f}"]
        figures += [f"{row['scrape MB']:,.1f} MB", f"{row['deaths a day']:.2f}", f"{row['share']:.2f}"]
        assert f"| {row['replicas']:,} | {' | '.join(figures)} |" in of_fleet, row
