"""Layouts of frameworks: encoding and decoding are inverse, layouts equal loops over tokens, and a layout refuses by
name what it cannot hold."""

import base64
import dataclasses
import importlib
import io
import json
import re

import numpy as np
import pybase64
import pytest

from replay.records import SPEC, random_record
from routed_experts import RoutedExperts, RoutingFormatError, formats
from routed_experts.core.capture_spec import CaptureSpec, expert_id_dtype
from routed_experts.formats import SequenceInfo
from routed_experts.replay import RoutedBatch, Sample, align

LENGTH, PROMPT = 12, 5
WIDE = CaptureSpec(num_hidden_layers=3, layer_ids=(0, 2), num_experts=300, top_k=6)


def info_of(record):
    """The info that decodes what this record is encoded to."""
    spec = CaptureSpec(
        num_hidden_layers=record.num_hidden_layers,
        layer_ids=record.layer_ids,
        num_experts=record.num_experts,
        top_k=record.top_k,
        router=record.router,
    )
    return SequenceInfo(
        spec=spec,
        num_tokens=record.num_tokens,
        num_prompt_tokens=record.num_prompt_tokens,
        start=record.start,
        version=record.version_spans,
        version_labels=record.version_labels,
    )


def build_record(spec=SPEC, **options):
    return random_record(np.random.default_rng(3), LENGTH, prompt_len=PROMPT, spec=spec, version=4, **options)


def routing_info(record, spec=SPEC):
    return SequenceInfo(spec=spec, num_tokens=LENGTH, num_prompt_tokens=PROMPT, start=record.start, version=4)


def with_gap(record, token):
    valid = np.ones(record.num_rows, bool)
    valid[token - record.start] = False
    return dataclasses.replace(record, valid=valid)


PAIRS = {
    "sglang": (formats.sglang.encode, formats.sglang.decode),
    "sglang, dense 0": (lambda record: formats.sglang.encode(record, dense_fill=0), formats.sglang.decode),
    "sglang, flat": (lambda record: formats.sglang.encode(record).reshape(-1), formats.sglang.decode),
    "sglang, base64": (
        lambda record: pybase64.b64encode(formats.sglang.encode(record).tobytes()),
        formats.sglang.decode,
    ),
    "vllm": (formats.vllm.encode, formats.vllm.decode),
    "vllm021": (formats.vllm021.encode, formats.vllm021.decode),
    "verl": (formats.verl.encode, formats.verl.decode),
    "slime": (formats.slime.encode, formats.slime.decode),
    "megatron": (formats.megatron.encode, formats.megatron.decode),
    "nemo_rl": (formats.nemo_rl.encode, formats.nemo_rl.decode),
    "tunix": (formats.tunix.encode, formats.tunix.decode),
    "maxtext": (formats.maxtext.encode, formats.maxtext.decode),
}
ANY_START = ("sglang", "vllm", "verl")


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["uint8", "uint16"])
@pytest.mark.parametrize("name", PAIRS)
def test_encoded_records_round_trip(name, spec):
    to, back = PAIRS[name]
    record = build_record(spec)
    assert back(to(record), routing_info(record, spec)) == record


@pytest.mark.parametrize("name", ["sglang", "tunix"])
def test_rows_that_the_memory_does_not_hold_are_refused_by_their_shape(name, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(np, "full", fail)
    with pytest.raises(RoutingFormatError, match=r"an array \[1\d, \d, \d\] of int\d+ does not fit the memory"):
        PAIRS[name][0](build_record())


@pytest.mark.parametrize("name", PAIRS)
def test_rows_from_the_middle_round_trip_or_are_refused(name):
    to, back = PAIRS[name]
    record = build_record(start=3)
    if name.startswith(ANY_START):
        assert back(to(record), routing_info(record)) == record
        return
    with pytest.raises(RoutingFormatError, match="begin at token 3; expected 0"):
        to(record)


@pytest.mark.parametrize("name", PAIRS)
def test_an_unknown_row_is_marked_or_refused(name):
    to, back = PAIRS[name]
    record = with_gap(build_record(), 7)
    with pytest.raises(RoutingFormatError, match=rf"{re.split(',| ', name)[0]}: the row of token 7 is not known"):
        to(record)
    if name in formats.WITH_MARK:
        assert back(to(record, missing="gate"), routing_info(record)) == record
        with pytest.raises(RoutingFormatError, match="choose error or gate"):
            to(record, missing="zero")


@pytest.mark.parametrize("name", PAIRS)
def test_an_id_that_is_no_expert_is_never_written(name):
    record = build_record()
    ids = record.ids.copy()
    ids[4, 2, 1] = 77
    with pytest.raises(RoutingFormatError, match="token 4, hidden layer 3, slot 1: id 77; expected 0 to 15; give"):
        PAIRS[name][0](dataclasses.replace(record, ids=ids))


@pytest.mark.parametrize("name", PAIRS)
def test_a_sequence_of_one_token_has_no_rows(name):
    to, back = PAIRS[name]
    record = random_record(np.random.default_rng(3), 1, prompt_len=1)
    assert back(to(record), info_of(record)) == record
    assert back(to(record), SequenceInfo(spec=SPEC, num_tokens=1, num_prompt_tokens=1, version=4)) == record


@pytest.mark.parametrize("name", PAIRS)
def test_a_sequence_without_tokens_has_no_rows(name):
    to, back = PAIRS[name]
    record = random_record(np.random.default_rng(3), 0, last=True)
    assert back(to(record), info_of(record)) == record
    if name in ("slime", "nemo_rl"):
        assert to(record).shape == (0, 4, 4)


@pytest.mark.parametrize("name", ["slime", "megatron", "nemo_rl", "tunix", "maxtext"])
def test_a_record_that_ends_too_early_is_one_whose_last_rows_are_not_known(name):
    """The oracle is the whole record with those rows marked as not known."""
    to, back = PAIRS[name]
    record = build_record()
    assert record.prompt.num_rows == PROMPT
    for cut in (record.prompt, record[: LENGTH - 2], record[:0]):
        end = cut.num_rows
        match = (
            f"{name}: the row of token {end} is not known, for the rows end before it; expected rows of tokens 0 to 10"
        )
        with pytest.raises(RoutingFormatError, match=match):
            to(cut)
        marked = dataclasses.replace(record, valid=np.arange(LENGTH - 1) < end)
        if name in formats.WITH_MARK:
            (rows, expected) = (to(which, missing="gate") for which in (cut, marked))
            assert back(rows, routing_info(record)) == marked
        elif name == "maxtext":
            native = random_record(np.random.default_rng(9), LENGTH, last=True).ids
            (rows, expected) = (to(which, native=native) for which in (cut, marked))
        else:
            continue
        rows, expected = ((part[0], part[1]) if name == "megatron" else ([part], []) for part in (rows, expected))
        for mine, theirs in zip([*rows[0], *rows[1]], [*expected[0], *expected[1]], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(RoutingFormatError, match="choose error or gate"):
        formats.tunix.encode(record.prompt, missing="zero")


@pytest.mark.parametrize("name", ["slime", "verl", "nemo_rl", "sglang", "vllm021"])
def test_no_rows_may_be_a_list_of_json(name):
    """`[]` tells neither layers nor experts. The generated rows of one token are none, too."""
    to, back = PAIRS[name]
    for length, prompt in ((1, 1), (5, 4)):
        record = random_record(np.random.default_rng(3), length, prompt_len=prompt)
        payload = to(record)
        as_json = [part.tolist() for part in payload] if isinstance(payload, tuple) else payload
        as_json = payload.tolist() if isinstance(payload, np.ndarray) else as_json
        assert back(as_json, info_of(record)) == record


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_without_an_answer_may_lack_its_last_row(name):
    to, back = PAIRS[name]
    for last in (False, True):
        record = random_record(np.random.default_rng(3), LENGTH, last=last)
        expected = record[: LENGTH - 1] if name in ("slime", "nemo_rl") else record
        assert back(to(record), info_of(expected)) == expected


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_no_record_is_refused_by_every_layout(name):
    for other in (build_record().ids, None, [build_record()]):
        with pytest.raises(RoutingFormatError, match=r"the record is .*; expected RoutedExperts|the record is None"):
            PAIRS[name][0](other)


@pytest.mark.parametrize("name", ["megatron", "vllm021"])
def test_what_is_no_pair_is_refused(name):
    for payload in (None, 3, (1, 2, 3)):
        with pytest.raises(RoutingFormatError, match=f"{name}: .*; expected the pair"):
            PAIRS[name][1](payload, routing_info(build_record()))


def test_counts_may_be_integers_of_numpy():
    record = build_record()
    info = SequenceInfo(spec=SPEC, num_tokens=np.int64(LENGTH), num_prompt_tokens=np.int32(PROMPT), version=np.int64(4))
    back = formats.verl.decode(formats.verl.encode(record), info)
    assert back == record
    encoded = json.loads(json.dumps(formats.encode_meta_info(back, payload_format="int32", layers="all")))
    assert formats.record_from_meta_info({"meta_info": encoded}) == record
    counts = dict(num_tokens=np.int64(LENGTH), version_spans=((np.int64(0), np.int64(LENGTH - 1), np.int64(4)),))
    encoded = json.loads(
        json.dumps(
            formats.encode_meta_info(dataclasses.replace(record, **counts), payload_format="int32", layers="all")
        )
    )
    assert formats.record_from_meta_info({"meta_info": encoded}) == record


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"spec": None}, "spec is None; expected a CaptureSpec"),
        ({"num_tokens": 12.0}, r"num_tokens=12\.0; expected an integer of at least 0"),
        ({"start": -1}, "start=-1; expected an integer"),
        ({"num_prompt_tokens": True}, "num_prompt_tokens=True; expected an integer"),
        ({"version": "step-1"}, "version='step-1'; expected a count of updates, or spans"),
        ({"version": True}, "version=True; expected a count"),
    ],
)
def test_info_that_is_none_is_refused(fields, text):
    with pytest.raises(RoutingFormatError, match=text):
        SequenceInfo(**dict(spec=SPEC, num_tokens=LENGTH, num_prompt_tokens=PROMPT) | fields)


def test_a_row_that_is_not_known_stays_where_it_is_not_the_last_tokens():
    """S - 1 rows came: the last of them feeds a scored token, and is not the one that a rollout leaves out."""
    record = build_record()
    rows = np.array(formats.tunix.encode(record))[: record.num_rows]
    rows[-1] = -1
    back = formats.tunix.decode(rows, routing_info(record))
    assert (
        back.num_rows == record.num_rows
        and back.valid is not None
        and back.valid.tolist() == [True] * (record.num_rows - 1) + [False]
    )


def test_tunix_marks_unknown_rows_on_request():
    record = with_gap(build_record(), 7)
    rows = formats.tunix.encode(record, missing="gate")
    assert np.all(rows[7] == -1) and np.all(rows[-1] == -1) and np.count_nonzero(rows == -1) == 2 * rows[0].size
    assert formats.tunix.decode(rows, routing_info(record)) == record


def test_maxtext_takes_the_ids_of_a_live_forward_for_rows_that_are_not_known():
    record, native = with_gap(build_record(), 7), random_record(np.random.default_rng(9), LENGTH, last=True).ids
    rows = formats.maxtext.encode(record, native=native)
    for token in range(LENGTH):
        expected = native[token] if token in (7, LENGTH - 1) else record.ids[token]
        np.testing.assert_array_equal(rows[token], expected)
    with pytest.raises(RoutingFormatError, match="maxtext: native is"):
        formats.maxtext.encode(record, native=native[1:])
    for value, text in ((16, "16"), (-1, "-1"), (1 << 32, "4294967296")):
        wrong = native.astype(np.int64)
        wrong[6] = value  # a row that is known is not read
        np.testing.assert_array_equal(formats.maxtext.encode(record, native=wrong), rows)
        wrong[7, 1, 2] = value
        with pytest.raises(RoutingFormatError, match=rf"maxtext: native\[7, 1, 2\] is {text}; expected 0 to 15"):
            formats.maxtext.encode(record, native=wrong)
    for wrong in (native.astype(np.float32), native > 3):
        with pytest.raises(RoutingFormatError, match=r"maxtext native: rows are (float32|bool)\[12, 3, 4\]"):
            formats.maxtext.encode(record, native=wrong)


@pytest.mark.parametrize("fill", [1 << 31, -(1 << 31) - 1, 0.5, "0", None, True])
def test_a_fill_of_dense_layers_that_is_no_int32_is_refused(fill):
    with pytest.raises(RoutingFormatError, match=r"sglang: dense_fill=.*; expected an int32: -1, or 0 as in SGLang"):
        formats.sglang.encode(build_record(), dense_fill=fill)
    expected = formats.sglang.encode(build_record(), dense_fill=0)
    np.testing.assert_array_equal(formats.sglang.encode(build_record(), dense_fill=np.int64(0)), expected)


FORMS = {
    "sglang": (np.int32, (LENGTH - 1, 4, 4), -1),
    "vllm": (np.uint8, (LENGTH - 1, 4, 4), 0),
    "verl": (np.int16, (LENGTH - 1, 4, 4), 0),
    "slime": (np.int32, (LENGTH - 1, 4, 4), 0),
    "nemo_rl": (np.int32, (LENGTH - 1, 4, 4), 0),
    "tunix": (np.int16, (LENGTH, 3, 4), None),
    "maxtext": (np.int32, (LENGTH, 3, 4), None),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_those_of_the_table(name):
    dtype, shape, dense = FORMS[name]
    record, array = build_record(), PAIRS[name][0](build_record())
    assert array.dtype == dtype and array.shape == shape and array.flags.writeable
    for token in range(LENGTH - 1):
        for column, layer in enumerate(SPEC.layer_ids):
            index = column if dense is None else layer
            np.testing.assert_array_equal(array[token, index], record.ids[token, column])
    if dense is not None:
        assert np.all(array[:, 0] == dense)


def test_megatron_spreads_what_the_router_is_to_choose():
    record = with_gap(build_record(), 7)
    layers, mask = formats.megatron.encode(record, missing="gate")
    assert len(layers) == 3 and mask.tolist() == [token not in (7, LENGTH - 1) for token in range(LENGTH)]
    for layer in layers:
        assert layer.dtype == np.int64
        assert layer[7].tolist() == [(7 * 4 + k) % 16 for k in range(4)]


def test_the_example_of_the_wire_form():
    """L = 3, layer 0 dense, K = 2, E = 8, prompt of 3, answer of 2, rows from token 2 on: the 48 bytes that peers
    send."""
    spec = CaptureSpec(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
    info = SequenceInfo(spec=spec, num_tokens=5, num_prompt_tokens=3, start=2)
    payload = "//////////8BAAAAAAAAAAcAAAADAAAA//////////8EAAAAAgAAAAUAAAABAAAA"
    record = formats.sglang.decode(payload, info)
    assert record.ids.tolist() == [[[1, 0], [7, 3]], [[4, 2], [5, 1]]] and record.start == 2
    assert pybase64.b64encode_as_string(formats.sglang.encode(record).tobytes()) == payload


@pytest.mark.parametrize("name", ["sglang", "vllm", "verl", "tunix", "maxtext", "nemo_rl", "megatron"])
def test_a_row_of_zeros_never_passes_for_an_expert(name):
    to, back = PAIRS[name]
    record = build_record()
    array = to(record)
    rows = array[0] if name == "megatron" else [array]
    for layer in rows:
        layer[4] = 0
    decoded = back(array, routing_info(record))
    assert decoded == with_gap(record, 4)


def test_slime_rejects_a_row_of_zeros_and_another_count():
    record = build_record()
    rows = formats.slime.encode(record)
    with pytest.raises(RoutingFormatError, match="expected 11 from 0 on"):
        formats.slime.decode(rows[:-1], routing_info(record))
    rows[4] = 0
    with pytest.raises(RoutingFormatError, match=r"slime: the ids .* of token 4 are no choice of 4 experts"):
        formats.slime.decode(rows, routing_info(record))


def test_a_score_record_gives_slime_what_a_rollout_has():
    record = build_record(last=True)
    assert formats.slime.decode(formats.slime.encode(record), routing_info(record)) == record[: LENGTH - 1]


BAD = {
    "flat of another model": (
        lambda rows: formats.sglang.decode(np.arange(17), rows),
        "17 ids are no whole rows of 4 layers x 4 experts",
    ),
    "columns": (
        lambda rows: formats.vllm.decode(np.zeros((11, 2, 4), int), rows),
        r"vllm: rows are int64\[11, 2, 4\]; expected integers \[rows, 4 layers, 4\]",
    ),
    "slots": (
        lambda rows: formats.verl.decode(np.zeros((11, 4, 3), int), rows),
        r"verl: rows are int64\[11, 4, 3\]; expected integers",
    ),
    "floats": (lambda rows: formats.tunix.decode(np.zeros((12, 3, 4)), rows), "tunix: rows are float64"),
    "count": (
        lambda rows: formats.maxtext.decode(np.zeros((10, 3, 4), int), rows),
        "maxtext: 10 rows .* expected 11 or 12",
    ),
    "prompt": (
        lambda rows: formats.vllm021.decode((np.zeros((5 - 1, 3, 4), int),) * 2, rows),
        "expected 5 rows of the prompt",
    ),
    "layers": (
        lambda rows: formats.megatron.decode(([np.zeros((12, 4), int)] * 2, None), rows),
        "megatron: 2 layers .*; expected 3",
    ),
    "torn": (
        lambda rows: formats.nemo_rl.decode(np.zeros((11, 4, 4), int) - np.eye(4, dtype=int)[1], rows),
        "nemo_rl: .* of token 0 are -1 in part",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_arrays_of_other_shapes_are_named(kind):
    read, message = BAD[kind]
    with pytest.raises(RoutingFormatError, match=message):
        read(SequenceInfo(spec=SPEC, num_tokens=LENGTH, num_prompt_tokens=PROMPT))


def test_ids_that_a_dtype_cannot_hold_are_refused():
    spec = CaptureSpec(num_hidden_layers=1, layer_ids=(0,), num_experts=40_000, top_k=2)
    record = build_record(spec)
    for to in (formats.verl.encode, formats.tunix.encode, formats.vllm021.encode):
        with pytest.raises(RoutingFormatError, match="40000 experts do not fit int16"):
            to(record)
    assert formats.sglang.decode(formats.sglang.encode(record), routing_info(record, spec)) == record


# --- batches


def build_batch(*records, lost=()):
    samples = [Sample(None if index in lost else record, LENGTH, PROMPT) for index, record in enumerate(records)]
    return align(samples, layout="pad_both", seq_len=20, spec=SPEC, prompt_width=8)


def same(left, right):
    known = np.asarray(left.valid)
    assert np.array_equal(known, right.valid) and np.array_equal(left.pad, right.pad)
    np.testing.assert_array_equal(np.asarray(left.ids)[known], np.asarray(right.ids)[known])


@pytest.mark.parametrize("columns", ["all", "moe"])
def test_a_verl_batch_round_trips(columns):
    batch = build_batch(build_record(), build_record())
    rows = formats.verl.encode_batch(batch, SPEC, columns=columns)
    assert (
        rows.dtype == np.int16 and rows.shape == (2, 20, 4 if columns == "all" else 3, 4) and not rows[batch.pad].any()
    )
    same(batch, formats.verl.decode_batch(rows, ~batch.pad, SPEC))
    with pytest.raises(RoutingFormatError, match="choose all"):
        formats.verl.encode_batch(batch, SPEC, columns="dense")


def test_maxtext_and_tunix_batches_round_trip():
    batch = build_batch(build_record(), build_record())
    rows = formats.maxtext.encode_batch(batch, SPEC)
    assert rows.dtype == np.int32 and np.all(rows[batch.pad] == -1)
    same(batch, formats.maxtext.decode_batch(rows, batch.pad, SPEC))
    rows = formats.tunix.encode_batch(batch, SPEC)
    assert rows.dtype == np.int16
    same(batch, formats.tunix.decode_batch(rows, batch.pad, SPEC))


def test_a_token_without_a_row_is_refused_by_sample_and_position_or_stood_in_for():
    batch = build_batch(build_record(), with_gap(build_record(), 7))
    for to in (
        lambda b: formats.verl.encode_batch(b, SPEC),
        lambda b: formats.maxtext.encode_batch(b, SPEC),
        lambda b: formats.tunix.encode_batch(b, SPEC),
    ):
        with pytest.raises(RoutingFormatError, match="sample 1, position 10: the row of this token is not known"):
            to(batch)
    native = random_record(np.random.default_rng(6), 40, last=True).ids.reshape(2, 20, 3, 4)
    rows = formats.maxtext.encode_batch(batch, SPEC, native=native)
    np.testing.assert_array_equal(rows[1, 10], native[1, 10])
    np.testing.assert_array_equal(rows[0, 10], batch.ids[0, 10])
    assert np.all(rows[batch.pad] == -1)
    with pytest.raises(RoutingFormatError, match="native is"):
        formats.maxtext.encode_batch(batch, SPEC, native=native[:1])
    wrong = native.astype(np.int64)
    wrong[0, 10] = wrong[np.asarray(batch.pad)] = 99  # of a known row, and of places without a token
    np.testing.assert_array_equal(formats.maxtext.encode_batch(batch, SPEC, native=wrong), rows)
    wrong[1, 10, 2, 0] = 16
    with pytest.raises(
        RoutingFormatError, match=r"maxtext: native\[1, 10, 2, 0\] is 16; expected 0 to 15: ids of a live"
    ):
        formats.maxtext.encode_batch(batch, SPEC, native=wrong)
    with pytest.raises(RoutingFormatError, match="maxtext native: rows are float64"):
        formats.maxtext.encode_batch(batch, SPEC, native=native.astype(float))


def test_a_sample_without_rows_is_refused_where_it_would_drop_the_others():
    with pytest.raises(RoutingFormatError, match="tunix: sample 1: no row is known"):
        formats.tunix.encode_batch(build_batch(build_record(), build_record(), lost=(1,)), SPEC)


def test_batches_of_other_shapes_are_named():
    for rows, pad in (
        (np.zeros((2, 20, 2, 4), int), np.zeros((2, 20), bool)),
        (np.zeros((2, 20, 3, 4), int), np.zeros((2, 19), bool)),
    ):
        with pytest.raises(RoutingFormatError, match="maxtext: rows are"):
            formats.maxtext.decode_batch(rows, pad, SPEC)


def test_a_batch_is_a_routed_batch_and_a_record_a_record():
    batch = build_batch(build_record())
    rows = formats.verl.decode_batch(formats.verl.encode_batch(batch, SPEC), ~batch.pad, SPEC)
    same(batch, RoutedBatch(*rows))
    assert isinstance(
        formats.verl.decode(formats.verl.encode(build_record()), routing_info(build_record())), RoutedExperts
    )


# --- worked examples, from the description of the wire

INT32_TEXT = (
    "//////////8BAAAAAAAAAAcAAAADAAAA//////////8EAAAAAgAAAAUAAAABAAAA"  # from the description of the wire, section 5
)


def five_tokens(**changes):
    """Three layers, the first dense; tokens 2 and 3 of five, the prompt three long."""
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


def whole(**changes):
    """The same from token 0 on: four rows of five tokens."""
    ids = np.array([[[0, 1], [2, 3]], [[6, 5], [4, 7]], [[1, 0], [7, 3]], [[4, 2], [5, 1]]], np.uint8)
    return five_tokens(ids=ids, start=0, version_spans=((0, 3, 1), (3, 4, 2)), **changes)


def layout_module(name):
    return importlib.import_module(f"routed_experts.formats.{name}")


def decode(name, payload, like, **changes):
    return layout_module(name).decode(payload, dataclasses.replace(info_of(like), **changes))


def test_sglang_and_vllm_are_the_worked_example():
    flat = np.frombuffer(base64.b64decode(INT32_TEXT), "<i4")
    assert (
        formats.sglang.encode(five_tokens()).dtype == np.int32
        and formats.sglang.encode(five_tokens()).tobytes() == flat.tobytes()
    )
    assert (formats.sglang.encode(five_tokens(), dense_fill=0)[:, 0] == 0).all()
    assert decode("sglang", INT32_TEXT, five_tokens()) == decode("sglang", flat, five_tokens()) == five_tokens()
    array = formats.vllm.encode(five_tokens())
    assert array.dtype == np.uint8 and array.tobytes() == bytes([0, 0, 1, 0, 7, 3, 0, 0, 4, 2, 5, 1])
    saved = io.BytesIO()
    np.save(saved, array)
    assert decode("vllm", base64.b64encode(saved.getvalue()).decode(), five_tokens()) == five_tokens()


def test_forms_of_whole_sequences_by_hand():
    record = whole()
    prompt, generated = formats.vllm021.encode(record)
    assert (
        prompt.dtype == np.int16
        and prompt.tolist() == record.ids[:3].tolist()
        and generated.tolist() == record.ids[3:].tolist()
    )
    tunix, maxtext = formats.tunix.encode(record), formats.maxtext.encode(record)
    assert (tunix.dtype, maxtext.dtype) == (np.int16, np.int32)
    assert tunix.tolist() == maxtext.tolist() == [*record.ids.tolist(), [[-1, -1], [-1, -1]]]
    layers, mask = formats.megatron.encode(record)
    assert [layer.dtype for layer in layers] == [np.int64, np.int64] and mask.tolist() == [True] * 4 + [False]
    assert layers[1].tolist() == [*record.ids[:, 1].tolist(), [0, 1]], "token 4 of top-2 over 8 experts: (4*2+k) % 8"
    verl = formats.verl.encode(record)
    assert (
        verl.dtype == np.int16
        and verl.flags.writeable
        and verl.tolist() == [[[0, 0], *row] for row in record.ids.tolist()]
    )


WHOLE = ("slime", "megatron", "nemo_rl", "tunix", "maxtext")  # layouts that begin with token 0
ROLLOUT = ("slime", "nemo_rl")  # layouts of exactly S - 1 rows


@pytest.mark.parametrize("name", formats.FRAMEWORKS)
def test_every_layout_round_trips(name):
    rng = np.random.default_rng(0)
    for trial in range(200):
        layers = int(rng.integers(1, 5))
        layer_ids = tuple(sorted(rng.choice(layers, size=int(rng.integers(1, layers + 1)), replace=False).tolist()))
        experts, top_k = int(rng.choice([8, 255, 256, 257, 2000])), int(rng.integers(2, 4))
        tokens = int(rng.integers(2, 8))
        start = 0 if name in WHOLE else int(rng.integers(0, tokens - 1))
        rows = tokens - start - (0 if trial % 3 == 0 and name not in ROLLOUT else 1)
        ids = np.argsort(rng.random((rows, len(layer_ids), experts)), axis=2)[:, :, :top_k].astype(
            expert_id_dtype(experts)
        )
        record = RoutedExperts(
            ids=ids,
            start=start,
            num_tokens=tokens,
            num_prompt_tokens=int(rng.integers(start, tokens)),
            layer_ids=layer_ids,
            num_hidden_layers=layers,
            num_experts=experts,
            version_spans=((start, start + rows, 3),),
            router="r",
        )
        assert decode(name, layout_module(name).encode(record), record) == record
        if name != "vllm021":  # nested lists, as JSON has them
            written = layout_module(name).encode(record)
            plain = (
                ([layer.tolist() for layer in written[0]], written[1].tolist())
                if name == "megatron"
                else written.tolist()
            )
            again = json.loads(json.dumps(plain))
            assert decode(name, tuple(again) if name == "megatron" else again, record) == record


@pytest.mark.parametrize("name", formats.FRAMEWORKS)
def test_an_unknown_row_is_marked_where_the_form_has_a_mark_and_refused_elsewhere(name):
    record = whole(valid=np.array([True, False, True, True]))
    with pytest.raises(RoutingFormatError, match="token 1"):
        layout_module(name).encode(record)
    if name in formats.WITH_MARK:
        back = decode(name, layout_module(name).encode(record, missing="gate"), record)
        assert back == record and back.valid.tolist() == [True, False, True, True]


@pytest.mark.parametrize("name", [name for name in formats.FRAMEWORKS if name != "slime"])
@pytest.mark.parametrize("filler", [0, -1, 8])
def test_a_filler_never_passes_for_experts(name, filler):
    record = whole()
    written = layout_module(name).encode(record)
    if name == "megatron":
        for layer in written[0]:
            layer[1] = filler
    elif name == "vllm021":
        written[0][1] = filler
    else:
        written = written.astype(np.int64)
        written[1] = filler
    assert decode(name, written, record).valid.tolist() == [True, False, True, True]


def test_dense_columns_are_dropped_whatever_they_hold():
    array = formats.sglang.encode(whole())
    array[:, 0] = 77
    assert decode("sglang", array, whole()) == whole()


def test_a_generation_may_have_its_last_row():
    record = whole()
    prompt, generated = formats.vllm021.encode(record)
    padded = np.concatenate([generated, np.full((1, 2, 2), -1, np.int16)])
    assert decode("vllm021", (prompt, padded), record) == record
    with_last = np.concatenate([generated, np.array([[[3, 2], [6, 0]]], np.int16)])
    assert decode("vllm021", (prompt, with_last), record, version=((0, 5, 0),)).num_rows == 5


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("sglang", np.zeros(7, np.int32)),
        ("sglang", "no base64!"),
        ("sglang", np.zeros((4, 2, 2), np.int32)),
        ("verl", np.zeros((9, 3, 2))),
        ("vllm", np.zeros((2, 3, 2), np.uint8)),
        ("megatron", [np.zeros((4, 2), np.int64)]),
        ("tunix", np.zeros((4, 3, 2), np.int16)),
        ("megatron", ([np.zeros((4, 2), np.int64)] * 2, [True])),
    ],
)
def test_what_does_not_fit_is_refused(name, payload):
    with pytest.raises(RoutingFormatError):
        decode(name, payload, whole())


def test_what_a_form_cannot_hold_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'torch'; it offers"):
        print(formats.torch)
    with pytest.raises(RoutingFormatError, match="missing"):
        formats.tunix.encode(whole(), missing="zero")
    for name in WHOLE:
        with pytest.raises(RoutingFormatError, match="token 2"):
            layout_module(name).encode(five_tokens())
    wide = five_tokens(ids=np.arange(8, dtype=np.uint16).reshape(2, 2, 2), num_experts=40_000)
    for name in ("vllm021", "verl"):
        with pytest.raises(RoutingFormatError, match="int16"):
            layout_module(name).encode(wide)
    assert formats.vllm.encode(wide).dtype == np.uint16


@pytest.mark.parametrize("name", ["slime", "nemo_rl"])
def test_a_record_with_a_row_for_the_last_token_is_decoded_without_it(name):
    """`Engine.score` returns S rows; these layouts hold S - 1."""
    to, back = PAIRS[name]
    record = random_record(np.random.default_rng(3), LENGTH, prompt_len=PROMPT, last=True)
    spans = ((0, 4, 1), (4, LENGTH - 1, 2), (LENGTH - 1, LENGTH, 3))
    record = dataclasses.replace(record, version_spans=spans)
    decoded = back(to(record), info_of(record))
    assert decoded == record[: LENGTH - 1] and decoded.version_spans == spans[:2]


RAGGED = [[[1, 2, 3, 4]], [[1]]]


@pytest.mark.parametrize(
    "decode",
    [
        lambda info: formats.slime.decode(RAGGED, info),
        lambda info: formats.verl.decode_batch(RAGGED, [[True]], SPEC),
        lambda info: formats.tunix.decode_batch(RAGGED, [[True]], SPEC),
        lambda info: formats.maxtext.decode_batch(RAGGED, [[True]], SPEC),
        lambda info: formats.tunix.decode_batch(np.zeros((1, 1, 3, 4), int), [[True], []], SPEC),
        lambda info: formats.verl.decode_batch(np.zeros((1, 1, 3, 4), int), [[True], []], SPEC),
        lambda info: formats.megatron.decode((1, 2), info),
        lambda info: formats.megatron.decode((np.zeros((3, 11, 4), int), [[1], []]), info),
        lambda info: formats.vllm.decode(base64.b64encode(b"PK\x03\x04broken"), info),
        lambda info: formats.vllm.decode(base64.b64encode(b"\x93NUMPY\x01\x00\x04\x00{'a'"), info),
        lambda info: formats.vllm.decode(base64.b64encode(npy_header((10**13, 4, 4)) + b"1"), info),
        lambda info: formats.wire.read_npy(b"\x93NUMPY\x01\x00\x04\x00{'a'", dtype="uint8", shape=(1, 1, 1)),
        lambda info: formats.archive.decode_record(None),
        lambda info: formats.archive.decode_answers("text"),
    ],
)
def test_what_holds_no_rows_is_refused_with_the_error_of_formats(decode):
    with pytest.raises(RoutingFormatError):
        decode(routing_info(build_record()))


def npy_header(shape):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def test_an_npz_is_no_npy_of_vllm():
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(3))
    with pytest.raises(RoutingFormatError, match=r"expected a \.npy, which begins with"):
        formats.vllm.decode(base64.b64encode(stream.getvalue()), routing_info(build_record()))


@pytest.mark.parametrize("name", ["maxtext", "tunix", "megatron", "slime", "nemo_rl"])
def test_a_sequence_of_a_length_that_no_model_has_is_not_laid_out(name):
    record = dataclasses.replace(build_record(), num_tokens=10**13)
    with pytest.raises(RoutingFormatError, match="num_tokens=10000000000000 of a record with 11 rows"):
        PAIRS[name][0](record)
