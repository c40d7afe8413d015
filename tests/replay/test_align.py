"""Alignment against a dict of places, filled token by token; and every record that does not fit is named."""

import dataclasses

import numpy as np
import pytest

from replay.records import SPEC, random_record
from routed_experts import InvalidRequestError, RoutingAlignmentError
from routed_experts.core.record_validation import repeated_rows
from routed_experts.formats.metadata import to_metadata
from routed_experts.formats.wire import npy_bytes, record_from_npy
from routed_experts.replay import Sample, align, zigzag_order

LENGTH = 24


def expected_positions(samples, layout, seq_len, width):
    """{(row, column): (sample, token)} by the words of the layouts."""
    positions, offset = {}, 0
    for index, sample in enumerate(samples):
        for token in range(sample.num_tokens):
            row, column = index, token
            if layout == "pad_left":
                column = seq_len - min(sample.num_tokens, seq_len) + token
            elif layout == "pad_both":
                column = width - sample.prompt_len + token
            elif layout == "packed":
                row, column = 0, offset + token
            if 0 <= column < seq_len and (layout != "pad_both" or column >= 0):
                positions[row, column] = (index, token)
        offset += sample.num_tokens
    return positions


def check_batch(batch, samples, positions):
    shape = batch.ids.shape
    assert batch.ids.dtype == SPEC.dtype and batch.valid.dtype == batch.pad.dtype == np.bool_
    for row, column in np.ndindex(*shape[:2]):
        index, token = positions.get((row, column), (None, None))
        assert batch.pad[row, column] == (index is None)
        record = None if index is None else samples[index].record
        known = record is not None and 0 <= token - record.start < record.num_rows
        known = bool(known and (record.valid is None or record.valid[token - record.start]))
        assert batch.valid[row, column] == known, (row, column)
        if known:
            np.testing.assert_array_equal(batch.ids[row, column], record.ids[token - record.start])
    assert not np.any(batch.valid & batch.pad)


def some_samples(seed, lengths=((9, 4), (24, 10), (1, 1), (17, 0), (12, 12))):
    rng = np.random.default_rng(seed)
    samples = []
    for index, (length, prompt) in enumerate(lengths):
        start = int(rng.integers(0, prompt + 1)) if length > 1 else 0
        last = bool(rng.integers(2))
        rows = length - start - (not last)
        valid = rng.random(rows) < 0.7 if index % 2 else None
        samples.append(
            Sample(random_record(rng, length, start=start, last=last, valid=valid, prompt_len=prompt), length, prompt)
        )
    return [*samples, Sample(None, 6, 3)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", ["pad_right", "pad_left", "pad_both"])
def test_every_row_stands_with_its_token(layout, seed):
    samples, width = some_samples(seed), 12 if layout == "pad_both" else None
    batch = align(samples, layout=layout, seq_len=LENGTH + 4, spec=SPEC, prompt_width=width)
    check_batch(batch, samples, expected_positions(samples, layout, LENGTH + 4, width))


@pytest.mark.parametrize("seed", range(4))
def test_packed_samples_follow_one_another(seed):
    samples = some_samples(seed)
    batch = align(samples, layout="packed", seq_len=96, spec=SPEC)
    assert batch.ids.shape == (1, 96, 3, 4)
    check_batch(batch, samples, expected_positions(samples, "packed", 96, None))


@pytest.mark.parametrize("layout", ["pad_right", "pad_left", "pad_both", "packed"])
def test_rows_are_cut_with_their_tokens(layout):
    """pad_both keeps the prompt's tail and the completion's head, the others the head."""
    rng, width = np.random.default_rng(5), 5 if layout == "pad_both" else None
    samples = [Sample(random_record(rng, 30, prompt_len=14), 30, 14)]
    batch = align(samples, layout=layout, seq_len=13, spec=SPEC, prompt_width=width)
    positions = {(0, column): (0, (9 if layout == "pad_both" else 0) + column) for column in range(13)}
    check_batch(batch, samples, positions)


@pytest.mark.parametrize("parts", [2, 4])
def test_zigzag_gives_rank_r_its_chunk_and_the_opposite_one(parts):
    samples, size = some_samples(7), 32 // (2 * parts)
    straight = align(samples, layout="pad_right", seq_len=32, spec=SPEC)
    turned = align(samples, layout="pad_right", seq_len=32, spec=SPEC, zigzag=parts)
    for rank in range(parts):
        expected = [
            *range(rank * size, (rank + 1) * size),
            *range((2 * parts - 1 - rank) * size, (2 * parts - rank) * size),
        ]
        chunk = slice(rank * 2 * size, (rank + 1) * 2 * size)
        assert zigzag_order(32, parts)[chunk].tolist() == expected
        for name in ("ids", "valid", "pad"):
            np.testing.assert_array_equal(getattr(turned, name)[:, chunk], getattr(straight, name)[:, expected])


def test_weights_travel_with_their_ids():
    rng = np.random.default_rng(8)
    record = random_record(rng, 9, weights=True)
    batch = align([Sample(record, 9)], layout="pad_left", seq_len=12, spec=SPEC, weights=True)
    np.testing.assert_array_equal(batch.weights[0, 3:11], record.weights)
    with pytest.raises(RoutingAlignmentError, match="sample 1: the record has no combine weights"):
        align(
            [Sample(record, 9), Sample(random_record(rng, 9), 9)],
            layout="pad_left",
            seq_len=12,
            spec=SPEC,
            weights=True,
        )


# --- what does not fit


def changed(index=None, ids=None, **fields):
    record = random_record(np.random.default_rng(1), 10)
    if index is not None:
        array = record.ids.copy()
        array[index] = ids
        fields["ids"] = array
    return dataclasses.replace(record, **fields)


def record_with(**other):
    return random_record(np.random.default_rng(1), 10, spec=dataclasses.replace(SPEC, **other))


FAULTS = {
    "one row too few": (
        changed()[:8],
        r"sample 1: 8 rows of tokens \[0, 8\) of a sequence of 10; the sample has 10 tokens, so expected 9",
    ),
    "another sample": (random_record(np.random.default_rng(2), 11), "sample 1: 10 rows .* the sample has 10 tokens"),
    "layers": (
        record_with(layer_ids=(0, 1, 2)),
        r"sample 1: .* layer_ids=\(0, 1, 2\), the model \(1, 2, 3\) \(layers \[0, 3\] differ\)",
    ),
    "top_k": (record_with(top_k=3), "sample 1: the record has top_k=3, the model 4"),
    "experts": (record_with(num_experts=32), "sample 1: the record has num_experts=32, the model 16"),
    "depth": (record_with(num_hidden_layers=5), "sample 1: the record has num_hidden_layers=5"),
    "no such expert": (
        changed((4, 2, 1), 16),
        "sample 1, token 4, hidden layer 3, slot 1: id 16; expected 0 to 15; give logical ids",
    ),
    "twice": (changed((5, 1), [7, 2, 9, 7]), r"sample 1, token 5, hidden layer 2: ids \[7, 2, 9, 7\] repeat an expert"),
    "zeros": (changed(6, 0), r"sample 1, token 6, hidden layer 1: ids \[0, 0, 0, 0\] repeat an expert"),
    "no record": ("rows", "sample 1: record is a str"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_record_that_does_not_fit_is_named(kind):
    record, match = FAULTS[kind]
    good = Sample(changed(), 10)
    with pytest.raises(RoutingAlignmentError, match=match):
        align([good, Sample(record, 10)], layout="pad_right", seq_len=12, spec=SPEC)


def test_what_stands_in_rows_that_are_not_valid_is_not_looked_at():
    valid = np.ones(9, bool)
    valid[6] = False
    for filler in (0, 255):
        batch = align([Sample(changed(6, filler, valid=valid), 10)], layout="pad_right", seq_len=12, spec=SPEC)
        assert not batch.valid[0, 6] and batch.valid[0, 5]


def test_rows_of_an_answer_that_is_not_exact_are_laid_out_as_any_others():
    sample = Sample(random_record(np.random.default_rng(3), 9, prompt_len=4), 9)
    changed_by_capacities = dataclasses.replace(sample, record=dataclasses.replace(sample.record, exact=False))
    plain, other = (
        align([entry], layout="pad_right", seq_len=9, spec=SPEC) for entry in (sample, changed_by_capacities)
    )
    for name in ("ids", "valid", "pad"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(other, name))


def test_rows_of_weights_that_the_batch_does_not_allow_are_refused():
    record = changed(version_spans=((0, 4, 7), (4, 9, 8)))
    assert align([Sample(record, 10)], layout="pad_right", seq_len=12, spec=SPEC, versions=(7, 8)).valid.sum() == 9
    with pytest.raises(
        RoutingAlignmentError, match=r"sample 0, row 0: rows 0 to 3 were routed by weight version 7; .*\[8\]"
    ):
        align([Sample(record, 10)], layout="pad_right", seq_len=12, spec=SPEC, versions=(8,))


def test_weights_are_allowed_by_count_or_by_label():
    """A label allows all updates under it, a count one of them. A number is never a label."""
    labels = ((7, "step-4"), (8, "step-4"), (9, "9"))
    samples = [Sample(changed(version_spans=((0, 4, 7), (4, 9, 8)), version_labels=labels), 10)]

    def laid_out(versions):
        return align(samples, layout="pad_right", seq_len=12, spec=SPEC, versions=versions).valid.sum()

    assert laid_out(("step-4",)) == laid_out({7, "step-4"}) == laid_out([8, 7]) == 9
    for versions, told in (
        ((8,), "7 \\('step-4'\\).*\\[8\\]"),
        (("step-5", 8), "batch allows"),
        (("7", "8"), "batch allows"),
    ):
        with pytest.raises(RoutingAlignmentError, match=told):
            laid_out(versions)
    with pytest.raises(InvalidRequestError, match="versions='step-4' is one label; give a list"):
        laid_out("step-4")


def test_another_router_is_refused_and_a_hash_routed_layer_may_repeat():
    spec = dataclasses.replace(SPEC, router="abc")
    with pytest.raises(RoutingAlignmentError, match="router=def, the model abc"):
        align([Sample(changed(router="def"), 10)], layout="pad_right", seq_len=12, spec=spec)
    twice = changed((5, 1), [7, 2, 9, 7])
    assert (
        align([Sample(twice, 10)], layout="pad_right", seq_len=12, spec=SPEC, repeats_in_layers=(2,)).valid.sum() == 9
    )


def test_what_is_read_once_may_be_an_iterator():
    """Spans in an order other than that of the versions, and more samples than one."""
    record = changed((5, 1), [7, 2, 9, 7], version_spans=((0, 4, 8), (4, 9, 7)))
    samples = [Sample(record, 10), Sample(record, 10)]
    how = dict(layout="pad_right", seq_len=12, spec=SPEC)
    expected = align(samples, versions=[7, 8], repeats_in_layers=[2], **how)
    batch = align(iter(samples), versions=iter([7, 8]), repeats_in_layers=iter([2]), **how)
    assert np.array_equal(batch.ids, expected.ids) and np.array_equal(batch.valid, expected.valid)
    assert align(samples, versions=np.array([7, 8]), repeats_in_layers=np.array([2]), **how).valid.sum() == 18
    with pytest.raises(RoutingAlignmentError, match=r"this batch allows \[8\]"):
        align(samples, versions=iter([8]), repeats_in_layers=[2], **how)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"versions": 0}, "versions=0 is no list; give a list"),
        ({"versions": (True,)}, "versions holds True; expected counts"),
        ({"versions": [0, None]}, "versions holds None; expected counts"),
        ({"repeats_in_layers": 2}, "repeats_in_layers=2; expected a list of indices"),
        ({"repeats_in_layers": "2"}, "repeats_in_layers='2'; expected a list of indices"),
    ],
)
def test_versions_and_layers_that_are_none_are_refused(arguments, text):
    with pytest.raises(InvalidRequestError, match=text) as caught:
        align([Sample(changed(), 10)], layout="pad_right", seq_len=12, spec=SPEC, **arguments)
    assert caught.value.param in arguments


BAD_ARGUMENTS = {
    "one sample": (dict(samples=Sample(None, 10)), "samples is a Sample; give a list of Sample"),
    "no samples": (dict(samples=None), "samples is None; give a list of Sample"),
    "a bare record": (dict(samples=[changed()]), "sample 0 is a RoutedExperts; give Sample"),
    "a tuple": (dict(samples=[Sample(None, 10), (None, 10)]), "sample 1 is a tuple of 2; give Sample"),
    "no spec": (dict(spec=None), "spec is None; give the model's config.capture_spec"),
    "a config": (dict(spec={"top_k": 4}), "spec is a dict of 1; give the model's config.capture_spec"),
    "a word": (dict(weights="no"), "weights='no' must be True or False"),
    "layout": (dict(layout="left"), "layout='left' is unknown; choose one of pad_right"),
    "width without": (dict(layout="pad_both"), "prompt_width=None with layout='pad_both'"),
    "width beside": (dict(prompt_width=3), "it belongs to pad_both"),
    "length": (dict(seq_len=0), "seq_len=0 must be an integer of at least 1"),
    "zigzag": (dict(zigzag=5), "seq_len=12 is no multiple of 10"),
    "negative zigzag": (dict(zigzag=-1), "zigzag=-1 must be"),
    "none": (dict(samples=[]), "samples is empty"),
    "tokens": (dict(samples=[Sample(None, 0)]), "sample 0: num_tokens=0"),
    "prompt": (
        dict(samples=[Sample(None, 3, 4)]),
        "sample 0: prompt_len=4 must be an integer in 0..3",
    ),
    "prompt_missing": (
        dict(layout="pad_both", prompt_width=4, samples=[Sample(None, 3)]),
        "sample 0: prompt_len is missing",
    ),
    "full": (
        dict(layout="packed", samples=[Sample(None, 12), Sample(None, 1)]),
        "sample 1 begins at position 12 of a row of 12",
    ),
}


@pytest.mark.parametrize("kind", BAD_ARGUMENTS)
def test_inconsistent_align_arguments_are_refused(kind):
    kwargs, text = BAD_ARGUMENTS[kind]
    with pytest.raises(RoutingAlignmentError, match=text):
        align(**dict(samples=[Sample(None, 10)], layout="pad_right", seq_len=12, spec=SPEC) | kwargs)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_repeats_are_those_that_a_set_finds(top_k, dtype):
    rng = np.random.default_rng(top_k)
    ids = rng.integers(0, 3 * top_k, (1200, 33, top_k)).astype(dtype)  # more than one block
    expected = np.array([[len(set(row.tolist())) < top_k for row in token] for token in ids])
    assert expected.any() == (top_k > 1) and not expected.all()
    np.testing.assert_array_equal(repeated_rows(ids), expected)


def test_a_prompt_that_is_not_the_records_is_refused():
    """One token off, and every row of the sample would stand at another token."""
    sample = Sample(random_record(np.random.default_rng(3), 6, prompt_len=3), 6, 2)
    with pytest.raises(RoutingAlignmentError, match="sample 0: prompt_len=2, and its record has a prompt of 3"):
        align([sample], layout="pad_both", seq_len=8, prompt_width=4, spec=SPEC)
    assert align([sample], layout="pad_right", seq_len=8, spec=SPEC).valid.sum() == 5


def test_reading_and_cutting_rows_copies_none():
    """What is read looks into the bytes that came, and so does every slice; alignment writes them once, into the
    batch."""
    record = random_record(np.random.default_rng(5), 400)
    encoded = npy_bytes(record.ids)
    read = record_from_npy(encoded, to_metadata(record, payload_format="npy").to_json())
    buffer = np.frombuffer(encoded, np.uint8)
    assert np.shares_memory(read.ids, buffer) and np.shares_memory(read[100:200].ids, buffer)
    batch = align([Sample(read, 400)], layout="pad_right", seq_len=400, spec=SPEC)
    assert np.array_equal(batch.ids[0, :-1], record.ids) and not np.shares_memory(batch.ids, buffer)
