"""KeptRows: the rows that a replica keeps for fetching, as it reports them to the coordinator of its fleet.

Event loop only."""

import collections

from routed_experts.fleet.link import Link
from routed_experts.fleet.messages import NumberedRows
from routed_experts.fleet.request_ids import tag_of
from routed_experts.server.limits import ServerSettings
from routed_experts.server.routing_store import RoutingStore, StoreEntry

MAX_REUSED = 65_536  # ids of this replica that clients have given to others
ENDING_S = 60.0  # ample, for a request to end after its time


def longest_kept_s(settings: ServerSettings) -> float:
    """Seconds after its reservation within which any entry of a server's store is dropped."""
    return settings.request_timeout + ENDING_S + settings.routing_store_ttl


class KeptRows:
    """The entries of one store. `keep_s`: as `longest_kept_s`."""

    def __init__(self, store: RoutingStore, *, keep_s: float) -> None:
        self._store, self._keep_s = store, keep_s
        self._link: Link | None = None
        self._reused: collections.OrderedDict[str, None] = collections.OrderedDict()  # made here, met elsewhere

    def attach(self, link: Link) -> None:
        """Set the way to the coordinator, before any entry is reserved."""
        self._link = link

    async def reserve(self, entry: StoreEntry) -> None:
        """Have the coordinator note a new entry, unless this replica has made its id. While the coordinator is
        restarted, wait for it: the answer that names the rows is sent later."""
        assert self._link is not None
        if self._is_noted(entry.request_id):
            arguments = entry.request_id, self._link.tag, self._keep_s
            entry.number = await self._link.call_when_reached("reserve_rows", *arguments)

    def numbered(self) -> NumberedRows:
        """The entries that the coordinator has noted."""
        numbers = {entry.request_id: entry.number for entry in self._store.entries() if entry.number is not None}
        return NumberedRows(numbers, self._keep_s)

    async def drop(self, request_id: str, before: int) -> None:
        """Drop the rows of an id that a client has given to another replica, in the reservation of this number."""
        entry, is_noted = self._store.find(request_id), self._is_noted(request_id)
        if not is_noted:
            self._reused[request_id] = None
            if len(self._reused) > MAX_REUSED:
                self._reused.popitem(last=False)
        # An entry that is noted, and has no number yet, may be newer.
        if entry is not None and (not is_noted if entry.number is None else entry.number < before):
            self._store.drop(entry)

    def _is_noted(self, request_id: str) -> bool:
        """Whether the coordinator notes reservations of this id: other replicas may have met it, too."""
        return self._link is None or tag_of(request_id) != self._link.tag or request_id in self._reused
