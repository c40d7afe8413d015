"""What no family serves is refused by name, by the engine itself, before any memory is taken: every family times every
fault.

A checkpoint of each family is written by transformers; then one key of its config.json is changed, or one tensor of its
file."""

import functools
import gc
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from oracles.families import CASES, Oracle
from routed_experts import Engine
from routed_experts.core.errors import CheckpointError
from routed_experts.models.model_folder import ModelFolder
from routed_experts.models.registry import FAMILIES

METHODS = ("awq", "gptq", "bitsandbytes", "gguf", "modelopt", "nvfp4", "fbgemm_fp8")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts")
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
UNREAD = {("Qwen3_5Moe", "intermediate_size")}  # no layer is dense
BY_LAYER = (
    "layer_types",
    "per_layer_config",
    "mlp_layer_types",
    "moe_layers",
    "no_rope_layers",
)  # lists that a change of the layers would contradict before tensors do

LISTED = ("Lfm2Moe",)  # no layer_types are no default of this family


@pytest.fixture(scope="module")
def write_case(tmp_path_factory):
    return functools.cache(lambda name: Oracle(CASES[name], tmp_path_factory.mktemp(name)).folder)


def refusal(folder):
    """The engine's error instead of a start; a start that succeeds is reported, and ends."""
    try:
        Engine(str(folder), skip_tokenizer_init=True, max_total_tokens=64, context_length=32).shutdown()
    except CheckpointError as error:
        return str(error)
    return "the engine started"


def known(values, keys):
    """The one of these keys that a config has."""
    return next(key for key in keys if values.get(key) is not None)


def faults(name, values):
    """(what is changed, words of the error) for every fault that a config of this family can have."""
    tolerated = FAMILIES[values["architectures"][0]].accepted_quirks
    layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
    for word in ("scoring_func", "score_function"):
        yield {word: "cosine"} if CASES[name].layer_ids else {}, [f"{word}='cosine'", "expected one of"]
    yield {"hidden_act": "gelu_new"}, ["hidden_act='gelu_new'", "expected one of silu"]
    for section in ("rope_parameters", "rope_scaling"):
        yield {"rope_parameters": None, section: {"rope_type": "ntk", "factor": 2.0}}, ["rope_type='ntk'", "longrope"]
    longer, shorter = (relayered(name, values, count) for count in (layers + 1, layers - 1))
    yield longer, ["missing", f"layers.{layers}."]
    yield shorter, ["unexpected", f"layers.{layers - 1}."]
    yield shorter | {"num_nextn_predict_layers": 1}, [f"layers.{layers - 1}."]
    yield {"num_hidden_layers": 0}, ["num_hidden_layers=0", "at least 1"]
    yield {"num_hidden_layers": 2**31}, ["num_hidden_layers=2147483648", "at most 1024"]
    eps = "norm_eps" if name == "Lfm2Moe" else "rms_norm_eps"
    yield {eps: -1}, [f"{eps}=-1", "at least 0"]
    widest = next(
        key for key in ("global_head_dim", "qk_rope_head_dim", "head_dim") if key in values or key == "head_dim"
    )
    yield {widest: 2**31}, [f"{widest}=2147483648", "at most 16384"]
    is_latent = "kv_lora_rank" in values
    both = {"num_key_value_heads": 2 * heads} if is_latent else {}
    width = {} if is_latent else {"head_dim": values.get("head_dim") or values["hidden_size"] // heads}
    yield {"num_attention_heads": 2 * heads} | width | both, ["misshapen"]
    yield {"num_key_value_heads": 3}, ["num_key_value_heads=3"]
    yield {"hidden_size": values["hidden_size"] + 8} | width, ["misshapen"]
    yield {"vocab_size": values["vocab_size"] + 1}, ["misshapen", "embed"]
    yield {"tie_word_embeddings": not values.get("tie_word_embeddings")}, ["lm_head.weight"]
    for key in WIDTHS:
        if values.get(key) and (name, key) not in UNREAD:
            yield {key: values[key] + 8}, ["misshapen"]
            yield {key: "48"}, [f"{key}='48'", "integer"]
    for method in METHODS:
        yield {"quantization_config": {"quant_method": method}}, [f"quant_method={method!r}", "unquantised"]
        yield {"compression_config": {"quant_method": method}}, ["compression_config", f"quant_method={method!r}"]
    yield {"quantization_config": {"quant_method": "fp8"}}, ["quant_method='fp8'", "no tensor", "is quantised"]
    yield {"quantization_config": {"quant_method": "compressed-tensors"}}, ["format is missing"]
    if not tolerated.code:
        yield {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, ["auto_map", "never run"]
    yield {"architectures": ["MambaForCausalLM"], "auto_map": None}, ["MambaForCausalLM", *FAMILIES]
    if CASES[name].layer_ids:
        yield from faults_of_experts(values)


def relayered(name, values, count):
    """Another number of layers, and lists that fit it where a family requires them."""
    lists = {"layer_types": [*values["layer_types"], "conv"][:count]} if name in LISTED else {}
    return {"num_hidden_layers": count} | dict.fromkeys(BY_LAYER) | lists


def faults_of_experts(values):
    experts, per_token = known(values, EXPERTS), known(values, PER_TOKEN)
    count = values[experts]
    yield {"topk_method": "magic"}, ["topk_method='magic'", "expected one of"]
    yield {experts: 2 * count}, ["expected"]
    yield {experts: count // 2}, ["expected"]
    yield (
        {experts: 0},
        ["unexpected"]
        if values["architectures"][0].startswith(("Qwen3Moe", "Qwen3VLMoe"))
        else [f"{experts}=0", "at least 1"],
    )
    yield {per_token: 0}, [f"{per_token}=0", "at least 1"]
    yield {per_token: count + 1}, [f"{per_token}={count + 1}", f"{count}"]
    of_groups = "num_expert_group" if "num_expert_group" in values else "n_group"
    groups = values.get(of_groups, 1)
    if groups > 1:
        yield {of_groups: 3}, [f"{of_groups}=3", "divisor"]
        yield {"topk_group": groups + 1}, [f"topk_group={groups + 1}", f"at most {groups}"]
        yield {of_groups: count, "topk_group": 1}, ["topk_group=1", "groups that hold"]
    else:
        yield {"n_group": 2, "topk_group": 3}, ["_group="]


@pytest.mark.parametrize("name", CASES)
def test_every_fault_of_a_config_is_refused_by_name_before_memory_is_taken(write_case, tmp_path, name):
    folder = shutil.copytree(write_case(name), tmp_path / "copy")
    outer = json.loads((folder / "config.json").read_text())
    values = {**outer.get("text_config", {}), **outer}
    assert ModelFolder.open(folder).config.num_layers == values["num_hidden_layers"]
    gc.collect()  # what other tests left may go at any time
    num_arrays, checked, wrong = len(jax.live_arrays()), 0, []
    for change, words in faults(name, values):
        if not change:
            continue
        inner = {"text_config": outer["text_config"] | change} if "text_config" in outer else {}
        (folder / "config.json").write_text(json.dumps(outer | change | inner))
        message = refusal(folder)
        if not all(word in message for word in (*words, str(folder), "expected")) or "\n" in message:
            wrong.append((change, message))
        checked += 1
    assert not wrong, wrong
    assert len(jax.live_arrays()) <= num_arrays, "memory was taken"
    assert checked >= 25


@pytest.mark.parametrize(
    "architecture",
    [
        "Llama4ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_text_model_inside_another_may_not_be_quantised_either(tmp_path, architecture, method):
    inner = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": inner}))
    with pytest.raises(CheckpointError, match=f"quantization_config of quant_method='{method}'"):
        Engine(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("file", "method"),
    [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ"), ("hf_quant_config.json", "ModelOpt")],
)
def test_a_file_that_speaks_of_quantisation_is_refused_by_its_method(write_case, tmp_path, file, method):
    folder = shutil.copytree(write_case("Mixtral"), tmp_path / "copy")
    (folder / file).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{file} says that weights are quantised by {method}"):
        Engine(str(folder), skip_tokenizer_init=True)


@pytest.mark.parametrize(
    ("end", "dtype", "method"),
    [
        (".weight_scale_inv", "float32", "fp8 blocks"),
        (".qweight", "int32", "GPTQ or AWQ"),
        (".weight_packed", "int32", "compressed-tensors"),
        (".weight_scale", "float32", "fp8 or compressed-tensors"),
        (".weight_packed .weight_scale", "int32", "compressed-tensors"),
        (".weight_packed .weight_scale .weight_global_scale", "float32", "NVFP4"),
        (".weight_scale .weight_scale_2", "float32", "NVFP4"),
        (".weight.absmax", "float32", "bitsandbytes"),
    ],
)
def test_tensors_that_look_quantised_are_refused_with_their_method(write_case, tmp_path, end, dtype, method):
    folder = shutil.copytree(write_case("Mixtral"), tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"model.layers.0.self_attn.q_proj" + part: np.zeros((2, 2), dtype) for part in end.split()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"look quantised by {method}, though"):
        Engine(str(folder), skip_tokenizer_init=True)


def test_gguf_weights_are_refused_by_name(write_case, tmp_path):
    folder = shutil.copytree(write_case("Mixtral"), tmp_path / "copy")
    file = folder / "model-Q4_K_M.gguf"
    (folder / "model.safetensors").rename(file)
    for path in (folder, file):
        with pytest.raises(CheckpointError, match=r"GGUF weights.*; take the checkpoint that they were converted from"):
            Engine(str(path), skip_tokenizer_init=True)
    for absent in ("x" * 5000 + ".gguf", str(tmp_path / "absent.gguf"), "a\0b.gguf"):
        with pytest.raises(CheckpointError, match="no checkpoint folder"):
            Engine(absent, skip_tokenizer_init=True)


def test_a_tensor_of_eight_bits_is_refused_by_its_dtype(write_case, tmp_path):
    folder = shutil.copytree(write_case("Mixtral"), tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    at = "model.layers.0.self_attn.q_proj.weight"
    save_file(
        tensors | {at: tensors[at].astype(ml_dtypes.float8_e4m3fn)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(CheckpointError, match=rf"{at} is F8_E4M3"):
        Engine(str(folder), skip_tokenizer_init=True)
