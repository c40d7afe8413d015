"""Padding of the batch changes no row: requests alone and together, on programs padded to one request and to four.

One baseline for all: transformers' Qwen3-MoE on the same checkpoint decodes greedily, and its own routers say which
experts each token went to. It shares no code with the engine, knows no batch and no padding."""

import numpy as np
import pytest
import torch

from oracles.testbeds import random_prompt
from routed_experts import Engine, extract_routed_experts_from_meta_info
from support.tiny_checkpoint import write_hf_qwen3_moe

pytestmark = pytest.mark.usefixtures("lazy_compilation")

NEW_TOKENS = 12
NEAR_TIE = 1e-4
PROMPTS = [random_prompt(np.random.default_rng(seed), length).tolist() for seed, length in enumerate((9, 30, 1, 17))]
GREEDY = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
SETTINGS = dict(
    enable_return_routed_experts=True,
    skip_tokenizer_init=True,
    precompile_token_paddings=[32],
    context_length=64,
    page_size=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("qwen3_moe")


@pytest.fixture(scope="module")
def baseline(folder):
    """For each prompt: the generated ids, the rows [S-1, L, K] with -1 for the dense layer 0, and which (token, layer)
    are near ties."""
    model = write_hf_qwen3_moe(folder)
    top_k = model.config.num_experts_per_tok
    judged = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            routers = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
        scores = torch.stack([torch.softmax(logits.float(), dim=-1) for logits in routers], dim=1)  # [S-1, M, E]
        best, ids = (part.numpy() for part in scores.topk(top_k + 1, dim=-1))
        rows = np.concatenate([np.full((len(ids), 1, top_k), -1), ids[..., :top_k]], axis=1)
        near = (best[..., :-1] - best[..., 1:]).min(axis=-1) <= NEAR_TIE
        judged.append((tokens[len(prompt) :], rows, np.concatenate([np.zeros((len(ids), 1), bool), near], axis=1)))
    return judged


@pytest.fixture(scope="module")
def padded_to_one(folder, baseline):
    with Engine(str(folder), precompile_bs_paddings=[1], **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def padded_to_four(folder, baseline):
    with Engine(str(folder), precompile_bs_paddings=[4], **SETTINGS) as engine:
        yield engine


def assert_equal_to_baseline(engine, baseline, count):
    """Serve the first `count` prompts in one call, from an empty prefix cache."""
    engine.flush_cache()
    results = engine.generate(input_ids=PROMPTS[:count], sampling_params=GREEDY, return_routed_experts=True)
    assert len(results) == count
    for result, (tokens, rows, near) in zip(results, baseline, strict=False):
        assert result["output_ids"] == tokens
        assert result["meta_info"]["cached_tokens"] == 0
        flat = extract_routed_experts_from_meta_info(result)
        assert (flat.dtype, flat.size) == (np.int32, rows.size)
        routed = flat.reshape(rows.shape)
        np.testing.assert_array_equal(routed[~near], rows[~near])
        others = np.argwhere((routed != rows).any(axis=-1))
        for token, layer in others:
            print(f"near tie at token {token}, layer {layer}: {routed[token, layer]} for {rows[token, layer]}")
        assert len(others) <= 0.01 * near.size
    assert engine.check_integrity() == []


def test_01_single_request_bs_padding_one(padded_to_one, baseline):
    assert_equal_to_baseline(padded_to_one, baseline, 1)


def test_02_single_request_bs_padding_four(padded_to_four, baseline):
    assert_equal_to_baseline(padded_to_four, baseline, 1)


@pytest.mark.parametrize("paddings", ["padded_to_four", "padded_to_one"])
def test_03_three_requests_bs_padding_four(paddings, baseline, request):
    assert_equal_to_baseline(request.getfixturevalue(paddings), baseline, 3)


def test_04_four_requests_bs_padding_four(padded_to_four, baseline):
    assert_equal_to_baseline(padded_to_four, baseline, 4)
