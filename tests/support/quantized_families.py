"""Small models of five families whose widths of 576, 320, 192 and 160 cut the last block short, as quantised folders
and their dequantised copies."""

import dataclasses
import re

import numpy as np

from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts import extract_routed_experts_from_meta_info
from support.quantized_checkpoints import PROJECTIONS, forms, mxfp4_folder, quantize_folder

EXPERTS = re.compile(r".*\.experts\.\d+\..*_proj\.weight")  # all that Kimi-K2 quantises
SMALL = dict(num_hidden_layers=2, hidden_size=192)
FAMILIES = {  # by name: the case, its sizes, the form
    "DeepSeek-V3": (
        "DeepseekV3",
        dict(
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            moe_intermediate_size=160,
            intermediate_size=320,
            first_k_dense_replace=1,
        ),
        "fp8 blocks",
    ),
    "Qwen3-MoE": ("Qwen3Moe", dict(moe_intermediate_size=320, intermediate_size=320, mlp_only_layers=[0]), "fp8 ue8m0"),
    "MiniMax-M2": ("MiniMaxM2", dict(hidden_size=160, intermediate_size=192), "fp8 blocks"),
    "GLM-4": ("Glm4Moe", dict(moe_intermediate_size=160), "float channel"),
    "Kimi-K2": (
        "DeepseekV3",
        dict(moe_intermediate_size=160, first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=32),
        "int4",
    ),
}
ORDER_OF_SUMS = 2e-5  # of logprobs
GPT_OSS = "GPT-OSS"  # with experts of MXFP4
PROMPTS = [np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist() for seed, length in ((0, 20), (1, 7))]
ENGINE = dict(
    skip_tokenizer_init=True,
    precompile_bs_paddings=(4,),
    precompile_token_paddings=(32,),
    page_size=8,
    max_total_tokens=256,
    context_length=64,
    enable_return_routed_experts=True,
)
ASK = dict(
    sampling_params={"temperature": 0.0, "max_tokens": 6, "ignore_eos": True},
    return_logprob=True,
    return_routed_experts=True,
)


def sized_case(name, sizes):
    case = CASES[name]
    layer_ids = (0, 1) if name in ("MiniMaxM2", "GptOss") else (1,)
    return dataclasses.replace(case, config=case.config | SMALL | sizes, layer_ids=layer_ids)


@dataclasses.dataclass
class Written:
    """Folders of one model: the quantised one and its copy."""

    oracle: Oracle
    quantized: object
    copy: object
    names: list


def write(folder, family, form=None, seed=None):
    if family == GPT_OSS:
        case = sized_case("GptOss", dict(intermediate_size=160))
        oracle = Oracle(case if seed is None else dataclasses.replace(case, seed=seed), folder / "plain")
        names = mxfp4_folder(folder / "plain", folder / "small", folder / "copy")
        return Written(oracle, folder / "small", folder / "copy", names)
    name, sizes, own = FAMILIES[family]
    case = sized_case(name, sizes)
    oracle = Oracle(case if seed is None else dataclasses.replace(case, seed=seed), folder / "plain")
    chosen = EXPERTS if family == "Kimi-K2" else PROJECTIONS
    names = quantize_folder(
        folder / "plain", folder / "small", folder / "copy", forms()[form or own], chosen=chosen.fullmatch
    )
    return Written(oracle, folder / "small", folder / "copy", names)


def answers(engine):
    """What an engine says to the prompts, to the bit."""
    results = [engine.generate(input_ids=prompt, **ASK) for prompt in PROMPTS]
    return [
        (
            result["output_ids"],
            result["meta_info"]["output_token_logprobs"],
            extract_routed_experts_from_meta_info(result).tobytes(),
        )
        for result in results
    ]


def assert_near(own, expected):
    """The same tokens and rows, and logprobs up to the order of sums."""
    for (tokens, logprobs, rows), (other_tokens, other_logprobs, other_rows) in zip(own, expected, strict=True):
        assert tokens == other_tokens and rows == other_rows
        pairs = zip(logprobs, other_logprobs, strict=True)
        assert max(abs(value - other) for (value, *_), (other, *_) in pairs) < ORDER_OF_SUMS
