"""A config.json that was edited by hand, or that transformers wrote of unusual settings, means what transformers makes
of it when it reads the folder again: logprobs and experts, and the tokens that each layer sees."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from oracles.families import CASES, SIZES, Oracle
from routed_experts.core.errors import CheckpointError
from routed_experts.layers.routing import replay_topk
from routed_experts.models.base.config_reader import ConfigReader, read_eos_token_ids
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.registry import FAMILIES
from routed_experts.replay.forward import forward

pytestmark = pytest.mark.usefixtures("fast_compilation")

LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=4.0, mscale_all_dim=1.0)
LONG = dict(rope_type="longrope", rope_theta=1e4, factor=4.0, original_max_position_embeddings=160)
LONG |= dict(short_factor=[1.1] * 8, long_factor=[2.0] * 8, short_mscale=1.3)
LLAMA3 = LINEAR | dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
EDITED = {  # family: settings of transformers, keys of the file that are set, and those that are left out
    "DeepseekV2: linear positions scale scores": ("DeepseekV2", dict(rope_parameters=LINEAR), {}, ()),
    "DeepseekV3: llama3 positions scale scores": ("DeepseekV3", dict(rope_parameters=LLAMA3), {}, ()),
    "Glm4MoeLite: dynamic positions scale scores": (
        "Glm4MoeLite",
        dict(rope_parameters=LINEAR | dict(rope_type="dynamic")),
        {},
        (),
    ),
    "BailingHybrid: the inner base counts": (
        "BailingHybrid",
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
        {},
        (),
    ),
    "BailingHybrid: the base of rope_scaling counts": (
        "BailingHybrid",
        {},
        dict(rope_scaling=dict(rope_type="linear", factor=2.0, rope_theta=5e4), rope_theta=6e6),
        ("rope_parameters",),
    ),
    "Qwen3Moe: a magnitude of PhiMoE": ("Qwen3Moe", dict(rope_parameters=LONG), {}, ()),
    "Qwen3Moe: both sections alike": (
        "Qwen3Moe",
        {},
        dict(
            rope_scaling=dict(type="linear", factor=4.0),
            rope_parameters=dict(rope_type="linear", rope_theta=5e5),
            rope_theta=5e5,
        ),
        (),
    ),
    "DeepseekV3: weights that null leaves as they are": ("DeepseekV3", {}, dict(norm_topk_prob=None), ()),
    "DeepseekV3: halves that null rotates": ("DeepseekV3", {}, dict(rope_interleave=None), ()),
    "Qwen3Moe: another name of silu": ("Qwen3Moe", {}, dict(hidden_act="swish"), ()),
    "GptOss: an empty section": ("GptOss", {}, dict(rope_scaling={}), ("rope_parameters",)),
    "BailingHybrid: a part of a head in the section": (
        "BailingHybrid",
        {},
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
        (),
    ),
    "Gemma4: layers whose numbers are padded with zeros": (
        "Gemma4",
        dict(num_hidden_layers=12, layer_types=None),
        {},
        (),
    ),
    "Gemma4: a base without sections": ("Gemma4", {}, dict(rope_theta=100.0), ("rope_parameters",)),
    "Glm4Moe: null rotates whole heads": (
        "Glm4Moe",
        {},
        dict(partial_rotary_factor=None, rope_theta=1e4),
        ("rope_parameters",),
    ),
    "MiniMaxM2: null rotates whole heads": (
        "MiniMaxM2",
        {},
        dict(partial_rotary_factor=None, rotary_dim=16, rope_theta=1e4),
        ("rope_parameters",),
    ),
    "Llama4: proportional positions in pairs": (
        "Llama4",
        {},
        dict(rope_parameters=dict(rope_type="proportional", rope_theta=1e4)),
        (),
    ),
    "Ernie4_5_Moe: another name of its top-k": ("Ernie4_5_Moe", {}, dict(num_experts_per_tok=2), ("moe_k",)),
    "HunYuanMoEV1: another name of its top-k": ("HunYuanMoEV1", {}, dict(num_experts_per_tok=2), ("moe_topk",)),
    "Llama4: no chunks": ("Llama4", dict(attention_chunk_size=None), {}, ()),
}
TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 48)


def write(name, settings, keys, absent, folder):
    """A folder whose config.json is edited, and what transformers makes of it."""
    case = dataclasses.replace(CASES[name], config=CASES[name].config | settings)
    if "num_hidden_layers" in settings:  # of a family whose layers all have experts
        case = dataclasses.replace(case, layer_ids=tuple(range(settings["num_hidden_layers"])))
    oracle = Oracle(case, folder)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values = {key: value for key, value in values.items() if key not in absent} | keys
    file.write_text(json.dumps(values))
    oracle.read_again()
    return oracle


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_file_means_what_transformers_makes_of_it(tmp_path, name):
    oracle = write(*EDITED[name], tmp_path)
    judged = oracle.judge(TOKENS)
    model = ModelFolder.open(tmp_path).load(jnp.dtype(jnp.float32))
    scored = forward(model, jnp.asarray(TOKENS, jnp.int32)[None], return_routed=True)
    logprobs = np.asarray(jax.nn.log_softmax(scored.logits[0].astype(jnp.float32)))
    assert np.abs(logprobs - judged.logprobs).max() < 1e-4
    assert (np.sort(scored.ids[0], -1) == np.sort(judged.ids, -1)).mean() > 0.99


def parse(name, values):
    """Our config of a file."""
    case = CASES[name]
    return FAMILIES[case.model or f"{name}ForCausalLM"].read_config(ConfigReader(values, "config.json"))


LENGTH = 65_536  # longer than every default
SLIDING = dict(max_position_embeddings=LENGTH, max_window_layers=1, use_sliding_window=True)


@pytest.mark.parametrize("name", ["Dots1", "Qwen2", "Qwen3", "Mixtral", "Phimoe"])
@pytest.mark.parametrize("window", ["absent", None, 128])
def test_windows_are_those_of_transformers(name, window):
    case = CASES[name]
    kind = getattr(transformers, f"{name}Config")
    values = json.loads(kind(**{**SIZES, **case.config, **SLIDING}).to_json_string())
    values = {key: value for key, value in values.items() if key not in ("sliding_window", "layer_types")}
    if window != "absent":
        values["sliding_window"] = window
    theirs = kind.from_dict(dict(values))
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    expected = [theirs.sliding_window or 0 if own == "sliding_attention" else 0 for own in kinds]
    assert [layer.mixer.window for layer in parse(name, values).layers] == expected


DYNAMIC = LINEAR | dict(rope_type="dynamic")
FULL = dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25)
LIMITS = {  # family, settings of transformers, and tokens of a sequence up to which a forward is that of transformers
    "no window": ("Mixtral", dict(sliding_window=None), None),
    "a window within the context": ("Mixtral", dict(sliding_window=64), None),
    "a window as wide as the context": ("Mixtral", dict(sliding_window=256), 256),
    "a window wider than the context": ("Mixtral", dict(sliding_window=300), 300),
    "windows of some layers": ("Qwen3", SLIDING | dict(max_position_embeddings=256, sliding_window=256), 256),
    "windows that are off": ("Qwen3", dict(use_sliding_window=False, sliding_window=300), None),
    "chunks": ("Llama4", dict(attention_chunk_size=512), 512),
    "linear positions": ("Mixtral", dict(rope_parameters=LINEAR, sliding_window=None), None),
    "dynamic positions": ("Mixtral", dict(rope_parameters=DYNAMIC, sliding_window=None), 256),
    "dynamic positions and a window": ("Mixtral", dict(rope_parameters=DYNAMIC, sliding_window=300), 256),
    "longrope": ("Qwen3Moe", dict(rope_parameters=LONG), 160),
    "dynamic positions of some layers": (
        "Gemma4",
        dict(rope_parameters=dict(sliding_attention=DYNAMIC, full_attention=FULL)),
        256,
    ),
    "longrope and a window": ("Phimoe", dict(rope_parameters=LONG | dict(long_mscale=1.2), sliding_window=256), 160),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_config_names_the_length_up_to_which_a_forward_is_that_of_transformers(case):
    name, settings, limit = LIMITS[case]
    kind = getattr(transformers, CASES[name].settings or f"{name}Config")
    values = json.loads(kind(**{**SIZES, **CASES[name].config, **settings}).to_json_string())
    config = parse(name, values)
    assert config.position_limit == limit
    reaches = {max(layer.mixer.window, layer.mixer.chunk) for layer in config.layers}
    assert all(reach < config.context_length for reach in reaches)


REFUSED = {  # what transformers reads in a way that no family here does, and words of the error
    "attention to later tokens": ("Qwen3Moe", dict(is_causal=False), ["is_causal=False", "true"]),
    "logits that are all 0": ("Gemma4", dict(final_logit_softcapping=0.0), ["final_logit_softcapping=0.0", "positive"]),
    "proportional positions that scale scores": (
        "Glm4MoeLite",
        dict(rope_parameters=dict(rope_type="proportional", rope_theta=1e4, mscale_all_dim=1.0)),
        ["mscale_all_dim=1.0", "proportional"],
    ),
    "two top-k of Ernie": ("Ernie4_5_Moe", dict(num_experts_per_tok=2), ["moe_k", "num_experts_per_tok", "differ"]),
    "two top-k of HunYuan": ("HunYuanMoEV1", dict(num_experts_per_tok=2), ["moe_topk", "num_experts_per_tok"]),
    "rotary dims of GLM-4.7-Flash": ("Glm4MoeLite", dict(head_dim=2), ["head_dim=2", "qk_rope_head_dim=8"]),
    "linear positions of PhiMoE": (
        "Phimoe",
        dict(rope_parameters=LINEAR | dict(short_mscale=1.2)),
        ["rope_type='linear'", "longrope"],
    ),
    "a share of plain heads": (
        "Gemma4",
        dict(
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=1e4),
                "full_attention": dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
            }
        ),
        ["partial_rotary_factor=0.5", "1.0"],
    ),
    "positions of some layers that hold for less": (
        "Gemma4",
        dict(rope_parameters=dict(sliding_attention=LONG, full_attention=FULL)),
        ["rope_parameters", "up to the trained length"],
    ),
    "a base in one of two sections": (
        "Qwen3Moe",
        dict(rope_scaling=dict(type="linear", factor=4.0), rope_parameters=dict(rope_theta=7e5)),
        ["rope_theta=700000.0", "rope_scaling"],
    ),
    "a clip of nothing": ("Olmoe", dict(clip_qkv=0.0), ["clip_qkv=0.0", "positive"]),
    "null for renormalised weights": ("Glm4Moe", dict(norm_topk_prob=None), ["norm_topk_prob=None", "true or false"]),
    "null for neighbours that rotate": ("Glm4MoeLite", dict(rope_interleave=None), ["rope_interleave=None", "true or"]),
    "null for biases": ("Qwen2Moe", dict(qkv_bias=None), ["qkv_bias=None", "true or false"]),
    "null for norms of heads": ("Llama4", dict(use_qk_norm=None), ["use_qk_norm=None", "true or false"]),
    "null for tuned queries": ("Llama4", dict(attn_temperature_tuning=None), ["temperature_tuning=None", "true or"]),
    "null for biases of the choice": ("Lfm2Moe", dict(use_expert_bias=None), ["use_expert_bias=None", "true or false"]),
    "null for tied embeddings": ("Ernie4_5_Moe", dict(tie_word_embeddings=None), ["tie_word_embeddings=None", "true"]),
    "null for an older key of weights": (
        "BailingHybrid",
        dict(moe_renormalize=None),
        ["moe_renormalize=None", "true or false"],
    ),
    "rotary dims of DeepSeek-V3": ("DeepseekV3", dict(head_dim=2), ["head_dim=2", "qk_rope_head_dim=8"]),
    "windows without a size": (
        "Dots1",
        dict(sliding_window=None, layer_types=["sliding_attention"] * SIZES["num_hidden_layers"]),
        ["layer_types", "sliding_window"],
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_no_family_reads_is_refused_by_name(fault):
    name, keys, words = REFUSED[fault]
    case = CASES[name]
    kind = getattr(transformers, case.settings or f"{name}Config")
    values = json.loads(kind(**{**SIZES, **case.config}).to_json_string()) | keys
    with pytest.raises(CheckpointError) as caught:
        parse(name, values)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_outer_flag_of_tied_embeddings_counts():
    inner = json.loads(transformers.Qwen3_5MoeTextConfig(**{**SIZES, **CASES["Qwen3_5Moe"].config}).to_json_string())
    family = FAMILIES["Qwen3_5MoeForConditionalGeneration"]
    for outer, tied in (({}, False), ({"tie_word_embeddings": True}, True)):
        values = {"text_config": inner | {"tie_word_embeddings": not tied}} | outer
        assert family.read_config(ConfigReader(values, "config.json")).tie_embeddings is tied


def test_positions_of_gemma4_may_have_the_old_spelling():
    values = json.loads(transformers.Gemma4TextConfig(**{**SIZES, **CASES["Gemma4"].config}).to_json_string())
    full = dict(rope_theta=1e5, partial_rotary_factor=0.25)
    sliding = dict(rope_type="default", rope_theta=1e4)
    new, old = (
        parse("Gemma4", values | dict(rope_parameters=dict(sliding_attention=sliding, full_attention=full | kind)))
        for kind in (dict(rope_type="proportional"), dict(type="proportional"))
    )
    assert new == old


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        *((name, False) for name in ("Mixtral", "Phimoe", "ExaoneMoe", "GraniteMoe", "Ernie4_5_Moe", "MiniMaxM2")),
        *((name, False) for name in ("Lfm2Moe", "BailingHybrid")),
        *((name, True) for name in ("Qwen3Moe", "DeepseekV3")),
    ],
)
def test_tensor_names_of_transformers_itself_are_read_or_refused_as_the_page_says(tmp_path, name, is_read):
    oracle = Oracle(CASES[name], tmp_path / "published")
    oracle.model.save_pretrained(tmp_path / "own", save_original_format=False)

    def load():
        return ModelFolder.open(tmp_path / "own").load(jnp.dtype(jnp.float32))

    if is_read:
        load()
    else:
        with pytest.raises(CheckpointError, match="missing"):
            load()


def test_ids_that_end_a_sequence_may_stand_in_the_text_section(tmp_path):
    def ids(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_eos_token_ids(tmp_path)

    inner = {"text_config": {"eos_token_id": [5, 7]}}
    assert ids(inner) == {5, 7} and ids(inner | {"eos_token_id": None}) == {5, 7}
    assert ids(inner | {"eos_token_id": 3}) == {3} and ids({}) == frozenset()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert ids(inner) == {5, 7, 9}


def test_ling_says_in_either_way_which_part_of_a_head_is_rotated(tmp_path):
    """The files of Ling-1T name dims; defaults are those of the published configuration class."""
    Oracle(CASES["BailingMoeV2"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    half, head_dim = parse("BailingMoeV2", values), values["hidden_size"] // values["num_attention_heads"]
    named = {key: value for key, value in values.items() if key != "partial_rotary_factor"} | {
        "rotary_dim": head_dim // 2
    }
    assert parse("BailingMoeV2", named) == half == parse("BailingMoeV2", values | {"rotary_dim": head_dim // 2})
    with pytest.raises(CheckpointError, match=f"rotary_dim={head_dim}.*partial_rotary_factor"):
        parse("BailingMoeV2", values | {"rotary_dim": head_dim})
    rest = {key: value for key, value in values.items() if key not in ("rope_theta", "routed_scaling_factor")}
    assert parse("BailingMoeV2", rest) == parse(
        "BailingMoeV2", values | {"rope_theta": 6e5, "routed_scaling_factor": 1.0}
    )


def test_ling_leaves_the_score_of_a_single_expert_and_may_have_no_shared_expert(tmp_path):
    """As the Python code of its checkpoints does (BailingMoeV2Gate, BailingMoeV2SparseMoeBlock)."""
    Oracle(CASES["BailingMoeV2"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    routers = {
        top_k: parse("BailingMoeV2", values | {"num_experts_per_tok": top_k}).layers[-1].feed.router for top_k in (1, 2)
    }
    scores = np.array([[0.9, 0.2, 0.4, 0.1, 0.3, 0.6, 0.5, 0.8] * (routers[1].num_experts // 8)])
    logits, bias = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32), jnp.zeros(scores.shape[1])
    for top_k, router in routers.items():
        routing = replay_topk(logits, None, spec=router, bias=bias)
        chosen = scores[0, np.asarray(routing.ids[0])]
        expected = (chosen / chosen.sum() if top_k > 1 else chosen) * router.scale
        np.testing.assert_allclose(routing.weights[0], expected, rtol=1e-5)
    for number in (None, 0):
        assert parse("BailingMoeV2", values | {"num_shared_experts": number}).layers[-1].feed.shared_width == 0


@pytest.mark.parametrize("key", ["-1", "x", "2", "01"])
def test_layers_of_gemma_4_that_do_not_exist_are_refused(key):
    values = json.loads(transformers.Gemma4TextConfig(**{**SIZES, **CASES["Gemma4"].config}).to_json_string())
    layers = {str(index): {"head_dim": 16, "num_key_value_heads": 2} for index in range(2)}
    values |= dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(CheckpointError, match=r"per_layer_config.*from 0 to 1"):
        parse("Gemma4", values | dict(per_layer_config=layers | {key: {}}))
