"""ReroutingStats: expert slots of each request that capacities moved away from its K best experts, or dropped.

Tokens that a request feeds count, and so do those of its cached prefix, which other requests fed. So counts are kept by
KV slot too; the next pass over a slot overwrites them. Engine thread only; the totals may be read from any thread.
Dims: N padded tokens, R real tokens, S tokens of a prefix."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int

from routed_experts.core.io_struct import ReroutingCounts
from routed_experts.core.model_worker_batch import ModelWorkerBatch
from routed_experts.scheduling.schedule_batch import Req


class ReroutingStats:
    """Slots that ran another expert than one of their token's K best, and slots that ran none."""

    def __init__(self, num_slots: int) -> None:
        self._by_slot = np.zeros((num_slots, 2), np.int32)
        self._own: dict[str, tuple[int, int]] = {}  # of live requests
        self._total = np.zeros(2, np.int64)

    @property
    def total(self) -> ReroutingCounts:
        """The sum over all requests since the start."""
        return ReroutingCounts(rerouted_slots=int(self._total[0]), dropped_slots=int(self._total[1]))

    def file(
        self,
        batch: ModelWorkerBatch,
        rerouting: Int[np.ndarray, "N 2"],
        live: Bool[np.ndarray, " R"] | None,
        running: Iterable[Req],
    ) -> None:
        """File a step: the changes in each of its tokens, and which of the R real ones belong to live requests (None:
        all)."""
        live = np.ones(batch.num_tokens, np.bool_) if live is None else live
        real = np.where(live[:, None], rerouting[: batch.num_tokens], 0)
        self._total += real.sum(axis=0)
        self._by_slot[batch.kv_slots[live]] = real[
            live
        ]  # the pages of the others may already belong to another request
        by_row = np.zeros((batch.num_requests, 2), np.int64)
        np.add.at(by_row, batch.token_rows[: batch.num_tokens], real)
        rids = {req.slot: req.rid for req in running}
        for row in np.flatnonzero(by_row.any(axis=1)):
            self._add(rids[int(batch.request_slots[row])], by_row[row])

    def retract(self, req: Req, prefix: Int[np.ndarray, " S"]) -> None:
        """Keep the counts of a cached prefix before its pages are freed: the generated tokens still depend on them."""
        counts = self._by_slot[prefix].sum(axis=0)
        if counts.any():
            self._add(req.rid, counts)

    def counts_for(self, req: Req, prefix: Int[np.ndarray, " S"], *, ended: bool) -> ReroutingCounts:
        """The counts of a request, in its own passes and in its cached prefix; those of an ended one are dropped."""
        own = self._own.get(req.rid, (0, 0))
        if ended:
            self._own.pop(req.rid, None)
        rerouted, dropped = (self._by_slot[prefix].sum(axis=0) + own).tolist()
        return ReroutingCounts(rerouted_slots=rerouted, dropped_slots=dropped)

    def _add(self, rid: str, counts: Int[np.ndarray, " 2"]) -> None:
        rerouted, dropped = self._own.get(rid, (0, 0))
        self._own[rid] = (rerouted + int(counts[0]), dropped + int(counts[1]))
