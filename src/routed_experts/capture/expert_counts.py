"""Count how often each expert is chosen by the rows that are filed. Engine thread only.

The engine thread only enqueues rows. One worker counts many at a time, in pieces small enough that the engine thread
never waits long for the interpreter; the compiled program has no counts. The queue is bounded: the engine thread waits
for a worker that lags. A reader waits until all rows are counted, or takes the last snapshot. Dims: F phases (prompt,
generated), R rows, M MoE layers, K experts per token, E experts."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from jaxtyping import Bool, Int64, UInt

from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.core.routing_stats import PHASES, WINDOW_TOKENS, RoutingStats

_WINDOWS = 32
_PARCEL_IDS = 1 << 15  # ids counted at a time: a tenth of a millisecond
_CHUNK_IDS = 1 << 18  # ids that go to the worker together; more only where a single step has more
_MAX_PENDING = 8  # such chunks, of a byte or two an id

PendingRows = tuple[UInt[np.ndarray, "R M*K"], Bool[np.ndarray, " R"]]


class ExpertCounts:
    """Counts since the last reset: in total, in complete windows, and in the window that fills."""

    def __init__(self, spec: CaptureSpec) -> None:
        self._spec = spec
        self._shape = (len(PHASES), spec.num_moe_layers, spec.num_experts)
        # The first number of each slot of a row, by phase: layers, then phases, E apart.
        starts = np.arange(len(PHASES) * spec.num_moe_layers) * spec.num_experts
        self._starts: Int64[np.ndarray, "F M*K"] = np.repeat(starts.reshape(len(PHASES), -1), spec.top_k, axis=1)
        # The thread starts with the first chunk.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="expert-counts")
        self._submitted: deque[Future[None]] = deque()
        self._pending: list[PendingRows] = []
        self._pending_ids = 0
        self._clear()

    def reset(self) -> None:
        """Set all counts to zero."""
        self._drain()
        self._clear()

    def enqueue(self, rows: UInt[np.ndarray, "R M*K"], generated: Bool[np.ndarray, " R"]) -> None:
        """Count these rows later; they must not change from now on. `generated`: rows of generated tokens, the
        others are of prompts."""
        self._pending.append((rows, generated))
        self._pending_ids += rows.size
        if self._pending_ids >= _CHUNK_IDS:
            if len(self._submitted) >= _MAX_PENDING:
                self._submitted.popleft().result()
            self._flush()

    def _flush(self) -> None:
        """Hand all enqueued rows to the worker."""
        pending, self._pending, self._pending_ids = self._pending, [], 0
        try:
            self._submitted.append(self._worker.submit(self._count, pending))
        except RuntimeError:  # the interpreter shuts down and takes no more work
            self._count(pending)

    def add(self, rows: UInt[np.ndarray, "R M*K"], generated: Bool[np.ndarray, " R"]) -> None:
        """Count these rows now. `generated`: rows of generated tokens, the others are of prompts."""
        low, step = 0, max(1, _PARCEL_IDS // rows.shape[1])
        while low < len(rows):
            part = slice(low, low + min(step, WINDOW_TOKENS - self._filling_rows))
            assert rows[part].max(initial=0) < self._spec.num_experts, (
                f"expert {rows[part].max()} of {self._spec.num_experts}"
            )
            for phase, part_rows in enumerate(_by_phase(rows[part], generated[part])):
                if not len(part_rows):
                    continue
                # Phase by phase: looking up each row's own starts takes three times as long.
                keys = self._starts[phase] + part_rows
                self._filling += np.bincount(keys.ravel(), minlength=self._before.size).reshape(self._shape)
            self._filling_rows += len(rows[part])
            low = part.stop
            if self._filling_rows == WINDOW_TOKENS:
                self._before = self._before + self._filling  # `snapshot` may have returned the old array
                self._windows.append(self._filling.astype(np.int32))
                self._filling, self._filling_rows = np.zeros(self._shape, np.int64), 0

    def _clear(self) -> None:
        self._before = np.zeros(self._shape, np.int64)  # of complete windows
        self._filling = np.zeros(self._shape, np.int64)
        self._filling_rows = 0
        self._windows: deque[np.ndarray] = deque(maxlen=_WINDOWS)
        self._latest = self._before  # never changed in place: a new array replaces it

    def _count(self, pending: Sequence[PendingRows]) -> None:
        for rows, generated in pending:
            self.add(rows, generated)
        self._latest = self._before + self._filling

    def _drain(self) -> None:
        """Wait for the worker, and count the rows still in the buffer."""
        while self._submitted:
            self._submitted.popleft().result()
        pending, self._pending, self._pending_ids = self._pending, [], 0
        self._count(pending)

    def snapshot(self) -> RoutingStats:
        """Return what the worker had counted when it last finished, without windows and without waiting; rows enqueued
        since are counted next."""
        while self._submitted and self._submitted[0].done():
            self._submitted.popleft().result()
        if self._pending and len(self._submitted) < _MAX_PENDING:
            self._flush()
        return self._stats(self._latest, [])

    def stats(self) -> RoutingStats:
        """Return a copy of all counts."""
        self._drain()
        windows = list(self._windows)
        if self._filling_rows:
            windows.append(self._filling.astype(np.int32))
        return self._stats(self._before + self._filling, windows)

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
    """Split into rows of prompts and rows of generated tokens; copies only where there are both."""
    num_generated = int(np.count_nonzero(generated))
    if num_generated in (0, len(rows)):
        return (rows[num_generated:], rows[:num_generated])
    return (rows[~generated], rows[generated])
