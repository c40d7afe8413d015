"""RowReservations: a replica's side of the RowDirectory: it reports which ids it stores rows for, and drops old rows.

Event loop only."""

from routed_experts.fleet.link import Link
from routed_experts.fleet.messages import NumberedRows
from routed_experts.server.limits import ServerSettings
from routed_experts.server.routing_store import RoutingStore, StoreEntry

ENDING_S = 60.0  # ample, for a request to end after its time


def max_retention_s(settings: ServerSettings) -> float:
    """Seconds after its reservation within which any entry of a server's store is dropped."""
    return settings.request_timeout + ENDING_S + settings.routing_store_ttl


class RowReservations:
    """The reservations of the entries of one store. `retention_s`: as `max_retention_s`."""

    def __init__(self, store: RoutingStore, *, retention_s: float) -> None:
        self._store, self._retention_s = store, retention_s
        self._link: Link | None = None

    def attach(self, link: Link) -> None:
        """Set the way to the coordinator, before any entry is reserved."""
        self._link = link

    async def reserve(self, entry: StoreEntry) -> None:
        """Report a new entry to the coordinator, unless this server generated its id. While the coordinator restarts,
        wait for it: the answer that names the rows is sent later."""
        assert self._link is not None
        if not entry.is_made:
            arguments = entry.request_id, self._link.tag, self._retention_s
            entry.number = await self._link.call_when_reached("reserve_rows", *arguments)

    def numbered(self) -> NumberedRows:
        """The entries that the coordinator has noted."""
        numbers = {entry.request_id: entry.number for entry in self._store.entries() if entry.number is not None}
        return NumberedRows(numbers, self._retention_s)

    async def drop(self, request_id: str, before: int) -> None:
        """Drop the rows of an id that a client has given to another replica, in the reservation of this number."""
        entry = self._store.find(request_id)
        # An entry without a number: older where this server generated the id, which clients know from its answer; else
        # it may be newer.
        if entry is not None and (entry.is_made if entry.number is None else entry.number < before):
            self._store.drop(entry)
