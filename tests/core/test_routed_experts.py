"""The record: its invariants, its slicing by token, its checks and its bytes."""

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from routed_experts.core.capture_spec import CaptureSpec, expert_id_dtype
from routed_experts.core.errors import CaptureUnsupportedError, RoutingFormatError
from routed_experts.core.record_validation import to_version_spans
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats.archive import decode_record, decode_record_and_tokens, encode_record

EXAMPLE_IDS = [[[1, 0], [7, 3]], [[4, 2], [5, 1]]]  # the worked example: tokens 2 and 3 of 5, prompt of 3


def example(**changes):
    fields = {
        "ids": np.array(EXAMPLE_IDS, np.uint8),
        "start": 2,
        "num_tokens": 5,
        "num_prompt_tokens": 3,
        "layer_ids": (1, 2),
        "num_hidden_layers": 3,
        "num_experts": 8,
        "version_spans": ((2, 4, 0),),
    }
    return RoutedExperts(**(fields | changes))


def random_record(rng):
    num_layers = int(rng.integers(1, 6))
    layer_ids = tuple(sorted(rng.choice(num_layers, size=int(rng.integers(1, num_layers + 1)), replace=False).tolist()))
    num_experts = int(rng.choice([1, 4, 255, 256, 257, 300, 65_535]))
    top_k = int(rng.integers(1, min(num_experts, 4) + 1))
    start, num_rows = int(rng.integers(0, 4)), int(rng.integers(0, 6))
    num_tokens = start + num_rows + int(rng.integers(0, 2))
    ids = np.empty((num_rows, len(layer_ids), top_k), expert_id_dtype(num_experts))
    for index in np.ndindex(ids.shape[:2]):
        ids[index] = rng.choice(num_experts, size=top_k, replace=False)
    valid = rng.random(num_rows) < 0.7 if rng.random() < 0.3 else None
    return RoutedExperts(
        ids=ids,
        start=start,
        num_tokens=num_tokens,
        num_prompt_tokens=int(rng.integers(0, num_tokens + 1)),
        layer_ids=layer_ids,
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        version_spans=to_version_spans(start, rng.integers(0, 2, num_rows)),
        valid=valid,
        weights=rng.random(ids.shape, np.float32) if rng.random() < 0.5 else None,
        router=rng.choice([None, "9f3a"]),
    )


def test_a_record_cannot_be_changed():
    ids = np.array(EXAMPLE_IDS, np.uint8)
    record = example(ids=ids)
    with pytest.raises(ValueError, match="read-only"):
        record.ids[0, 0, 0] = 3
    with pytest.raises(ValueError, match="read-only"):
        ids[0, 0, 0] = 3  # the record owns what it was given
    with pytest.raises(FrozenInstanceError):
        record.start = 3
    with pytest.raises(ValueError, match="read-only"):
        record[2:3].ids[0, 0, 0] = 3


def test_slicing_is_by_absolute_token():
    record = example(version_spans=((2, 3, 0), (3, 4, 1)))
    assert record[3:4].ids.tolist() == [EXAMPLE_IDS[1]]
    assert (record[3:4].start, record[3:4].version_spans) == (3, ((3, 4, 1),))
    assert record[0:5] == record == record[:]  # tokens 0, 1 and 4 have no row
    assert record[3:4].num_tokens == 5
    assert record[4:9].num_rows == 0
    assert record[0:2].version_spans == ()


def test_prompt_and_generated_rows_split_at_the_prompt_length():
    record = example()
    assert record.prompt.ids.tolist() == EXAMPLE_IDS[:1]
    assert record.generated.ids.tolist() == EXAMPLE_IDS[1:]
    assert record.generated.start == 3


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(0, 12))
def test_a_slice_holds_the_rows_of_its_tokens_and_no_other(seed, low, high):
    record = random_record(np.random.default_rng(seed))
    cut = record[low:high]
    tokens = [token for token in range(record.start, record.start + record.num_rows) if low <= token < high]
    version_of = {token: version for a, b, version in record.version_spans for token in range(a, b)}
    assert cut.num_rows == len(tokens)
    for row, token in enumerate(tokens):
        assert cut.start + row == token
        assert np.array_equal(cut.ids[row], record.ids[token - record.start])
        assert record.valid is None or cut.valid[row] == record.valid[token - record.start]
    assert {token: version for a, b, version in cut.version_spans for token in range(a, b)} == {
        t: version_of[t] for t in tokens
    }


@pytest.mark.parametrize("tokens", [slice(-1, None), slice(0, -1), slice(0, 4, 2)])
def test_a_slice_that_is_no_run_of_tokens_is_refused(tokens):
    with pytest.raises(IndexError, match="absolute indices"):
        example()[tokens]


def test_a_record_is_not_iterated_by_accident():
    with pytest.raises(TypeError, match=r"record\[a:b\]"):
        list(example())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ids": np.array(EXAMPLE_IDS, np.uint16)}, "uint16"),
        ({"ids": np.array(EXAMPLE_IDS, np.int32)}, "int32"),
        ({"ids": np.asfortranarray(np.array(EXAMPLE_IDS, np.uint8))}, "C-order False"),
        ({"num_experts": 257}, r"expected C-order uint16"),
        ({"layer_ids": (2, 1)}, "ascending"),
        ({"layer_ids": (1, 3)}, r"0\.\.2"),
        ({"layer_ids": (1,)}, "2 columns"),
        ({"start": 4, "version_spans": ((4, 6, 0),)}, r"\[4, 6\) in a sequence of 5"),
        ({"num_prompt_tokens": 6}, "prompt 6"),
        ({"version_spans": ((2, 3, 0),)}, "end at 3"),
        ({"version_spans": ((2, 4, 0), (3, 4, 1))}, "begins at 3"),
        ({"version_spans": ()}, "end at 2"),
        ({"valid": np.ones(3, bool)}, r"bool\[3\]"),
        ({"weights": np.ones((2, 2, 2))}, "float64"),
        ({"ids": EXAMPLE_IDS}, "ids is a list of 2; expected a NumPy array; convert it with np.asarray"),
        ({"ids": jnp.array(EXAMPLE_IDS, jnp.uint8)}, "ids is .*; expected a NumPy array"),
        ({"valid": [True, False]}, "valid is a list of 2; expected a NumPy array"),
        ({"weights": [[0.5]]}, "weights is a list of 1; expected a NumPy array"),
        ({"start": 2.0}, r"start=2\.0; expected an integer"),
        ({"num_tokens": "5"}, "num_tokens='5'; expected an integer"),
        ({"num_prompt_tokens": True}, "num_prompt_tokens=True; expected an integer"),
        ({"num_experts": True}, "num_experts=True; expected an integer of at least 1"),
        ({"num_experts": 8.0}, r"num_experts=8\.0; expected an integer"),
        ({"num_experts": "8"}, "num_experts='8'; expected an integer"),
        ({"num_experts": None}, "num_experts=None; expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True; expected an integer of at least 1"),
        ({"num_hidden_layers": 3.0}, r"num_hidden_layers=3\.0; expected an integer"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3'; expected an integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None; expected an integer"),
        ({"layer_ids": [1, 2]}, "layer_ids is a list of 2; expected a tuple of integers; convert it with tuple"),
        ({"layer_ids": np.array([1, 2])}, "layer_ids is a ndarray of 2; expected a tuple"),
        ({"layer_ids": (1, "2")}, "layer_ids is a tuple of 2; expected a tuple of integers"),
        ({"layer_ids": (False, 2)}, "expected a tuple of integers"),
        ({"layer_ids": None}, "layer_ids is None; expected a tuple of integers"),
        ({"version_spans": [(2, 4, 0)]}, "version_spans is or holds a list; expected a tuple of tuples"),
        ({"version_spans": ([2, 4, 0],)}, "version_spans is or holds a list; expected a tuple of tuples"),
        ({"version_spans": None}, r"version_spans=None; expected triples"),
        ({"version_spans": (0, 2, 4)}, r"version_spans=a tuple of 3; expected triples"),
        ({"version_spans": ((2, 4, 0.5),)}, "expected triples .* of integers"),
    ],
)
def test_a_record_that_breaks_its_own_laws_is_not_made(changes, text):
    with pytest.raises(RoutingFormatError, match=text):
        example(**changes)


def test_integers_of_numpy_are_those_of_a_record():
    numbers = {name: np.int32(value) for name, value in (("num_experts", 8), ("num_hidden_layers", 3))}
    record = example(**numbers, layer_ids=(np.int64(1), np.uint8(2)), version_spans=((2, np.int64(4), 0),))
    assert record == example() == decode_record(encode_record(record))


def test_a_spec_of_a_list_of_layers_gives_the_record_of_a_tuple():
    spec = CaptureSpec(num_hidden_layers=3, layer_ids=[1, 2], num_experts=8, top_k=2)
    ids = np.array(EXAMPLE_IDS, np.uint8)
    record = RoutedExperts.from_spec(
        spec, ids=ids, start=2, num_tokens=5, num_prompt_tokens=3, version_spans=((2, 4, 0),)
    )
    assert record == example()


def test_validate_names_the_first_bad_token_layer_and_slot():
    example().validate()
    text = "token 3, hidden layer 2, slot 0: id 8; expected 0 to 7; give logical ids"
    with pytest.raises(RoutingFormatError, match=text):
        example(ids=np.array([[[1, 0], [7, 3]], [[4, 2], [8, 1]]], np.uint8)).validate()
    with pytest.raises(RoutingFormatError, match="token 2, hidden layer 1, slot 1: expert 0"):
        example(ids=np.array([[[0, 0], [7, 3]], [[4, 2], [5, 5]]], np.uint8)).validate()


def test_validate_leaves_out_unknown_rows_and_hash_routed_repeats():
    repeated = np.array([[[255, 255], [7, 3]], [[4, 2], [5, 5]]], np.uint8)
    example(ids=repeated, valid=np.array([False, True])).validate(repeats_in_layers=[2])
    with pytest.raises(RoutingFormatError, match="token 3, hidden layer 2"):
        example(ids=repeated, valid=np.array([False, True])).validate(repeats_in_layers=[1])


def test_equality_compares_ids_and_metadata_but_not_unknown_rows():
    record = example()
    assert record == example(valid=np.array([True, True]))
    assert record != example(ids=np.array([[[1, 0], [7, 3]], [[4, 2], [1, 5]]], np.uint8))
    for changes in (
        {"num_tokens": 4},
        {"num_experts": 9},
        {"router": "x"},
        {"num_hidden_layers": 4},
        {"version_spans": ((2, 4, 1),)},
    ):
        assert record != example(**changes)
    assert record != example(valid=np.array([True, False]))
    assert record != example(weights=np.ones((2, 2, 2), np.float32))
    other = np.array([[[1, 0], [7, 3]], [[0, 0], [0, 0]]], np.uint8)
    assert example(valid=np.array([True, False])) == example(ids=other, valid=np.array([True, False]))
    assert record != 3


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1))
def test_bytes_hold_the_whole_record(seed):
    record = random_record(np.random.default_rng(seed))
    decoded = decode_record(encode_record(record))
    assert decoded == record
    assert np.array_equal(decoded.ids, record.ids)
    assert decoded.ids.dtype == record.ids.dtype
    assert decoded.version_spans == record.version_spans


def test_bytes_are_the_tensors_and_the_metadata_of_the_description():
    encoded = encode_record(example(), np.array([5, 7, 9, 4, 6]))
    tensors = load(encoded)
    shapes = {name: (str(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {"routed_experts": ("uint8", (2, 2, 2)), "token_ids": ("int32", (5,))}
    metadata = json.loads(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])["__metadata__"]
    info = json.loads(metadata["routed_experts_info"])
    assert (info["format"], info["layers"], info["dtype"], info["shape"]) == ("ref", "moe", "uint8", [2, 2, 2])
    assert info["sha256"].startswith("68a6f491")
    record, token_ids = decode_record_and_tokens(encoded)
    assert record == example()
    assert token_ids.tolist() == [5, 7, 9, 4, 6]


def test_bytes_that_were_changed_are_refused():
    encoded = encode_record(example())
    for broken in (b"", b"\0" * 40, encoded[:-1], encoded + b"\0", encoded[:-8] + bytes([1, 0, 7, 3, 4, 2, 5, 2])):
        with pytest.raises(RoutingFormatError):
            decode_record(broken)
    with pytest.raises(RoutingFormatError, match=r"\(4,\); expected \(5,\)"):
        encode_record(example(), np.arange(4))


def test_the_smallest_dtype_holds_every_expert():
    spec = CaptureSpec(num_hidden_layers=3, layer_ids=(1, 2), num_experts=256, top_k=4)
    assert (spec.dtype, spec.num_moe_layers, spec.row_bytes) == (np.uint8, 2, 8)
    assert (replace(spec, num_experts=257).dtype, replace(spec, num_experts=65_535).row_bytes) == (np.uint16, 16)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 65_536},
        {"num_hidden_layers": 1025},
        {"layer_ids": ()},
        {"layer_ids": (1, 1)},
        {"layer_ids": (3,)},
        {"top_k": 0},
        {"top_k": 9},
    ],
)
def test_a_model_that_cannot_be_captured_is_refused(changes):
    with pytest.raises(CaptureUnsupportedError, match=r"captured|build without"):
        replace(CaptureSpec(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2), **changes)


def test_reading_a_record_imports_no_jax():
    modules = "routed_experts.capture, routed_experts.capture.host_cache, routed_experts.core.routed_experts"
    script = f"import sys, {modules}; print([name for name in ('jax', 'flax', 'torch') if name in sys.modules])"
    program = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("weights", [None, jnp.bfloat16, np.float32])
def test_a_record_that_was_pickled_or_copied_is_read_only_too(weights):
    record = example(valid=np.array([True, False]))
    if weights is not None:
        record = replace(record, weights=np.ones(record.ids.shape, weights))
    for other in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record), copy.copy(record)):
        assert other == record and other.version_spans == record.version_spans
        for array in (other.ids, other.valid, other.weights):
            assert array is None or not array.flags.writeable
