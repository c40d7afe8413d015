"""Tiny random checkpoints of every family, written by transformers, and transformers as their judge. Shares no code
with the package.

Each case is a config of the oracle's own class; weights are wide and routers wider, so that routing differs by token.
`choice` gives the scores that a router of the family chooses by, experts of groups that it did not keep at -inf, and
the margin between the groups that it kept and the others. Dims: S tokens, M MoE layers, K experts per token, E experts,
V vocabulary."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

VOCAB_SIZE = 211
SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One family: the oracle's classes are <name>Config and <name>ForCausalLM. `router` is the suffix of a router's
    class, `layer_ids` the layers with experts, `scoring_func` what makes scores of the logits that a router puts out.
    `vision`: config of a tower beside the text model, which `config` and the class `settings` are then of."""

    name: str
    config: dict
    scoring_func: str = "softmax"
    router: str = "TopKRouter"
    layer_ids: tuple = (0, 1, 2, 3)
    title: str = ""
    rewrite: Callable | None = None  # what a folder must go through to be of the family
    settings: str = ""
    model: str = ""
    seed: int = 0
    vision: dict | None = None


@dataclasses.dataclass
class Judged:
    """The results of transformers for one sequence; `choice` [S, M, E] and `groups` [S, M], the margin between selected
    and other groups. `weights` [S, M, K] of the `ids`, as the routers give them."""

    logits: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    choice: np.ndarray
    groups: np.ndarray

    @property
    def logprobs(self):
        wide = self.logits.astype(np.float64)
        wide = wide - wide.max(-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


class Oracle:
    """A model of transformers in float32 and what is read of it."""

    def __init__(self, case, folder):
        import torch
        import transformers

        self.case, self.folder = case, Path(folder)
        config = getattr(transformers, case.settings or f"{case.name}Config")(**{**SIZES, **case.config})
        if case.vision is not None:
            both = dict(text_config=config.to_dict(), vision_config=case.vision)
            tied = config.tie_word_embeddings
            config = getattr(transformers, f"{case.name}Config")(**both, tie_word_embeddings=tied)
        torch.manual_seed(case.seed)
        config._attn_implementation = config._experts_implementation = "eager"  # whatever the sizes
        self.model = getattr(transformers, case.model or f"{case.name}ForCausalLM")(config).to(torch.float32).eval()
        rng = np.random.default_rng(case.seed)
        with torch.no_grad():
            for name, weight in [*self.model.named_parameters(), *self.model.named_buffers()]:
                if "inv_freq" not in name and weight.dim() > 0:
                    weight.copy_(torch.from_numpy(random_weight(rng, name, tuple(weight.shape), case)))
        self.model.save_pretrained(folder)
        if case.rewrite is not None:
            case.rewrite(Path(folder))
        self.config = self.model.config.get_text_config()
        self.routers = [
            module
            for _, module in self.model.named_modules()
            if type(module).__name__.lower().endswith(case.router.lower())
        ]
        assert len(self.routers) == len(case.layer_ids), (
            f"{case.title or case.name}: {len(self.routers)} modules of transformers have a class whose name ends in "
            f"{case.router!r}, and layer_ids={case.layer_ids}; correct `router` or `layer_ids` of the case"
        )

    def read_again(self):
        """Take the model that transformers makes of the folder as it is now, for a config.json that was edited."""
        import torch

        options = dict(dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
        self.model = type(self.model).from_pretrained(self.folder, **options).eval()
        self.config = self.model.config.get_text_config()
        self.routers = [
            module
            for module in self.model.modules()
            if type(module).__name__.lower().endswith(self.case.router.lower())
        ]

    def judge(self, tokens):
        """Score a whole sequence."""
        import torch

        recorded = []
        hooks = [
            router.register_forward_hook(lambda module, inputs, output: recorded.append((module, output)))
            for router in self.routers
        ]
        with torch.no_grad():
            logits = self.model(torch.tensor([list(tokens)])).logits[0].float().numpy()
        for hook in hooks:
            hook.remove()
        biases = [self.router_biases(router) for router, _ in recorded]
        layers = [read_router(output) for _, output in recorded]
        chosen = [
            (*choice(self.case, bias, logits), ids, weights)
            for bias, (logits, ids, weights) in zip(biases, layers, strict=True)
        ]
        if not chosen:
            return Judged(logits, *(np.zeros((len(tokens), 0, 1)),) * 3, np.zeros((len(tokens), 0)))
        scores, groups, ids, weights = (np.stack(parts, axis=1) for parts in zip(*chosen, strict=True))
        return Judged(logits, ids, weights, scores, groups)

    def router_biases(self, router):
        """Selection biases of the block that a router stands in, by the last part of their names."""
        block = next(module for module in self.model.modules() if router in module.children())
        tensors = [*block.named_parameters(), *block.named_buffers()]
        return {
            name.rpartition(".")[2]: bias.detach().numpy().reshape(-1)
            for name, bias in tensors
            if name.endswith(("correction_bias", "expert_bias"))
        }

    def generate(self, prompt, count):
        """No teacher: the oracle writes its own answer."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(np.argmax(self.judge(tokens).logits[-1])))
        return tokens[len(prompt) :]


def read_router(output):
    """Logits, ids and weights. Most routers give logits, weights and ids; Llama 4's gives scores, 0 but for the one
    expert, and logits."""
    if output[-1].dtype.is_floating_point:
        weights, ids = output[0].max(-1, keepdim=True)
        return output[-1].float().numpy(), ids.numpy(), weights.float().numpy()
    return output[0].float().numpy(), output[-1].numpy(), output[1].float().numpy()


def random_weight(rng, name, shape, case):
    """Numbers by what a tensor is for."""
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name and name.endswith("weight"):
        return noise * 0.1 + (0.0 if case.name in ("Qwen3Next", "Qwen3_5Moe") and "linear_attn" not in name else 1.0)
    if name.endswith("A_log"):
        return np.log(1 + 3 * rng.random(shape)).astype(np.float32)
    if name.endswith(("e_score_correction_bias", "moe_statics", "expert_bias")):
        return 0.1 * noise
    if name.endswith("sinks"):
        return noise
    if name.endswith(("layer_scalar", "expert_scale")):
        return noise * 0.1 + 1.0
    if name.endswith("router.scale"):
        return noise + 8.0
    if "router" in name or name.endswith(("gate.weight", "gate.wg.weight")):
        return 0.25 * noise
    if "embed" in name:
        return noise / case.config.get("embedding_multiplier", 1.0)
    return 0.12 * noise


def softmax(x):
    wide = np.exp(x - x.max(-1, keepdims=True))
    return wide / wide.sum(-1, keepdims=True)


def choice(case, biases, logits):
    """[S, E] scores that are chosen by, and [S] margins between groups."""
    scores = {"softmax": softmax, "sigmoid": lambda z: 1 / (1 + np.exp(-z)), "logits": lambda z: z}[case.scoring_func](
        logits.astype(np.float64)
    )
    for bias in biases.keys() & {"e_score_correction_bias", "expert_bias"}:
        scores = scores + biases[bias]
    groups, topk_group = case.config.get("n_group") or 1, case.config.get("topk_group") or 1
    if groups == topk_group or case.config.get("topk_method") == "greedy":
        return scores, np.full(len(scores), np.inf)
    parts = np.sort(scores.reshape(len(scores), groups, -1), axis=-1)
    ranks = parts[..., -1] if case.scoring_func == "softmax" else parts[..., -2:].sum(-1)
    order = np.sort(ranks, axis=-1)
    keeps = ranks >= order[:, -topk_group][:, None]
    masked = np.where(np.repeat(keeps, scores.shape[1] // groups, axis=1), scores, -np.inf)
    return masked, order[:, -topk_group] - order[:, -topk_group - 1]


QWEN_NEXT = dict(
    num_hidden_layers=8,
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    head_dim=16,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)


def as_bailing_moe_v2(folder):
    """Ling's equations are those of GLM-4-MoE with groups (grouped sigmoid routing, a norm on each head, rotary on half
    of it); names differ, and queries, keys and values are one tensor. Names from inclusionAI's published files."""
    tensors = load_file(folder / "model.safetensors")
    for layer in sorted({name.rpartition(".self_attn.")[0] for name in tensors if ".self_attn." in name}):
        parts = [tensors.pop(f"{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        tensors[f"{layer}.attention.query_key_value.weight"] = np.concatenate(parts)
    names = {
        "embed_tokens": "word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "gate.e_score_correction_bias": "gate.expert_bias",
    }
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {
        renamed.get(key, key): value for key, value in config.items() if key not in ("rope_parameters", "use_qk_norm")
    }
    config |= dict(
        architectures=["BailingMoeV2ForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"},
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        rope_scaling=None,
        use_qkv_bias=False,
        score_function="sigmoid",
        use_qk_norm=True,
        moe_router_enable_expert_bias=True,
    )
    (folder / "config.json").write_text(json.dumps(config))


CASES = {
    case.title or case.name: case
    for case in (
        Case(
            "Qwen3Moe",
            dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=16, head_dim=16, mlp_only_layers=[1]),
            layer_ids=(0, 2, 3),
        ),
        Case(
            "Qwen3VLMoe",
            dict(
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=16,
                head_dim=16,
                mlp_only_layers=[1],
                rope_parameters=dict(rope_type="default", rope_theta=5e5, mrope_section=[4, 2, 2]),
            ),
            layer_ids=(0, 2, 3),
            settings="Qwen3VLMoeTextConfig",
            model="Qwen3VLMoeForConditionalGeneration",
            vision=dict(
                depth=2,
                hidden_size=16,
                intermediate_size=24,
                num_heads=2,
                out_hidden_size=64,
                deepstack_visual_indexes=[0],
                num_position_embeddings=16,
            ),
        ),
        Case("Mixtral", dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=24)),
        Case(
            "Phimoe",
            dict(
                num_local_experts=8,
                num_experts_per_tok=2,
                attention_bias=True,
                lm_head_bias=True,
                router_jitter_noise=0.2,
                rope_parameters=dict(
                    rope_type="longrope",
                    rope_theta=1e4,
                    short_factor=[1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0],
                    long_factor=[8.0] * 8,
                    short_mscale=1.2,
                    long_mscale=1.3,
                    original_max_position_embeddings=160,
                ),
            ),
            scoring_func="logits",
        ),
        Case(
            "Qwen2Moe",
            dict(
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=40,
                mlp_only_layers=[1],
                tie_word_embeddings=True,
            ),
            layer_ids=(0, 2, 3),
        ),
        Case("Olmoe", dict(num_experts=16, num_experts_per_tok=4, intermediate_size=16, clip_qkv=2.0)),
        Case(
            "DeepseekV2",
            dict(
                n_routed_experts=16,
                num_experts_per_tok=3,
                moe_intermediate_size=16,
                n_shared_experts=2,
                first_k_dense_replace=1,
                kv_lora_rank=24,
                q_lora_rank=20,
                qk_rope_head_dim=8,
                qk_nope_head_dim=12,
                v_head_dim=10,
                num_key_value_heads=4,
                topk_method="group_limited_greedy",
                n_group=4,
                topk_group=2,
                routed_scaling_factor=1.7,
                rope_parameters=dict(
                    rope_type="yarn",
                    rope_theta=1e4,
                    factor=4.0,
                    original_max_position_embeddings=64,
                    beta_fast=32.0,
                    beta_slow=1.0,
                    mscale=0.707,
                    mscale_all_dim=0.707,
                ),
            ),
            layer_ids=(1, 2, 3),
        ),
        Case(
            "DeepseekV3",
            dict(
                n_routed_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=16,
                n_shared_experts=1,
                first_k_dense_replace=2,
                kv_lora_rank=24,
                q_lora_rank=None,
                qk_rope_head_dim=8,
                qk_nope_head_dim=12,
                v_head_dim=10,
                num_key_value_heads=4,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=2.5,
                num_mtp_layers=0,
                rope_parameters=dict(
                    rope_type="yarn",
                    rope_theta=1e4,
                    factor=4.0,
                    original_max_position_embeddings=64,
                    beta_fast=32.0,
                    beta_slow=1.0,
                    mscale=1.0,
                    mscale_all_dim=1.0,
                ),
            ),
            scoring_func="sigmoid",
            layer_ids=(2, 3),
        ),
        Case(
            "Glm4Moe",
            dict(
                n_routed_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=16,
                n_shared_experts=1,
                first_k_dense_replace=1,
                routed_scaling_factor=1.5,
                use_qk_norm=True,
                attention_bias=True,
                num_mtp_layers=0,
            ),
            scoring_func="sigmoid",
            layer_ids=(1, 2, 3),
        ),
        Case(
            "Glm4MoeLite",
            dict(
                n_routed_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=16,
                n_shared_experts=1,
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                kv_lora_rank=24,
                q_lora_rank=20,
                qk_rope_head_dim=8,
                qk_nope_head_dim=12,
                v_head_dim=10,
                num_key_value_heads=4,
                routed_scaling_factor=1.8,
            ),
            scoring_func="sigmoid",
            layer_ids=(1, 2, 3),
        ),
        Case(
            "Dots1",
            dict(
                n_routed_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=16,
                n_shared_experts=2,
                first_k_dense_replace=1,
                norm_topk_prob=True,
                routed_scaling_factor=2.5,
                attention_bias=True,
                sliding_window=24,
                max_window_layers=2,
            ),
            scoring_func="sigmoid",
            layer_ids=(1, 2, 3),
        ),
        Case(
            "ExaoneMoe",
            dict(
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=24,
                num_shared_experts=2,
                first_k_dense_replace=1,
                n_group=4,
                topk_group=2,
                routed_scaling_factor=1.7,
                head_dim=24,
                sliding_window=12,
            ),
            scoring_func="sigmoid",
            layer_ids=(1, 2, 3),
        ),
        Case(
            "GptOss",
            dict(
                num_local_experts=8,
                num_experts_per_tok=3,
                sliding_window=12,
                head_dim=16,
                rope_parameters=dict(
                    rope_type="yarn",
                    rope_theta=15e4,
                    factor=4.0,
                    original_max_position_embeddings=64,
                    beta_fast=32.0,
                    beta_slow=1.0,
                    truncate=False,
                ),
            ),
            scoring_func="logits",
        ),
        Case(
            "GraniteMoe",
            dict(
                num_local_experts=8,
                num_experts_per_tok=3,
                attention_multiplier=0.11,
                embedding_multiplier=3.0,
                residual_multiplier=0.7,
                logits_scaling=0.5,
            ),
            scoring_func="logits",
        ),
        Case(
            "Ernie4_5_Moe",
            dict(
                moe_num_experts=16,
                moe_k=4,
                moe_intermediate_size=16,
                moe_num_shared_experts=2,
                moe_layer_start_index=1,
                moe_layer_end_index=2,
                rms_norm_eps=1e-5,
            ),
            layer_ids=(1, 2),
        ),
        Case(
            "HunYuanMoEV1",
            dict(
                num_experts=16,
                moe_topk=4,
                intermediate_size=24,
                head_dim=24,
                rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0),
            ),
            router="HunYuanMoEV1Gate",
        ),
        Case(
            "MiniMaxM2",
            dict(num_local_experts=16, num_experts_per_tok=4, head_dim=24, rotary_dim=16),
            scoring_func="sigmoid",
        ),
        Case(
            "Llama4",
            dict(
                num_local_experts=8,
                num_experts_per_tok=1,
                intermediate_size=32,
                intermediate_size_mlp=48,
                head_dim=16,
                interleave_moe_layer_step=2,
                attention_chunk_size=20,
                floor_scale=16,
                attn_scale=0.3,
            ),
            scoring_func="sigmoid",
            router="Llama4Router",
            layer_ids=(1, 3),
            settings="Llama4TextConfig",
        ),
        Case(
            "Glm4Moe",
            dict(
                n_routed_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=16,
                n_shared_experts=1,
                first_k_dense_replace=1,
                routed_scaling_factor=2.5,
                use_qk_norm=True,
                n_group=4,
                topk_group=2,
                num_mtp_layers=0,
            ),
            scoring_func="sigmoid",
            layer_ids=(1, 2, 3),
            title="BailingMoeV2",
            rewrite=as_bailing_moe_v2,
        ),
        Case("Qwen3Next", QWEN_NEXT | dict(mlp_only_layers=[1]), layer_ids=(0, 2, 3, 4, 5, 6, 7)),
        Case(
            "Gemma4",
            dict(
                num_hidden_layers=6,
                head_dim=16,
                global_head_dim=32,
                num_key_value_heads=2,
                num_global_key_value_heads=1,
                attention_k_eq_v=True,
                hidden_size_per_layer_input=0,
                enable_moe_block=True,
                num_experts=16,
                top_k_experts=4,
                moe_intermediate_size=24,
                sliding_window=8,
                final_logit_softcapping=3.0,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            ),
            scoring_func="logits",  # its router puts out the softmax
            router="TextRouter",
            layer_ids=(0, 1, 2, 3, 4, 5),
            settings="Gemma4TextConfig",
        ),
        Case(
            "Lfm2Moe",
            dict(
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=24,
                num_dense_layers=1,
                num_hidden_layers=6,
                layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
                conv_L_cache=4,
                conv_bias=True,
                routed_scaling_factor=1.5,
            ),
            scoring_func="sigmoid",
            layer_ids=(1, 2, 3, 4, 5),
        ),
        Case(
            "BailingHybrid",
            dict(
                num_hidden_layers=4,
                num_local_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=24,
                n_group=4,
                topk_group=2,
                first_k_dense_replace=1,
                layer_group_size=2,
                num_key_value_heads=4,
                head_dim=6,
                kv_lora_rank=24,
                qk_rope_head_dim=8,
                qk_nope_head_dim=12,
                v_head_dim=10,
                num_mtp_layers=0,
                kda_safe_gate=True,
                short_conv_kernel_size=3,
            ),
            scoring_func="sigmoid",
            layer_ids=(1, 2, 3),
        ),
        Case("Qwen3_5Moe", QWEN_NEXT, layer_ids=tuple(range(8)), settings="Qwen3_5MoeTextConfig"),
        Case(
            "Llama",
            dict(
                rope_parameters=dict(
                    rope_type="llama3",
                    rope_theta=1e4,
                    factor=4.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=64,
                )
            ),
            layer_ids=(),
        ),
        Case("Mistral", dict(head_dim=16, sliding_window=20), layer_ids=()),
        Case("Qwen2", {}, layer_ids=()),
        Case("Qwen3", dict(head_dim=24, tie_word_embeddings=True), layer_ids=()),
    )
}
