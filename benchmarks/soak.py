"""Engines with drafts under random work for a long time: memory stays flat, and every counter agrees with the answers.

    python benchmarks/soak.py [--minutes 30]
    python benchmarks/soak.py --small                 # does it run

The demo model, in turn with each drafter: NGRAM, SUFFIX with remembered answers, EAGLE3 with the demo's head, and
STANDALONE with the demo model as its own draft. Requests have random prompts (some repeat others), lengths, sampling
parameters, choices and stops; some are aborted. After each round of requests: the drafts that the answers report, and
those of aborted requests, are those that the engine counts; every answer has a row for each token but the last; nothing
of the state is inconsistent. The table has the resident memory after the first fifth of a drafter's time, when caches
have filled, and at its end."""

import argparse
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import print_table, progress, write_result

from routed_experts import Engine, SpeculativeConfig, extract_routed_experts_from_meta_info
from routed_experts.models.loading.model_source import demo_model_path

DRAFTERS: dict[str, dict[str, Any]] = {
    "NGRAM": {},
    "SUFFIX": {"scope": "namespace", "remember": True, "store_bytes": 1 << 20},
    "EAGLE3": {"draft_model_path": "demo"},
    "STANDALONE": {"draft_model_path": str(demo_model_path())},
}
ROUND = 12  # requests


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_sampling(rng: random.Random) -> dict[str, Any]:
    """Parameters of one call."""
    sampling: dict[str, Any] = {"max_new_tokens": rng.randint(1, 96), "seed": rng.randint(0, 9)}
    sampling |= rng.choice([{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}])
    sampling |= rng.choice([{}, {}, {"presence_penalty": 0.5}, {"logit_bias": {"7": 3.0}}, {"n": 3}])
    return sampling | rng.choice([{}, {"ignore_eos": True}, {"stop": [" the"]}, {"min_new_tokens": 1}])


def run_round(engine: Engine, rng: random.Random, vocabulary: int, prompts: list[list[int]]) -> tuple[int, int, int]:
    """Answer requests of several threads; returns (choices, proposed, correct drafts) of the answers."""
    totals, lock, spec = [0, 0, 0], threading.Lock(), engine.components.capture
    assert spec is not None

    def call(index: int, seed: int) -> None:
        own = random.Random(seed)
        with lock:
            is_new = not prompts or own.random() < 0.5
            prompt = own.choices(range(vocabulary), k=own.randint(1, 64)) if is_new else own.choice(prompts)
            prompts.append(prompt)
            del prompts[:-50]
        rid = f"{seed}-{index}"
        timer = threading.Timer(own.random() * 0.3, lambda: engine.abort(rid))
        if own.random() < 0.2:
            timer.start()
        outs = engine.generate(
            input_ids=prompt, sampling_params=make_sampling(own), return_routed_experts=True, rid=rid
        )
        timer.cancel()
        for out in outs if isinstance(outs, list) else [outs]:
            meta = out["meta_info"]
            with lock:
                totals[0] += 1
                totals[1] += meta["spec_num_proposed_drafts"]
                totals[2] += meta["spec_num_correct_drafts"]
            if out["output_ids"]:
                num_rows = len(prompt) + len(out["output_ids"]) - 1
                ids = extract_routed_experts_from_meta_info(out)
                assert ids.size == num_rows * spec.num_hidden_layers * spec.top_k, (ids.size, num_rows)

    with ThreadPoolExecutor(ROUND) as pool:
        for call_done in [pool.submit(call, index, rng.getrandbits(40)) for index in range(ROUND)]:
            call_done.result()
    return totals[0], totals[1], totals[2]


def soak(name: str, seconds: float, seed: int) -> dict[str, object]:
    """One drafter."""
    options, rng = DRAFTERS[name], random.Random(seed)
    speculative = SpeculativeConfig(algorithm=name, adaptive=name == "NGRAM", **options)
    sizes: dict[str, Any] = {"max_total_tokens": 2048, "max_running_requests": 8, "page_size": 8}
    prompts, sums, first = list[list[int]](), [0, 0, 0], None
    with Engine("demo", enable_return_routed_experts=True, speculative=speculative, **sizes) as engine:
        vocabulary, start = engine.components.vocab_size, time.monotonic()
        while time.monotonic() - start < seconds or first is None:
            found = run_round(engine, rng, vocabulary, prompts)
            sums = [old + new for old, new in zip(sums, found, strict=True)]
            counted = engine.stats().speculative.requests
            assert (counted.proposed, counted.accepted) == (sums[1], sums[2]), (counted, sums)
            violations = engine.check_integrity()
            assert not violations, violations
            if rng.random() < 0.05:
                engine.flush_cache()
            if first is None and time.monotonic() - start >= seconds / 5:
                first = resident_bytes()
            progress(f"{name}: {sums[0]} answers, {sums[2]} of {sums[1]} drafts")
        last = resident_bytes()
    return {
        "drafter": name,
        "minutes": seconds / 60,
        "answers": sums[0],
        "drafts": sums[1],
        "accepted": sums[2],
        "MB after a fifth": first / 1e6,
        "MB at the end": last / 1e6,
        "end / fifth": last / first,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="for all drafters together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="one round of each")
    parser.add_argument("--name", default="soak_cpu", help="of the result")
    args = parser.parse_args()
    seconds = 0.0 if args.small else args.minutes * 60 / len(DRAFTERS)
    rows = [soak(name, seconds, args.seed + index) for index, name in enumerate(DRAFTERS)]
    print_table(rows)
    print(write_result(args.name, rows))


if __name__ == "__main__":
    main()
