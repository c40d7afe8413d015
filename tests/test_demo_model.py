"""The demo model that the package ships: small enough, read by transformers to the same logits, and routed by token.
The oracle of logits and routing is transformers' Qwen3-MoE."""

import json
import math
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import routed_experts
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay.forward import forward

pytestmark = pytest.mark.usefixtures("fast_compilation")

FOLDER = Path(routed_experts.__file__).parent / "demo_model"
TEXT = """The old captain walked along the harbour and looked at the ships. \
"It will rain before the evening," he said to the boy.
<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n<|im_start|>assistant\n3 plus 4 is 7.<|im_end|>\n
def largest(numbers):\n    best = None\n    for number in numbers:\n\
        if best is None or number > best:\n            best = number
    return best\n\nMr. Speaker, the economy of this country has grown for three years, \
and more people are at work than ever before.
O night, that hid'st the stars beneath thy wing,\nAnd hear'st the dying Muse of summer sing,
"""


@cache
def tokens() -> list[int]:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(TEXT).ids


@cache
def ours() -> tuple[np.ndarray, np.ndarray]:
    out = forward(ModelFolder.open(FOLDER).load(jnp.dtype("float32")), jnp.asarray([tokens()]), return_routed=True)
    assert out.ids is not None
    return np.asarray(out.logits[0]), np.asarray(out.ids[0])


@cache
def theirs() -> tuple[np.ndarray, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.tensor([tokens()]), output_router_logits=True)
    return out.logits[0].numpy(), np.stack([logits.numpy() for logits in out.router_logits], axis=1)


def test_folder_is_whole_and_at_most_six_megabytes() -> None:
    sizes = {file.name: file.stat().st_size for file in FOLDER.iterdir() if file.is_file()}
    expected = {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert set(sizes) == expected
    assert [file.name for file in FOLDER.iterdir() if file.is_dir()] == ["draft_head"]
    assert sum(sizes.values()) <= 6_000_000, sizes


def test_transformers_gives_the_same_logits() -> None:
    np.testing.assert_allclose(ours()[0], theirs()[0], rtol=0, atol=2e-4)


def test_transformers_routes_every_token_to_the_same_experts() -> None:
    _, ids = ours()
    _, router_logits = theirs()
    np.testing.assert_array_equal(ids, np.argsort(-router_logits, axis=-1, kind="stable")[..., : ids.shape[-1]])


def test_text_survives_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    strange = TEXT + "1234 äöü 漢字 \t\r\n \U0001f600"
    assert tokenizer.decode(tokenizer.encode(strange).ids, skip_special_tokens=False) == strange


def test_transformers_tokenizes_alike_and_special_tokens_stop_a_chat() -> None:
    slow = AutoTokenizer.from_pretrained(FOLDER)
    assert slow(TEXT).input_ids == tokens()
    config, generation = (json.loads((FOLDER / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert slow.convert_tokens_to_ids("<|im_end|>") == config["eos_token_id"] == slow.eos_token_id
    assert slow.convert_tokens_to_ids("<|endoftext|>") == config["pad_token_id"] == slow.pad_token_id
    assert set(generation["eos_token_id"]) == {config["eos_token_id"], config["pad_token_id"]}
    chat = slow.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_load_is_spread_but_differs_by_token() -> None:
    logits, ids = ours()
    num_experts = ModelFolder.open(FOLDER).config.capture_spec.num_experts
    for column in ids.transpose(1, 0, 2):
        share = np.bincount(column.reshape(-1), minlength=num_experts) / column.size
        used = share[share > 0]
        assert -np.sum(used * np.log(used)) / math.log(num_experts) > 0.85
        assert len({tuple(sorted(row)) for row in column.tolist()}) > len(logits) / 4


def test_it_knows_its_own_text_better_than_chance() -> None:
    logits, _ = ours()
    rows = logits[:-1].astype(np.float64)
    expected = rows[np.arange(len(rows)), tokens()[1:]]
    top = rows.max(axis=-1)
    loss = np.mean(top + np.log(np.exp(rows - top[:, None]).sum(axis=-1)) - expected)
    assert loss < 0.6 * math.log(rows.shape[-1])  # chance: ln V
