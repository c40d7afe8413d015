"""The registry: one entry for each architecture that can be served. docs/models.md is written from this table."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from routed_experts.models.base.config_reader import NOTHING, AcceptedQuirks, ConfigReader
from routed_experts.models.decoder.family_config import FamilyConfig
from routed_experts.models.families.bailing_hybrid import read_bailing_hybrid
from routed_experts.models.families.bailing_moe_v2 import read_bailing_moe_v2
from routed_experts.models.families.deepseek import read_deepseek_v2, read_deepseek_v3
from routed_experts.models.families.dense import read_llama, read_mistral, read_qwen2, read_qwen3
from routed_experts.models.families.dots1 import read_dots1
from routed_experts.models.families.ernie4_5_moe import read_ernie4_5_moe
from routed_experts.models.families.exaone_moe import read_exaone_moe
from routed_experts.models.families.gemma4 import read_gemma4, read_gemma4_text
from routed_experts.models.families.glm4_moe import read_glm4_moe
from routed_experts.models.families.glm4_moe_lite import read_glm4_moe_lite
from routed_experts.models.families.gpt_oss import gpt_oss_tensors, read_gpt_oss
from routed_experts.models.families.granite_moe import read_granite_moe
from routed_experts.models.families.hunyuan_v1_moe import read_hunyuan_v1_moe
from routed_experts.models.families.lfm2_moe import read_lfm2_moe
from routed_experts.models.families.llama4 import read_llama4, read_llama4_text
from routed_experts.models.families.minimax_m2 import read_minimax_m2
from routed_experts.models.families.mixtral import read_mixtral, read_phimoe
from routed_experts.models.families.olmoe import read_olmoe
from routed_experts.models.families.qwen2_moe import read_qwen2_moe
from routed_experts.models.families.qwen3_moe import read_qwen3_moe
from routed_experts.models.families.qwen3_next import read_qwen3_5_moe, read_qwen3_5_moe_text, read_qwen3_next
from routed_experts.models.families.qwen3_vl_moe import qwen3_vl_moe_tensors, read_qwen3_vl_moe
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.virtual_tensors import VirtualTensor, no_virtual_tensors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: how to read its config, and which tensors are computed from its files'; and notes for the
    docs."""

    read_config: Callable[[ConfigReader], FamilyConfig]
    virtual_tensors: Callable[[Checkpoint], Mapping[str, VirtualTensor]] = no_virtual_tensors
    accepted_quirks: AcceptedQuirks = NOTHING
    title: str
    checkpoints: str
    routing: str
    refused: str = ""
    quantized: str = ""  # forms that others publish and that are read
    test: str  # the test that compares it with its oracle


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": Family(
            read_config=read_qwen3_moe,
            title="Qwen3-MoE",
            checkpoints="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
            routing="top-k of softmax(z); renormalised if `norm_topk_prob`",
            refused="sliding windows, attention biases, partial rotary positions",
            quantized="fp8 blocks",
            test="test_qwen3_moe_parity.py",
        ),
        "Qwen3VLMoeForConditionalGeneration": Family(
            read_config=read_qwen3_vl_moe,
            virtual_tensors=qwen3_vl_moe_tensors,
            title="Qwen3-VL-MoE, text",
            checkpoints="Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B, without their vision",
            routing="as Qwen3MoeForCausalLM, always renormalised",
            refused="images; attention biases",
            quantized="fp8 blocks",
            test="test_families.py[Qwen3VLMoe]",
        ),
        "MixtralForCausalLM": Family(
            read_config=read_mixtral,
            title="Mixtral",
            checkpoints="Mixtral-8x7B, Mixtral-8x22B",
            routing="top-k of softmax(z); softmax over the chosen z",
            test="test_families.py[Mixtral]",
        ),
        "PhimoeForCausalLM": Family(
            read_config=read_phimoe,
            title="PhiMoE",
            checkpoints="as transformers writes them",
            routing="sparsemixer: best z, then best of the rest; each a softmax over the z within "
            "2 `router_jitter_noise` of it",
            refused="longrope past `original_max_position_embeddings`, other scaled positions",
            test="test_families.py[Phimoe]",
        ),
        "PhiMoEForCausalLM": Family(
            read_config=read_phimoe,
            accepted_quirks=AcceptedQuirks(code=True),
            title="PhiMoE",
            checkpoints="Phi-3.5-MoE-instruct",
            routing="as PhimoeForCausalLM",
            refused="longrope past `original_max_position_embeddings`, other scaled positions",
            test="test_families.py[Phimoe]",
        ),
        "Qwen2MoeForCausalLM": Family(
            read_config=read_qwen2_moe,
            title="Qwen2-MoE",
            checkpoints="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
            routing="top-k of softmax(z), not renormalised; shared expert times sigmoid(x w)",
            refused="sliding windows",
            test="test_families.py[Qwen2Moe]",
        ),
        "OlmoeForCausalLM": Family(
            read_config=read_olmoe,
            title="OLMoE",
            checkpoints="OLMoE-1B-7B",
            routing="top-k of softmax(z), not renormalised",
            refused="attention biases",
            test="test_families.py[Olmoe]",
        ),
        "DeepseekV2ForCausalLM": Family(
            read_config=read_deepseek_v2,
            accepted_quirks=AcceptedQuirks(code=True),
            title="DeepSeek-V2",
            checkpoints="DeepSeek-V2, V2-Lite, Coder-V2",
            routing="groups ranked by their best softmax(z), top-k among those kept; v * `routed_scaling_factor`; "
            "shared experts",
            refused="`norm_topk_prob`",
            test="test_families.py[DeepseekV2]",
        ),
        "DeepseekV3ForCausalLM": Family(
            read_config=read_deepseek_v3,
            accepted_quirks=AcceptedQuirks(code=True),
            title="DeepSeek-V3",
            checkpoints="DeepSeek-V3, R1, Kimi-K2, Moonlight",
            routing="s = sigmoid(z); groups ranked by their two best s + b, top-k of s + b among those kept; "
            "v / sum v * "
            "`routed_scaling_factor`; shared experts",
            refused="layers that predict further tokens only draft (NEXTN)",
            quantized="fp8 blocks; int4 groups (Kimi-K2-Thinking)",
            test="test_families.py[DeepseekV3]",
        ),
        "Glm4MoeForCausalLM": Family(
            read_config=read_glm4_moe,
            title="GLM-4-MoE",
            checkpoints="GLM-4.5, GLM-4.5-Air, GLM-4.6",
            routing="as DeepseekV3ForCausalLM, one group",
            refused="layers that predict further tokens only draft (NEXTN)",
            quantized="fp8 by channel",
            test="test_families.py[Glm4Moe]",
        ),
        "Glm4MoeLiteForCausalLM": Family(
            read_config=read_glm4_moe_lite,
            title="GLM-4-MoE-Lite",
            checkpoints="GLM-4.7-Flash",
            routing="as DeepseekV3ForCausalLM, one group",
            refused="attention biases; layers that predict further tokens only draft (NEXTN)",
            test="test_families.py[Glm4MoeLite]",
        ),
        "Dots1ForCausalLM": Family(
            read_config=read_dots1,
            title="dots.llm1",
            checkpoints="dots.llm1.base, dots.llm1.inst",
            routing="as DeepseekV3ForCausalLM, one group; renormalised if `norm_topk_prob`",
            refused="a `moe_layer_freq` other than 1",
            test="test_families.py[Dots1]",
        ),
        "ExaoneMoeForCausalLM": Family(
            read_config=read_exaone_moe,
            title="K-EXAONE",
            checkpoints="as transformers writes it",
            routing="as DeepseekV3ForCausalLM",
            refused="models without windows; layers that predict further tokens are not run",
            test="test_families.py[ExaoneMoe]",
        ),
        "ExaoneMoEForCausalLM": Family(
            read_config=read_exaone_moe,
            title="K-EXAONE",
            checkpoints="K-EXAONE-236B-A23B",
            routing="as DeepseekV3ForCausalLM",
            refused="models without windows; layers that predict further tokens are not run",
            test="test_families.py[ExaoneMoe]",
        ),
        "BailingMoeV2ForCausalLM": Family(
            read_config=read_bailing_moe_v2,
            accepted_quirks=AcceptedQuirks(code=True),
            title="Bailing MoE v2",
            checkpoints="Ling-mini-2.0, Ling-flash-2.0, Ling-1T",
            routing="as DeepseekV3ForCausalLM",
            refused="its own Python code is never run; layers that predict further tokens only draft (NEXTN)",
            quantized="fp8 blocks",
            test="test_families.py[BailingMoeV2]",
        ),
        "BailingHybridForCausalLM": Family(
            read_config=read_bailing_hybrid,
            accepted_quirks=AcceptedQuirks(code=True),
            title="Bailing hybrid",
            checkpoints="Ling 3.0, as transformers writes it",
            routing="as DeepseekV3ForCausalLM",
            refused="prefix caching (off by itself); compressed queries; layers that predict further "
            "tokens are not run",
            test="test_families.py[BailingHybrid]",
        ),
        "GptOssForCausalLM": Family(
            read_config=read_gpt_oss,
            virtual_tensors=gpt_oss_tensors,
            accepted_quirks=AcceptedQuirks(quantization=("mxfp4",)),
            title="GPT-OSS",
            checkpoints="gpt-oss-20b, gpt-oss-120b, MXFP4 or bfloat16",
            routing="z with a bias; top-k of z; softmax over the chosen z",
            refused="another clamp or slope of the activation than 7 and 1.702",
            quantized="mxfp4",
            test="test_families.py[GptOss]",
        ),
        "GraniteMoeForCausalLM": Family(
            read_config=read_granite_moe,
            title="Granite-MoE",
            checkpoints="Granite-3.x-1B-A400M, 3B-A800M",
            routing="top-k of z; softmax over the chosen z",
            test="test_families.py[GraniteMoe]",
        ),
        "Ernie4_5_MoeForCausalLM": Family(
            read_config=read_ernie4_5_moe,
            accepted_quirks=AcceptedQuirks(code=True),
            title="Ernie 4.5 MoE",
            checkpoints="ERNIE-4.5-21B-A3B, 300B-A47B (text)",
            routing="s = softmax(z); top-k of s + b; v / sum v; shared experts",
            refused="biases of projections; layers that predict further tokens only draft (NEXTN)",
            test="test_families.py[Ernie4_5_Moe]",
        ),
        "HunYuanMoEV1ForCausalLM": Family(
            read_config=read_hunyuan_v1_moe,
            accepted_quirks=AcceptedQuirks(code=True),
            title="HunYuan V1 MoE",
            checkpoints="Hunyuan-A13B",
            routing="top-k of softmax(z), renormalised; shared expert",
            refused="layers that differ in experts or widths; more than one shared expert",
            test="test_families.py[HunYuanMoEV1]",
        ),
        "MiniMaxM2ForCausalLM": Family(
            read_config=read_minimax_m2,
            accepted_quirks=AcceptedQuirks(code=True),
            title="MiniMax-M2",
            checkpoints="MiniMax-M2",
            routing="s = sigmoid(z); top-k of s + b; v / sum v",
            refused="layers that predict further tokens are not run",
            quantized="fp8 blocks",
            test="test_families.py[MiniMaxM2]",
        ),
        "Qwen3NextForCausalLM": Family(
            read_config=read_qwen3_next,
            title="Qwen3-Next",
            checkpoints="Qwen3-Next-80B-A3B",
            routing="top-k of softmax(z), renormalised if `norm_topk_prob`; shared expert times sigmoid(x w)",
            refused="prefix caching (off by itself); layers that predict further tokens only draft (NEXTN)",
            quantized="fp8 blocks",
            test="test_families.py[Qwen3Next]",
        ),
        "Qwen3_5MoeForCausalLM": Family(
            read_config=read_qwen3_5_moe_text,
            title="Qwen3.5-MoE",
            checkpoints="text models as transformers writes them",
            routing="as Qwen3NextForCausalLM, always renormalised",
            refused="prefix caching (off by itself)",
            quantized="fp8 blocks",
            test="test_families.py[Qwen3_5Moe]",
        ),
        "Qwen3_5MoeForConditionalGeneration": Family(
            read_config=read_qwen3_5_moe,
            title="Qwen3.5-MoE",
            checkpoints="Qwen3.5-35B-A3B and larger, without their vision",
            routing="as Qwen3NextForCausalLM, always renormalised",
            refused="images; prefix caching (off by itself); layers that predict further tokens only draft (NEXTN)",
            quantized="fp8 blocks",
            test="test_family_folders.py",
        ),
        "Lfm2MoeForCausalLM": Family(
            read_config=read_lfm2_moe,
            title="LFM2-MoE",
            checkpoints="LFM2-8B-A1B",
            routing="s = sigmoid(z); top-k of s + b; v / (sum v + 1e-6) * `routed_scaling_factor`",
            refused="prefix caching (off by itself)",
            test="test_families.py[Lfm2Moe]",
        ),
        "Gemma4ForCausalLM": Family(
            read_config=read_gemma4_text,
            title="Gemma 4 MoE, text",
            checkpoints="text models as transformers writes them",
            routing="top-k of softmax(z), renormalised, times a number of the expert; z from the stream, normed apart",
            refused="models without experts; embeddings for each layer; keys and values shared between layers; "
            "experts on the host",
            test="test_families.py[Gemma4]",
        ),
        "Gemma4ForConditionalGeneration": Family(
            read_config=read_gemma4,
            title="Gemma 4 MoE, text",
            checkpoints="gemma-4-26B-A4B, without its vision",
            routing="as Gemma4ForCausalLM",
            refused="images; else as Gemma4ForCausalLM",
            test="test_family_folders.py",
        ),
        "Llama4ForCausalLM": Family(
            read_config=read_llama4_text,
            title="Llama 4, text",
            checkpoints="Llama 4 text models",
            routing="top-1 of sigmoid(z), which multiplies the expert's input; shared expert",
            refused="more than one expert a token",
            quantized="fp8 by channel",
            test="test_families.py[Llama4]",
        ),
        "Llama4ForConditionalGeneration": Family(
            read_config=read_llama4,
            title="Llama 4, text",
            checkpoints="Llama-4-Scout, Llama-4-Maverick, without their vision",
            routing="as Llama4ForCausalLM",
            refused="images",
            quantized="fp8 by channel",
            test="test_family_folders.py",
        ),
        **{
            name: Family(
                read_config=read,
                title=title,
                checkpoints=stands_for,
                routing="",
                refused="capture",
                test=f"test_families.py[{case}]",
            )
            for name, read, title, stands_for, case in (
                ("LlamaForCausalLM", read_llama, "Llama", "Llama-2, Llama-3", "Llama"),
                ("MistralForCausalLM", read_mistral, "Mistral", "Mistral-7B", "Mistral"),
                ("Qwen2ForCausalLM", read_qwen2, "Qwen2", "Qwen2, Qwen2.5", "Qwen2"),
                ("Qwen3ForCausalLM", read_qwen3, "Qwen3", "Qwen3 dense", "Qwen3"),
            )
        },
    }
)
