"""Drafters on the host: what a step and a prompt cost them, by context and kind of text.

    python benchmarks/drafting.py [--small]

"step" is `extend` by one token and `propose` of 7, in microseconds: the median and the 99th percentile, the median of
`extend` alone, and the mean of CPU time, in which the sorting of the index (once in 256 to 2,048 tokens) is spread over
all steps; "sort" is the longest of these steps, in milliseconds. "search": by compiled code, or in Python, as without a
compiler. "build" is `open`, microseconds of CPU time a token. Bytes are those of the drafter after the steps.
"ngram" and "suffix" search the text itself. "rollout" follows an answer of an earlier epoch; "suffix, shared" has 8
other answers to the prompt and their namespace to search, too. Texts: "zipf" has 50,000 tokens by a power law, "edit"
repeats a third of itself with an error in 20 tokens, "letters" has 3 tokens, "same" has one. Last row: the policy
chooses among 7 drafts of each of 32 requests, and learns what was accepted."""

import argparse
import statistics
import time

import numpy as np
from common import print_table, write_result

from routed_experts.layers.native.text_drafts import text_draft_functions
from routed_experts.speculation.acceptance_estimates import AcceptanceEstimates
from routed_experts.speculation.continuations import PRIOR_SURVIVAL
from routed_experts.speculation.cost_table import CostTable
from routed_experts.speculation.draft_policy import DraftPolicy
from routed_experts.speculation.drafter import Draft, DraftSample, DraftSequence
from routed_experts.speculation.namespace_texts import NamespaceTexts
from routed_experts.speculation.rollouts import RolloutStore
from routed_experts.speculation.text_drafter import CopyRule, TextDrafter, context_hash

MOST = 7
SUFFIX = CopyRule(max_window=24, counts=True)
DRAFTERS = ("ngram", "suffix", "rollout", "suffix, shared")
REQUESTS = 32


def make_text(kind: str, length: int) -> np.ndarray:
    """A text of this kind."""
    rng = np.random.default_rng(0)
    if kind == "same":
        return np.zeros(length, np.int32)
    if kind == "letters":
        return rng.integers(0, 3, length).astype(np.int32)
    text = (rng.zipf(1.3, length) % 50_000).astype(np.int32)
    if kind == "edit":
        text = np.resize(text[: length // 3], length)
        errors = rng.integers(0, length, length // 20)
        text[errors] = rng.integers(0, 50_000, errors.size)
    return text


def make_drafter(name: str, search: str, prompt: np.ndarray, answer: np.ndarray) -> TextDrafter:
    """A drafter; the last two have a store, with 8 answers to the prompt: the true one, or others."""
    compiled = text_draft_functions() if search == "compiled" else None
    if name in ("ngram", "suffix"):
        return TextDrafter(CopyRule() if name == "ngram" else SUFFIX, compiled=compiled)
    rule = CopyRule() if name == "rollout" else SUFFIX
    contexts = context_hash(rule)
    texts = NamespaceTexts(contexts, max_bytes=1 << 28) if rule.counts else None
    store = RolloutStore(max_bytes=1 << 28)
    drafter = TextDrafter(rule, store=store, texts=texts, contexts=contexts, compiled=compiled)
    for seed in range(8):
        other = np.random.default_rng(seed).permutation(answer)
        drafter.remember(prompt, answer if name == "rollout" and seed == 0 else other, DraftSample(noise=seed))
    return drafter


def drafting_row(name: str, search: str, kind: str, context: int, steps: int, repeats: int) -> dict[str, object]:
    """One text and context: the index of the prompt, then steps of one token."""
    text = make_text(kind, context + steps)
    drafter = make_drafter(name, search, text[:context], text[context:])
    builds, seconds, extending = list[float](), list[float](), list[float]()
    for _ in range(repeats):
        start = time.thread_time()
        drafter.open("text", text[:context], DraftSequence(prompt_len=context, sample=DraftSample(noise=0)))
        builds.append(time.thread_time() - start)
    start = time.thread_time()
    for position in range(context, context + steps):
        began = time.perf_counter()
        drafter.extend("text", text[position : position + 1])
        extending.append(time.perf_counter() - began)
        drafter.propose("text", MOST)
        seconds.append(time.perf_counter() - began)
    total = time.thread_time() - start
    return {
        "drafter": name,
        "search": search,
        "text": kind,
        "context": context,
        "step_us": statistics.median(seconds) * 1e6,
        "step_p99_us": float(np.percentile(seconds, 99)) * 1e6,
        "extend_us": statistics.median(extending) * 1e6,
        "step_mean_us": total / steps * 1e6,
        "sort_ms": max(seconds) * 1e3,
        "build_us_per_token": statistics.median(builds) / context * 1e6,
        "bytes_per_token": drafter.nbytes / (context + steps),
    }


def policy_row(steps: int) -> dict[str, object]:
    """The choice for REQUESTS requests, a request; then the estimates, a request."""
    costs = CostTable()
    for padded in (REQUESTS, 2 * REQUESTS, (MOST + 1) * REQUESTS):
        for tokens in {REQUESTS, padded}:
            costs.set(REQUESTS, padded, tokens, 0.01 + 1e-5 * tokens)
    policy, estimates = DraftPolicy(costs), AcceptanceEstimates()
    drafts = [Draft(np.zeros(MOST, np.int32), PRIOR_SURVIVAL[1 + key % 12, :MOST]) for key in range(REQUESTS)]
    choosing, learning = [], []
    for _ in range(steps):
        start = time.thread_time()
        survivals = [estimates.survival(key, draft) for key, draft in enumerate(drafts)]
        estimated = time.thread_time()
        chosen = policy.choose(survivals, REQUESTS)
        chose = time.thread_time()
        for key, num_drafts in enumerate(chosen):
            estimates.observe(key, num_drafts, num_drafts * (key % 3) // 2)
        choosing.append(chose - estimated)
        learning.append(time.thread_time() - chose + estimated - start)
    return {
        "requests": REQUESTS,
        "drafts": MOST,
        "choose_us_per_request": statistics.median(choosing) / REQUESTS * 1e6,
        "estimates_us_per_request": statistics.median(learning) / REQUESTS * 1e6,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one short context")
    small = parser.parse_args().small
    contexts, steps, repeats = ([512], 50, 1) if small else ([1024, 8192, 32_768], 4000, 7)
    kinds = ("zipf", "edit", "letters", "same")
    rows = [
        drafting_row(name, search, kind, context, steps, repeats)
        for search in ("compiled", "python")
        for name in DRAFTERS
        for kind in (kinds if name in ("ngram", "suffix") else ("zipf", "edit"))
        for context in (contexts if name == "ngram" and search == "compiled" else contexts[-1:])
    ]
    policy = policy_row(5 if small else 500)
    print_table(rows)
    print_table([policy])
    print(write_result("drafting_cpu", rows, policy=policy))


if __name__ == "__main__":
    main()
