"""Variations of a family's config beside its standard case: groups, dense layers first, shared experts, tied
embeddings, partial rotary dims, scaled positions, windows, odd ratios of heads. Each is compared with transformers over
whole sequences.

    PYTHONPATH=src:tests python tests/oracles/variations.py [part of a name ...]

runs all of them, or those whose names hold a part, and prints a line each. Shares no code with the package but what it
judges."""

import dataclasses
import sys
import tempfile
import time

import jax.numpy as jnp
import numpy as np

from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts.models.model_folder import ModelFolder
from routed_experts.replay.forward import forward

MARGIN = 1e-4
LENGTH = 75


def positions(kind, **more):
    """A section of rope_parameters; all that are scaled were trained on 64 tokens."""
    trained = {} if kind in ("default", "linear", "dynamic") else {"original_max_position_embeddings": 64}
    return {
        "rope_parameters": {
            "rope_type": kind,
            "rope_theta": 1e4,
            **({} if kind == "default" else {"factor": 4.0}),
            **trained,
            **more,
        }
    }


YARN = positions("yarn", beta_fast=32.0, beta_slow=1.0)
LLAMA3 = positions("llama3", low_freq_factor=1.0, high_freq_factor=4.0)
ALL_LAYERS = (0, 1, 2, 3)

# name of the case, what is varied, and the MoE layers where they change
VARIED = {
    "Qwen3Moe": [
        (dict(norm_topk_prob=True), None),
        (dict(norm_topk_prob=False, tie_word_embeddings=True), None),
        (dict(decoder_sparse_step=2, mlp_only_layers=[]), (1, 3)),
        (YARN | dict(mlp_only_layers=[]), ALL_LAYERS),
        (positions("linear"), None),
        (positions("dynamic"), None),
        (LLAMA3, None),
        (dict(num_attention_heads=6, num_key_value_heads=2, num_experts_per_tok=1), None),
        (dict(num_attention_heads=5, num_key_value_heads=1, head_dim=24, num_experts=13), None),
    ],
    "Mixtral": [
        (dict(num_experts_per_tok=1, sliding_window=None), None),
        (dict(num_experts_per_tok=3, num_local_experts=7, tie_word_embeddings=True), None),
        (dict(sliding_window=1, num_attention_heads=6, num_key_value_heads=2, head_dim=16), None),
        (positions("linear") | dict(sliding_window=5), None),
        (YARN | dict(head_dim=16), None),
        (LLAMA3, None),
    ],
    "Phimoe": [
        (positions("default") | dict(attention_bias=False, lm_head_bias=False, router_jitter_noise=0.01), None),
        (dict(sliding_window=9, num_local_experts=5, tie_word_embeddings=True), None),
    ],
    "Qwen2Moe": [
        (dict(norm_topk_prob=True, qkv_bias=False, mlp_only_layers=[], tie_word_embeddings=False), ALL_LAYERS),
        (dict(decoder_sparse_step=3, mlp_only_layers=[], num_experts_per_tok=1), (2,)),
        (YARN | dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=96), None),
    ],
    "Olmoe": [
        (dict(clip_qkv=None, norm_topk_prob=True), None),
        (dict(tie_word_embeddings=True, num_experts_per_tok=1, num_experts=6), None),
        (positions("dynamic") | dict(num_key_value_heads=1), None),
    ],
    "DeepseekV2": [
        (dict(topk_method="greedy", first_k_dense_replace=0), ALL_LAYERS),
        (dict(q_lora_rank=None, n_shared_experts=1, n_group=8, topk_group=3), None),
        (dict(first_k_dense_replace=3, n_group=2, topk_group=1) | positions("default"), (3,)),
        (YARN | dict(routed_scaling_factor=1.0, tie_word_embeddings=True), None),
        (positions("yarn", beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.707), None),
        (positions("linear") | dict(num_experts_per_tok=1), None),
    ],
    "DeepseekV3": [
        (dict(norm_topk_prob=False, first_k_dense_replace=0), ALL_LAYERS),
        (dict(n_group=1, topk_group=1, n_shared_experts=2), None),
        (dict(q_lora_rank=20, rope_interleave=False, n_group=8, topk_group=4), None),
        (dict(first_k_dense_replace=3, routed_scaling_factor=1.0) | positions("default"), (3,)),
        (dict(n_group=2, topk_group=1, num_experts_per_tok=8, tie_word_embeddings=True), None),
    ],
    "Glm4Moe": [
        (dict(use_qk_norm=False, attention_bias=False, first_k_dense_replace=0, n_shared_experts=2), ALL_LAYERS),
        (positions("default", partial_rotary_factor=1.0) | dict(norm_topk_prob=False), None),
        (positions("default", partial_rotary_factor=0.25) | dict(n_group=4, topk_group=1, num_experts_per_tok=2), None),
        (
            positions("yarn", partial_rotary_factor=0.5, beta_fast=32.0, beta_slow=1.0)
            | dict(tie_word_embeddings=True),
            None,
        ),
        (dict(num_attention_heads=6, num_key_value_heads=2, head_dim=16, first_k_dense_replace=3), (3,)),
    ],
    "Qwen3VLMoe": [
        (dict(mlp_only_layers=[], decoder_sparse_step=2, tie_word_embeddings=True), (1, 3)),
        (YARN | dict(num_attention_heads=6, num_key_value_heads=2), None),
    ],
    "Glm4MoeLite": [
        (dict(mlp_layer_types=["sparse", "dense"] * 2, q_lora_rank=None, rope_interleave=False), (0, 2)),
        (dict(mlp_layer_types=None), None),
        (dict(n_group=4, topk_group=2, norm_topk_prob=False, n_shared_experts=2) | YARN, None),
        (dict(hidden_size=68), None),  # 17 a head, which latent attention does not use
    ],
    "Dots1": [
        (dict(attention_bias=False, sliding_window=None, norm_topk_prob=False, first_k_dense_replace=0), ALL_LAYERS),
        (dict(n_group=4, topk_group=2, max_window_layers=0, tie_word_embeddings=True), None),
        (dict(n_shared_experts=0), None),
    ],
    "ExaoneMoe": [
        (
            dict(sliding_window_pattern=2, num_shared_experts=1, norm_topk_prob=False, first_k_dense_replace=0),
            ALL_LAYERS,
        ),
        (dict(layer_types=["full_attention"] * 4, n_group=1, topk_group=1, tie_word_embeddings=True), None),
        (dict(mlp_layer_types=["sparse", "dense"] * 2, sliding_window=1, num_attention_heads=6), (0, 2)),
        (YARN | dict(sliding_window_pattern=3, num_key_value_heads=1, num_experts_per_tok=8), None),
    ],
    "GptOss": [
        (dict(attention_bias=False, sliding_window=4, num_experts_per_tok=1), None),
        (dict(layer_types=["full_attention"] * 4, tie_word_embeddings=True), None),
        (
            dict(layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"])
            | positions("default"),
            None,
        ),
        (dict(num_attention_heads=6, num_key_value_heads=3, num_local_experts=5), None),
    ],
    "GraniteMoe": [
        (dict(attention_bias=True, tie_word_embeddings=True), None),
        (
            dict(attention_multiplier=1.0, residual_multiplier=1.0, embedding_multiplier=1.0, logits_scaling=4.0)
            | YARN,
            None,
        ),
        (dict(num_experts_per_tok=8, num_key_value_heads=1), None),
    ],
    "Ernie4_5_Moe": [
        (dict(moe_layer_start_index=0, moe_layer_end_index=-1, moe_num_shared_experts=1), ALL_LAYERS),
        (dict(moe_layer_interval=2, moe_layer_end_index=3, tie_word_embeddings=True), (1, 3)),
        (dict(moe_num_shared_experts=0, moe_k=1), None),
        (LLAMA3, None),
    ],
    "HunYuanMoEV1": [
        (positions("default") | dict(attention_bias=True, tie_word_embeddings=True, moe_topk=1), None),
        (positions("dynamic") | dict(num_attention_heads=6, num_key_value_heads=3), None),
    ],
    "MiniMaxM2": [
        (dict(rotary_dim=24), None),
        (dict(rotary_dim=8, num_experts_per_tok=1, tie_word_embeddings=True), None),
        (dict(num_attention_heads=6, num_key_value_heads=2, num_experts_per_tok=8), None),
    ],
    "Llama4": [
        (dict(use_qk_norm=False, attn_temperature_tuning=False), None),
        (dict(interleave_moe_layer_step=1, attention_chunk_size=7), ALL_LAYERS),
        (dict(no_rope_layer_interval=2, attention_chunk_size=512, tie_word_embeddings=True), None),
        (positions("llama3", low_freq_factor=1.0, high_freq_factor=4.0), None),
        (positions("llama3", low_freq_factor=1.0, high_freq_factor=1.0) | dict(use_qk_norm=False), None),
    ],
    "BailingMoeV2": [
        (dict(n_group=8, topk_group=3, first_k_dense_replace=0), ALL_LAYERS),
        (dict(n_group=1, topk_group=1, n_shared_experts=2), None),
    ],
    "Qwen3Next": [
        (dict(mlp_only_layers=[], norm_topk_prob=False, linear_conv_kernel_dim=2), tuple(range(8))),
        (
            dict(mlp_only_layers=[], layer_types=["full_attention", "linear_attention"] * 4, tie_word_embeddings=True),
            tuple(range(8)),
        ),
        (
            positions("default", partial_rotary_factor=0.5) | dict(linear_num_key_heads=1, linear_num_value_heads=3),
            None,
        ),
        (dict(decoder_sparse_step=2, mlp_only_layers=[], linear_num_key_heads=4), (1, 3, 5, 7)),
        (dict(num_attention_heads=6, num_key_value_heads=2, num_experts_per_tok=1), None),
    ],
    "Qwen3_5Moe": [
        (dict(layer_types=["linear_attention"] * 7 + ["full_attention"], linear_conv_kernel_dim=3), None),
        (dict(linear_num_key_heads=1, linear_num_value_heads=3, tie_word_embeddings=True), None),
    ],
    "BailingHybrid": [
        (dict(kda_safe_gate=False, short_conv_kernel_size=2, norm_topk_prob=False, n_shared_experts=2), None),
        (
            YARN
            | dict(
                rope_theta=1e4,
                layer_group_size=4,
                kda_lower_bound=-2.0,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=0,
            ),
            ALL_LAYERS,
        ),
        (
            dict(mlp_layer_types=["sparse", "dense"] * 2, layer_types=["full_attention", "linear_attention"] * 2),
            (0, 2),
        ),
    ],
    "Gemma4": [
        (dict(attention_k_eq_v=False, tie_word_embeddings=True, final_logit_softcapping=None), None),
        (dict(num_attention_heads=6, num_key_value_heads=6, num_global_key_value_heads=2, sliding_window=1), None),
        (
            dict(num_hidden_layers=7, layer_types=None, global_head_dim=16, num_global_key_value_heads=2),
            tuple(range(7)),
        ),
    ],
    "Lfm2Moe": [
        (dict(conv_bias=False, conv_L_cache=2, use_expert_bias=False, tie_word_embeddings=True), None),
        (dict(layer_types=["full_attention", "conv"] * 3, norm_topk_prob=False, num_dense_layers=3), (3, 4, 5)),
        (
            YARN | dict(layer_types=["conv"] * 5 + ["full_attention"], conv_L_cache=3, num_dense_layers=0),
            tuple(range(6)),
        ),
    ],
    "Llama": [
        (YARN | dict(attention_bias=True), None),
        (positions("linear") | dict(tie_word_embeddings=True), None),
        (positions("dynamic") | dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=96), None),
    ],
    "Mistral": [(dict(sliding_window=None, num_key_value_heads=1), None), (dict(sliding_window=1) | YARN, None)],
    "Qwen2": [
        (dict(tie_word_embeddings=True), None),
        (dict(use_sliding_window=True, sliding_window=6, max_window_layers=2), None),
    ],
    "Qwen3": [(YARN, None), (dict(use_sliding_window=True, sliding_window=6, max_window_layers=1), None)],
}


def describe_change(change):
    """A change in words."""
    flat = {key: value for key, value in change.items() if key != "rope_parameters"}
    rope = change.get("rope_parameters", {})
    kind = (
        []
        if not rope
        else [
            " ".join(
                [
                    rope["rope_type"],
                    *(f"{key}={rope[key]}" for key in ("partial_rotary_factor", "mscale") if key in rope),
                ]
            )
        ]
    )
    return ", ".join([*kind, *(f"{key}={value}" for key, value in flat.items())])


VARIATIONS = {
    f"{name}: {describe_change(change)}": dataclasses.replace(
        CASES[name], config=CASES[name].config | change, layer_ids=CASES[name].layer_ids if layers is None else layers
    )
    for name, changes in VARIED.items()
    for change, layers in changes
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Largest difference of log probabilities, and the largest logit; ids, those near a tie of the oracle (not
    compared), and wrong ones.

    Logits of tied embeddings are ten times larger than others here, and so is what rounding makes of them."""

    logprob: float
    logit: float
    ids: int
    near: int
    wrong: int

    @property
    def agrees(self):
        """Whether ids are the oracle's, and numbers up to rounding."""
        return self.wrong == 0 and self.logprob < 1e-5 * max(self.logit, 10.0)


def compare(case, folder):
    """Our whole-sequence forward on the case's checkpoint against transformers', over one random sequence."""
    oracle, tokens = Oracle(case, folder), np.random.default_rng(7).integers(0, VOCAB_SIZE, LENGTH)
    judged = oracle.judge(tokens.tolist())
    model = ModelFolder.open(folder).load(jnp.dtype(jnp.float32))
    sparse = bool(case.layer_ids)
    out = forward(model, jnp.asarray(tokens, jnp.int32)[None], return_routed=sparse)
    wide = np.asarray(out.logits, np.float64)[0]
    wide -= wide.max(-1, keepdims=True)
    largest = float(np.abs(judged.logits).max())
    difference = float(np.abs(wide - np.log(np.exp(wide).sum(-1, keepdims=True)) - judged.logprobs).max())
    if not sparse:
        return Verdict(difference, largest, 0, 0, 0)
    ids, reference = np.sort(np.asarray(out.ids)[0], axis=-1), np.sort(judged.ids, axis=-1)
    top_k, experts = ids.shape[-1], judged.choice.shape[-1]
    best = -np.sort(-judged.choice, axis=-1)
    margin = np.full(ids.shape[:2], np.inf) if top_k == experts else best[..., top_k - 1] - best[..., top_k]
    decided = (margin > MARGIN) & (judged.groups > MARGIN)
    return Verdict(
        difference, largest, ids.size, int((~decided).sum()) * top_k, int((ids[decided] != reference[decided]).sum())
    )


def main(parts):
    """Run and print; the number of variations that differ is the exit status."""
    begun, bad = time.perf_counter(), 0
    chosen = {name: case for name, case in VARIATIONS.items() if not parts or any(part in name for part in parts)}
    if not chosen:
        sys.exit(f"no variation's name holds {' or '.join(parts)}; expected a part of one, as {', '.join(VARIED)}")
    for name, case in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict = compare(case, folder)
            except Exception as error:  # one variation that cannot run must not hide the others
                verdict, bad = f"{type(error).__name__}: {str(error)[:300]}", bad + 1
            else:
                bad += not verdict.agrees
        print(f"{name}: {verdict}", flush=True)
    print(f"{len(chosen)} variations, {bad} differ, {time.perf_counter() - begun:.0f} s")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
