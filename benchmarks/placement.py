"""Plans from real routing of the demo model, judged on routing that they have not seen; and what making a plan
takes.

    python benchmarks/placement.py      # CPU: tables, results/placement_cpu.json and docs/images/placement.png

Two domains are generated with capture: English (tales, novels, speeches, verse) and Python. Each is cut in half:
plans learn from one half of a domain, of the other domain or of both, and are judged on the other half. Ratios and
counts do not depend on the machine; the milliseconds do."""

import argparse
import time
from pathlib import Path

import numpy as np
from common import print_table, write_result

from routed_experts import Engine, placement
from routed_experts.capture.expert_counts import ExpertCounts
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.placement import ExpertPlacement, ResidencyMap
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.demo import demo_model_path
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.placement.eplb import rebalance
from routed_experts.placement.figures import draw_plans

DOCS = Path(__file__).parents[1] / "docs"
INSTANCES, DEVICES, RESIDENTS = 40, 8, 8
PROMPTS = {
    "english": (
        "Once upon a time there was a",
        "The whale swam past the ship and",
        "Mr. Speaker, the state of the Union is",
        "Alice looked at the",
        "O for a muse of fire, that would",
        "My fellow Americans, this year we",
        "The captain called his men and",
        "It was raining all day, and the",
    ),
    "python": (
        "def first(iterable, default=None):\n",
        "class LRU(dict):\n    def __init__",
        "import itertools\nfrom collections import",
        "    for item in iterable:\n        if",
        "def chunked(src, size,",
        "    return [x for x in",
        "    >>> list(",
        "try:\n    from",
    ),
}


def main() -> None:
    """Generate, plan, judge, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--new-tokens", type=int, default=160, help="of each of 32 answers a domain; default: 160")
    options = parser.parse_args()
    learned, judged = {}, {}
    for domain, records in generate(options.new_tokens).items():
        learned[domain], judged[domain] = records[::2], records[1::2]
    learned["both"] = [*learned["english"], *learned["python"]]
    stats = {name: RoutingStats.from_records(records) for name, records in learned.items()}
    balance, hits = judge_balance(stats, judged), judge_hits(stats, judged)
    times = time_plans()
    for rows in (balance, hits, times):
        print_table(rows)
        print()
    plan = placement.eplb(stats["python"], num_instances=INSTANCES, num_devices=DEVICES)
    before = ExpertPlacement.identity(len(stats["python"].layer_ids), stats["python"].num_experts, DEVICES)
    devices = {
        f"{DEVICES} devices as they come": placement.simulate(judged["python"], before).device_load,
        f"{INSTANCES} instances, planned": placement.simulate(judged["python"], plan).device_load,
    }
    num_tokens = sum(record.num_rows for record in judged["python"])
    title = f"Demo model, Python text: planned on one half, judged on {num_tokens:,} tokens of the other"
    draw_plans(
        DOCS / "images" / "placement.png",
        judged["python"],
        stats["python"].load,
        devices=devices,
        residents=RESIDENTS,
        title=title,
    )
    counting = time_counting()
    print(f"counting: {counting:.2f} us a token of 48 layers, 128 experts, top-8")
    print(
        write_result(
            "placement_cpu", balance, hits=hits, times=times, counting_us=counting, new_tokens=options.new_tokens
        )
    )


def generate(new_tokens: int) -> dict[str, list[RoutedExperts]]:
    """Four samples of each prompt, with their routing."""
    sizes = {"precompile_bs_paddings": (32,), "precompile_token_paddings": (256,)}
    records = {}
    with Engine(str(demo_model_path()), enable_return_routed_experts=True, **sizes) as engine:
        for domain, prompts in PROMPTS.items():
            sampling = {"temperature": 0.8, "seed": 1, "n": 4, "max_tokens": new_tokens, "ignore_eos": True}
            answers = engine.generate(list(prompts), sampling_params=sampling, return_routed_experts=True)
            records[domain] = [record_from_meta_info(answer) for answer in answers]
    return records


def judge_balance(stats: dict[str, RoutingStats], judged: dict[str, list[RoutedExperts]]) -> list[dict[str, object]]:
    """Balancedness, mean of the layers, over the whole trace and in steps of 256 tokens."""
    rows = []
    for domain, records in judged.items():
        plans = {
            name: placement.eplb(learned, num_instances=INSTANCES, num_devices=DEVICES)
            for name, learned in stats.items()
        }
        num_layers, num_experts = stats[domain].load.shape
        for name, plan in {"none": ExpertPlacement.identity(num_layers, num_experts, DEVICES), **plans}.items():
            whole_trace = placement.eplb_balancedness(placement.simulate(records, plan, step_tokens=10**9).device_load)
            row: dict[str, object] = {"judged on": domain, "plan from": name, "whole trace": whole_trace}
            for dispatch in ("even", "waterfill"):
                row[dispatch] = float(
                    placement.simulate(records, plan, dispatch=dispatch, step_tokens=256).balancedness.mean()
                )
            rows.append(row)
    return rows


def judge_hits(stats: dict[str, RoutingStats], judged: dict[str, list[RoutedExperts]]) -> list[dict[str, object]]:
    """Share of slots on the accelerator with 8 of 32 experts resident, and copies a token and layer."""
    rows = []
    for domain, records in judged.items():
        num_layers, num_experts = stats[domain].load.shape
        plans = {"first": ResidencyMap.first_n(num_layers, num_experts, RESIDENTS)}
        plans |= {
            f"static, from {name}": placement.resident(learned, per_layer=RESIDENTS) for name, learned in stats.items()
        }
        for name, learned in stats.items():
            plans[f"adaptive, from {name}"] = placement.AdaptiveResidency.start(
                plans[f"static, from {name}"], learned=learned
            )
        for name, plan in plans.items():
            report = placement.simulate(records, plan, step_tokens=8)
            copies = float(report.copies.mean() / report.num_tokens)
            rows.append(
                {"judged on": domain, "policy": name, "hits": float(report.hit_ratio.mean()), "copies a token": copies}
            )
        lru = placement.lru_coverage(*records)
        copies = float(lru.copies_per_token[:, RESIDENTS].mean())
        rows.append(
            {
                "judged on": domain,
                "policy": "LRU",
                "hits": float(lru.hits[:, RESIDENTS].mean()),
                "copies a token": copies,
            }
        )
    return rows


def time_plans() -> list[dict[str, object]]:
    """Milliseconds of a plan for 58 layers of 256 experts, gamma loads; and the copies after the load has drifted."""
    rng = np.random.default_rng(0)
    load = rng.gamma(0.5, size=(58, 256))
    drifted = load * np.exp(0.5 * rng.standard_normal(load.shape))
    rows = []
    for num_instances, num_devices in ((288, 32), (384, 128)):
        sizes = {"num_instances": num_instances, "num_devices": num_devices}
        greedy, greedy_ms = timed(lambda sizes=sizes: rebalance(load, **sizes, refined=False))
        old, refined_ms = timed(lambda sizes=sizes: rebalance(load, **sizes))
        new = rebalance(drifted, **sizes)
        relabelled, relabel_ms = timed(lambda new=new, old=old: placement.relabel(new, old))
        balance = [placement.eplb_balancedness(placement.device_load(load, plan)) for plan in (greedy, old)]
        copies = [int(placement.num_copies(old, plan).sum()) for plan in (new, relabelled)]
        rows.append(
            {
                "instances": num_instances,
                "devices": num_devices,
                "greedy ms": greedy_ms,
                "refined ms": refined_ms,
                "balance, greedy": balance[0],
                "balance, refined": balance[1],
                "relabel ms": relabel_ms,
                "copies": copies[0],
                "copies, relabelled": copies[1],
            }
        )
    return rows


def time_counting() -> float:
    """Microseconds a token of counting the rows of 16 decode steps of 8 requests, as the host store does where it files
    them."""
    spec = CaptureSpec(num_hidden_layers=48, layer_ids=tuple(range(48)), num_experts=128, top_k=8)
    rows = np.random.default_rng(0).integers(0, 128, (128, 48 * 8)).astype(spec.dtype)
    counts, generated = ExpertCounts(spec), np.ones(128, np.bool_)
    return min(timed(lambda: counts.add(rows, generated))[1] for _ in range(20)) * 1000 / 128


def timed(make):
    """The result, and the least of five times in ms."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = make()
        seconds.append(time.perf_counter() - start)
    return result, 1000 * min(seconds)


if __name__ == "__main__":
    main()
