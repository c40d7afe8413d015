"""Files of many answers: every record, token and field round-trips; any other file is refused."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from placement.cases import skewed_record
from routed_experts import formats
from routed_experts.core.errors import RoutingFormatError
from routed_experts.formats.archive import (
    ArchivedAnswer,
    decode_answers,
    decode_record,
    decode_record_and_tokens,
    encode_answers,
    encode_record,
    holds_answers,
)

LOGITS = np.random.default_rng(1).normal(0, 1.2, (3, 16))


def filed(seed, *, with_record=True):
    rng = np.random.default_rng(seed)
    record = skewed_record(rng, LOGITS, 20 + seed, prompt_len=5)
    tokens = rng.integers(0, 300, record.num_tokens).astype(np.int32)
    answer = {
        "prompt": f"ü {seed}\n\u2028",
        "text": "x",
        "input_ids": tokens[:5].tolist(),
        "output_ids": tokens[5:].tolist(),
        "meta_info": {"id": str(seed), "prompt_tokens": 5, "routed_experts": "payload"},
    }
    return ArchivedAnswer(answer=answer, token_ids=tokens, record=record if with_record else None)


def test_archived_answers_round_trip():
    archived = [filed(1), filed(2, with_record=False), filed(3)]
    for some in (archived, archived[1:2], []):
        encoded = encode_answers(some)
        assert holds_answers(encoded)
        for answer, back in zip(some, decode_answers(encoded), strict=True):
            assert back.record == answer.record and np.array_equal(back.token_ids, answer.token_ids)
            meta = {name: value for name, value in back.answer["meta_info"].items() if name != "routed_experts_info"}
            assert {**back.answer, "meta_info": meta} == {
                **answer.answer,
                "meta_info": {"id": meta["id"], "prompt_tokens": 5},
            }
    assert not holds_answers(encode_record(archived[0].record))


def test_answers_are_no_record_and_the_error_names_what_reads_them():
    encoded = encode_answers([filed(1), filed(2, with_record=False), filed(3)])
    for decode in (decode_record, decode_record_and_tokens):
        with pytest.raises(
            RoutingFormatError, match=r"hold 3 answers.*formats\.decode_answers.*routed-experts convert"
        ):
            decode(encoded)


def test_files_are_read_and_written_by_names_of_the_package():
    answers = [filed(1), filed(2)]
    decoded = formats.decode_answers(encode_answers(answers))
    assert all(isinstance(answer, formats.ArchivedAnswer) for answer in decoded)
    assert formats.decode_record(formats.encode_record(decoded[0].record)) == answers[0].record
    assert {"ArchivedAnswer", "decode_answers", "decode_record", "encode_answers", "encode_record"} <= {
        *formats.__all__
    }


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_may_come_in_any_type_of_them(kind):
    archived = [filed(1), filed(2)]
    answers, record = kind(encode_answers(archived)), kind(encode_record(archived[0].record, archived[0].token_ids))
    assert holds_answers(answers) and not holds_answers(record)
    assert [back.record for back in decode_answers(answers)] == [answer.record for answer in archived]
    assert decode_record(record) == archived[0].record
    assert np.array_equal(decode_record_and_tokens(record)[1], archived[0].token_ids)
    for decode in (decode_answers, decode_record):
        with pytest.raises(RoutingFormatError, match=r"^9 bytes are no "):
            decode(kind(b"not these"))


@pytest.mark.parametrize("decode", [decode_answers, decode_record, decode_record_and_tokens, holds_answers])
def test_what_is_no_bytes_is_refused(decode):
    for value in (None, "text", [1, 2], np.zeros(3, np.uint8)):
        with pytest.raises(RoutingFormatError, match="which are no bytes"):
            decode(value)


def test_the_tensors_are_readable_by_safetensors_alone():
    archived = [filed(1), filed(2)]
    tensors = load(encode_answers(archived))
    begin, end = tensors["row_offsets"][1:3]
    assert np.array_equal(tensors["routed_experts"][begin:end], archived[1].record.ids)
    begin, end = tensors["token_offsets"][1:3]
    assert np.array_equal(tensors["token_ids"][begin:end], archived[1].token_ids)
    assert [json.loads(line)["prompt"] for line in tensors["answers"].tobytes().split(b"\n")[:-1]] == [
        "ü 1\n\u2028",
        "ü 2\n\u2028",
    ]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("row_offsets", lambda a: a + 1),
        ("row_offsets", lambda a: a[:-1]),
        ("token_offsets", lambda a: a[::-1].copy()),
        ("token_offsets", lambda a: a.astype(np.int32)),
        ("routed_experts", lambda a: a[:-1]),
        ("routed_experts", lambda a: a + 16),
        ("answers", lambda a: a[:-9]),
        ("token_ids", None),
        ("answers", None),
    ],
)
def test_a_damaged_file_is_refused(name, change):
    tensors = load(encode_answers([filed(1), filed(2)]))
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    with pytest.raises(RoutingFormatError):
        decode_answers(save(tensors))


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "count", [float("inf"), float("nan"), -1, 10**30, 22, "3", None, [], True, 1e300, 4.7, 5.0], ids=repr
)
def test_a_count_of_prompt_tokens_that_is_none_is_refused(count):
    answer = filed(1)
    meta_info = {**answer.answer["meta_info"], "prompt_tokens": count}
    encoded = encode_answers([dataclasses.replace(answer, answer={**answer.answer, "meta_info": meta_info})])
    with pytest.raises(RoutingFormatError, match=r"prompt_tokens is .*; expected an integer of 0 to 21"):
        decode_answers(encoded)


def test_token_ids_are_as_many_as_the_record_has_tokens():
    answer = filed(1)
    for token_ids in (answer.token_ids[:-1], np.append(answer.token_ids, np.int32(3))):
        wrong = dataclasses.replace(answer, token_ids=token_ids)
        with pytest.raises(
            RoutingFormatError, match=r"answers\[1\]\.token_ids has shape .*; expected \(21,\), the tokens"
        ):
            encode_answers([filed(2), wrong])
        without = dataclasses.replace(wrong, record=None)
        assert np.array_equal(decode_answers(encode_answers([without]))[0].token_ids, token_ids)
    tensors = load(encode_answers([answer, filed(1)]))
    tensors["token_offsets"][1] -= 1
    with pytest.raises(RoutingFormatError, match="an answer of 20 tokens has a record of 21; expected as many"):
        decode_answers(save(tensors))


def encode_one(answer, token_ids):
    return encode_answers([dataclasses.replace(answer, token_ids=token_ids)])


@pytest.mark.parametrize("encode", [lambda answer, ids: encode_record(answer.record, ids), encode_one])
def test_token_ids_are_integers_of_32_bits(encode):
    answer = filed(1)
    usual = encode(answer, answer.token_ids)
    for same in (answer.token_ids.tolist(), answer.token_ids.astype(">i8"), answer.token_ids.astype(np.uint16)):
        assert encode(answer, same) == usual
    for value in (1 << 31, -(1 << 31) - 1):
        ids = answer.token_ids.astype(np.int64)
        ids[4] = value
        with pytest.raises(RoutingFormatError, match=rf"token_ids\[4\] is {value}; expected an int32"):
            encode(answer, ids)
    for ids, text in (
        (answer.token_ids + 0.5, "holds float64; expected integers"),
        (answer.token_ids > 9, "holds bool; expected integers"),
        ([*answer.token_ids[:-1].tolist(), 10**30], "holds object; expected integers"),
        (answer.token_ids[:, None], r"has shape \(21, 1\); expected \(21,\)"),
        ([[1], [1, 2]], "is no array"),
        (3, r"has shape \(\); expected \(21,\)"),
    ):
        with pytest.raises(RoutingFormatError, match=f"token_ids {text}"):
            encode(answer, ids)


@pytest.mark.parametrize("value", ["\ud800", object(), {1, 2}], ids=["surrogate", "object", "set"])
def test_fields_that_no_json_holds_are_refused_by_their_answer(value):
    answer = filed(1)
    wrong = dataclasses.replace(answer, answer={**answer.answer, "text": value})
    with pytest.raises(
        RoutingFormatError, match=r"^answers\[1\] is no JSON in UTF-8 \(.*\); give what Engine.generate"
    ):
        encode_answers([answer, wrong])


def test_json_that_is_nested_too_deep_is_refused():
    tensors = load(encode_answers([filed(1)]))
    tensors["answers"] = np.frombuffer(DEEP.encode() + b"\n", np.uint8)
    with pytest.raises(RoutingFormatError, match="are no file of answers: maximum recursion depth"):
        decode_answers(save(tensors))
    ids = {"routed_experts": filed(1).record.ids}
    with pytest.raises(RoutingFormatError, match="are no record in safetensors form: RecursionError"):
        decode_record(save(ids, metadata={"routed_experts_info": DEEP}))


@pytest.mark.parametrize("array", [np.zeros((10**13, 0), np.int32), np.zeros((21, 1), np.int32), np.zeros(21)])
def test_token_ids_of_another_form_are_refused(array):
    tensors = load(encode_answers([filed(1)]))
    tensors |= {"token_ids": array, "token_offsets": np.array([0, len(array)])}
    with pytest.raises(RoutingFormatError, match="expected int32 of one dim"):
        decode_answers(save(tensors))


def test_rows_that_are_marked_otherwise_than_in_the_metadata_are_refused():
    record = filed(1).record
    valid = np.ones(record.num_rows, np.bool_)
    valid[3] = False
    encoded = encode_record(dataclasses.replace(record, valid=valid))
    assert np.array_equal(decode_record(encoded).valid, valid)
    header = json.loads(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])
    changed = save({**load(encoded), "valid": np.roll(valid, 1)}, metadata=header["__metadata__"])
    with pytest.raises(RoutingFormatError, match="valid marks other rows"):
        decode_record(changed)


def test_records_of_two_models_are_refused():
    first, second = filed(1), filed(2)
    narrow = skewed_record(np.random.default_rng(0), LOGITS[:, :8], 22, prompt_len=5)
    with pytest.raises(RoutingFormatError, match="2 models"):
        encode_answers([first, ArchivedAnswer(answer=second.answer, token_ids=second.token_ids, record=narrow)])
