"""Orders: what the processes of a group tell each other, and their bytes.

    header   32 bytes, little-endian: magic, version, kind, seq, bytes of the head, bytes of the arrays
    head     a JSON object; "arrays" lists dtype and shape of each array
    arrays   raw, little-endian, one after another
No code is ever read: there is no pickle. Every bound is checked before memory is reserved."""

import dataclasses
import enum
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from routed_experts.core.errors import OrderFormatError

MAGIC, VERSION = b"REXO", 1
_T = TypeVar("_T")
_HEADER = struct.Struct("<4sHHQQQ")
HEADER_BYTES = _HEADER.size
MAX_HEAD_BYTES, MAX_BODY_BYTES = 1 << 18, 1 << 28
MAX_ARRAYS, MAX_NDIM, MAX_SIDE = 64, 8, 1 << 31
ALIGNMENT = 8  # of the first array, by spaces after the head
_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {name: np.dtype(name) for name in ("<i4", "<f4", "<i8", "|u1", "<u2", "<u4", "|b1")}
)
NO_HEAD: Mapping[str, Any] = MappingProxyType({})
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class OrderKind(enum.IntEnum):
    """What an order is about. Those up to EXCHANGE belong to the connection; the others are carried out by followers,
    in the order of their `seq`."""

    HELLO = 1  # a process asks to join: its rank and the fields that must be equal
    WELCOME = 2  # all processes have joined
    REFUSE = 3  # a process may not join: the reason
    BEAT = 4  # a sign of life; `seq` is the last order that is done
    REPLY = 5  # the result of the order `seq`
    FAIL = 6  # a process ends by an error: its text
    DRAIN = 7  # a follower was asked to end, and asks process 0 to drain
    EXCHANGE = 8  # a value of each process, for all of them
    STEP = 16
    TAKE_COUNTS = 17
    MOVE_LAYER = 18
    SET_PLACEMENT = 19
    SET_CAPACITY = 20
    BEGIN_SCORE = 21
    SCORE = 22
    END_SCORE = 23
    PREPARE_WEIGHTS = 24
    COMMIT_WEIGHTS = 25
    DROP_WEIGHTS = 26
    SET_VERSION = 27
    RELEASE = 28
    ALLOCATE_POOL = 29
    OVERWRITE_POOL = 30
    STOP = 31  # the group ends: without an error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order. `head` holds JSON values, `arrays` have little-endian dtypes of at most 8 bytes."""

    kind: OrderKind
    seq: int = 0
    head: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    arrays: tuple[np.ndarray, ...] = ()


class OrderSender(Protocol):
    """Tells followers what to run. `in_order` is held around sending and dispatching, so that all processes dispatch in
    one order."""

    def in_order(self) -> AbstractContextManager[object]:
        """Hold the order of all dispatches."""
        ...

    def send(self, kind: OrderKind, head: Mapping[str, Any] = NO_HEAD, arrays: Sequence[np.ndarray] = ()) -> int:
        """Send an order to every follower; returns its `seq`. The arrays must not change from now on."""
        ...

    def begin_wait(self) -> None:
        """Note that this process now waits for a step of all processes."""
        ...

    def end_wait(self, tokens: np.ndarray) -> None:
        """Note that the step has ended, with these tokens."""
        ...

    def read(self, seq: int, read: Callable[[], _T]) -> _T:
        """Return what `read` does, which waits for the results of the order `seq`, other than a STEP; one call at a
        time. Raises PeerLostError as soon as the group has ended."""
        ...


class _NoFollowers:
    """For an engine of one process: there is nothing to send and nothing to hold."""

    __slots__ = ()

    def in_order(self) -> AbstractContextManager[object]:
        return _NOTHING_HELD

    def send(self, kind: OrderKind, head: Mapping[str, Any] = NO_HEAD, arrays: Sequence[np.ndarray] = ()) -> int:
        return 0

    def begin_wait(self) -> None:
        return

    def end_wait(self, tokens: np.ndarray) -> None:
        return

    def read(self, seq: int, read: Callable[[], _T]) -> _T:
        return read()


_NOTHING_HELD = nullcontext()
NO_FOLLOWERS: OrderSender = _NoFollowers()


def encode(order: Order) -> list[bytes | memoryview]:
    """The bytes of an order, in parts; arrays are not copied. Raises OrderFormatError for one that is too large."""
    arrays = [np.asarray(array, order="C") for array in order.arrays]
    head = dict(order.head)
    if arrays:
        head["arrays"] = [[array.dtype.str, array.shape] for array in arrays]
    text = _to_json(head).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    body = sum(array.nbytes for array in arrays)
    _check_sizes(len(text), body)
    unknown = {array.dtype.str for array in arrays} - _DTYPES.keys()
    if unknown or len(arrays) > MAX_ARRAYS:
        raise OrderFormatError(f"an order of {len(arrays)} arrays with dtypes {sorted(unknown)}: not of this protocol")
    header = _HEADER.pack(MAGIC, VERSION, order.kind, order.seq, len(text), body)
    return [header + text, *(array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes)]


class OrderReader:
    """Cuts a stream of bytes into orders. It holds at most one incomplete order, of at most the given sizes."""

    def __init__(self, *, max_head: int = MAX_HEAD_BYTES, max_body: int = MAX_BODY_BYTES) -> None:
        self._max_head, self._max_body = max_head, max_body
        self._buffer = bytearray()

    def feed(self, received: bytes | bytearray | memoryview) -> list[Order]:
        """Take the next bytes; returns the orders that they complete. Raises OrderFormatError, after which the stream
        cannot be read on."""
        self._buffer += received
        orders: list[Order] = []
        while len(self._buffer) >= HEADER_BYTES:
            kind, seq, head_bytes, body_bytes = self._header()
            size = HEADER_BYTES + head_bytes + body_bytes
            if len(self._buffer) < size:
                break
            orders.append(_decode(kind, seq, bytes(memoryview(self._buffer)[HEADER_BYTES:size]), head_bytes))
            del self._buffer[:size]
        return orders

    def _header(self) -> tuple[OrderKind, int, int, int]:
        magic, version, kind, seq, head_bytes, body_bytes = _HEADER.unpack_from(self._buffer)
        if magic != MAGIC:
            raise OrderFormatError("these bytes are no order: another program is at the other end of the connection")
        if version != VERSION:
            raise OrderFormatError(f"an order of protocol version {version}, and this process has {VERSION}")
        if head_bytes > self._max_head or body_bytes > self._max_body:
            limits = f"{self._max_head} and {self._max_body}"
            raise OrderFormatError(f"an order of {head_bytes} and {body_bytes} bytes is above the limits {limits}")
        try:
            return OrderKind(kind), seq, head_bytes, body_bytes
        except ValueError:
            raise OrderFormatError(f"order {seq} has the unknown kind {kind}; run one version everywhere") from None


def _decode(kind: OrderKind, seq: int, encoded: bytes, head_bytes: int) -> Order:
    """An order whose bytes are all there."""
    try:
        head: Any = json.loads(encoded[:head_bytes])
    except (ValueError, RecursionError):
        raise OrderFormatError(f"the head of order {seq} is no JSON") from None
    if not isinstance(head, dict):
        raise OrderFormatError(f"the head of order {seq} is no JSON object")
    fields = cast("dict[str, Any]", head)
    described = fields.pop("arrays", [])
    if not isinstance(described, list) or len(cast("list[object]", described)) > MAX_ARRAYS:
        raise OrderFormatError(f"order {seq} does not list its arrays")
    arrays: list[np.ndarray] = []
    at = head_bytes
    for item in cast("list[object]", described):
        dtype, shape = _described(item, seq)
        size = math.prod(shape) * dtype.itemsize
        if at + size > len(encoded):
            raise OrderFormatError(f"order {seq} has fewer bytes than its arrays {dtype.str}{shape}")
        try:
            flat = np.frombuffer(encoded, dtype, math.prod(shape), at) if size else np.empty(0, dtype)
            arrays.append(flat.reshape(shape))
        except ValueError:
            raise OrderFormatError(f"order {seq} has an array of an impossible shape") from None
        at += size
    if at != len(encoded):
        raise OrderFormatError(f"order {seq} has {len(encoded) - at} bytes after its arrays")
    return Order(kind=kind, seq=seq, head=fields, arrays=tuple(arrays))


def _described(item: object, seq: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Dtype and shape of one array, as a head lists them."""
    pair = cast("list[object]", item) if isinstance(item, list) else []
    dtype = _DTYPES.get(pair[0]) if len(pair) == 2 and isinstance(pair[0], str) else None
    sides = cast("list[object]", pair[1]) if len(pair) == 2 and isinstance(pair[1], list) else None
    if dtype is None or sides is None or len(sides) > MAX_NDIM:
        raise OrderFormatError(f"order {seq} has an array of unknown dtype or shape")
    shape = [side for side in sides if isinstance(side, int) and not isinstance(side, bool) and 0 <= side < MAX_SIDE]
    if len(shape) != len(sides):
        raise OrderFormatError(f"order {seq} has an array of an impossible shape")
    return dtype, tuple(shape)


def _check_sizes(head_bytes: int, body_bytes: int) -> None:
    if head_bytes > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
        limits = f"{MAX_HEAD_BYTES} and {MAX_BODY_BYTES}"
        raise OrderFormatError(f"an order of {head_bytes} and {body_bytes} bytes is above the limits {limits}")
