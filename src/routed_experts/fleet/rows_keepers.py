"""RowsKeepers: which replica keeps the rows of an id that a client gave, which other replicas may have met before.

The coordinator counts the reservations of the fleet. The last one of an id is the one that counts, on whichever replica
it is; rows of older ones are not given out, also where those of the last one are gone. Ids that a replica makes name
it, and are not here until a client gives one again."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping

# 40 to 70 MB, with ids of 36 to 256 characters; by the default times 100 such requests a second while rows are kept.
# Beyond, the oldest are forgotten: each replica then answers for itself, or asks the one that the id names.
MAX_KEEPERS = 1 << 17


@dataclasses.dataclass(frozen=True, slots=True)
class _Keeper:
    tag: str
    number: int
    forgotten_at: float  # by the clock: no rows of this reservation, or of an older one, are kept then


class RowsKeepers:
    """`first`: a number above those of the coordinator before this one."""

    def __init__(self, *, first: int, clock: Callable[[], float]) -> None:
        self._numbers, self._clock = itertools.count(first), clock
        self._keepers: collections.OrderedDict[str, _Keeper] = collections.OrderedDict()

    def reserve(self, request_id: str, tag: str, keep_s: float) -> tuple[int, str | None]:
        """Note a replica as the keeper of an id; returns the number of this reservation, and the keeper before.
        `keep_s`: seconds within which the rows are kept, if they are."""
        former, number = self._keepers.get(request_id), next(self._numbers)
        self._note(request_id, _Keeper(tag, number, self._clock() + keep_s))
        return number, None if former is None else former.tag

    def add(self, tag: str, numbers: Mapping[str, int], keep_s: float) -> None:
        """Note the reservations of a replica that joins again, by id."""
        for request_id, number in numbers.items():
            former = self._keepers.get(request_id)
            if former is None or former.number < number:
                self._note(request_id, _Keeper(tag, number, self._clock() + keep_s))

    def get(self, request_id: str) -> str | None:
        """The tag of the replica that keeps the rows of an id, if it still does."""
        self._forget()
        keeper = self._keepers.get(request_id)
        return None if keeper is None else keeper.tag

    def _note(self, request_id: str, keeper: _Keeper) -> None:
        self._keepers[request_id] = keeper
        self._keepers.move_to_end(request_id)
        self._forget()

    def _forget(self) -> None:
        now = self._clock()
        while self._keepers:
            oldest = next(iter(self._keepers.values()))
            if oldest.forgotten_at > now and len(self._keepers) <= MAX_KEEPERS:
                return
            self._keepers.popitem(last=False)
