"""RoutingStore: rows that are kept for fetching (format ref), within a number of bytes and of seconds. Knows no HTTP.

The oldest finished go first; nothing live is ever dropped for room. Time is the injected clock's. Event loop only."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server.errors import ApiError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The record of one choice and the tokens of its sequence. `owner`: digest of the key that asked for it."""

    record: RoutedExperts
    token_ids: Int32[np.ndarray, " S"]
    owner: str

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.record.ids.nbytes + self.token_ids.nbytes


@dataclasses.dataclass(slots=True, kw_only=True)
class _Entry:
    owner: str
    num_choices: int
    choices: dict[int, KeptRows]
    until: float = float("inf")  # of the clock; set when the last choice has come


class RoutingStore:
    """Kept rows by request id and choice."""

    def __init__(self, *, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()
        self.nbytes = 0

    @property
    def is_on(self) -> bool:
        """May rows be kept at all."""
        return self._max_bytes > 0

    def expect(self, request_id: str, *, owner: str, num_choices: int) -> None:
        """A request has begun whose rows will be kept."""
        self._drop(request_id)
        self._entries[request_id] = _Entry(owner=owner, num_choices=num_choices, choices={})

    def put(self, request_id: str, choice: int, kept: KeptRows) -> None:
        """Keep the rows of an ended choice; the oldest finished make room. Rows that cannot fit at all are not kept."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        self._expire()
        entry.choices[choice] = kept
        self.nbytes += kept.nbytes
        if len(entry.choices) == entry.num_choices:
            entry.until = self._clock() + self._ttl_s
            self._entries.move_to_end(request_id)
        while self.nbytes > self._max_bytes:
            finished = next((name for name, one in self._entries.items() if one.until < float("inf") and name != request_id), None)
            self._drop(request_id if finished is None else finished)

    def forget(self, request_id: str) -> None:
        """A request ended without an answer: what is kept of it goes."""
        entry = self._entries.get(request_id)
        if entry is not None and len(entry.choices) < entry.num_choices:
            self._drop(request_id)

    def get(self, request_id: str, choice: int, *, owner: str) -> KeptRows:
        """The rows of a choice. Raises ApiError: 404 unknown or expired, 403 another's, 409 not ended yet."""
        entry = self._owned(request_id, owner)
        if not 0 <= choice < entry.num_choices:
            text = f"choice={choice} of a request with {entry.num_choices} choices; wanted 0..{entry.num_choices - 1}"
            raise ApiError(text, status=404, code="routing_not_found", param="choice")
        if choice not in entry.choices:
            raise ApiError("the request has not ended; try again when it has", status=409, code="routing_not_ready")
        return entry.choices[choice]

    def delete(self, request_id: str, *, owner: str) -> None:
        """Free the rows of a request. Raises as `get` does."""
        self._owned(request_id, owner)
        self._drop(request_id)

    def _owned(self, request_id: str, owner: str) -> _Entry:
        self._expire()
        entry = self._entries.get(request_id)
        if entry is None:
            text = "no rows are kept under this id: unknown, freed or expired (--routing-store-ttl)"
            raise ApiError(text, status=404, code="routing_not_found")
        if entry.owner != owner:
            raise ApiError("these rows were asked for with another key; use that one", status=403, code="routing_of_another_key")
        return entry

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.until <= now]:
            self._drop(name)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.nbytes -= sum(kept.nbytes for kept in entry.choices.values())
