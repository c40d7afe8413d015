"""Counts the programs that this process makes, before and after an engine is ready. Knows no program.

JAX reports each as an event, those of small eager operations among them; one that is read from the compilation cache
counts too."""

from typing import Any

import jax.monitoring

_MADE = "/jax/core/compile/backend_compile_duration"
_FROM_CACHE = "/jax/compilation_cache/cache_hits"


class CompileCount:
    """Counts from its making until `close`. The numbers may be read from any thread."""

    def __init__(self) -> None:
        self.startup = self.serving = self.cache_hits = 0
        self._is_serving = self._is_closed = False
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def start_serving(self) -> None:
        """From now on programs count as `serving`: there should be none."""
        self._is_serving = True

    def close(self) -> None:
        """Count no more. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            jax.monitoring.unregister_event_duration_listener(self._on_duration)
            jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _MADE:
            self.serving += self._is_serving
            self.startup += not self._is_serving

    def _on_event(self, event: str, **kwargs: Any) -> None:
        self.cache_hits += event == _FROM_CACHE
