"""ExpertCounts: counts the rows that are filed. Knows nothing of slots, pages or requests. Engine thread only.

Filing only hands rows over. They are counted many at a time by one worker, in pieces small enough that the engine's
thread never waits long for the interpreter, and the compiled program is the one without counts. A worker that lags
makes the engine wait, so what is kept for it is bounded; whoever reads waits until all is counted, or takes what was
counted last. Dims: F phases (prompt, generated), R rows, M MoE layers, K experts per token, E experts."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from jaxtyping import Bool, Int64, UInt

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.routing_stats import PHASES, WINDOW_TOKENS, RoutingStats

_WINDOWS = 32
_PARCEL_IDS = 1 << 15  # ids: a tenth of a millisecond
_CHUNK_IDS = 1 << 18  # ids that go to the worker together
_MAX_PENDING = 8  # such parcels; one is larger only where a single step is, of a byte or two an id

NotedRows = tuple[UInt[np.ndarray, "R M*K"], Bool[np.ndarray, " R"]]


class ExpertCounts:
    """Counts since the last reset: in all, in whole windows, and in the one that fills."""

    def __init__(self, spec: CaptureSpec) -> None:
        self._spec = spec
        self._shape = (len(PHASES), spec.num_moe_layers, spec.num_experts)
        # The first number of each slot of a row, by phase: layers, then phases, lie E apart.
        starts = np.arange(len(PHASES) * spec.num_moe_layers) * spec.num_experts
        self._starts: Int64[np.ndarray, "F M*K"] = np.repeat(starts.reshape(len(PHASES), -1), spec.top_k, axis=1)
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="expert-counts"
        )  # its thread begins with the first parcel
        self._handed: deque[Future[None]] = deque()
        self._noted: list[NotedRows] = []
        self._noted_ids = 0
        self._clear()

    def reset(self) -> None:
        """Begin anew."""
        self._drain()
        self._clear()

    def enqueue(self, rows: UInt[np.ndarray, "R M*K"], generated: Bool[np.ndarray, " R"]) -> None:
        """Count these rows later; nobody may change them from now on. `generated`: those of generated tokens, the
        others are of prompts."""
        self._noted.append((rows, generated))
        self._noted_ids += rows.size
        if self._noted_ids >= _CHUNK_IDS:
            if len(self._handed) >= _MAX_PENDING:
                self._handed.popleft().result()
            self._flush()

    def _flush(self) -> None:
        """Let the worker count what was noted."""
        noted, self._noted, self._noted_ids = self._noted, [], 0
        try:
            self._handed.append(self._worker.submit(self._count, noted))
        except RuntimeError:  # the interpreter is ending, and takes no more work
            self._count(noted)

    def add(self, rows: UInt[np.ndarray, "R M*K"], generated: Bool[np.ndarray, " R"]) -> None:
        """Count these rows now; `generated` says which are of generated tokens, the others are of prompts."""
        low, step = 0, max(1, _PARCEL_IDS // rows.shape[1])
        while low < len(rows):
            part = slice(low, low + min(step, WINDOW_TOKENS - self._filling_rows))
            assert rows[part].max(initial=0) < self._spec.num_experts, (
                f"expert {rows[part].max()} of {self._spec.num_experts}"
            )
            for phase, mine in enumerate(_by_phase(rows[part], generated[part])):
                if not len(mine):
                    continue
                keys = (
                    self._starts[phase] + mine
                )  # phase by phase: to look up each row's own starts takes three times as long
                self._filling += np.bincount(keys.ravel(), minlength=self._before.size).reshape(self._shape)
            self._filling_rows += len(rows[part])
            low = part.stop
            if self._filling_rows == WINDOW_TOKENS:
                self._before = self._before + self._filling  # `latest` may have handed out the old one
                self._windows.append(self._filling.astype(np.int32))
                self._filling, self._filling_rows = np.zeros(self._shape, np.int64), 0

    def _clear(self) -> None:
        self._before = np.zeros(self._shape, np.int64)  # of windows that are whole
        self._filling = np.zeros(self._shape, np.int64)
        self._filling_rows = 0
        self._windows: deque[np.ndarray] = deque(maxlen=_WINDOWS)
        self._latest = self._before  # nobody changes it: another one takes its place

    def _count(self, noted: Sequence[NotedRows]) -> None:
        for rows, generated in noted:
            self.add(rows, generated)
        self._latest = self._before + self._filling

    def _drain(self) -> None:
        """Wait for the worker, and count what it was not handed."""
        while self._handed:
            self._handed.popleft().result()
        noted, self._noted, self._noted_ids = self._noted, [], 0
        self._count(noted)

    def snapshot(self) -> RoutingStats:
        """What the worker had counted when it was last done, without windows; waits for nobody. What was noted since is
        counted next."""
        while self._handed and self._handed[0].done():
            self._handed.popleft().result()
        if self._noted and len(self._handed) < _MAX_PENDING:
            self._flush()
        return self._stats(self._latest, [])

    def stats(self) -> RoutingStats:
        """A copy of what was counted."""
        self._drain()
        kept = list(self._windows)
        if self._filling_rows:
            kept.append(self._filling.astype(np.int32))
        return self._stats(self._before + self._filling, kept)

    def _stats(self, counts: Int64[np.ndarray, "F M E"], windows: Sequence[np.ndarray]) -> RoutingStats:
        return RoutingStats(
            counts=counts,
            num_tokens=counts[:, 0].sum(axis=1) // self._spec.top_k,
            windows=np.array(windows, np.int32).reshape(-1, *self._shape),
            layer_ids=self._spec.layer_ids,
            top_k=self._spec.top_k,
        )


def _by_phase(
    rows: UInt[np.ndarray, "R M*K"], generated: Bool[np.ndarray, " R"]
) -> tuple[UInt[np.ndarray, "prompt M*K"], UInt[np.ndarray, "new M*K"]]:
    """Rows of prompts, and those of generated tokens; copied only where there are both."""
    num_generated = int(np.count_nonzero(generated))
    if num_generated in (0, len(rows)):
        return (rows[num_generated:], rows[:num_generated])
    return (rows[~generated], rows[generated])
