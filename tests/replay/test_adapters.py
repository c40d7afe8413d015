"""Adapters: what goes out comes back; forms are those of loops over tokens; what cannot be said is refused by name."""

import dataclasses
import re

import numpy as np
import pybase64
import pytest

from replay.records import SPEC, random_record
from routed_experts import RoutedExperts, RoutingAlignmentError
from routed_experts.core.capture_spec import CaptureSpec
from routed_experts.replay import RoutedBatch, Sample, adapters, align
from routed_experts.replay.adapters import Origin

LENGTH, PROMPT = 12, 5
WIDE = CaptureSpec(num_hidden_layers=3, layer_ids=(0, 2), num_experts=300, top_k=6)


def record_of(spec=SPEC, **options):
    return random_record(np.random.default_rng(3), LENGTH, prompt_len=PROMPT, spec=spec, version=4, **options)


def origin_of(record, spec=SPEC):
    return Origin(spec=spec, num_tokens=LENGTH, num_prompt_tokens=PROMPT, start=record.start, version=4)


def with_gap(record, token):
    valid = np.ones(record.num_rows, bool)
    valid[token - record.start] = False
    return dataclasses.replace(record, valid=valid)


PAIRS = {
    "sglang": (adapters.to_sglang, adapters.from_sglang),
    "sglang, dense 0": (lambda record: adapters.to_sglang(record, dense_fill=0), adapters.from_sglang),
    "sglang, flat": (lambda record: adapters.to_sglang(record).reshape(-1), adapters.from_sglang),
    "sglang, base64": (lambda record: pybase64.b64encode(adapters.to_sglang(record).tobytes()), adapters.from_sglang),
    "vllm": (adapters.to_vllm, adapters.from_vllm),
    "vllm021": (adapters.to_vllm021, lambda pair, origin: adapters.from_vllm021(*pair, origin)),
    "verl": (adapters.to_verl, adapters.from_verl),
    "slime": (adapters.to_slime, adapters.from_slime),
    "megatron": (
        adapters.to_megatron,
        lambda pair, origin: without_last(adapters.from_megatron(pair[0], origin, mask=pair[1])),
    ),
    "nemo_rl": (adapters.to_nemo_rl, adapters.from_nemo_rl),
    "tunix": (adapters.to_tunix, adapters.from_tunix),
    "maxtext": (adapters.to_maxtext, adapters.from_maxtext),
}
ANY_START = ("sglang", "vllm", "verl")


def without_last(record):
    cut = record[: LENGTH - 1]
    return dataclasses.replace(cut, valid=None if cut.valid is None or cut.valid.all() else cut.valid)


@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["uint8", "uint16"])
@pytest.mark.parametrize("name", PAIRS)
def test_what_goes_out_comes_back(name, spec):
    to, back = PAIRS[name]
    record = record_of(spec)
    assert back(to(record), origin_of(record, spec)) == record


@pytest.mark.parametrize("name", PAIRS)
def test_rows_from_the_middle_come_back_or_are_refused(name):
    to, back = PAIRS[name]
    record = record_of(start=3)
    if name.startswith(ANY_START):
        assert back(to(record), origin_of(record)) == record
        return
    with pytest.raises(RoutingAlignmentError, match="begin at token 3; wanted 0"):
        to(record)


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_that_is_not_known_is_said_or_refused(name):
    to, back = PAIRS[name]
    record = with_gap(record_of(), 7)
    if name in ("megatron", "nemo_rl"):
        assert back(to(record), origin_of(record)) == record
        return
    with pytest.raises(RoutingAlignmentError, match=rf"{re.split(',| ', name)[0]}, row 7: the row is not known"):
        to(record)


def test_a_row_that_is_not_known_stays_where_it_is_not_the_last_tokens():
    """S - 1 rows came: the last of them feeds a scored token, and is not the one that a rollout leaves out."""
    record = record_of()
    rows = np.array(adapters.to_tunix(record))[: record.num_rows]
    rows[-1] = -1
    back = adapters.from_tunix(rows, origin_of(record))
    assert (
        back.num_rows == record.num_rows
        and back.valid is not None
        and back.valid.tolist() == [True] * (record.num_rows - 1) + [False]
    )


def test_tunix_says_it_where_the_caller_knows_that_it_is_heard():
    record = with_gap(record_of(), 7)
    rows = adapters.to_tunix(record, missing="gate")
    assert np.all(rows[7] == -1) and np.all(rows[-1] == -1) and np.count_nonzero(rows == -1) == 2 * rows[0].size
    assert adapters.from_tunix(rows, origin_of(record)) == record
    with pytest.raises(RoutingAlignmentError, match="choose error or gate"):
        adapters.to_tunix(record, missing="zero")


def test_maxtext_takes_the_ids_of_a_live_forward_for_rows_that_are_not_known():
    record, native = with_gap(record_of(), 7), random_record(np.random.default_rng(9), LENGTH, last=True).ids
    rows = adapters.to_maxtext(record, native=native)
    for token in range(LENGTH):
        wanted = native[token] if token in (7, LENGTH - 1) else record.ids[token]
        np.testing.assert_array_equal(rows[token], wanted)
    with pytest.raises(RoutingAlignmentError, match="maxtext: native is"):
        adapters.to_maxtext(record, native=native[1:])


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
    record, array = record_of(), PAIRS[name][0](record_of())
    assert array.dtype == dtype and array.shape == shape and array.flags.writeable
    for token in range(LENGTH - 1):
        for column, layer in enumerate(SPEC.layer_ids):
            place = column if dense is None else layer
            np.testing.assert_array_equal(array[token, place], record.ids[token, column])
    if dense is not None:
        assert np.all(array[:, 0] == dense)


def test_megatron_spreads_what_the_router_is_to_choose():
    record = with_gap(record_of(), 7)
    layers, mask = adapters.to_megatron(record)
    assert len(layers) == 3 and mask.tolist() == [token not in (7, LENGTH - 1) for token in range(LENGTH)]
    for layer in layers:
        assert layer.dtype == np.int64
        assert layer[7].tolist() == [(7 * 4 + k) % 16 for k in range(4)]


def test_the_example_of_the_wire_form():
    """L = 3, layer 0 dense, K = 2, E = 8, prompt of 3, answer of 2, rows from token 2 on: the 48 bytes that peers
    send."""
    spec = CaptureSpec(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
    origin = Origin(spec=spec, num_tokens=5, num_prompt_tokens=3, start=2)
    payload = "//////////8BAAAAAAAAAAcAAAADAAAA//////////8EAAAAAgAAAAUAAAABAAAA"
    record = adapters.from_sglang(payload, origin)
    assert record.ids.tolist() == [[[1, 0], [7, 3]], [[4, 2], [5, 1]]] and record.start == 2
    assert pybase64.b64encode_as_string(adapters.to_sglang(record).tobytes()) == payload


@pytest.mark.parametrize("name", ["sglang", "vllm", "verl", "tunix", "maxtext", "nemo_rl", "megatron"])
def test_a_row_of_zeros_never_passes_for_an_expert(name):
    to, back = PAIRS[name]
    record = record_of()
    array = to(record)
    rows = array[0] if name == "megatron" else [array]
    for layer in rows:
        layer[4] = 0
    came = back(array, origin_of(record))
    assert came == with_gap(record, 4)


def test_slime_rejects_a_row_of_zeros_and_another_count():
    record = record_of()
    rows = adapters.to_slime(record)
    with pytest.raises(RoutingAlignmentError, match="wanted 11 from 0 on"):
        adapters.from_slime(rows[:-1], origin_of(record))
    rows[4] = 0
    with pytest.raises(RoutingAlignmentError, match=r"slime, row 4: ids .* are no choice of 4 experts"):
        adapters.from_slime(rows, origin_of(record))


def test_a_score_record_gives_slime_what_a_rollout_has():
    record = record_of(last=True)
    assert adapters.from_slime(adapters.to_slime(record), origin_of(record)) == record[: LENGTH - 1]


BAD = {
    "flat of another model": (
        lambda rows: adapters.from_sglang(np.arange(17), rows),
        "17 ids are no whole rows of 4 layers x 4 experts",
    ),
    "columns": (
        lambda rows: adapters.from_vllm(np.zeros((11, 2, 4), int), rows),
        "rows have 2 columns; wanted 4, .* or 3",
    ),
    "slots": (
        lambda rows: adapters.from_verl(np.zeros((11, 4, 3), int), rows),
        r"verl: rows are int64\[11, 4, 3\]; wanted integers",
    ),
    "floats": (lambda rows: adapters.from_tunix(np.zeros((12, 3, 4)), rows), "tunix: rows are float64"),
    "count": (
        lambda rows: adapters.from_maxtext(np.zeros((10, 3, 4), int), rows),
        "maxtext: 10 rows .* wanted 11 or 12",
    ),
    "prompt": (
        lambda rows: adapters.from_vllm021(*[np.zeros((5 - 1, 3, 4), int)] * 2, rows),
        "wanted 5, one a prompt token",
    ),
    "layers": (lambda rows: adapters.from_megatron([np.zeros((12, 4), int)] * 2, rows), "megatron: 2 layers; wanted 3"),
    "torn": (
        lambda rows: adapters.from_nemo_rl(np.zeros((11, 3, 4), int) - np.eye(4, dtype=int)[1], rows),
        "row 0: .* -1 in part",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_arrays_of_other_shapes_are_named(kind):
    read, said = BAD[kind]
    with pytest.raises(RoutingAlignmentError, match=said):
        read(Origin(spec=SPEC, num_tokens=LENGTH, num_prompt_tokens=PROMPT))


def test_ids_that_a_dtype_cannot_hold_are_refused():
    spec = CaptureSpec(num_hidden_layers=1, layer_ids=(0,), num_experts=40_000, top_k=2)
    record = record_of(spec)
    for to in (adapters.to_verl, adapters.to_tunix, adapters.to_vllm021):
        with pytest.raises(RoutingAlignmentError, match="40000 experts do not fit int16"):
            to(record)
    assert adapters.from_sglang(adapters.to_sglang(record), origin_of(record, spec)) == record


# --- batches


def batch_of(*records, lost=()):
    samples = [Sample(None if index in lost else record, LENGTH, PROMPT) for index, record in enumerate(records)]
    return align(samples, layout="pad_both", seq_len=20, spec=SPEC, prompt_width=8)


def same(one, other):
    known = np.asarray(one.valid)
    assert np.array_equal(known, other.valid) and np.array_equal(one.pad, other.pad)
    np.testing.assert_array_equal(np.asarray(one.ids)[known], np.asarray(other.ids)[known])


@pytest.mark.parametrize("columns", ["all", "moe"])
def test_a_verl_batch_comes_back(columns):
    batch = batch_of(record_of(), record_of())
    rows = adapters.batch_to_verl(batch, SPEC, columns=columns)
    assert (
        rows.dtype == np.int16 and rows.shape == (2, 20, 4 if columns == "all" else 3, 4) and not rows[batch.pad].any()
    )
    same(batch, adapters.batch_from_verl(rows, ~batch.pad, SPEC))
    with pytest.raises(RoutingAlignmentError, match="choose all"):
        adapters.batch_to_verl(batch, SPEC, columns="dense")


def test_maxtext_and_tunix_batches_come_back():
    batch = batch_of(record_of(), record_of())
    rows = adapters.batch_to_maxtext(batch)
    assert rows.dtype == np.int32 and np.all(rows[batch.pad] == -1)
    same(batch, adapters.batch_from_maxtext(rows, batch.pad, SPEC))
    rows = adapters.batch_to_tunix(batch, SPEC)
    assert rows.dtype == np.int16
    same(batch, adapters.batch_from_tunix(rows, batch.pad, SPEC))


def test_a_token_without_a_row_is_refused_by_sample_and_place_or_stood_in_for():
    batch = batch_of(record_of(), with_gap(record_of(), 7))
    for to in (
        lambda b: adapters.batch_to_verl(b, SPEC),
        adapters.batch_to_maxtext,
        lambda b: adapters.batch_to_tunix(b, SPEC),
    ):
        with pytest.raises(RoutingAlignmentError, match="sample 1, place 10: the row of this token is not known"):
            to(batch)
    native = random_record(np.random.default_rng(6), 40, last=True).ids.reshape(2, 20, 3, 4)
    rows = adapters.batch_to_maxtext(batch, native=native)
    np.testing.assert_array_equal(rows[1, 10], native[1, 10])
    np.testing.assert_array_equal(rows[0, 10], batch.ids[0, 10])
    assert np.all(rows[batch.pad] == -1)
    with pytest.raises(RoutingAlignmentError, match="native is"):
        adapters.batch_to_maxtext(batch, native=native[:1])


def test_a_sample_without_rows_is_refused_where_it_would_drop_the_others():
    with pytest.raises(RoutingAlignmentError, match="tunix, sample 1: no row is known"):
        adapters.batch_to_tunix(batch_of(record_of(), record_of(), lost=(1,)), SPEC)


def test_batches_of_other_shapes_are_named():
    for rows, pad in (
        (np.zeros((2, 20, 2, 4), int), np.zeros((2, 20), bool)),
        (np.zeros((2, 20, 3, 4), int), np.zeros((2, 19), bool)),
    ):
        with pytest.raises(RoutingAlignmentError, match="maxtext: rows are"):
            adapters.batch_from_maxtext(rows, pad, SPEC)


def test_a_batch_is_a_routed_batch_and_a_record_a_record():
    batch = batch_of(record_of())
    assert isinstance(adapters.batch_from_verl(adapters.batch_to_verl(batch, SPEC), ~batch.pad, SPEC), RoutedBatch)
    assert isinstance(adapters.from_verl(adapters.to_verl(record_of()), origin_of(record_of())), RoutedExperts)
