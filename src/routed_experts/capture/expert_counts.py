"""ExpertCounts: counts the rows that are filed, some hundreds at a time. Knows nothing of slots, pages or requests. Engine thread only.

It counts where rows are filed, in bulk and off the step path, so that the compiled program is the one without it.
Dims: F phases (prompt, generated), R rows, M MoE layers, K experts per token, E experts."""

from collections import deque

import numpy as np
from jaxtyping import Bool, Int64, UInt

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.routing_stats import PHASES, WINDOW_TOKENS, RoutingStats

_WINDOWS = 32
_AT_ONCE = 1024  # rows: their keys take 8 bytes an id


class ExpertCounts:
    """Counts since the last reset: in all, in whole windows, and in the one that fills."""

    def __init__(self, spec: CaptureSpec) -> None:
        self._spec = spec
        self._shape = (len(PHASES), spec.num_moe_layers, spec.num_experts)
        # The first number of each slot of a row, by phase: layers, then phases, lie E apart.
        starts = np.arange(len(PHASES) * spec.num_moe_layers) * spec.num_experts
        self._starts: Int64[np.ndarray, "F M*K"] = np.repeat(starts.reshape(len(PHASES), -1), spec.top_k, axis=1)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._before = np.zeros(self._shape, np.int64)  # of windows that are whole
        self._filling = np.zeros(self._shape, np.int64)
        self._filling_rows = 0
        self._windows: deque[np.ndarray] = deque(maxlen=_WINDOWS)

    def add(self, rows: UInt[np.ndarray, "R M*K"], generated: Bool[np.ndarray, " R"]) -> None:
        """Count these rows; `generated` says which are of generated tokens, the others are of prompts."""
        for low in range(0, len(rows), _AT_ONCE):
            part = slice(low, low + _AT_ONCE)
            keys = self._starts[generated[part].astype(np.intp)] + rows[part]
            self._filling += np.bincount(keys.ravel(), minlength=self._before.size).reshape(self._shape)
        self._filling_rows += len(rows)
        if self._filling_rows >= WINDOW_TOKENS:
            self._before += self._filling
            self._windows.append(self._filling.astype(np.int32))
            self._filling, self._filling_rows = np.zeros(self._shape, np.int64), 0

    def stats(self, *, windows: bool = True) -> RoutingStats:
        """A copy of what was counted; `windows` may be left out, which are most of it."""
        counts = self._before + self._filling
        kept = list(self._windows) if windows else []
        if windows and self._filling_rows:
            kept.append(self._filling.astype(np.int32))
        return RoutingStats(
            counts=counts, num_tokens=counts[:, 0].sum(axis=1) // self._spec.top_k,
            windows=np.array(kept, np.int32).reshape(-1, *self._shape), layer_ids=self._spec.layer_ids, top_k=self._spec.top_k,
        )  # fmt: skip
