"""RoutingStore: rows that are kept for fetching (format ref), within a number of bytes and of seconds.

The oldest finished entries are dropped first; an entry of a running call is never dropped for space. A call holds the
entry that `reserve` returned, because its id may be used again by a newer call. Event loop only. Dims: S tokens."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np
from jaxtyping import Int32

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server.errors import ApiError

_NEVER = float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class HttpMeta:
    """Headers of rows in one encoding (an ETag among them) and their size."""

    headers: Mapping[str, str]
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """The record of one choice and the tokens of its sequence. `owner`: digest of the key of the request; `meta`: by
    encoding, once it was encoded."""

    record: RoutedExperts
    token_ids: Int32[np.ndarray, " S"]
    owner: str
    meta: dict[str, HttpMeta] = dataclasses.field(default_factory=dict[str, HttpMeta], compare=False)

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.record.nbytes + self.token_ids.nbytes


@dataclasses.dataclass(slots=True, kw_only=True)
class StoreEntry:
    """The rows of one call."""

    request_id: str
    owner: str
    expected: frozenset[int]  # choices whose rows will be stored
    choices: dict[int, StoredRows]
    expires_at: float = _NEVER  # by the clock; set when the last choice was stored
    is_made: bool = False  # the server made the id for this call; else a client gave it, perhaps several times
    number: int | None = None  # in a fleet: of this reservation among those of all replicas

    @property
    def is_complete(self) -> bool:
        """Whether the rows of every expected choice are stored."""
        return self.choices.keys() == self.expected


class RoutingStore:
    """Rows by request id and choice. `call_later` runs a call after some seconds, so that rows expire without a
    request."""

    def __init__(
        self,
        *,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._call_later, self._is_expiry_scheduled = call_later, False
        self._entries: collections.OrderedDict[str, StoreEntry] = collections.OrderedDict()
        self.nbytes = 0

    def reserve(self, request_id: str, *, owner: str, choices: Collection[int], is_made: bool = False) -> StoreEntry:
        """Open an entry for the rows of `choices` of a call; an earlier entry of the same id is dropped. `is_made`:
        as in StoreEntry."""
        self._drop(request_id)
        expected = frozenset(choices)
        entry = StoreEntry(request_id=request_id, owner=owner, expected=expected, choices={}, is_made=is_made)
        self._entries[request_id] = entry
        return entry

    def fill(self, entry: StoreEntry, choice: int, rows: StoredRows) -> None:
        """Store the rows of a finished choice and make room for them.

        Rows that are larger than the store are not kept, nor are rows of an entry that was dropped."""
        self.expire()
        request_id = entry.request_id
        if self._entries.get(request_id) is not entry:
            return
        entry.choices[choice] = rows
        self.nbytes += rows.nbytes
        if entry.is_complete:
            entry.expires_at = self._clock() + self._ttl_s
            self._entries.move_to_end(request_id)
            self._schedule_expiry()
        while self.nbytes > self._max_bytes:
            others = (name for name, other in self._entries.items() if other.expires_at < _NEVER and name != request_id)
            self._drop(next(others, request_id))

    def entries(self) -> Collection[StoreEntry]:
        """All entries."""
        return self._entries.values()

    def find(self, request_id: str) -> StoreEntry | None:
        """The entry of an id, whoever owns it."""
        return self._entries.get(request_id)

    def drop(self, entry: StoreEntry) -> None:
        """Drop an entry, also one of a running call."""
        if self._entries.get(entry.request_id) is entry:
            self._drop(entry.request_id)

    def release(self, entry: StoreEntry) -> None:
        """Drop the entry of a call that has ended without all of its rows."""
        if self._entries.get(entry.request_id) is entry and not entry.is_complete:
            self._drop(entry.request_id)

    def get(self, request_id: str, choice: int, *, owner: str) -> StoredRows:
        """Return the rows of a choice. Raises ApiError: 404 unknown or expired, 403 another owner, 409 not finished."""
        entry = self._owned(request_id, owner)
        if choice not in entry.expected:
            text = (
                f"choice={choice} is none of the {len(entry.expected)} whose rows are kept; "
                f"the first is {min(entry.expected)}"
            )
            raise ApiError(text, status=404, code="routing_not_found", param="choice")
        if choice not in entry.choices:
            text = "the request has not finished; try again when it has"
            raise ApiError(text, status=409, code="routing_not_ready")
        return entry.choices[choice]

    def delete(self, request_id: str, *, owner: str) -> None:
        """Drop the rows of a call. Raises as `get` does."""
        self._owned(request_id, owner)
        self._drop(request_id)

    def expire(self) -> None:
        """Drop the entries whose time is over."""
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.expires_at <= now]:
            self._drop(name)

    def _schedule_expiry(self) -> None:
        """Call `expire` when the first entry is due."""
        due = min((entry.expires_at for entry in self._entries.values()), default=_NEVER)
        if due < _NEVER and not self._is_expiry_scheduled:
            self._is_expiry_scheduled = True
            self._call_later(max(0.0, due - self._clock()), self._on_expiry)

    def _on_expiry(self) -> None:
        self._is_expiry_scheduled = False
        self.expire()
        self._schedule_expiry()

    def _owned(self, request_id: str, owner: str) -> StoreEntry:
        self.expire()
        entry = self._entries.get(request_id)
        if entry is None:
            text = "no rows are kept under this id: unknown, freed or expired (--routing-store-ttl)"
            raise ApiError(text, status=404, code="routing_not_found")
        if entry.owner != owner:
            text = "these rows belong to another key; use that one"
            raise ApiError(text, status=403, code="routing_of_another_key")
        return entry

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.nbytes -= sum(rows.nbytes for rows in entry.choices.values())
