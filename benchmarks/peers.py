"""Decode and prefill beside other engines, on the same weights and prompts. Each peer is a process and runs in turn.

    python benchmarks/peers.py [--rounds 3] [--batches 1 8 32] [--dtype float32] [--drafts K] [--peer NAME=PYTHON ...]
    python benchmarks/peers.py --dtype bfloat16 --codes --peer llama_cpp=PYTHON       # weights of 8 bits

NAME is transformers, vllm or llama_cpp (peer_programs/), PYTHON the interpreter of an environment that has it;
llama_cpp also needs torch, transformers and LLAMA_CPP=FOLDER, the source of llama.cpp, with --drafts built there.
Without --peer, transformers of this environment. This engine runs as a user calls it: Engine.generate with the rows
of every request. Prefill is a run of one new token, and decode what the whole run takes more, for all alike. Rounds
alternate, with half a second between two turns; a ratio is that of one round; medians are given. `same` is the share
of greedy tokens before the first difference that equal those of this engine: a low share means that the peer computes
something else.

With --codes this engine quantises its weights to e4m3 as it loads them, llama_cpp reads its own 8-bit form (Q8_0, which
also rounds activations to 8 bits), and this engine without codes is one more peer. The functions differ, so `same` says
little.

With --drafts K every engine drafts up to K tokens by n-grams of 1 to 12 tokens, and prompts repeat 16 tokens: the
model's greedy answers then repeat themselves, so that about half of the drafts are right. Peers: vllm, and
llama_cpp, whose n-grams have two tokens. Greedy answers that loop soon part where a product is rounded otherwise: then
`same` is low, and the two copy other text."""

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from common import VOCABULARY, benchmark_model, print_table, write_checkpoint, write_result

from routed_experts import Engine, SpeculativeConfig

# threads of an engine's OpenMP look for work for 0.2 s after its turn: the next one begins when the cores are free
REST_S = 0.5

REPEATED = 16  # tokens of a prompt that are repeated, where engines draft
PROGRAMS = Path(__file__).parent / "peer_programs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One round of one engine, tokens per second, and what it generated."""

    prefill: float
    decode: float
    tokens: list[list[int]]


class PeerEnded(RuntimeError):
    """A peer's process ended; the text is its last error."""


class Peer:
    """Another engine's process. It must announce that it is ready: raises PeerEnded where it ends before."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str, drafts: int = 0) -> None:
        """`dtype`: also a form of weights that the peer's program knows."""
        command = [python, str(PROGRAMS / f"peer_{name}.py"), str(folder), dtype, *([str(drafts)] if drafts else [])]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open as long as the process is
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.name = name
        self.version = self._answer()["version"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            lines = [text for text in self._log.read().splitlines() if text.strip()]
            errors = [text for text in lines if "Error" in text] or lines or ["no output"]
            raise PeerEnded(f"{errors[-1].strip()} (exit code {code})")
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
        self._log.close()


class WithoutCodes:
    """This engine with plain weights, as a peer in this process."""

    name = "routed_experts without codes"
    version = "this one"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, prompts: list[list[int]], new: int) -> Timing:
        """One round."""
        return measure_engine(self._engine, prompts, new)[0]

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()


def measure_engine(
    engine: Engine, prompts: list[list[int]], new: int, *, ask: bool = True
) -> tuple[Timing, list[dict]]:
    """One round of this engine, measured as its peers are, through the call that users make; and its outputs. `ask`:
    for the rows of every request."""
    seconds, outputs = [], []
    for count in (1, new):
        engine.flush_cache()
        start = time.perf_counter()
        outputs = engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0.0, "ignore_eos": True},
            max_new_tokens=count,
            return_routed_experts=ask,
        )
        seconds.append(time.perf_counter() - start)
    first, total = seconds
    tokens = [output["output_ids"] for output in outputs]
    num_prompt_tokens, num_decoded = sum(map(len, prompts)), len(prompts) * (new - 1)
    return Timing(prefill=num_prompt_tokens / first, decode=num_decoded / (total - first), tokens=tokens), outputs


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
    parser.add_argument("--drafts", type=int, default=0, help="of every engine, by n-grams")
    parser.add_argument("--codes", action="store_true", help="weights of 8 bits, in this engine and in llama_cpp")
    parser.add_argument("--peer", action="append", metavar="NAME=PYTHON")
    args = parser.parse_args()
    model = benchmark_model(jnp.dtype(args.dtype))
    build = functools.partial(
        Engine,
        enable_return_routed_experts=True,
        max_total_tokens=16_384,
        skip_tokenizer_init=True,
        speculative=SpeculativeConfig(num_draft_tokens=args.drafts + 1) if args.drafts else None,
    )
    engine = build(model=model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_checkpoint(model, Path(temporary))
        named = [peer.split("=", 1) for peer in args.peer or [f"transformers={sys.executable}"]]
        forms = {"llama_cpp": "q8_0"} if args.codes else {}
        peers: list[Peer | WithoutCodes] = [
            Peer(name, python, folder, forms.get(name, args.dtype), args.drafts) for name, python in named
        ]
        if args.codes:
            peers.append(WithoutCodes(engine))
            engine = build(str(folder), dtype=args.dtype, quantization="fp8_block")
    noise, rows = np.random.default_rng(0), []
    for batch in args.batches:
        ours: list[Timing] = []
        theirs: dict[str, list[Timing]] = {peer.name: [] for peer in peers}
        for turn in range(-1, args.rounds):  # the first round warms up
            new = args.new if turn >= 0 else 8
            repeats = args.prompt // REPEATED if args.drafts else 1
            drawn = noise.integers(0, VOCABULARY, (batch, args.prompt // repeats))
            prompts = np.tile(drawn, (1, repeats)).tolist()
            time.sleep(REST_S)
            own, _ = measure_engine(engine, prompts, new)
            answers: dict[str, Timing] = {}
            for peer in peers:
                time.sleep(REST_S)
                answers[peer.name] = peer.run(prompts, new)
            if turn >= 0:
                ours.append(own)
                for name, answer in answers.items():
                    theirs[name].append(answer)
        rows += table(batch, ours, theirs)
        print_table(rows[-2 * len(peers) :])
    engine.shutdown()
    versions = {peer.name: peer.version for peer in peers}
    for peer in peers:
        peer.close()
    name = f"peers_{'drafts_' if args.drafts else ''}{'codes_' if args.codes else ''}{args.dtype}_cpu"
    sizes = {"rounds": args.rounds, "prompt": args.prompt, "new": args.new, "drafts": args.drafts}
    print(write_result(name, rows, **sizes, dtype=args.dtype, peers=versions))


if __name__ == "__main__":
    main()
