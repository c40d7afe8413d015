"""Protocol between benchmarks/peers.py and a peer's program: JSON lines, a request on standard input and its timing on
standard output. Runs on any Python: each peer has an environment of its own.

A request is {"prompts": [[token, ...], ...], "new": count}; the answer {"prefill_s", "decode_s", "tokens": [[token,
...], ...]}: seconds until the first token of all prompts, seconds for the others, and the greedy tokens."""

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO


def _own_output() -> TextIO:
    """Standard output for the protocol alone: what a peer prints, from its import on, goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


OUT = _own_output()


def serve(name: str, version: str, run: Callable[[list[list[int]], int], tuple[float, float, list[list[int]]]]) -> None:
    """Announce the peer, then answer requests until standard input ends."""
    print(json.dumps({"name": name, "version": version}), file=OUT, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prefill_s, decode_s, tokens = run(request["prompts"], request["new"])
        print(json.dumps({"prefill_s": prefill_s, "decode_s": decode_s, "tokens": tokens}), file=OUT, flush=True)
