"""RoutingStore: rows that are kept for fetching (format ref), within a number of bytes and of seconds. Knows no HTTP.

The oldest finished go first; nothing live is ever dropped for room. A call holds the entry that `expect` gave it, for
its id may be used again and is then the newer call's. Time is the injected clock's. Event loop only."""

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np
from jaxtyping import Int32

from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.server.errors import ApiError


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What is said of rows in one form: headers (an ETag among them) and the number of bytes."""

    headers: Mapping[str, str]
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The record of one choice and the tokens of its sequence. `owner`: digest of the key that asked for it."""

    record: RoutedExperts
    token_ids: Int32[np.ndarray, " S"]
    owner: str
    told: dict[str, Told] = dataclasses.field(
        default_factory=dict[str, Told], compare=False
    )  # by form, once it was encoded

    @property
    def nbytes(self) -> int:
        """Host memory, in bytes."""
        return self.record.ids.nbytes + self.token_ids.nbytes


@dataclasses.dataclass(slots=True, kw_only=True)
class StoreEntry:
    """What is kept of one call."""

    request_id: str
    owner: str
    expected: frozenset[int]  # choices whose rows will be kept
    choices: dict[int, KeptRows]
    until: float = float("inf")  # of the clock; set when the last choice has come


class RoutingStore:
    """Kept rows by request id and choice. `later` calls back after some seconds, so that rows expire where nobody
    asks."""

    def __init__(
        self,
        *,
        max_bytes: int,
        ttl_s: float,
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._later, self._is_awaited = later, False
        self._entries: collections.OrderedDict[str, StoreEntry] = collections.OrderedDict()
        self.nbytes = 0

    @property
    def is_on(self) -> bool:
        """May rows be kept at all."""
        return self._max_bytes > 0

    def expect(self, request_id: str, *, owner: str, choices: Collection[int]) -> StoreEntry:
        """A request has begun, the rows of whose `choices` will be kept; those of an earlier one of its id go."""
        self._drop(request_id)
        entry = StoreEntry(request_id=request_id, owner=owner, expected=frozenset(choices), choices={})
        self._entries[request_id] = entry
        return entry

    def put(self, entry: StoreEntry, choice: int, kept: KeptRows) -> None:
        """Keep the rows of an ended choice; the oldest finished make room. Rows that cannot fit at all are not kept,
        nor are those of an entry that has gone."""
        self.expire()
        request_id = entry.request_id
        if self._entries.get(request_id) is not entry:
            return
        entry.choices[choice] = kept
        self.nbytes += kept.nbytes
        if entry.choices.keys() == entry.expected:
            entry.until = self._clock() + self._ttl_s
            self._entries.move_to_end(request_id)
            self._await_expiry()
        while self.nbytes > self._max_bytes:
            finished = next(
                (name for name, one in self._entries.items() if one.until < float("inf") and name != request_id), None
            )
            self._drop(request_id if finished is None else finished)

    def forget(self, entry: StoreEntry) -> None:
        """A request ended without an answer: what is kept of it goes."""
        if self._entries.get(entry.request_id) is entry and entry.choices.keys() < entry.expected:
            self._drop(entry.request_id)

    def get(self, request_id: str, choice: int, *, owner: str) -> KeptRows:
        """The rows of a choice. Raises ApiError: 404 unknown or expired, 403 another's, 409 not ended yet."""
        entry = self._owned(request_id, owner)
        if choice not in entry.expected:
            text = f"choice={choice} is none of the {len(entry.expected)} whose rows were asked for; wanted {min(entry.expected)} and on"
            raise ApiError(text, status=404, code="routing_not_found", param="choice")
        if choice not in entry.choices:
            raise ApiError("the request has not ended; try again when it has", status=409, code="routing_not_ready")
        return entry.choices[choice]

    def delete(self, request_id: str, *, owner: str) -> None:
        """Free the rows of a request. Raises as `get` does."""
        self._owned(request_id, owner)
        self._drop(request_id)

    def expire(self) -> None:
        """Free what has been kept for its time."""
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.until <= now]:
            self._drop(name)

    def _await_expiry(self) -> None:
        """Come back when the first of the finished is due."""
        due = min((entry.until for entry in self._entries.values()), default=float("inf"))
        if due < float("inf") and not self._is_awaited:
            self._is_awaited = True
            self._later(max(0.0, due - self._clock()), self._on_expiry)

    def _on_expiry(self) -> None:
        self._is_awaited = False
        self.expire()
        self._await_expiry()

    def _owned(self, request_id: str, owner: str) -> StoreEntry:
        self.expire()
        entry = self._entries.get(request_id)
        if entry is None:
            text = "no rows are kept under this id: unknown, freed or expired (--routing-store-ttl)"
            raise ApiError(text, status=404, code="routing_not_found")
        if entry.owner != owner:
            raise ApiError(
                "these rows were asked for with another key; use that one", status=403, code="routing_of_another_key"
            )
        return entry

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.nbytes -= sum(kept.nbytes for kept in entry.choices.values())
