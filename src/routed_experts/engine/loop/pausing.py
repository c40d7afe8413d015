"""Pauses: what becomes of running requests while an engine holds still. Knows nothing of threads; call between steps,
drained.

New requests queue until the pause ends, whatever its mode."""

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import InvalidRequestError
from routed_experts.core.io_struct import FinishReason
from routed_experts.engine.loop.core import EngineCore, PauseMode


def hold_of(mode: object) -> PauseMode:
    """The pause that a caller names; raises InvalidRequestError."""
    known = [hold.value for hold in PauseMode]
    if mode not in known:
        raise InvalidRequestError(f"mode={short_repr(mode)} is unknown; choose one of {', '.join(known)}", param="mode")
    return PauseMode(mode)


def pause(core: EngineCore, hold: PauseMode) -> None:
    """Hold the core. WAIT: what has started goes on to its end. RETRACT: it goes back to the queue with its tokens and
    rows, and its pages are free. IN_PLACE: it keeps its pages and does not move. ABORT: every request ends with what it
    has."""
    core.hold, core.scheduler.accepts_new = hold, False
    if hold is PauseMode.RETRACT:
        for req in tuple(reversed(core.scheduler.running)):
            core.retract(req)
    elif hold is PauseMode.ABORT:
        for rid in core.ledger.live():
            core.abort(rid, FinishReason(type="abort", message="aborted by a pause"))


def resume(core: EngineCore) -> None:
    """End the pause, if there is one: requests go on from where they are."""
    core.hold, core.scheduler.accepts_new = None, True
