"""GET /v1/routing/stats and POST /v1/routing/reset: how often each expert was chosen, and how evenly. Knows no
placement.

Counts are read on the engine's thread, between two steps; readers that come together share one reading, and metrics
take the last one when the thread is stuck. Event loop only. Dims: M MoE layers, E experts."""

import asyncio
import hashlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64, Int64
from starlette.requests import Request
from starlette.responses import Response

from routed_experts.core.errors import RoutedExpertsError
from routed_experts.core.routing_stats import PHASES, RoutingStats
from routed_experts.server.errors import busy
from routed_experts.server.reply import json_reply

_PATIENCE_S = 1.0  # of metrics


class CachedReader:
    """Reads the counts, or resets them, one reading at a time. `read` waits for the engine's thread."""

    def __init__(self, read: Callable[[], RoutingStats]) -> None:
        self._read = read
        self._reading: asyncio.Task[RoutingStats] | None = None
        self._last: RoutingStats | None = None

    async def now(self) -> RoutingStats:
        """The counts. Raises CaptureDisabledError where nothing is recorded, EngineDeadError."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
        found = await asyncio.shield(self._reading)
        self._last = found
        return found

    async def soon(self) -> RoutingStats | None:
        """The counts, or those of the last reading if the engine's thread has no time or is gone; None where there are
        none."""
        try:
            return await asyncio.wait_for(self.now(), _PATIENCE_S)
        except (TimeoutError, RoutedExpertsError):
            return self._last


def load_imbalance(load: Int64[np.ndarray, "M E"]) -> Float64[np.ndarray, " M"]:
    """Largest over mean count of a layer's experts: 1 is even, E is all on one; NaN where nothing was counted."""
    with np.errstate(invalid="ignore"):
        return load.max(axis=1) / load.mean(axis=1)


def load_entropy(load: Int64[np.ndarray, "M E"]) -> Float64[np.ndarray, " M"]:
    """Entropy of a layer's counts over that of an even load, 0 to 1; NaN where nothing was counted."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = load / load.sum(axis=1, keepdims=True)
        return -np.where(share > 0, share * np.log(share), share).sum(axis=1) / np.log(load.shape[1])


def stats_reply(request: Request, stats: RoutingStats) -> Response:
    """The counts as JSON, with an ETag by which a reader learns that nothing has changed."""
    tag = hashlib.sha256(stats.counts.tobytes()).hexdigest()[:32]
    headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    load, newest = stats.load, stats.windows[-1] if len(stats.windows) else np.zeros_like(stats.counts)
    body: dict[str, object] = {
        "layer_ids": stats.layer_ids,
        "num_experts": stats.num_experts,
        "top_k": stats.top_k,
        "num_tokens": dict(zip(PHASES, stats.num_tokens.tolist(), strict=True)),
        "counts": dict(zip(PHASES, stats.counts.tolist(), strict=True)),
        "imbalance": load_imbalance(load).tolist(),
        "entropy": load_entropy(load).tolist(),
        "dead_experts": (load == 0).sum(axis=1).tolist(),
        "window": {
            "num_tokens": int(newest[:, :1].sum()) // stats.top_k,
            "counts": dict(zip(PHASES, newest.tolist(), strict=True)),
        },
    }
    return json_reply(body, headers=headers)


async def with_timeout(reader: CachedReader, seconds: float) -> RoutingStats:
    """The counts, or 503 when the engine's thread gives none in time."""
    try:
        return await asyncio.wait_for(reader.now(), seconds)
    except TimeoutError as late:
        raise busy("the engine's thread did not answer in time; it is stalled", code="stalled") from late
