"""Files of many answers: every record, token and field comes back; what is no such file is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from placement.cases import skewed_record
from routed_experts.core.errors import RoutingFormatError
from routed_experts.formats.archive import ArchivedAnswer, decode_answers, encode_answers, encode_record, holds_answers

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


def test_what_was_filed_comes_back():
    given = [filed(1), filed(2, with_record=False), filed(3)]
    for some in (given, given[1:2], []):
        encoded = encode_answers(some)
        assert holds_answers(encoded)
        for one, back in zip(some, decode_answers(encoded), strict=True):
            assert back.record == one.record and np.array_equal(back.token_ids, one.token_ids)
            meta = {name: value for name, value in back.answer["meta_info"].items() if name != "routed_experts_info"}
            assert {**back.answer, "meta_info": meta} == {
                **one.answer,
                "meta_info": {"id": meta["id"], "prompt_tokens": 5},
            }
    assert not holds_answers(encode_record(given[0].record))


def test_the_tensors_are_readable_by_safetensors_alone():
    given = [filed(1), filed(2)]
    tensors = load(encode_answers(given))
    begin, end = tensors["row_offsets"][1:3]
    assert np.array_equal(tensors["routed_experts"][begin:end], given[1].record.ids)
    begin, end = tensors["token_offsets"][1:3]
    assert np.array_equal(tensors["token_ids"][begin:end], given[1].token_ids)
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


def test_records_of_two_models_are_refused():
    one, other = filed(1), filed(2)
    narrow = skewed_record(np.random.default_rng(0), LOGITS[:, :8], 22, prompt_len=5)
    with pytest.raises(RoutingFormatError, match="2 models"):
        encode_answers([one, ArchivedAnswer(answer=other.answer, token_ids=other.token_ids, record=narrow)])
