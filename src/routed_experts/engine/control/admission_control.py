"""AdmissionControl: a pause, which the caller ends, and a hold, which an update of several engines ends.

Both may be on at once, and neither ends the other. A hold lets started requests run on and queues new ones. So does an
operation that waits for the end of started requests, for as long as it takes."""

import contextlib
from collections.abc import Generator

from routed_experts.core.error_text import short_repr
from routed_experts.core.errors import PARAM, InvalidRequestError
from routed_experts.engine.control.context import EngineContext
from routed_experts.engine.loop.core import PauseMode


def parse_pause_mode(mode: str) -> PauseMode:
    """The mode of a pause. Raises InvalidRequestError for an unknown one."""
    known = [pause_mode.value for pause_mode in PauseMode]
    if mode not in known:
        text = f"{PARAM}={short_repr(mode)} is unknown; choose one of {', '.join(known)}"
        raise InvalidRequestError(text, param="mode")
    return PauseMode(mode)


class AdmissionControl:
    """Pause and hold of one engine. Thread-safe: both change on the engine thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._pause: PauseMode | None = None
        self._is_held = False
        self._num_waits = 0  # operations that wait for the end of started requests, or go on after it

    @property
    def paused(self) -> str | None:
        """The mode of the pause, or None; a hold is none."""
        return None if self._pause is None else self._pause.value

    @property
    def held(self) -> bool:
        """Whether admission is held."""
        return self._is_held

    def pause(self, mode: str) -> None:
        """`Engine.pause`."""
        pause_mode, thread = parse_pause_mode(mode), self._context.thread

        def pause() -> None:
            self._context.core.pause(pause_mode)
            self._pause = pause_mode

        thread.run_drained(pause)
        if pause_mode is PauseMode.WAIT:
            thread.wait_until_paused()

    def resume(self) -> None:
        """`Engine.resume`."""

        def resume() -> None:
            self._pause = None
            self._apply()

        self._context.thread.run_between_steps(resume)

    def hold(self) -> None:
        """`Engine.hold_admission`."""
        self._set_held(True)

    def open(self) -> None:
        """`Engine.open_admission`."""
        self._set_held(False)

    @contextlib.contextmanager
    def none_started(self) -> Generator[None, None, None]:
        """Wait until every started request has ended; within, none starts. A pause stays, and what it holds is not
        waited for."""
        self._count_wait(1)
        try:
            self._context.thread.wait_until_paused()
            yield
        finally:
            self._count_wait(-1)

    def _count_wait(self, step: int) -> None:
        def change() -> None:
            self._num_waits += step
            if self._pause is None:
                self._apply()

        self._context.thread.run_between_steps(change)

    def _set_held(self, is_held: bool) -> None:
        def change() -> None:
            self._is_held = is_held
            if self._pause is None:
                self._apply()

        if is_held:
            self._context.admission_open.clear()
        self._context.thread.run_between_steps(change)
        if not is_held:
            self._context.admission_open.set()

    def _apply(self) -> None:
        """Without a pause: hold new requests back, or none."""
        core = self._context.core
        if self._is_held or self._num_waits:
            core.pause(PauseMode.WAIT)
        else:
            core.resume()
