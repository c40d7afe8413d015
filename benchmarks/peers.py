"""Decode and prefill beside other engines, on the same weights and prompts. Each peer is a process and runs in turn.

    python benchmarks/peers.py [--rounds 3] [--batches 1 8 32] [--dtype float32] [--peer NAME=PYTHON ...]

NAME is transformers, vllm or llama_cpp (peer_programs/), PYTHON the interpreter of an environment that has it;
without --peer, transformers of this environment. This engine runs with capture on and rows in every request. Prefill
is a run of one new token, and decode what the whole run takes more, for all alike. Rounds alternate, with half a
second between two turns; a ratio is that of one round; medians are given. `same` is the share of greedy tokens
before the first difference that equal those of this engine: a low share means that the peer computes something else."""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from common import Prompts, benchmark_model, build, print_table, write_checkpoint, write_result

from routed_experts.engine.loop.core import EngineCore

# threads of an engine's OpenMP look for work for 0.2 s after its turn: the next one begins when the cores are free
_REST_S = 0.5

PROGRAMS = Path(__file__).parent / "peer_programs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One round of one engine, tokens per second, and what it generated."""

    prefill: float
    decode: float
    tokens: list[list[int]]


class Peer:
    """Another engine's process."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str) -> None:
        command = [python, str(PROGRAMS / f"peer_{name}.py"), str(folder), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name, self.version = name, self._answer()["version"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended with {self._process.wait()}; its words are above")
        return json.loads(line)

    def run(self, prompts: list[list[int]], new: int) -> Timing:
        """One round."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "new": new}), file=self._process.stdin, flush=True)
        answer = self._answer()
        fed, generated = sum(map(len, prompts)), len(prompts) * (new - 1)
        return Timing(prefill=fed / answer["prefill_s"], decode=generated / answer["decode_s"], tokens=answer["tokens"])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure_engine(core: EngineCore, prompts: Prompts, ids: list[np.ndarray], new: int) -> Timing:
    """One round of this engine, measured as its peers are."""
    seconds, reqs = [], []
    for count in (1, new):
        reqs = prompts.build_requests(ids, new=count, ask=True)
        core.flush_cache()
        start = time.perf_counter()
        core.add(reqs)
        while not core.is_idle:
            core.step()
        seconds.append(time.perf_counter() - start)
    first, whole = seconds
    tokens = [req.tokens[req.prompt_len : req.num_known].tolist() for req in reqs]
    return Timing(prefill=sum(map(len, ids)) / first, decode=len(ids) * (new - 1) / (whole - first), tokens=tokens)


def same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens up to the first difference of each sequence."""

    def agreed(mine: list[int], other: list[int]) -> int:
        return next((i for i, pair in enumerate(zip(mine, other, strict=True)) if pair[0] != pair[1]), len(mine))

    return sum(map(agreed, ours, theirs)) / sum(map(len, ours))


def table(batch: int, ours: list[Timing], theirs: dict[str, list[Timing]]) -> list[dict[str, object]]:
    """A row for each phase and peer."""
    rows: list[dict[str, object]] = []
    for phase in ("prefill", "decode"):
        own = [getattr(timing, phase) for timing in ours]
        for name, timings in theirs.items():
            other = [getattr(timing, phase) for timing in timings]
            ratios = [a / b for a, b in zip(own, other, strict=True)]
            agreed = statistics.mean(same(a.tokens, b.tokens) for a, b in zip(ours, timings, strict=True))
            rows.append(
                {
                    "batch": batch,
                    "phase": phase,
                    "peer": name,
                    "ours tok/s": statistics.median(own),
                    "theirs tok/s": statistics.median(other),
                    "ratio": statistics.median(ratios),
                    "ratios": " ".join(f"{ratio:.2f}" for ratio in ratios),
                    "same": agreed,
                }
            )
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--peer", action="append", metavar="NAME=PYTHON")
    args = parser.parse_args()
    model = benchmark_model(jnp.dtype(args.dtype))
    core = build(model, capture=True).core
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_checkpoint(model, Path(temporary))
        named = [peer.split("=", 1) for peer in args.peer or [f"transformers={sys.executable}"]]
        peers = [Peer(name, python, folder, args.dtype) for name, python in named]
    prompts, rows = Prompts(), []
    for batch in args.batches:
        ours: list[Timing] = []
        theirs: dict[str, list[Timing]] = {peer.name: [] for peer in peers}
        for turn in range(-1, args.rounds):  # the first round warms up
            new = args.new if turn >= 0 else 8
            ids = [req.source.input_ids for req in prompts.requests(batch, prompt=args.prompt, new=1, ask=True)]
            time.sleep(_REST_S)
            own = measure_engine(core, prompts, ids, new)
            answers: dict[str, Timing] = {}
            for peer in peers:
                time.sleep(_REST_S)
                answers[peer.name] = peer.run([list(map(int, prompt)) for prompt in ids], new)
            if turn >= 0:
                ours.append(own)
                for name, answer in answers.items():
                    theirs[name].append(answer)
        rows += table(batch, ours, theirs)
        print_table(rows[-2 * len(peers) :])
    versions = {peer.name: peer.version for peer in peers}
    for peer in peers:
        peer.close()
    name = f"peers_{args.dtype}_cpu"
    print(
        write_result(name, rows, rounds=args.rounds, prompt=args.prompt, new=args.new, dtype=args.dtype, peers=versions)
    )


if __name__ == "__main__":
    main()
