"""Write docs/models.md from the table of families: python scripts/models_page.py. A test holds the page to it."""

import json
from pathlib import Path
from typing import Any

from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.absent_tpu import skip_absent_tpu
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.registry import FAMILIES, Family

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "results"
_GPU_RESULTS = ("families_gpu", "families_gpu_deepseek_h200", "families_gpu_glm_h200")  # a later one replaces a family
_PUBLISHED = {  # the models of benchmarks/family_configs.py
    "OLMoE-1B-7B": "OlmoeForCausalLM",
    "Mixtral-8x7B": "MixtralForCausalLM",
    "DeepSeek-V2-Lite": "DeepseekV2ForCausalLM",
    "GLM-4.5-Air": "Glm4MoeForCausalLM",
    "MiniMax-M2": "MiniMaxM2ForCausalLM",
    "GPT-OSS-20b": "GptOssForCausalLM",
    "Qwen3-Next-80B-A3B": "Qwen3NextForCausalLM",
}
_HEAD = """# Models

`scripts/models_page.py` writes this page from `models/registry.py`. Every family is compared with an independent
implementation, token by token and expert id by expert id, in the test that is named. Mostly that is transformers, on
random checkpoints in the true format.

In the routing laws, z are a router's logits and s its scores. b is a bias that changes the choice and no weight, and
v are the scores of the chosen experts.

| family | checkpoints | architecture | routing | captured | refused | quantised | test |
|---|---|---|---|---|---|---|---|
"""
_PATHS = """
On a CPU with the C++ kernels, bfloat16 and float16 are the dtype of weights, keys and values. The residual stream and
all numbers between two products are float32, in a fused run and in pieces alike; `Kernels.stream_dtype`
(`layers/kernels.py`) says what is rounded. `tests/models/test_half_precision.py` compares logprobs of tiny models with
float32 `transformers`, on the same weights and experts. With a rounded stream their mean error is 1.7 to 3.6 times as
large. On GPU and TPU, in array code and in training the stream has the dtype of the
weights, as it has with `experts=`.

## How layers run

The kernels say which features they have, and the layers say which they need (`models/decoder/fused_path.py`). In a
"fused run" neighbouring layers that follow one pattern and have equal sizes are one kernel. On CPU dense layers are
part of it, before MoE layers or between them (`decoder_sparse_step` 2). On a GPU each MoE layer is a few kernels, for
steps of up to 512 tokens; longer steps run layer by layer. Latent attention, states and gated heads run in pieces up to
their last projection; where the rest of the layer is the same few kernels, it is a "fused feed-forward". "pieces" are
the parts of a layer that have kernels of their own, where layers run one by one; `inspect` says "plain" where all is
array code, which XLA compiles. On a TPU the delta rule has a kernel for requests of one token and a kernel for prompts.
The latter needs heads of whole 128 numbers and one decay a head: prompts of Ling 3.0 run array code. The table is for
one device, for `auto` backends, and for models as they are published; `routed-experts inspect MODEL` says it for a
checkpoint.

| architecture | CPU | GPU | TPU |
|---|---|---|---|
"""
_FOOT = """
A record holds the K experts that each token ran, best first, as logical ids. Shared experts and layers without a
router have no column. A dense model is served; capturing it is refused.

Weights are bfloat16, float16 or float32, or quantised by `fp8` or `compressed-tensors`, GPT-OSS also by `mxfp4`, and
then served as codes or after one rounding: [quantised checkpoints](quantization.md). Other methods (AWQ, GPTQ,
bitsandbytes, NVFP4, ModelOpt) are refused by name before any memory is taken. The column "quantised" has the forms
that others publish. Tests read small checkpoints of all of these families in such forms; no published file was read
yet. An architecture that is not in the table is refused with the list of those that are.

`num_hidden_layers` is at most 1,024 and a head has at most 16,384 dims: larger numbers are refused before anything is
made for each layer.
Rotary positions may be plain, linear, yarn or llama3. Dynamic scaling works up to the trained length, longrope up to
the length of its short factors; PhiMoE has plain positions or longrope. Where a file has both `rope_scaling` and
`rope_parameters`, transformers reads the first alone, so a key that only the second has is refused. Factors of linear,
dynamic, yarn and llama3 positions below 1, another activation than the family's, and biases that it does not have are
refused by name, too. A missing key has transformers' default. `null` is read so:

| key | `null` means |
|---|---|
| `sliding_window`, `attention_chunk_size` | none, which may differ from the default |
| `num_shared_experts` of Bailing MoE v2 | none; the default is 1 |
| `norm_topk_prob` and `rope_interleave` of DeepSeek-V3, `truncate` of yarn | false, as in transformers |
| `norm_topk_prob` of Mixtral, GPT-OSS, Granite-MoE, Ernie 4.5 MoE, Hunyuan and MiniMax-M2 | the default |
| `use_qk_norm` and `use_mixed_mlp_moe` of Hunyuan, `attn_output_gate` of Qwen3-Next | the default |
| another switch that is on by default | refused, as in transformers |

Tensors have the names of published files, which transformers writes by default. Its own names
(`save_pretrained(..., save_original_format=False)`) are refused for Mixtral, PhiMoE, K-EXAONE, Granite-MoE,
Ernie 4.5 MoE, MiniMax-M2, LFM2-MoE and Ling 3.0.

Where layers keep a state of fixed size (Qwen3-Next, Qwen3.5, LFM2, Ling 3.0), the prefix cache is off:
`get_server_info()["prefix_cache"]` says so.
"""
_MEASURED = """
## Measured

CPU: two cores of an AMD EPYC, small models of one size, float32, all rows returned; throughput over transformers at
batch 8 and 32, and the multiple of a decode step's floor at batch 8. GPU: an H200, published shapes, bfloat16; the
multiple of the floor at batch 16, 64 and 256. What these are: [performance](performance.md), which also has Qwen3-MoE
on a GPU, and [performance on a CPU](performance_cpu.md); they say which rows are of earlier code. A family without a
row was not measured.

| architecture | CPU: decode | CPU: prefill | CPU: step / floor | GPU: step / floor |
|---|---|---|---|---|
"""
_LAST = """
To add one: [add a model family](add-a-family.md).
"""


# Keys of config.json that decide which features the layers have, and sizes; a reader takes those of its family.
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 32_768,
    "num_experts": 16,
    "n_routed_experts": 16,
    "moe_num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "use_qk_norm": True,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.2,
}
_PHIMOE = {"attention_bias": True, "lm_head_bias": True}
_LLAMA4 = {"num_experts_per_tok": 1}
_GEMMA4 = {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "top_k_experts": 2, "global_head_dim": 32}
_OWN = {
    "PhimoeForCausalLM": _PHIMOE,
    "PhiMoEForCausalLM": _PHIMOE,
    "DeepseekV3ForCausalLM": {"head_dim": None},
    "Glm4MoeLiteForCausalLM": {"head_dim": None},
    "DeepseekV2ForCausalLM": {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
    "Glm4MoeForCausalLM": {"attention_bias": True},
    "BailingHybridForCausalLM": {"q_lora_rank": None, "n_group": 4, "topk_group": 2},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": None},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 8},
    "BailingMoeV2ForCausalLM": {"partial_rotary_factor": 0.5},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": _SIZES | _GEMMA4},
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": {"text_config": _SIZES | _LLAMA4},
    "Qwen3_5MoeForConditionalGeneration": {"text_config": _SIZES},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": _SIZES},
}


def layer_paths(architecture: str) -> dict[str, str]:
    """How the layers of an architecture run, by platform."""
    keys = _SIZES | _OWN.get(architecture, {})
    return DEFAULT_BACKENDS.layer_paths(FAMILIES[architecture].read_config(ConfigReader(keys, architecture)))


def measured() -> str:
    """A row for each architecture that is in the results of benchmarks/families.py or families_gpu.py."""
    cpu = json.loads((RESULTS / "families_float32_cpu.json").read_text())["rows"]
    ratios = {
        (f"{row['family']}ForCausalLM", row["phase"], row["batch"]): f"{row['ratio']:.2f}"
        for row in cpu
        if row["peer"] == "transformers"
    }
    floors = {f"{row['family']}ForCausalLM": f"{row['step / floor']:.2f}" for row in cpu if _is_decode_of_8(row)}
    steps: dict[str, list[str]] = {}
    for name in _GPU_RESULTS:
        newer: dict[str, list[str]] = {}
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            if row["capture"] == "on, asked" and row["batch"] > 1:
                newer.setdefault(_PUBLISHED[row["family"]], []).append(f"{row['step/floor']:.2f}")
        steps |= newer

    def pair(architecture: str, phase: str) -> str:
        found = [ratios[key] for batch in (8, 32) if (key := (architecture, phase, batch)) in ratios]
        return ", ".join(found) or "-"

    return "".join(
        f"| `{name}` | {pair(name, 'decode')} | {pair(name, 'prefill')} | {floors.get(name, '-')} "
        f"| {', '.join(steps.get(name, ['-']))} |\n"
        for name in FAMILIES
        if name in floors or name in steps
    )


def _is_decode_of_8(row: dict[str, Any]) -> bool:
    return row["peer"] == "transformers" and row["phase"] == "decode" and row["batch"] == 8


def render() -> str:
    """The whole page."""
    rows = "".join(_row(architecture, family) for architecture, family in FAMILIES.items())
    paths = ((architecture, layer_paths(architecture)) for architecture in FAMILIES)
    layers = "".join(f"| `{name}` | {path['cpu']} | {path['gpu']} | {path['tpu']} |\n" for name, path in paths)
    return f"{_HEAD}{rows}{_FOOT}{_PATHS}{layers}{_MEASURED}{measured()}{_LAST}"


def _row(architecture: str, family: Family) -> str:
    captured = "K ids of each MoE layer" if family.routing else "nothing"
    cells = (
        family.title,
        family.checkpoints,
        f"`{architecture}`",
        family.routing or "dense",
        captured,
        family.refused or "-",
        family.quantized or "-",
        f"`{family.test}`",
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    skip_absent_tpu()
    PAGE.write_text(render(), encoding="utf-8")
