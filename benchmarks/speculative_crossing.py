"""Tokens of each second with speculative decoding over those without it, while drafts come to pay and cease to.

    python benchmarks/speculative_crossing.py [--running 1 2 4 8 16 8 4 2 1] [--hold 3] [--rounds 5]
    python benchmarks/speculative_crossing.py --dummy --running 1 8 64 256 64 8 1 --rounds 3 --name NAME     # a GPU
    python benchmarks/speculative_crossing.py --small                # does it run

The benchmark model in float32; with --dummy Qwen3-30B-A3B in bfloat16 with random weights. `--running` requests are
held for --hold seconds, then the next number: a request that ends is followed by a new one. The first half of each
answer copies its prompt, the second half is random, so drafts cease to pay within each request, too. The answers are
given, as in speculative.py; capture is on and asked.

Three engines over the same weights take turns: with drafts by n-grams, and two equal ones without. A row is a window of
one second, and a round gives a ratio of tokens: those with drafts over the mean of those without ("on / off"), and
those without over each other ("off / off"), which is the noise. Both are medians over rounds. `least`: the smallest of
all rounds."""

import argparse
import statistics
import time

import jax.numpy as jnp
import numpy as np
from common import Prompts, benchmark_model, print_table, progress, write_result
from speculative import Runner, text_of

from capture import dummy_model
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.builder import build_engine
from routed_experts.scheduling.schedule_batch import Req, ReqState

WINDOW = 1.0  # seconds


class Load:
    """Requests that are held at the number of a schedule, on one engine. Equal seeds give equal requests, in order."""

    def __init__(self, engine: Runner, args: argparse.Namespace, seed: int) -> None:
        self._engine, self._args = engine, args
        self._noise, self._prompts = np.random.default_rng(seed), Prompts(seed)
        self._live: list[Req] = []
        self._ended = 0  # tokens of requests that have ended

    def run(self) -> np.ndarray:
        """Tokens of each window."""
        core, args = self._engine.core, self._args
        core.flush_cache()
        times, tokens, start = [0.0], [0], time.perf_counter()
        total = args.hold * len(args.running)
        while (now := time.perf_counter() - start) < total:
            self._fill(args.running[int(now / args.hold)])
            core.step()
            times.append(time.perf_counter() - start)
            tokens.append(self._ended + sum(req.num_output for req in self._live))
        core.abort_all("the run is over")
        while not core.is_idle:
            core.step()
        return np.diff(np.interp(np.arange(0.0, total + WINDOW / 2, WINDOW), times, tokens))

    def _fill(self, running: int) -> None:
        """Replace what has ended, up to so many."""
        ended = [req for req in self._live if req.state is ReqState.FINISHED]
        self._ended += sum(req.num_output for req in ended)
        self._live = [req for req in self._live if req.state is not ReqState.FINISHED]
        missing = running - len(self._live)
        if missing > 0:
            self._live += self._new(missing)

    def _new(self, count: int) -> list[Req]:
        args, vocabulary = self._args, self._engine.core.runner.config.vocab_size
        prompts = [self._noise.integers(0, vocabulary, args.prompt).astype(np.int32) for _ in range(count)]
        requests = self._prompts.build_requests(prompts, new=args.new, ask=True)
        half = args.new // 2
        for req, prompt in zip(requests, prompts, strict=True):
            parts = [("copy and edit", half), ("random", args.new - half)]
            answer = [text_of(kind, prompt, size, self._noise, vocabulary) for kind, size in parts]
            self._engine.give_text(req, np.concatenate(answer))
        self._engine.core.add(requests)
        return requests


def make_engine(args: argparse.Namespace, model: object, *, drafts: int) -> Runner:
    """An engine for all numbers of requests."""
    most, width = max(args.running), args.prompt + args.new + 1
    server = ServerArgs(
        enable_return_routed_experts=True,
        precompile_bs_paddings=tuple(sorted(set(args.running))),
        precompile_token_paddings=(max(256, args.prompt),),
        context_length=width + 15,
        max_total_tokens=most * (width + 32) + 512,
        skip_tokenizer_init=True,
    )
    speculative = SpeculativeConfig(num_draft_tokens=drafts + 1) if drafts else None
    return Runner(build_engine(server, model=model, speculative=speculative), width)


def main() -> None:
    """Run the engines in turn, and compare windows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 2, 4, 8, 16, 8, 4, 2, 1])
    parser.add_argument("--hold", type=float, default=3.0, help="seconds of each number of requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=7, help="of a request, by n-grams")
    parser.add_argument("--dummy", action="store_true", help="Qwen3-30B-A3B with random weights, for a GPU")
    parser.add_argument("--small", action="store_true", help="one short round")
    parser.add_argument("--name", default="speculative_crossing_cpu", help="of the result")
    args = parser.parse_args()
    if args.small:
        args.running, args.hold, args.rounds, args.prompt, args.new = [1, 2], 1.0, 1, 64, 16
    model = dummy_model() if args.dummy else benchmark_model(jnp.dtype("float32"))
    engines = {name: make_engine(args, model, drafts=args.drafts * (name == "on")) for name in ("on", "off", "off too")}
    tokens = {name: list[np.ndarray]() for name in engines}
    for turn in range(-1, args.rounds):
        progress(f"round {turn + 1} of {args.rounds}")
        for name in engines if turn % 2 else reversed(engines):
            windows = Load(engines[name], args, turn + 1).run()
            if turn >= 0:
                tokens[name].append(windows)
    off, too = np.array(tokens["off"]), np.array(tokens["off too"])
    ratios, noise = np.array(tokens["on"]) / ((off + too) / 2), off / too
    rows = [
        {
            "second": second,
            "running": args.running[int(second * WINDOW / args.hold)],
            "tokens/s off": statistics.median(off[:, second]),
            "on / off": statistics.median(ratios[:, second]),
            "least": ratios[:, second].min(),
            "off / off": statistics.median(noise[:, second]),
            "its least": noise[:, second].min(),
        }
        for second in range(ratios.shape[1])
    ]
    print_table(rows)
    worst = {"on / off": min(np.median(ratios, axis=0)), "off / off": min(np.median(noise, axis=0))}
    print("smallest of the medians:", {name: round(float(value), 3) for name, value in worst.items()})
    print(write_result(args.name, rows, rounds=args.rounds, hold=args.hold))


if __name__ == "__main__":
    main()
