"""RowDirectory: the replica that stores the rows of each request id that a client chose; part of the coordinator.

Reservations are numbered. Only the rows of the newest reservation of an id are served, on whichever replica they are;
older ones are not, even where the newest are gone. An id that a replica generated contains the replica's tag; the
directory has it only once a client reuses it."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping

# 40 to 70 MB, with ids of 36 to 256 characters; by the default times 100 such requests a second while rows are kept.
# Beyond, the oldest are forgotten: each replica then answers for itself, or asks the one that the id names.
MAX_LOCATIONS = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True)
class _Location:
    tag: str
    number: int
    forgotten_at: float  # by the clock: no rows of this reservation, or of an older one, are kept then


class RowDirectory:
    """The location of the rows of each id, for as long as they may be stored. `first`: a number above all that an
    earlier coordinator gave."""

    def __init__(self, *, first: int, clock: Callable[[], float]) -> None:
        self._numbers, self._clock = itertools.count(first), clock
        self._locations: collections.OrderedDict[str, _Location] = collections.OrderedDict()

    def reserve(self, request_id: str, tag: str, retention_s: float) -> tuple[int, str | None]:
        """Note a replica as the location of an id; returns the number of this reservation, and the tag of the replica
        before. `retention_s`: the longest time for which the rows are stored."""
        former, number = self._locations.get(request_id), next(self._numbers)
        self._note(request_id, _Location(tag, number, self._clock() + retention_s))
        return number, None if former is None else former.tag

    def add(self, tag: str, numbers: Mapping[str, int], retention_s: float) -> None:
        """Note the reservations of a replica that joins again, by id."""
        for request_id, number in numbers.items():
            former = self._locations.get(request_id)
            if former is None or former.number < number:
                self._note(request_id, _Location(tag, number, self._clock() + retention_s))

    def get(self, request_id: str) -> str | None:
        """The tag of the replica with the newest reservation of an id; None where there is none."""
        self._forget()
        location = self._locations.get(request_id)
        return None if location is None else location.tag

    def _note(self, request_id: str, location: _Location) -> None:
        self._locations[request_id] = location
        self._locations.move_to_end(request_id)
        self._forget()

    def _forget(self) -> None:
        now = self._clock()
        while self._locations:
            oldest = next(iter(self._locations.values()))
            if oldest.forgotten_at > now and len(self._locations) <= MAX_LOCATIONS:
                return
            self._locations.popitem(last=False)
