"""CompileCount: counts the programs that this process compiles, before and after an engine is ready.

JAX reports each as an event, also those of small eager operations; a program that is read from the compilation cache
counts too. Any library may remove the listeners of all others. They are added again when a count is read, and then
`is_complete` is False: programs compiled meanwhile are unknown."""

import contextlib
import logging
import threading
from typing import Any

import jax.monitoring

logger = logging.getLogger(__name__)

_COMPILED = "/jax/core/compile/backend_compile_duration"
_FROM_CACHE = "/jax/compilation_cache/cache_hits"
_PROBE = "/routed_experts/compile_count"


class CompileCount:
    """Counts from its creation until `close`. The numbers may be read from any thread."""

    def __init__(self) -> None:
        self._startup = self._serving = self._cache_hits = 0
        self._is_serving = self._is_closed = self._is_heard = False
        self._is_complete = True
        self._lock = threading.Lock()
        self._listen()

    @property
    def startup(self) -> int:
        """Programs before `start_serving`."""
        self._check_listeners()
        return self._startup

    @property
    def serving(self) -> int:
        """Programs since then: there should be none."""
        self._check_listeners()
        return self._serving

    def latest_serving(self) -> int:
        """`serving`, without a look whether the listeners are still there: for every request, at no cost."""
        return self._serving

    @property
    def cache_hits(self) -> int:
        """Programs that were read from the compilation cache."""
        self._check_listeners()
        return self._cache_hits

    @property
    def is_complete(self) -> bool:
        """Whether every program was counted; False: the counts are lower bounds."""
        self._check_listeners()
        return self._is_complete

    def start_serving(self) -> None:
        """Count programs as `serving` from now on."""
        self._check_listeners()
        self._is_serving = True

    def close(self) -> None:
        """Stop counting. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(AssertionError, ValueError):  # JAX's, for listeners that were removed
                jax.monitoring.unregister_event_duration_listener(self._on_duration)
            with contextlib.suppress(AssertionError, ValueError):
                jax.monitoring.unregister_event_listener(self._on_event)

    def _listen(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _check_listeners(self) -> None:
        """Add the listeners again if they were removed, which an event of our own finds out."""
        with self._lock:
            if self._is_closed:
                return
            self._is_heard = False
            jax.monitoring.record_event(_PROBE)
            if self._is_heard:
                return
            self._listen()
            if self._is_complete:
                logger.warning("compile counts are incomplete: another library removed the listeners of JAX's events")
            self._is_complete = False

    def _on_duration(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILED:
            self._serving += self._is_serving
            self._startup += not self._is_serving

    def _on_event(self, event: str, **kwargs: Any) -> None:
        self._is_heard = self._is_heard or event == _PROBE
        self._cache_hits += event == _FROM_CACHE
