"""Orders keep their values through their bytes, and bytes that are no order are refused without reserving memory."""

import json
import random
import tracemalloc

import numpy as np
import pytest

from routed_experts.core.errors import OrderFormatError
from routed_experts.execution.orders import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    NO_FOLLOWERS,
    Order,
    OrderKind,
    OrderReader,
    encode,
)

DTYPES = ("<i4", "<f4", "<i8", "|u1", "<u2", "<u4", "|b1")


def random_order(noise):
    arrays = []
    for _ in range(noise.randrange(4)):
        shape = tuple(noise.randrange(5) for _ in range(noise.randrange(4)))
        bits = np.frombuffer(noise.randbytes(int(np.prod(shape, dtype=int)) * 8), np.uint8)
        arrays.append(bits.astype(np.dtype(noise.choice(DTYPES)))[: int(np.prod(shape, dtype=int))].reshape(shape))
    head = {f"k{index}": noise.choice([1, -5, 2**40, 1.5, "text é", None, [1, 2], {"a": True}]) for index in range(3)}
    return Order(kind=noise.choice(list(OrderKind)), seq=noise.randrange(2**60), head=head, arrays=tuple(arrays))


def same(left, right):
    alike = [
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(left.arrays, right.arrays, strict=True)
    ]
    return (left.kind, left.seq, dict(left.head)) == (right.kind, right.seq, dict(right.head)) and all(alike)


def test_orders_keep_their_values_however_the_stream_is_cut():
    noise = random.Random(0)
    orders = [random_order(noise) for _ in range(2000)]
    stream = b"".join(b"".join(encode(order)) for order in orders)
    reader, read, at = OrderReader(), [], 0
    while at < len(stream):
        size = noise.choice((1, 7, 31, 32, 33, 500, 5000))
        read += reader.feed(stream[at : at + size])
        at += size
    assert len(read) == 2000 and all(map(same, orders, read))


def mutate(noise, data):
    data = bytearray(data)
    for _ in range(noise.randrange(1, 5)):
        action, at = noise.randrange(4), noise.randrange(max(1, len(data)))
        if action == 0:
            data[at : at + 1] = bytes([(data[at] if data else 0) ^ 1 << noise.randrange(8)])
        elif action == 1:
            data[at : at + noise.randrange(1, 9)] = noise.randbytes(noise.randrange(9))
        elif action == 2:
            del data[at:]
            data += b"\0"
        else:
            data[at:at] = noise.randbytes(noise.randrange(1, 40))
    return bytes(data)


def test_mutated_bytes_are_an_order_or_a_typed_refusal_in_bounded_memory():
    noise, refusals = random.Random(1), []
    tracemalloc.start()
    for _ in range(5000):
        data = mutate(noise, b"".join(encode(random_order(noise))))
        try:
            OrderReader().feed(data)
        except OrderFormatError as error:
            refusals.append(str(error))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(refusals) > 2500
    assert all("\n" not in text and len(text) < 300 for text in set(refusals))
    assert peak < 4 << 20, peak


def header(kind=16, head=2, body=0, magic=b"REXO", version=1):
    return magic + np.array([version, kind], "<u2").tobytes() + np.array([1, head, body], "<u8").tobytes()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n", "another program"),
        (header(version=2), "protocol version 2, and this process has 1"),
        (header(kind=999), "order 1 has the unknown kind 999"),
        (header(body=1 << 40), "above the limits"),
        (header(head=1 << 40), "above the limits"),
        (header(head=4) + b"[1]\n", "no JSON object"),
        (header(head=4) + b"\xff\xfe{}", "no JSON"),
        (header(head=200_000) + b"[" * 200_000, "no JSON"),
    ],
)
def test_what_is_no_order_is_refused_by_name(data, expected):
    with pytest.raises(OrderFormatError, match=expected):
        OrderReader().feed(data)


@pytest.mark.parametrize(
    "arrays",
    [
        1,
        [1],
        [["<i4"]],
        [["<i4", 3]],
        [["O", [1]]],
        [["<i4", [-1]]],
        [["<i4", [2**40]]],
        [["<i4", [True]]],
        [["<i4", [1.5]]],
        [["<i4", [1] * 9]],
        [["<i4", [5]]],
        [["<i4", []]] * 65,
        [["<i4", [2**31 - 1] * 7 + [0]]],
        [["<i4", [2**31 - 1] * 8]],
    ],
)
def test_an_impossible_list_of_arrays_is_refused(arrays):
    head = json.dumps({"arrays": arrays}).encode()
    with pytest.raises(OrderFormatError):
        OrderReader().feed(header(head=len(head)) + head)


def test_a_reader_for_hellos_takes_no_larger_ones():
    data = b"".join(encode(Order(kind=OrderKind.STEP, arrays=(np.zeros(3, np.int32),))))
    with pytest.raises(OrderFormatError, match="above the limits 100 and 0"):
        OrderReader(max_head=100, max_body=0).feed(data[:HEADER_BYTES])


def test_an_order_that_no_reader_would_take_is_not_sent():
    with pytest.raises(OrderFormatError, match="above the limits"):
        encode(Order(kind=OrderKind.STEP, head={"text": "x" * (1 << 19)}))
    big = np.broadcast_to(np.zeros(1, np.uint8), (MAX_BODY_BYTES + 1,))
    with pytest.raises(OrderFormatError, match="above the limits"):
        encode(Order(kind=OrderKind.STEP, arrays=(big,)))
    with pytest.raises(OrderFormatError, match="dtypes"):
        encode(Order(kind=OrderKind.STEP, arrays=(np.zeros(1, np.complex64),)))


def test_without_followers_nothing_is_sent_and_nothing_is_held():
    with NO_FOLLOWERS.in_order():
        assert NO_FOLLOWERS.send(OrderKind.STEP, {}, (np.zeros(1),)) == 0
