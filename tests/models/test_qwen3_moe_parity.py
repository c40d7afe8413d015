"""Parity with transformers: the real engine on a checkpoint that transformers wrote, float32 on the CPU,
teacher-forced.

One forward of transformers over prompt and answer judges every token: if its argmax agrees at every place, greedy
decoding agrees by induction. Where the oracle itself is near a tie (margin 1e-4) a difference is an exception: counted
and printed, one line a configuration (pytest -rP), and bounded."""

import dataclasses

import numpy as np
import pytest
import torch

from routed_experts import Engine, extract_routed_experts_from_meta_info
from support.tiny_checkpoint import write_hf_qwen3_moe

pytestmark = pytest.mark.usefixtures("lazy_compilation")

MARGIN = 1e-4
NEW_TOKENS = 12
GREEDY = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
CONFIGS = {
    "all MoE, 8 heads on 1, renormalised": dict(
        num_hidden_layers=3,
        mlp_only_layers=[],
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=16,
    ),
    "sparse step 2, tied, 4 heads on 2, wide heads, not renormalised": dict(
        num_hidden_layers=4,
        mlp_only_layers=[],
        decoder_sparse_step=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=True,
        norm_topk_prob=False,
        hidden_size=48,
    ),
    "dense layers 0 and 2, heads on their own, 260 experts, theta 1e6": dict(
        num_hidden_layers=4,
        mlp_only_layers=[0, 2],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        hidden_size=32,
        num_experts=260,
        num_experts_per_tok=8,
        moe_intermediate_size=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}
PROMPT_LENGTHS = (1, 5, 70, 17, 33, 32)  # one longer than two buckets of 32, more than run at once


@dataclasses.dataclass
class Judged:
    """The results of transformers for one sequence: next-token logits, and router scores and choices of every MoE
    layer."""

    logits: np.ndarray  # [S, V]
    scores: np.ndarray  # [S, M, E], softmax
    ids: np.ndarray  # [S, M, K]

    @property
    def logprobs(self) -> np.ndarray:
        shifted = self.logits.astype(np.float64) - self.logits.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclasses.dataclass
class Tally:
    """Counts over one configuration."""

    tokens: int = 0
    near_tokens: int = 0  # the oracle's best two logits are closer than the margin
    ids: int = 0
    near_ids: int = 0  # in rows and layers where the k-th and the next router score are closer than the margin
    exceptions: int = 0  # tokens, and choices of a router, that differ
    logprob: float = 0.0  # largest difference

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens compared ({self.near_tokens} near a tie), {self.ids} ids compared ({self.near_ids} "
            "near a tie), "
            f"{self.exceptions} exceptions, largest logprob difference {self.logprob:.1e}"
        )


def judge(model, tokens) -> Judged:
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    recorded = []
    hooks = [router.register_forward_hook(lambda module, inputs, output: recorded.append(output)) for router in routers]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float().numpy()
    for hook in hooks:
        hook.remove()
    scores = np.stack([torch.softmax(logits.float(), -1).numpy() for logits, _, _ in recorded], axis=1)
    return Judged(logits, scores, np.stack([ids.numpy() for _, _, ids in recorded], axis=1))


def compare_ids(judged, rows, tally):
    """Rows of the record against the oracle's choices, in executed order."""
    top_k = rows.shape[-1]
    best = -np.sort(-judged.scores[: len(rows)], axis=-1)[..., : top_k + 1]
    margins = best[..., :-1] - best[..., 1:]
    set_decided, order_decided = margins[..., -1] > MARGIN, np.min(margins, axis=-1) > MARGIN
    expected = judged.ids[: len(rows)]
    assert np.array_equal(np.sort(rows[set_decided], axis=-1), np.sort(expected[set_decided], axis=-1))
    assert np.array_equal(rows[order_decided], expected[order_decided])
    tally.ids += rows.size
    tally.near_ids += int(np.sum(~set_decided)) * top_k
    tally.exceptions += int(np.sum(np.any(rows != expected, axis=-1)))


def compare_tokens(judged, prompt, answer, tally):
    for step, token in enumerate(answer):
        logits = judged.logits[len(prompt) - 1 + step]
        second, best = np.sort(logits)[-2:]
        tally.tokens += 1
        near = best - second <= MARGIN
        tally.near_tokens += int(near)
        assert near or token == int(np.argmax(logits)), (step, token, int(np.argmax(logits)))
        tally.exceptions += int(token != int(np.argmax(logits)))


def compare_logprobs(judged, entries, tokens, first, tally):
    """`entries` holds [value, token, text] for tokens[first:]; the first token of a sequence has no value."""
    assert [entry[1] for entry in entries] == list(tokens[first : first + len(entries)])
    for position, (value, token, _) in enumerate(entries, start=first):
        assert (value is None) == (position == 0)
        if value is not None:
            tally.logprob = max(tally.logprob, abs(value - judged.logprobs[position - 1, token]))


def compare(model, prompt, result, tally, *, prompt_logprobs=True):
    """One answer of the engine against the oracle."""
    answer, meta = result["output_ids"], result["meta_info"]
    judged = judge(model, [*prompt, *answer])
    compare_tokens(judged, prompt, answer, tally)
    compare_logprobs(judged, meta["output_token_logprobs"], [*prompt, *answer], len(prompt), tally)
    if prompt_logprobs:
        compare_logprobs(judged, meta["input_token_logprobs"], prompt, 0, tally)
    layers, top_k = model.config.num_hidden_layers, model.config.num_experts_per_tok
    rows = extract_routed_experts_from_meta_info(result).reshape(-1, layers, top_k)
    assert len(rows) == len(prompt) + len(answer) - 1
    moe = [layer for layer, block in enumerate(model.model.layers) if hasattr(block.mlp, "gate")]
    assert np.all(np.delete(rows, moe, axis=1) == -1)
    compare_ids(judged, rows[:, moe], tally)


def generate(model, prompt):
    """No teacher: transformers writes its own answer, token after token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(torch.argmax(model(torch.tensor([tokens])).logits[0, -1])))
    return tokens[len(prompt) :]


def build(folder, **options):
    sizes = dict(
        precompile_bs_paddings=(4,),
        precompile_token_paddings=(32,),
        page_size=8,
        max_total_tokens=512,
        context_length=160,
    )
    return Engine(str(folder), skip_tokenizer_init=True, enable_return_routed_experts=True, **{**sizes, **options})


def random_prompts(model, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.config.vocab_size, length).tolist() for length in lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_logprobs_and_routed_experts_are_those_of_transformers(tmp_path, name):
    model = write_hf_qwen3_moe(tmp_path, seed=len(name), **CONFIGS[name])
    prompts, counts = random_prompts(model, PROMPT_LENGTHS), Tally()
    kwargs = dict(sampling_params=GREEDY, return_logprob=True, return_routed_experts=True)
    with build(tmp_path) as engine:
        results = engine.generate(input_ids=prompts, logprob_start_len=0, **kwargs)
        for prompt, result in zip(prompts, results, strict=True):
            assert len(result["output_ids"]) == NEW_TOKENS
            compare(model, prompt, result, counts)
        assert results[1]["output_ids"] == generate(model, prompts[1])
        longer = [*prompts[2], *results[2]["output_ids"], 7, 8, 9]  # the previous output, and a new turn
        hit = engine.generate(input_ids=longer, **kwargs)
        assert hit["meta_info"]["cached_tokens"] >= len(prompts[2])
        compare(model, longer, hit, counts, prompt_logprobs=False)
        assert engine.check_integrity() == []
    print(f"{name}: {counts}")
    assert counts.logprob < 1e-4
    assert counts.near_tokens <= 0.02 * counts.tokens and counts.near_ids <= 0.1 * counts.ids
    assert counts.exceptions <= 0.01 * counts.ids
    assert len({tuple(result["output_ids"]) for result in results}) > 1, "a constant answer proves nothing"


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 0.5), ("float16", 0.06)])
def test_half_precision_checkpoints_are_served_in_their_own_dtype(tmp_path, dtype, near):
    """Prints how many choices flip against float32; that number is a property of the dtype and is not asserted."""
    model = write_hf_qwen3_moe(tmp_path / "float32", seed=4)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / dtype)
    model = model.to(torch.float32)  # the same rounded weights, computed in float32
    prompts = random_prompts(model, (3, 40, 20), seed=2)
    with build(tmp_path / dtype) as engine:
        results = engine.generate(
            input_ids=prompts, sampling_params=GREEDY, return_logprob=True, return_routed_experts=True
        )
    flipped = total = 0
    differences = []
    for prompt, result in zip(prompts, results, strict=True):
        tokens = [*prompt, *result["output_ids"]]
        judged = judge(model, tokens)
        rows = extract_routed_experts_from_meta_info(result).reshape(-1, 4, 4)[:, 1:]
        flipped += int(np.sum(np.any(np.sort(rows, axis=-1) != np.sort(judged.ids[:-1], axis=-1), axis=-1)))
        total += rows.shape[0] * rows.shape[1]
        for position, (value, token, _) in enumerate(result["meta_info"]["output_token_logprobs"], start=len(prompt)):
            differences.append(abs(value - judged.logprobs[position - 1, token]))
    print(
        f"{dtype}: {flipped} of {total} routers flipped ({flipped / total:.2%}), mean logprob difference "
        f"{np.mean(differences):.1e}"
    )
    assert np.median(differences) < near
