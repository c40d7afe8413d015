"""KeptRows: the rows that a replica keeps for fetching, as it reports them to the coordinator of its fleet.

Event loop only."""

from routed_experts.fleet.link import Link
from routed_experts.fleet.messages import NumberedRows
from routed_experts.server.limits import ServerSettings
from routed_experts.server.routing_store import RoutingStore, StoreEntry

ENDING_S = 60.0  # ample, for a request to end after its time


def longest_kept_s(settings: ServerSettings) -> float:
    """Seconds after its reservation within which any entry of a server's store is dropped."""
    return settings.request_timeout + ENDING_S + settings.routing_store_ttl


class KeptRows:
    """The entries of one store. `keep_s`: as `longest_kept_s`."""

    def __init__(self, store: RoutingStore, *, keep_s: float) -> None:
        self._store, self._keep_s = store, keep_s
        self._link: Link | None = None

    def attach(self, link: Link) -> None:
        """Set the way to the coordinator, before any entry is reserved."""
        self._link = link

    async def reserve(self, entry: StoreEntry) -> None:
        """Have the coordinator note a new entry, unless this replica has made its id: also one that only looks so.
        While the coordinator is restarted, wait for it: the answer that names the rows is sent later."""
        assert self._link is not None
        if not entry.is_made:
            arguments = entry.request_id, self._link.tag, self._keep_s
            entry.number = await self._link.call_when_reached("reserve_rows", *arguments)

    def numbered(self) -> NumberedRows:
        """The entries that the coordinator has noted."""
        numbers = {entry.request_id: entry.number for entry in self._store.entries() if entry.number is not None}
        return NumberedRows(numbers, self._keep_s)

    async def drop(self, request_id: str, before: int) -> None:
        """Drop the rows of an id that a client has given to another replica, in the reservation of this number."""
        entry = self._store.find(request_id)
        # Without a number: where the id was made here it is older, for clients know it from its answer; else it may be
        # newer.
        if entry is not None and (entry.is_made if entry.number is None else entry.number < before):
            self._store.drop(entry)
