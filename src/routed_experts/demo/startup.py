"""Where the seconds of start-up go: tracing, lowering, compiling, and reading the compilation cache.

Programs are built in several threads, so these are thread seconds and may exceed the wall time."""

import threading
from collections import Counter
from types import TracebackType

from jax import monitoring

_SECONDS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",  # includes reading the cache
    "/jax/compilation_cache/cache_retrieval_time_sec": "read",
}
_COUNTS = {"/jax/compilation_cache/cache_hits": "hits", "/jax/compilation_cache/cache_misses": "misses"}


class CompileClock:
    """Listens to JAX's monitoring events between enter and exit; its counters are under a lock."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._seconds: dict[str, float] = dict.fromkeys(_SECONDS.values(), 0.0)
        self._lock = threading.Lock()

    def __enter__(self) -> "CompileClock":
        """Begin to listen."""
        monitoring.register_event_duration_secs_listener(self._on_seconds)
        monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        monitoring.unregister_event_duration_listener(self._on_seconds)
        monitoring.unregister_event_listener(self._on_event)

    def line(self) -> str:
        """The seconds so far, in one line."""
        with self._lock:
            seconds, hits, misses = dict(self._seconds), self._events["hits"], self._events["misses"]
        xla = max(seconds["compile"] - seconds["read"], 0.0)
        parts = f"trace {seconds['trace']:.1f} · lower {seconds['lower']:.1f} · XLA {xla:.1f}"
        parts += f" · read cache {seconds['read']:.1f} s"
        return f"thread seconds: {parts} ({hits} programs from the cache, {misses} compiled)"

    def _on_seconds(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in _SECONDS:
            with self._lock:
                self._seconds[_SECONDS[event]] += duration_secs

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        if event in _COUNTS:
            with self._lock:
                self._events[_COUNTS[event]] += 1
