"""Wire forms: the worked example to the byte, every form back to the same record, and what is refused."""

import base64
import dataclasses
import io
import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from routed_experts.core.capture_spec import expert_id_dtype
from routed_experts.core.errors import RoutingFormatError
from routed_experts.core.record_validation import to_version_spans
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.formats import packed, record_from_meta_info, record_from_npy, record_from_response
from routed_experts.formats.archive import decode_record, encode_record
from routed_experts.formats.meta_info import extract_routed_experts_from_meta_info
from routed_experts.formats.metadata import RoutedExpertsMetadata, to_metadata
from routed_experts.formats.wire import (
    decode_routed_experts,
    encode_as_lists,
    encode_meta_info,
    encode_routed_experts,
    npy_bytes,
)

# Typed from the description of the wire (section 5), not from this code.
INT32_TEXT = "//////////8BAAAAAAAAAAcAAAADAAAA//////////8EAAAAAgAAAAUAAAABAAAA"
NPY_ALL_DATA = bytes([0, 0, 1, 0, 7, 3, 0, 0, 4, 2, 5, 1])
NPY_MOE_DATA = bytes([1, 0, 7, 3, 4, 2, 5, 1])
FLAT = [-1, -1, 1, 0, 7, 3, -1, -1, 4, 2, 5, 1]
INFO = {
    "schema": "routed_experts/1",
    "format": "int32",
    "layers": "all",
    "dtype": "int32",
    "shape": [2, 3, 2],
    "start": 2,
    "num_tokens": 5,
    "num_prompt_tokens": 3,
    "prompt_rows": 1,
    "include_last": False,
    "num_hidden_layers": 3,
    "moe_layer_ids": [1, 2],
    "num_experts": 8,
    "top_k": 2,
    "dense_fill": -1,
    "order": "score_desc",
    "ids": "logical",
    "exact": True,
    "placement": None,
    "version_spans": [[2, 4, 0]],
    "missing_rows": 0,
    "weights": None,
    "router": None,
}


def example(**changes):
    fields = {
        "ids": np.array([[[1, 0], [7, 3]], [[4, 2], [5, 1]]], np.uint8),
        "start": 2,
        "num_tokens": 5,
        "num_prompt_tokens": 3,
        "layer_ids": (1, 2),
        "num_hidden_layers": 3,
        "num_experts": 8,
        "version_spans": ((2, 4, 0),),
    }
    return RoutedExperts(**(fields | changes))


def listed(record, layers="moe"):
    """Form (c), worked out here: the prompt's rows apart from the choice's."""
    ids = record.ids.astype(np.int16)
    if layers == "all":
        ids = np.full((record.num_rows, record.num_hidden_layers, record.top_k), -1, np.int16)
        ids[:, list(record.layer_ids)] = record.ids
    info = to_metadata(record, payload_format="list", layers=layers).to_json()
    return {
        "prompt_routed_experts": ids[: info["prompt_rows"]].tolist(),
        "choices": [{"index": 0, "routed_experts": ids[info["prompt_rows"] :].tolist(), "routed_experts_info": info}],
    }


def test_int32_is_the_worked_example():
    fields = encode_meta_info(example(), payload_format="int32", layers="all")
    sha256 = fields["routed_experts_info"].pop("sha256")
    assert sha256.startswith("68a6f491")
    assert fields == {"routed_experts": INT32_TEXT, "routed_experts_info": INFO, "routed_experts_start_len": 2}
    assert list(fields["routed_experts_info"]) == list(INFO)  # the same order
    users_own = np.frombuffer(base64.b64decode(fields["routed_experts"].encode()), np.int32).reshape(-1, 3, 2)
    assert users_own.reshape(-1).tolist() == FLAT


@pytest.mark.parametrize(
    ("layers", "data", "length", "shape", "fill"),
    [("all", NPY_ALL_DATA, 188, (2, 3, 2), 0), ("moe", NPY_MOE_DATA, 184, (2, 2, 2), None)],
)
def test_npy_is_the_worked_example(layers, data, length, shape, fill):
    fields = encode_routed_experts(example(), payload_format="npy", layers=layers)
    text, info = fields["routed_experts"], fields["routed_experts_info"]
    raw = base64.b64decode(text)
    assert (len(text), len(raw), raw[128:]) == (length, 128 + len(data), data)
    assert raw[:8] == b"\x93NUMPY\x01\x00"
    assert text.startswith("k05VTVBZAQB2AHsn")
    assert layers == "moe" or text.endswith(
        "AAEABwMAAAQCBQE="
    )  # past the header's last group, whose newline the description misprints
    saved = io.BytesIO()
    np.save(saved, np.frombuffer(data, np.uint8).reshape(shape))  # NumPy's own bytes, made of the description's data
    assert raw == saved.getvalue()
    loaded = np.load(io.BytesIO(raw), allow_pickle=False)
    assert (loaded.dtype, loaded.shape, loaded.flags.c_contiguous) == (np.uint8, shape, True)
    assert (info["format"], info["layers"], info["dtype"], info["shape"], info["dense_fill"]) == (
        "npy",
        layers,
        "uint8",
        list(shape),
        fill,
    )
    assert info["sha256"].startswith("68a6f491")


def test_int32_of_moe_layers_has_no_dense_column():
    fields = encode_routed_experts(example(), payload_format="int32", layers="moe")
    assert np.frombuffer(base64.b64decode(fields["routed_experts"]), "<i4").tolist() == list(NPY_MOE_DATA)
    assert (fields["routed_experts_info"]["dense_fill"], fields["routed_experts_info"]["shape"]) == (None, [2, 2, 2])


def random_record(rng):
    num_layers = int(rng.integers(1, 5))
    layer_ids = tuple(sorted(rng.choice(num_layers, size=int(rng.integers(1, num_layers + 1)), replace=False).tolist()))
    num_experts, top_k = int(rng.choice([3, 255, 256, 257, 32_768])), int(rng.integers(1, 4))
    start, num_rows = int(rng.integers(0, 3)), int(rng.integers(0, 5))
    num_tokens = start + num_rows + int(rng.integers(0, 2))
    ids = rng.integers(0, num_experts, (num_rows, len(layer_ids), top_k)).astype(expert_id_dtype(num_experts))
    dtype = rng.choice([None, None, "float32", "bfloat16"])
    return RoutedExperts(
        ids=ids,
        start=start,
        num_tokens=num_tokens,
        num_prompt_tokens=int(rng.integers(0, num_tokens + 1)),
        layer_ids=layer_ids,
        num_hidden_layers=num_layers,
        num_experts=num_experts,
        version_spans=to_version_spans(start, rng.integers(0, 2, num_rows)),
        valid=rng.random(num_rows) < 0.7 if rng.random() < 0.2 else None,
        weights=rng.random(ids.shape, np.float32).astype(dtype) if dtype is not None else None,
    )


def test_every_form_of_a_thousand_records_round_trips_and_reads_as_one_array():
    rng = np.random.default_rng(0)
    for _ in range(1_000):
        record = random_record(rng)
        expected = np.full((record.num_rows, record.num_hidden_layers, record.top_k), -1, np.int32)
        for row, column in np.ndindex(record.num_rows, len(record.layer_ids)):
            if record.valid is None or record.valid[row]:
                expected[row, record.layer_ids[column]] = record.ids[row, column]
        for payload_format in ("int32", "npy", "packed"):
            layers = str(rng.choice(["all", "moe"]))
            fields = json.loads(json.dumps(encode_routed_experts(record, payload_format=payload_format, layers=layers)))
            for answer in ({"meta_info": fields}, {"index": 0, **fields}):  # /generate, and a choice
                assert record_from_meta_info(answer) == record
                flat = extract_routed_experts_from_meta_info(answer)
                assert flat.dtype == np.int32
                assert np.array_equal(flat, expected.reshape(-1))
        response = listed(record, layers=str(rng.choice(["all", "moe"])))
        if record.weights is None:
            assert record_from_response(response) == record
        layers = str(rng.choice(["all", "moe"]))
        assert record_from_meta_info(json.loads(json.dumps(encode_as_lists(record, layers=layers)))) == record
        info = to_metadata(record, payload_format="ref").to_json()
        assert record_from_npy(npy_bytes(record.ids), info) == dataclasses.replace(record, weights=None)
        assert decode_record(encode_record(record)) == record


def test_weights_are_npy_of_float32_or_of_the_bits_of_bfloat16():
    """Read with NumPy and struct alone."""
    weights = np.array([[[1.0, 0.5], [0.75, -2.0]], [[3.0, 0.1], [1e-30, 7.0]]], np.float32)
    for dtype, name in ((np.float32, "float32"), (ml_dtypes.bfloat16, "bfloat16")):
        record = example(weights=weights.astype(dtype))
        fields = encode_routed_experts(record, payload_format="npy", layers="moe")
        assert fields["routed_experts_info"]["weights"] == name
        read = np.load(io.BytesIO(base64.b64decode(fields["routed_experts_weights"])))
        if name == "bfloat16":
            assert read.dtype == np.uint16
            read = np.array([struct.unpack("<f", struct.pack("<I", int(bits) << 16)) for bits in read.reshape(-1)])
        assert np.array_equal(read.reshape(weights.shape), record.weights.astype(np.float32))
        listed_weights = encode_as_lists(record, layers="moe")["routed_experts_weights"]
        assert np.array_equal(np.array(listed_weights, np.float32), record.weights.astype(np.float32))


def test_weights_that_do_not_fit_are_refused():
    fields = encode_routed_experts(example(weights=np.ones((2, 2, 2), np.float32)), payload_format="npy", layers="moe")
    short = base64.b64encode(npy_bytes(np.ones((1, 2, 2), np.float32))).decode()
    for answer, text in (
        ({"meta_info": fields | {"routed_experts_weights": short}}, r"\[1, 2, 2\]|\(1, 2, 2\)"),
        ({"meta_info": fields | {"routed_experts_weights": None}}, "NoneType; expected base64"),
        (changed(fields, weights="bfloat16"), "float32|uint16"),
        (changed(fields, weights="float64"), "one of|float32 or bfloat16"),
    ):
        with pytest.raises(RoutingFormatError, match=text):
            record_from_meta_info(answer)
    strided = np.ones((2, 2, 4), np.float32)[..., ::2]
    for weights in (np.ones((2, 2, 2)), np.ones((2, 2, 1), np.float32), np.ones((2, 2, 2), np.float16), strided):
        with pytest.raises(RoutingFormatError, match="expected C-order float32 or bfloat16"):
            example(weights=weights)
    assert example(weights=np.ones((2, 2, 2), np.float32)) != example(
        weights=np.ones((2, 2, 2), np.float32).astype(ml_dtypes.bfloat16)
    )


def test_weights_in_lists_have_the_shape_and_the_range_of_the_record():
    weights = np.arange(1, 9, dtype=np.float32).reshape(2, 2, 2) / 8
    for dtype in (np.float32, ml_dtypes.bfloat16):
        record = example(weights=weights.astype(dtype))
        fields = encode_as_lists(record, layers="moe")
        assert decode_lists(fields, fields["routed_experts_weights"]) == record
        for wrong, text in (
            (weights.T.reshape(2, 4).tolist(), r"shape \[2, 4\]; expected \[2, 2, 2\]"),
            (weights.reshape(8).tolist(), r"shape \[8\]; expected \[2, 2, 2\]"),
            ([], r"shape \[0\]; expected \[2, 2, 2\]"),
            (
                (weights.astype(np.float64) * 1e40).tolist(),
                rf"holds 1\.25e\+39, which {np.dtype(dtype).name} does not hold",
            ),
        ):
            with pytest.raises(RoutingFormatError, match=text):
                decode_lists(fields, wrong)
    wide = example(
        ids=np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
        weights=np.ones((1, 2, 3), np.float32),
        version_spans=((2, 3, 0),),
    )
    fields = encode_as_lists(wide, layers="moe")
    with pytest.raises(RoutingFormatError, match=r"shape \[1, 3, 2\]; expected \[1, 2, 3\]"):
        decode_lists(fields, np.ones((1, 3, 2)).tolist())
    none = wide[2:2]
    fields = encode_as_lists(none, layers="moe")
    assert fields["routed_experts_weights"] == [] and decode_lists(fields, []) == none
    infinite = example(weights=np.full((2, 2, 2), np.inf, np.float32))
    fields = encode_as_lists(infinite, layers="moe")
    assert decode_lists(fields, fields["routed_experts_weights"]) == infinite


def decode_lists(fields, weights):
    return decode_routed_experts(
        fields["routed_experts"],
        fields["routed_experts_info"],
        weights=weights,
        prompt_payload=fields["prompt_routed_experts"],
    )


def test_expert_256_survives_every_form():
    record = example(ids=np.array([[[256, 0], [7, 256]], [[4, 2], [256, 1]]], np.uint16), num_experts=257)
    expected = [-1, -1, 256, 0, 7, 256, -1, -1, 4, 2, 256, 1]
    for payload_format in ("int32", "npy"):
        fields = encode_routed_experts(record, payload_format=payload_format, layers="all")
        assert extract_routed_experts_from_meta_info({"meta_info": fields}).tolist() == expected
    assert record_from_response(listed(record)) == record
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize("largest", [299, 200])
def test_packed_rows_in_the_dtype_of_skyrl_are_read(largest):
    record = example(ids=np.array([[[largest, 0], [7, 1]], [[4, 2], [6, 1]]], np.uint16), num_experts=300)
    fields = encode_routed_experts(record, payload_format="packed", layers="all")
    ids = packed.narrow(packed.decode(fields["routed_experts"]))
    info = {**fields["routed_experts_info"], "dtype": ids.dtype.name}
    narrowed = {"routed_experts": packed.encode(ids, start=record.start), "routed_experts_info": info}
    assert ids.dtype == (np.int16 if largest > 255 else np.uint8)
    assert record_from_response({"choices": [narrowed]}) == record
    expected = [-1, -1, largest, 0, 7, 1, -1, -1, 4, 2, 6, 1]
    assert extract_routed_experts_from_meta_info({"meta_info": narrowed}).tolist() == expected
    for dtype, wire in (("uint32", "packed"), ("int16", "npy")):
        with pytest.raises(RoutingFormatError, match=f"dtype is '{dtype}'"):
            RoutedExpertsMetadata.from_json({**info, "dtype": dtype, "format": wire})


def test_integers_of_numpy_are_written():
    """As `flatnonzero` gives them, and a slice by one."""
    plain = example()
    fields = dict(layer_ids=tuple(np.array(plain.layer_ids)), num_experts=np.int64(plain.num_experts))
    fields |= dict(num_hidden_layers=np.int64(plain.num_hidden_layers))
    for record, expected in ((dataclasses.replace(plain, **fields), plain), (plain[np.int64(1) :], plain[1:])):
        for wire in ("int32", "npy", "packed"):
            told = json.loads(json.dumps(encode_meta_info(record, payload_format=wire, layers="all")))
            assert record_from_meta_info({"meta_info": told}) == expected
        json.dumps(encode_as_lists(record, layers="all"))
        assert decode_record(encode_record(record)) == expected


def test_the_extracted_array_can_be_written_to():
    for payload_format in ("int32", "npy"):
        fields = encode_meta_info(example(), payload_format=payload_format, layers="all")
        for answer in ({"meta_info": fields}, {"meta_info": {"routed_experts": INT32_TEXT}}):
            flat = extract_routed_experts_from_meta_info(answer)
            assert flat.tolist() == FLAT
            flat[0] = 5


def test_the_last_token_counts_as_included_when_it_has_a_row():
    record = example(num_tokens=4)
    assert (
        encode_routed_experts(record, payload_format="int32", layers="all")["routed_experts_info"]["include_last"]
        is True
    )


@pytest.mark.parametrize("layers", ["all", "moe"])
def test_an_id_that_is_no_expert_is_never_written(layers):
    ids = example().ids.copy()
    ids[1, 1, 0] = 8
    wrong = example(ids=ids)
    for encode in (
        lambda: encode_routed_experts(wrong, payload_format="int32", layers=layers),
        lambda: encode_routed_experts(wrong, payload_format="npy", layers=layers),
        lambda: encode_as_lists(wrong, layers=layers),
    ):
        with pytest.raises(RoutingFormatError, match="token 3, hidden layer 2, slot 0: id 8; expected 0 to 7"):
            encode()


def test_no_rows_are_an_empty_payload_and_null_where_nothing_was_generated_before_an_abort():
    score = example(num_tokens=4, num_prompt_tokens=4)  # nothing generated, yet not aborted
    assert encode_routed_experts(score, payload_format="int32", layers="all")["routed_experts"] == INT32_TEXT
    fields = encode_routed_experts(score, payload_format="int32", layers="all", aborted=True)
    assert fields["routed_experts"] is None and fields["routed_experts_info"]["shape"] == [0, 3, 2]
    assert extract_routed_experts_from_meta_info({"meta_info": fields}) is None
    lists = encode_as_lists(score, layers="all", aborted=True)
    assert lists["prompt_routed_experts"] is lists["routed_experts"] is None
    empty = example()[3:3]
    assert encode_routed_experts(empty, payload_format="int32", layers="all", aborted=True)["routed_experts"] == ""
    fields = encode_routed_experts(empty, payload_format="int32", layers="all")
    assert fields["routed_experts"] == "" and fields["routed_experts_info"]["shape"] == [0, 3, 2]
    assert extract_routed_experts_from_meta_info({"meta_info": fields}).reshape(-1, 3, 2).shape == (0, 3, 2)
    npy = encode_routed_experts(empty, payload_format="npy", layers="all")["routed_experts"]
    assert np.load(io.BytesIO(base64.b64decode(npy))).shape == (0, 3, 2)
    lists = encode_as_lists(empty, layers="moe")
    assert lists["prompt_routed_experts"] == lists["routed_experts"] == []


def test_rows_absent_or_null_read_as_none():
    for answer in (
        {},
        {"meta_info": None},
        {"meta_info": {}},
        {"meta_info": {"routed_experts": None}},
        {"routed_experts": None},
    ):
        assert extract_routed_experts_from_meta_info(answer) is None
        assert record_from_meta_info(answer) is None
    assert extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": ""}}).shape == (0,)


def test_a_ref_names_its_url():
    for answer in (
        {"meta_info": {"routed_experts_ref": "/v1/routing/r1?choice=0"}},
        {"routed_experts_ref": "/v1/routing/r1?choice=0"},
    ):
        with pytest.raises(RoutingFormatError, match=r"/v1/routing/r1\?choice=0"):
            extract_routed_experts_from_meta_info(answer)


def changed(fields, **info):
    return {"meta_info": fields | {"routed_experts_info": fields["routed_experts_info"] | info}}


def test_an_answer_that_does_not_fit_its_sidecar_is_refused_with_both_numbers():
    int32 = encode_routed_experts(example(), payload_format="int32", layers="all")
    npy = encode_routed_experts(example(), payload_format="npy", layers="moe")
    cut = int32 | {"routed_experts": INT32_TEXT[:-4]}
    cut_npy = npy | {"routed_experts": base64.b64encode(base64.b64decode(npy["routed_experts"])[:-1]).decode()}
    for answer, text in (
        ({"meta_info": cut}, "45 bytes; expected 48"),
        ({"meta_info": int32 | {"routed_experts": INT32_TEXT[:-1]}}, "base64"),
        ({"meta_info": int32 | {"routed_experts": INT32_TEXT[:32] + "\n" + INT32_TEXT[32:]}}, "base64"),
        ({"meta_info": int32 | {"routed_experts": 3}}, "int; expected base64"),
        (changed(int32, shape=[3, 3, 2]), "include_last is False; expected True for 3 rows from token 2 on of 5"),
        (changed(int32, shape=[2, 2, 2]), r"\[2, 2, 2\]; expected \[R, 3, 2\]"),
        (changed(int32, num_experts=7), "id 7; expected 0 to 6"),
        (changed(int32, moe_layer_ids=[0, 2]), "dense layer"),
        (changed(int32, moe_layer_ids=[1, 3]), "num_hidden_layers 3"),
        (changed(int32, moe_layer_ids=[1, 1]), "dense layer|ascending"),
        (changed(int32, dense_fill=0), "dense layer"),
        (changed(int32, dense_fill=1), "dense_fill is 1; expected an integer of -1 to 0"),
        (changed(int32, schema="routed_experts/2"), r"routed_experts/2'; expected 'routed_experts/1"),
        (changed(int32, num_tokens=True), "num_tokens is True"),
        (changed(int32, start=-1), "start is -1"),
        (changed(int32, version_spans=[[2, 3, 0]]), "end at 3; expected 4"),
        (changed(int32, num_tokens=3), "sequence of 3"),
        (
            changed(int32, sha256="00"),
            "expected 00: the payload was changed on its way, or the prompt's rows are those of",
        ),
        (changed(int32, weights="float32"), "NoneType; expected base64"),
        (changed(int32, missing_rows=1), "missing_rows is 1"),
        (changed(int32, missing_rows=1, valid="Aw=="), "0 of 2 rows are marked missing; expected 1"),
        (changed(int32, missing_rows=1, valid="AwA="), "2 bytes; expected 1"),
        (changed(int32, missing_rows=1, valid="!" * 5000), r"'!{60}'\.\.\. \(5000 characters\)"),
        (changed(npy, dtype="uint16"), "dtype is 'uint16'; expected 'uint8' for the format 'npy' and"),
        (changed(int32, dtype="uint8"), "dtype is 'uint8'; expected 'int32' for the format 'int32'"),
        (changed(int32, format="list"), "dtype is 'int32'; expected 'int16' for the format 'list'"),
        (changed(int32, include_last=True), "include_last is True; expected False for 2 rows from token 2 on of 5"),
        (changed(int32, num_tokens=4), "include_last is False; expected True for 2 rows from token 2 on of 4"),
        ({"meta_info": cut_npy}, "7 bytes .*expected 8"),
        ({"meta_info": npy | {"routed_experts": INT32_TEXT}}, r"no \.npy"),
        (changed(npy, format="ref"), "fetched from its URL"),
        ({"meta_info": npy | {"routed_experts_info": []}}, "list; expected a JSON object"),
    ):
        with pytest.raises(RoutingFormatError, match=text):
            extract_routed_experts_from_meta_info(answer)
    for key in INFO:
        short = {name: value for name, value in int32["routed_experts_info"].items() if name != key}
        with pytest.raises(RoutingFormatError, match=key):
            extract_routed_experts_from_meta_info({"meta_info": int32 | {"routed_experts_info": short}})


HUGE_SIZES = {
    "rows without ids": {"top_k": 0, "shape": [10**13, 2, 0]},
    "rows without layers": {"moe_layer_ids": [], "shape": [10**13, 0, 2]},
    "no hidden layer": {"num_hidden_layers": 0, "moe_layer_ids": [], "shape": [10**13, 0, 2]},
    "layers of one payload": {"num_hidden_layers": 10**12, "shape": [2, 2, 2]},
    "layers beyond any integer": {"num_hidden_layers": 10**30, "shape": [2, 2, 2]},
    "layers without rows": {"num_hidden_layers": 2**62, "shape": [0, 2**62, 2]},
    "slots without rows": {"top_k": 2**40, "shape": [0, 2, 2**40]},
    "tokens": {"num_tokens": 10**40},
    "update": {"version_spans": [[2, 4, 10**400]]},
    "digits": {"start": 10**5000},
}


@pytest.mark.parametrize("payload_format", ["int32", "npy", "packed", "list"])
@pytest.mark.parametrize("layers", ["all", "moe"])
@pytest.mark.parametrize("name", HUGE_SIZES)
def test_sizes_that_no_payload_carries_are_refused_before_memory_is_claimed(name, layers, payload_format):
    if payload_format == "list":
        fields = encode_as_lists(example(), layers=layers)
    else:
        fields = encode_routed_experts(example(), payload_format=payload_format, layers=layers)
    info = fields["routed_experts_info"] | {"sha256": None} | HUGE_SIZES[name]
    if HUGE_SIZES[name].get("shape", [2, 2, 2]) != [2, 2, 2]:
        num_rows, num_columns, top_k = info["shape"]
        num_columns = info["num_hidden_layers"] if layers == "all" else num_columns
        num_columns = len(info["moe_layer_ids"]) if layers == "moe" else num_columns
        shape, num_tokens = [num_rows, num_columns, top_k], num_rows + 3
        spans = [[2, 2 + num_rows, 0]] if num_rows else []
        info |= {"shape": shape, "num_tokens": num_tokens, "prompt_rows": min(num_rows, 1), "version_spans": spans}
        fields["routed_experts"] = {
            "int32": "",
            "npy": base64.b64encode(npy_bytes(np.zeros((0, 2, 2), np.uint8))).decode(),
            "packed": {"data": "", "shape": shape, "start": 2, "dtype": "uint8"},
            "list": [],
        }[payload_format]
        if payload_format == "list":
            fields["prompt_routed_experts"] = []
    answer = {"meta_info": fields | {"routed_experts_info": info}}
    for read in (extract_routed_experts_from_meta_info, record_from_meta_info):
        with pytest.raises(RoutingFormatError, match=r"expected (1 to|an integer of)|has \d+ layers"):
            read(answer)


@pytest.mark.parametrize("shape", [[10**13, 5, 0], [10**13, 0, 2], [0, 10**30, 2], [0, 2, 2**62]])
def test_a_packed_payload_without_metadata_is_bounded_by_its_bytes(shape):
    with pytest.raises(RoutingFormatError, match=r"packed rows have .* expected 1 to"):
        extract_routed_experts_from_meta_info({"routed_experts": {"data": "", "shape": shape, "dtype": "uint8"}})


def test_a_record_has_layers_experts_and_a_number_of_layers_that_models_have():
    for changes, text in (
        ({"ids": np.zeros((2, 2, 0), np.uint8)}, r"\[2, 2, 0\]; expected .* at least one"),
        ({"ids": np.zeros((2, 0, 2), np.uint8), "layer_ids": ()}, r"\[2, 0, 2\]; expected .* at least one"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected at most 1024"),
    ):
        with pytest.raises(RoutingFormatError, match=text):
            example(**changes)


def test_ids_of_another_shape_than_the_metadata_are_refused():
    info = to_metadata(example(), payload_format="ref").to_json()
    tensors = {"routed_experts": np.zeros((10**13, 2, 0), np.uint8)}
    encoded = save(tensors, metadata={"routed_experts_info": json.dumps(info)})
    with pytest.raises(RoutingFormatError, match=r"\[10000000000000, 2, 0\]; expected \[2, 2, 2\]"):
        decode_record(encoded)


LABELS = ((0, "default"), (3, "größer \N{FOX FACE}"), (4, "default"))


def labelled(**changes):
    """Weights of two updates, and the label of one that made no row here."""
    return example(version_spans=((2, 3, 0), (3, 4, 3)), version_labels=LABELS, **changes)


@pytest.mark.parametrize("form", ["int32", "npy", "list", "npy file", "safetensors"])
def test_every_form_keeps_the_labels_of_the_counts_in_its_spans(form):
    record = labelled()
    if form == "list":
        again = record_from_response(listed(record))
    elif form == "npy file":
        info = json.loads(json.dumps(to_metadata(record, payload_format="ref").to_json()))
        again = record_from_npy(npy_bytes(record.ids), info)
    elif form == "safetensors":
        again = decode_record(encode_record(record))
    else:
        again = record_from_meta_info({"meta_info": encode_routed_experts(record, payload_format=form, layers="all")})
    assert again == record and again.labels == record.labels == {0: "default", 3: "größer \N{FOX FACE}"}
    assert again[3:].labels == {3: "größer \N{FOX FACE}"}


@pytest.mark.parametrize("count", [2**31, 10**10, 2**63 - 1])
def test_a_label_of_any_count_of_updates_is_read_as_it_is_written(count):
    record = example(version_spans=((2, 4, count),), version_labels=((count, "step"),))
    info = json.loads(json.dumps(to_metadata(record, payload_format="ref").to_json()))
    assert RoutedExpertsMetadata.from_json(info).version_labels == {count: "step"}
    assert decode_record(encode_record(record)).labels == record.labels == {count: "step"}


def test_a_sidecar_without_labels_is_read_as_before_and_labels_are_names_alone():
    info = to_metadata(example(), payload_format="int32", layers="all").to_json()
    assert "version_labels" not in info and RoutedExpertsMetadata.from_json(info).version_labels == {}
    renamed = labelled(), example(version_spans=((2, 3, 0), (3, 4, 3)))
    assert renamed[0] == renamed[1], "the same rows of the same updates"
    assert labelled() != example(version_labels=LABELS), "other updates, under the same labels"


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([["0", "a"]], "an object of labels by count"),
        ({"-1": "a"}, "holds '-1': 'a'; expected \"count\": text of at most 256"),
        ({"0" * 20: "a"}, f"holds '{'0' * 20}': 'a'"),
        ({str(2**63): "a"}, f"holds '{2**63}': 'a'; expected .* for a count of 0 to {2**63 - 1}"),
        ({"\u0663": "a"}, 'expected "count"'),
        ({"0": 4}, "holds '0': 4;"),
        ({"0": "x" * 257}, r"holds '0': 'x+'\.\.\. \(257 characters\)"),
    ],
)
def test_labels_that_are_none_are_refused(labels, told):
    int32 = encode_routed_experts(labelled(), payload_format="int32", layers="all")
    with pytest.raises(RoutingFormatError, match=told):
        record_from_meta_info(changed(int32, version_labels=labels))


def test_a_payload_without_sidecar_is_raw_int32_and_nothing_else():
    assert extract_routed_experts_from_meta_info({"meta_info": {"routed_experts": INT32_TEXT}}).tolist() == FLAT
    npy = encode_routed_experts(example(), payload_format="npy", layers="all")["routed_experts"]
    ragged = INT32_TEXT[:-4] + "AA=="
    for payload, text in (
        (npy, "without routed_experts_info"),
        (ragged, "46 bytes; expected a multiple of 4"),
        ([[[1]]], "list"),
    ):
        with pytest.raises(RoutingFormatError, match=text):
            extract_routed_experts_from_meta_info({"routed_experts": payload})
    with pytest.raises(RoutingFormatError, match="shape"):
        record_from_meta_info({"routed_experts": INT32_TEXT})
    with pytest.raises(RoutingFormatError, match="model_dump"):
        extract_routed_experts_from_meta_info("r1")


def test_npy_never_unpickles():
    stream = io.BytesIO()
    np.save(stream, np.array([[[{}]]], dtype=object), allow_pickle=True)
    with pytest.raises(RoutingFormatError, match="object"):
        record_from_npy(stream.getvalue(), to_metadata(example(), payload_format="ref").to_json())


def test_a_list_needs_the_prompt_rows_that_stand_beside_the_choices():
    response = listed(example())
    assert response["prompt_routed_experts"] == [[[1, 0], [7, 3]]]
    assert record_from_response(response) == example()
    with pytest.raises(RoutingFormatError, match=r"\[0\]; expected \[1, 2, 2\].*record_from_response"):
        extract_routed_experts_from_meta_info(response["choices"][0])
    for broken in ([[[1, 0], [7]]], [[[1, 0.5], [7, 3]]], [[[1, 0]]], "x", [[[True, False], [False, True]]]):
        with pytest.raises(RoutingFormatError, match="prompt_routed_experts"):
            record_from_response(response | {"prompt_routed_experts": broken})


def test_a_response_is_read_by_the_index_of_its_choice():
    later = example(version_spans=((2, 4, 1),))
    encoded = {
        j: encode_routed_experts(record, payload_format="npy", layers="all")
        for j, record in ((1, later), (0, example()))
    }
    choices = [{"index": j, **fields} for j, fields in encoded.items()]
    assert record_from_response({"choices": choices}, choice=1) == later
    assert record_from_response({"choices": choices}) == example()
    with pytest.raises(RoutingFormatError, match=r"choice=2 names 0 of the 2 choices of the response.* are 1, 0; "):
        record_from_response({"choices": choices}, choice=2)
