"""Variations of families against transformers: some of those that tests/oracles/variations.py holds, which runs all of
them by itself."""

import pytest

from oracles.variations import VARIATIONS, compare, main

pytestmark = pytest.mark.usefixtures("fast_compilation")

CHOSEN = (  # each kind of thing that varies once; the start of a name
    "Qwen3Moe: yarn",
    "Qwen3Moe: num_attention_heads=5",
    "DeepseekV2: q_lora_rank=None, n_shared_experts=1, n_group=8",
    "DeepseekV3: q_lora_rank=20, rope_interleave=False",
    "Glm4Moe: default partial_rotary_factor=0.25",
    "Glm4MoeLite: hidden_size=68",
    "Dots1: n_shared_experts=0",
    "GptOss: default, layer_types",
    "Ernie4_5_Moe: moe_num_shared_experts=0",
    "Llama4: interleave_moe_layer_step=1",
    "Qwen3_5Moe: linear_num_key_heads=1",
    "Qwen3: use_sliding_window=True",
)
# The longest three; only scripts/thorough has these forms.
LONG = (
    "DeepseekV3: q_lora_rank=20, rope_interleave=False",
    "Glm4MoeLite: hidden_size=68",
    "Qwen3_5Moe: linear_num_key_heads=1",
)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # torch, of no shared experts
@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=pytest.mark.thorough) if start in LONG else start for start in CHOSEN]
)
def test_a_variation_is_what_transformers_makes_of_it(tmp_path, start):
    names = [name for name in VARIATIONS if name.startswith(start)]
    assert len(names) == 1, names
    verdict = compare(VARIATIONS[names[0]], tmp_path)
    print(f"{names[0]}: {verdict}")
    assert verdict.agrees, verdict
    assert verdict.near <= 0.05 * verdict.ids


def test_the_command_that_runs_them_all_prints_a_line_each(capsys):
    assert main(["Llama: linear"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Llama: linear, tie_word_embeddings=True: Verdict(") and lines[-1].startswith(
        "1 variations, 0 differ"
    )


def test_every_family_with_a_case_is_varied():
    assert len(VARIATIONS) >= 75
    assert {name.partition(":")[0] for name in VARIATIONS} >= {
        "Qwen3Moe",
        "DeepseekV2",
        "DeepseekV3",
        "GptOss",
        "Qwen3Next",
        "Llama4",
    }
