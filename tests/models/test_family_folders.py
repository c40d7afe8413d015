"""Folders of every family: what is refused and the error's words, layouts that hold the same numbers, and the layers of
a config."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from oracles.driver import Bench, assert_all_faithful, request
from oracles.families import CASES, VOCAB_SIZE, Oracle
from routed_experts import Engine
from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.core.model_worker_batch import ForwardMode
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.backends import DEFAULT_BACKENDS
from routed_experts.execution.aot_programs import RunnerConfig, lowerings
from routed_experts.execution.forward_batch import BatchShape
from routed_experts.execution.programs import ProgramSpec
from routed_experts.layers.moe import MOE_BACKENDS
from routed_experts.memory.kv_pool import KVPoolSpec
from routed_experts.models.base.config_reader import ConfigReader
from routed_experts.models.decoder.decoder import FamilyDecoder
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.registry import FAMILIES
from support.backends import with_moe

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture(scope="module")
def write_case(tmp_path_factory):
    """The checkpoint of a case, written once."""

    @functools.cache
    def written(name):
        return Oracle(CASES[name], tmp_path_factory.mktemp(name)).folder

    def copy(name, tmp_path, **config):
        folder = shutil.copytree(written(name), tmp_path / "copy")
        values = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in values.items() if value is not ...})
        )
        return folder

    return copy


def load_arrays(folder):
    state = nnx.state(ModelFolder.open(folder).load(jnp.dtype(jnp.float32)))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


def rewrite(folder, change):
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")


REFUSED = {
    "scoring function": ("DeepseekV3", dict(scoring_func="softmax"), ["scoring_func='softmax'", "sigmoid"]),
    "choice of groups": ("DeepseekV3", dict(topk_method="greedy"), ["topk_method='greedy'", "noaux_tc"]),
    "choice of groups, V2": (
        "DeepseekV2",
        dict(topk_method="noaux_tc"),
        ["topk_method='noaux_tc'", "group_limited_greedy"],
    ),
    "renormalised V2": ("DeepseekV2", dict(norm_topk_prob=True), ["norm_topk_prob=True", "false"]),
    "groups that do not divide": ("DeepseekV3", dict(n_group=3), ["n_group=3", "16 experts"]),
    "groups too few": ("DeepseekV3", dict(n_group=16, topk_group=2), ["topk_group=2", "4 experts"]),
    "rotary positions": (
        "Glm4Moe",
        dict(rope_parameters={"rope_type": "ntk", "rope_theta": 1e4}),
        ["rope_type='ntk'", "yarn"],
    ),
    "old spelling": ("Glm4Moe", dict(rope_parameters=..., rope_scaling={"type": "ntk"}), ["type='ntk'", "default"]),
    "experts of a token": ("Mixtral", dict(num_experts_per_tok=9), ["num_experts_per_tok=9", "at most 8"]),
    "experts and tensors": ("Mixtral", dict(num_local_experts=7), ["7.w1.weight", "expected [7, 64]"]),
    "dense layers": ("DeepseekV3", dict(first_k_dense_replace=1), ["missing", "layers.1.mlp.gate.weight"]),
    "latent rank": ("DeepseekV3", dict(kv_lora_rank=16), ["kv_a_layernorm.weight is [24], expected [16]"]),
    "fp8": ("DeepseekV3", dict(quantization_config={"quant_method": "fp8"}), ["quant_method='fp8'"]),
    "activation": ("GptOss", dict(swiglu_limit=5.0), ["swiglu_limit=5.0", "7.0"]),
    "layer types": ("GptOss", dict(layer_types=["full_attention"]), ["layer_types", "4 words"]),
    "other layer types": (
        "Qwen3Next",
        dict(layer_types=["mamba"] * 8),
        ["layer_types", "full_attention, linear_attention"],
    ),
    "sparsemixer of three": ("Phimoe", dict(num_experts_per_tok=3), ["num_experts_per_tok=3", "2"]),
    "experts of Llama 4": ("Llama4", dict(num_experts_per_tok=2), ["num_experts_per_tok=2", "1"]),
    "temperature of Llama 4": (
        "Llama4",
        dict(attn_temperature_tuning=-1),
        ["attn_temperature_tuning=-1", "at least 0"],
    ),
    "layer types of Llama 4": ("Llama4", dict(layer_types=["full_attention"] * 4), ["layer_types", "no_rope_layers"]),
    "dense layers of GLM-4.7-Flash": (
        "Glm4MoeLite",
        dict(first_k_dense_replace=2),
        ["mlp_layer_types", "first 2 layers", "first_k_dense_replace"],
    ),
    "windows of dots.llm1": ("Dots1", dict(sliding_window=None), ["layer_types", "without sliding_window"]),
    "full layers of K-EXAONE alone": ("ExaoneMoe", dict(sliding_window=None), ["sliding_window=None", "windows"]),
    "layers of K-EXAONE": ("ExaoneMoe", dict(is_moe_layer=[True] * 4), ["is_moe_layer=[True", "dense, sparse"]),
    "a pattern of K-EXAONE": (
        "ExaoneMoe",
        dict(layer_types=None, sliding_window_pattern="LLLG"),
        ["sliding_window_pattern='LLLG'", "an integer"],
    ),
    "experts of HunYuan's layers": ("HunYuanMoEV1", dict(moe_topk=[4, 4, 4, 2]), ["moe_topk=[4, 4, 4, 2]", "same"]),
    "a shared width of HunYuan": ("HunYuanMoEV1", dict(moe_intermediate_size=48), ["moe_intermediate_size=48", "24"]),
    "keys that HunYuan's layers share": ("HunYuanMoEV1", dict(use_cla=True), ["use_cla=True", "false"]),
    "alpha of HunYuan": (
        "HunYuanMoEV1",
        dict(rope_parameters={"rope_type": "dynamic", "alpha": -1.0}),
        ["alpha=-1.0", "positive"],
    ),
    "layers of Ling 3.0": (
        "BailingHybrid",
        dict(layer_types=["linear_attention"] * 4),
        ["layer_types", "at least one"],
    ),
    "queries of Ling 3.0": ("BailingHybrid", dict(q_lora_rank=16), ["q_lora_rank=16", "none"]),
    "decays of Ling 3.0": ("BailingHybrid", dict(kda_lower_bound=1.0), ["kda_lower_bound=1.0", "negative"]),
    "small matrices of Ling 3.0": ("BailingHybrid", dict(no_kda_lora=False), ["no_kda_lora=False", "true"]),
    "lengths of queries of Ling 3.0": ("BailingHybrid", dict(use_qk_norm=False), ["use_qk_norm=False", "true"]),
    "biases of Ling 3.0": ("BailingHybrid", dict(use_qkv_bias=True), ["use_qkv_bias=True", "false"]),
    "windows of Ling 3.0": ("BailingHybrid", dict(use_sliding_window=True), ["use_sliding_window=True", "false"]),
    "a router of Ling 3.0": (
        "BailingHybrid",
        dict(moe_router_enable_expert_bias=False),
        ["moe_router_enable_expert_bias=False", "true"],
    ),
    "two spellings of Ling 3.0": ("BailingHybrid", dict(n_group=2), ["n_group and num_expert_group differ"]),
    "further layers of Ling 3.0": (
        "BailingHybrid",
        dict(num_mtp_layers=1),
        ["num_nextn_predict_layers and num_mtp_layers differ: [0, 1]"],
    ),
    "more further layers than any model has": (
        "DeepseekV3",
        dict(num_nextn_predict_layers=10**20),
        [f"num_nextn_predict_layers={10**20}", "at most 64"],
    ),
    "layers of LFM2": ("Lfm2Moe", dict(layer_types=["conv"] * 5), ["layer_types", "6 words"]),
    "LFM2 without attention": ("Lfm2Moe", dict(layer_types=["conv"] * 6), ["layer_types", "at least one"]),
    "taps of LFM2": ("Lfm2Moe", dict(conv_L_cache=1), ["conv_L_cache=1", "at least 2"]),
    "Gemma 4 without experts": ("Gemma4", dict(enable_moe_block=False), ["enable_moe_block=False", "true"]),
    "embeddings of each layer": ("Gemma4", dict(hidden_size_per_layer_input=8), ["hidden_size_per_layer_input=8", "0"]),
    "Gemma 4 that sees what follows": (
        "Gemma4",
        dict(use_bidirectional_attention="all"),
        ["use_bidirectional_attention='all'", "vision"],
    ),
    "renormalised Qwen3-VL": (
        "Qwen3VLMoe",
        dict(text_config={"norm_topk_prob": False}),
        ["text_config: norm_topk_prob=False", "true"],
    ),
    "floor of Ernie's sums": ("Ernie4_5_Moe", dict(moe_norm_min=0.5), ["moe_norm_min=0.5", "1e-6"]),
    "renormalised Qwen3.5": ("Qwen3_5Moe", dict(norm_topk_prob=False), ["norm_topk_prob=False", "true"]),
    "a window of Llama": ("Llama", dict(sliding_window=64), ["sliding_window=64", "none"]),
    "a part of Mixtral's heads": ("Mixtral", dict(partial_rotary_factor=0.5), ["partial_rotary_factor=0.5", "1.0"]),
    "heads of linear attention": (
        "Qwen3Next",
        dict(linear_num_value_heads=3),
        ["linear_num_value_heads=3", "multiple"],
    ),
    "code of Ling in another": ("Mixtral", dict(auto_map={"AutoModel": "x.Y"}), ["auto_map", "never run"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_before_any_weight_is_read(write_case, tmp_path, name):
    family, config, words = REFUSED[name]
    folder = write_case(family, tmp_path, **config)
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(folder)
    assert all(word in str(caught.value) for word in words), caught.value


def test_llama_4_files_with_4_for_true_are_read(write_case, tmp_path):
    folder = write_case("Llama4", tmp_path)
    values, read = json.loads((folder / "config.json").read_text()), FAMILIES["Llama4ForCausalLM"].read_config
    plain, tuned, published, none = (
        read(ConfigReader(values | {"attn_temperature_tuning": tuned}, "config.json")) for tuned in (False, True, 4, 0)
    )
    assert published == tuned != plain == none


def test_published_gemma_4_files_give_the_sizes_of_full_layers_by_two_keys(write_case, tmp_path):
    folder = write_case("Gemma4", tmp_path)
    values, read = json.loads((folder / "config.json").read_text()), FAMILIES["Gemma4ForCausalLM"].read_config
    keys = {"global_head_dim": 32, "num_global_key_value_heads": 1, "per_layer_config": None}
    written, published = (read(ConfigReader(values | more, "config.json")) for more in ({}, keys))
    assert written == published and [layer.mixer.head_dim for layer in written.layers] == [16, 16, 32] * 2
    assert [(group.num_layers, group.rows, group.head_dim) for group in written.cache.groups] == [
        (4, 4, 16),
        (2, 2, 32),
    ]


def test_dots_files_that_name_their_scores_by_the_method_are_read(write_case, tmp_path):
    folder = write_case("Dots1", tmp_path)
    values, read = json.loads((folder / "config.json").read_text()), FAMILIES["Dots1ForCausalLM"].read_config
    plain, published = (
        read(ConfigReader(values | {"scoring_func": scores}, "config.json")) for scores in ("sigmoid", "noaux_tc")
    )
    assert plain == published and plain.layers[1].feed.router.scoring_func == "sigmoid"


def test_published_files_of_k_exaone_are_read(write_case, tmp_path):
    folder = write_case("ExaoneMoe", tmp_path)
    written = ModelFolder.open(folder).config
    values = json.loads((folder / "config.json").read_text())
    assert "first_k_dense_replace" in values
    values["first_last_k_dense_replace"] = values.pop("first_k_dense_replace")
    values |= dict(architectures=["ExaoneMoEForCausalLM"], mlp_layer_types=None, is_moe_layer=[False, True, True, True])
    values |= dict(sliding_window_pattern="LLLG", scoring_func="sigmoid", topk_method="noaux_tc")
    (folder / "config.json").write_text(json.dumps(values))
    rewrite(folder, lambda tensors: tensors | {"mtp.layers.0.eh_proj.weight": np.zeros((2, 2), np.float32)})
    assert ModelFolder.open(folder).config == written


def test_hunyuan_files_that_give_a_number_to_each_layer_are_read(write_case, tmp_path):
    folder = write_case("HunYuanMoEV1", tmp_path)
    values, read = json.loads((folder / "config.json").read_text()), FAMILIES["HunYuanMoEV1ForCausalLM"].read_config
    lists = {"num_experts": 16, "moe_topk": 4, "moe_intermediate_size": 24, "num_shared_expert": 1}
    plain, published = (
        read(ConfigReader(values | more, "config.json")) for more in ({}, {key: [lists[key]] * 4 for key in lists})
    )
    assert plain == published and plain.layers[0].feed.router.top_k == 4


@pytest.mark.parametrize("name", ["Qwen2Moe", "DeepseekV3", "Glm4Moe"])
def test_fused_experts_hold_the_numbers_of_single_ones(write_case, tmp_path, name):
    folder = write_case(name, tmp_path)
    single = load_arrays(folder)

    def fuse(tensors):
        layers = {key.partition(".experts.")[0] for key in tensors if ".experts." in key}
        for at in layers:
            parts = {part: [] for part in ("gate", "up", "down")}
            for expert in range(16):
                for part, weights in parts.items():
                    weights.append(tensors.pop(f"{at}.experts.{expert}.{part}_proj.weight"))
            tensors[f"{at}.experts.gate_up_proj"] = np.concatenate(
                [np.stack(parts["gate"]), np.stack(parts["up"])], axis=1
            )
            tensors[f"{at}.experts.down_proj"] = np.stack(parts["down"])
        return tensors

    rewrite(folder, fuse)
    fused = load_arrays(folder)
    assert single.keys() == fused.keys() and all(np.array_equal(single[key], fused[key]) for key in single)


@pytest.mark.parametrize(
    ("name", "architecture", "stem", "head", "more"),
    [
        (
            "Llama4",
            "Llama4ForConditionalGeneration",
            "language_model.model.",
            "language_model.lm_head.",
            "vision_model.w",
        ),
        ("Qwen3_5Moe", "Qwen3_5MoeForConditionalGeneration", "model.language_model.", "lm_head.", "model.visual.w"),
        ("Gemma4", "Gemma4ForConditionalGeneration", "model.language_model.", "lm_head.", "model.vision_tower.w"),
    ],
)
def test_a_text_model_beside_a_vision_tower_is_the_text_model(
    write_case, tmp_path, name, architecture, stem, head, more
):
    folder = write_case(name, tmp_path)
    alone = load_arrays(folder)

    def nest(tensors):
        renamed = {
            key.replace("lm_head.", head) if key.startswith("lm_head.") else stem + key.removeprefix("model."): t
            for key, t in tensors.items()
        }
        return renamed | {more: np.zeros(3, np.float32)}

    rewrite(folder, nest)
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": [architecture], "text_config": config, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer))
    nested = load_arrays(folder)
    assert alone.keys() == nested.keys() and all(np.array_equal(alone[key], nested[key]) for key in alone)


def test_published_stacks_of_qwen3_vl_hold_the_numbers_of_those_of_transformers(write_case, tmp_path):
    folder = write_case("Qwen3VLMoe", tmp_path)
    written = load_arrays(folder)
    rewrite(folder, lambda tensors: {key: t.swapaxes(1, 2) if ".experts." in key else t for key, t in tensors.items()})
    assert load_file(folder / "model.safetensors")["model.language_model.layers.0.mlp.experts.down_proj"].shape == (
        16,
        16,
        64,
    )
    published = load_arrays(folder)
    assert written.keys() == published.keys() and all(np.array_equal(written[key], published[key]) for key in written)


@pytest.mark.parametrize("name", ["Glm4Moe", "BailingHybrid"])
@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_that_predict_further_tokens_are_left_where_they_are(name, key, write_case, tmp_path):
    folder = write_case(name, tmp_path, **{"num_nextn_predict_layers": ..., key: 1})
    rewrite(folder, lambda tensors: tensors | {"model.layers.4.eh_proj.weight": np.zeros((2, 2), np.float32)})
    assert ModelFolder.open(folder).config.num_layers == 4
    rewrite(folder, lambda tensors: tensors | {"model.layers.5.eh_proj.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=r"1 unexpected \(model.layers.5.eh_proj.weight\)"):
        ModelFolder.open(folder)


def test_longrope_is_served_up_to_the_length_where_its_short_factors_hold(write_case, tmp_path):
    folder = write_case("Phimoe", tmp_path)
    assert ModelFolder.open(folder).config.context_length == 160
    with pytest.raises(ConfigError, match="context_length=161 is above the model's 160"):
        Engine(str(folder), skip_tokenizer_init=True, context_length=161)


def test_a_backend_that_cannot_do_what_a_model_does_is_refused_by_name(write_case, tmp_path):
    config = ModelFolder.open(write_case("GptOss", tmp_path)).config
    plain = MOE_BACKENDS["tiled"].__class__(name="plain", run=MOE_BACKENDS["tiled"].run)
    with pytest.raises(ConfigError, match=r"plain.*biased experts"):
        with_moe(DEFAULT_BACKENDS, plain).choose(ServerArgs(moe_backend="plain"), config.needs)


def lowered_size(values, num_layers):
    """Characters of the lowered step of a model with these config.json values."""
    family = FAMILIES[values["architectures"][0]]
    config = family.read_config(ConfigReader(values | {"num_hidden_layers": num_layers}, "config.json"))
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: FamilyDecoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(jnp.float32)))
    )
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state)
    cache = {field.name: getattr(config.cache, field.name) for field in dataclasses.fields(config.cache)}
    pool = KVPoolSpec(num_pages=9, page_size=8, dtype=jnp.dtype(jnp.float32), num_requests=5, **cache)
    kernels, attention = DEFAULT_BACKENDS.choose(ServerArgs(), config.needs)
    spec = ProgramSpec(
        graphdef=graphdef,
        capture=config.capture_spec,
        kernels=kernels,
        attention=attention,
        num_pages=9,
        raw_logprobs=False,
    )
    shape = BatchShape(mode=ForwardMode.EXTEND, num_tokens=32, num_requests=4, table_width=8)
    runner = RunnerConfig(pool=pool, num_request_slots=5, shapes=(shape,), vocab_size=VOCAB_SIZE)
    return len(lowerings(state, spec, runner)["forward", shape]().as_text())


PERIODIC = {
    "DeepseekV3": {},
    "Qwen3Next": {"layer_types": None, "mlp_only_layers": []},
    "GptOss": {"layer_types": None},
    "Llama4": {"moe_layers": None, "no_rope_layers": None, "layer_types": None},
}


@pytest.mark.parametrize("name", PERIODIC)
def test_the_program_does_not_grow_with_the_number_of_layers(write_case, tmp_path, name):
    values = json.loads((write_case(name, tmp_path) / "config.json").read_text()) | PERIODIC[name]
    few, many = (lowered_size(values, layers) for layers in (8, 48))
    assert many < 1.05 * few, (few, many)


@pytest.mark.parametrize("name", ["Qwen3Next", "Lfm2Moe"])
def test_a_retracted_hybrid_request_and_reused_slots_give_the_same_tokens(write_case, tmp_path, name):
    """States are not pages: a request that starts again must start from nothing, in whichever slot."""
    opened = ModelFolder.open(write_case(name, tmp_path))
    bench = Bench(
        opened.load(jnp.dtype(jnp.float32)),
        page_size=4,
        context_length=96,
        precompile_bs_paddings=(4,),
        precompile_token_paddings=(32,),
        moe_backend="probed",
        disable_radix_cache=True,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB_SIZE, size) for size in (20, 7, 40, 1, 13, 30)]
    calm = bench.drive()
    calm_told = calm.run(*(request(str(i), prompt, 12) for i, prompt in enumerate(prompts)))
    wild = bench.drive()
    wild.add(*(request(str(i), prompt, 12) for i, prompt in enumerate(prompts)))
    retracted = sum(wild.retract_victim() for _ in range(6) if [wild.steps(2)])
    outputs = wild.run()
    assert retracted >= 3
    assert {rid: output.tokens for rid, output in outputs.items()} == {
        rid: output.tokens for rid, output in calm_told.items()
    }
    assert assert_all_faithful(wild) > 100
