"""Tokens that tokenizer_config.json and special_tokens_map.json add to tokenizer.json: texts, ids and what decoding
skips equal transformers'."""

import json
import random

import pytest
from transformers import AutoTokenizer

from routed_experts.core.errors import CheckpointError
from routed_experts.engine.requests.tokenizer import Tokenizer
from support.tiny_checkpoint import write_tiny_tokenizer

PIECES = (
    "hello",
    " ",
    "<|extra|>",
    "<s>",
    "</s>",
    "<|im_end|>",
    "<|endoftext|>",
    "<unk>",
    "h",
    "\n",
    "é",
    "x<|extra|",
    ">",
)


def token(content, **flags):
    no = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **no, **flags}


def saved(described):
    return {"__type": "AddedToken", **described}


def listed(*tokens):
    return {"added_tokens_decoder": {str(313 + index): each for index, each in enumerate(tokens)}}


CONFIGS = {
    "none": {},
    "listed": listed(token("<|extra|>"), token("<s>", special=False)),
    "listed by ids as numbers": {
        "added_tokens_decoder": {"1000": token("<s>"), "313": token("<|extra|>"), "99": token("</s>")}
    },
    "strips": listed(token("<|extra|>", lstrip=True, rstrip=True), token("<s>", rstrip=True)),
    "single word": listed(token("<|extra|>", single_word=True), token("hello", single_word=True, special=False)),
    "few flags": listed({"content": "<|extra|>"}, {"content": "<s>", "special": True}),
    "other flags": {"added_tokens_decoder": {"2": token("<|im_end|>", lstrip=True)}},
    "same, not special": {"added_tokens_decoder": {"2": token("<|im_end|>", special=False)}},
    "named": {"bos_token": "<s>", "unk_token": saved(token("<unk>", lstrip=True)), "cls_token": None},
    "named and listed": {"bos_token": "<s>", **listed(token("<s>", special=False))},
    "of the vocabulary": {"unk_token": "h"},
    "additional": {"additional_special_tokens": ["<|extra|>", "</s>"]},
    "extra": {"extra_special_tokens": ["<|extra|>", saved(token("</s>", rstrip=True))]},
    "extra by name": {"extra_special_tokens": {"image_token": "<|extra|>"}},
    "a name of the model": {"image_token": "<|extra|>", "add_bos_token": False},
    "extra before additional": {"extra_special_tokens": ["<|extra|>"], "additional_special_tokens": ["<s>"]},
    "listed and additional": {"additional_special_tokens": ["<s>"], **listed(token("<s>", special=False))},
    "listed and extra by name": {
        "extra_special_tokens": {"image_token": "<s>"},
        **listed(token("<s>", special=False)),
    },
    "one name twice": {"image_token": "<s>", "extra_special_tokens": {"image_token": "<|extra|>"}},
    "the end alone is listed": {"eos_token": "<s>", **listed(token("<s>"))},
    "the end is the beginning": {"eos_token": "<s>", "bos_token": "<s>"},
    "split": {"split_special_tokens": True, **listed(token("<|extra|>"))},
}
MAPS = {
    "map": {"bos_token": "<s>", "unk_token": token("<unk>")},
    "map of extra tokens": {"extra_special_tokens": ["<|extra|>"], "pad_token": "</s>"},
    "map with a name of the model": {"image_token": "<|extra|>"},
}


def assert_as_transformers(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    theirs, ours, rng = AutoTokenizer.from_pretrained(folder), Tokenizer.from_directory(folder), random.Random(0)
    for _ in range(60):
        text = "".join(rng.choice(PIECES) for _ in range(12))
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], text
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips), text


@pytest.mark.parametrize("name", CONFIGS)
def test_added_tokens_are_those_of_transformers(tmp_path, name):
    folder = write_tiny_tokenizer(tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CONFIGS[name]))
    assert_as_transformers(folder)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("has_list", [False, True])
def test_special_tokens_map_is_read_where_no_added_tokens_are_listed(tmp_path, name, has_list):
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps(MAPS[name]))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | (listed(token("<unk>")) if has_list else {})))
    assert_as_transformers(folder)


def test_extra_tokens_of_both_files_and_older_lists_of_ids_are_joined(tmp_path):
    folder = write_tiny_tokenizer(tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": ["<s>", "<unk>"]}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"extra_special_tokens": ["<unk>", "</s>"]}))
    assert_as_transformers(folder)
    (folder / "added_tokens.json").write_text(json.dumps({"<|extra|>": 314, "<s>": 313}))
    assert_as_transformers(folder)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ([], "added_tokens_decoder=a list of 0 must be an object of tokens by id"),
        ({"x": token("<s>")}, "added_tokens_decoder=.*must be an object of tokens by id"),
        ({"313": "<s>"}, "added_tokens_decoder holds '<s>', which is no token"),
        ({"313": {"special": True}}, "added_tokens_decoder holds .*which is no token"),
    ],
)
def test_what_is_no_list_of_tokens_is_named(tmp_path, value, match):
    folder = write_tiny_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": value}))
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: {match}"):
        Tokenizer.from_directory(folder)
