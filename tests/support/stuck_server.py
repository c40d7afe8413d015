"""`routed-experts` with a device that hangs, for tests: `python -m support.stuck_server serve ...`.

A step with the request RID and every score never return. They print STUCK on standard error when they begin to hang."""

import sys
import threading

from routed_experts.cli import main
from routed_experts.engine.engine import Engine
from routed_experts.engine.loop.core import EngineCore

STUCK = "it hangs"
RID = "stuck-step"
_step = EngineCore.step


def hang():
    print(STUCK, file=sys.stderr, flush=True)
    threading.Event().wait()


def step(core):
    if RID in core.request_table.live_ids():
        hang()
    return _step(core)


def score(engine, token_ids, *, routed=None, replay_weights=False, return_routed_experts=None):
    hang()


if __name__ == "__main__":
    EngineCore.step, Engine.score = step, score
    sys.exit(main())
