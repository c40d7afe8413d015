"""Quantised checkpoints of five families in the engine, against their dequantised copies: weights, tokens, logprobs and
rows equal to the bit; transformers judges the copy. Widths of 576, 320, 192 and 160 cut the last block short.

transformers itself is no oracle of blocks that are cut short: it stretches them."""

import dataclasses
import json
import logging
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from oracles.families import CASES, Oracle
from routed_experts import Engine
from routed_experts.core.errors import CheckpointError
from routed_experts.core.server_args import ServerArgs
from routed_experts.engine.build.inspection import inspect_model
from routed_experts.models.decoder.code_selection import CodeSupport
from routed_experts.models.loading import weight_loader
from routed_experts.models.loading.export import hugging_face_tensors
from routed_experts.models.model_folder import ModelFolder
from support.quantized_checkpoints import (
    Form,
    compressed_config,
    forms,
    fp8,
    fp8_config,
    integers,
    integers_of_a_tensor,
    quantize_folder,
    read_tensors,
    rewrite_folder,
    write_folder,
)
from support.quantized_families import ENGINE, FAMILIES, ORDER_OF_SUMS, PROMPTS, answers, assert_near, sized_case, write

pytestmark = pytest.mark.usefixtures("fast_compilation")

MARGIN = 1e-4


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write(tmp_path_factory.mktemp("qwen"), "Qwen3-MoE", "fp8 blocks")


def states(folder, dtype="float32"):
    state = nnx.state(ModelFolder.open(folder).load(jnp.dtype(dtype)))
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}


def same_states(left, right):
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


@pytest.mark.parametrize(
    "family",
    [  # its form is that of DeepSeek-V3
        pytest.param(family, marks=pytest.mark.thorough) if family == "MiniMax-M2" else family for family in FAMILIES
    ],
)
def test_a_quantised_checkpoint_answers_as_its_dequantised_copy_by_the_bit(tmp_path, family):
    written = write(tmp_path, family)
    with Engine(str(written.copy), dtype="float32", **ENGINE) as engine:
        expected = answers(engine)
        live = engine.score(PROMPTS[0])
        engine.update_weights_from_disk(tmp_path / "plain")
        assert answers(engine) != expected, "quantisation must be seen"
        engine.update_weights_from_disk(written.quantized)
        assert answers(engine) == expected
        again = engine.score(PROMPTS[0], routed=live.routed_experts)
        assert np.array_equal(again.logprobs, live.logprobs)
    for prompt, (tokens, logprobs, _) in zip(PROMPTS, expected, strict=True):
        judged = judge(written.copy, [*prompt, *tokens])
        for step, (value, token, _) in enumerate(logprobs):
            row = judged[len(prompt) - 1 + step]
            second, best = np.sort(row)[-2:]
            assert token == int(np.argmax(row)) or best - second < MARGIN
            assert abs(row[token] - value) < MARGIN


def judge(folder, tokens):
    """Logprobs of transformers, [S, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    return torch.log_softmax(logits, -1).numpy()


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_form_loads_the_numbers_of_its_copy_rounded_once(tmp_path_factory, form, dtype):
    written = write(tmp_path_factory.mktemp("form"), "Qwen3-MoE", form)
    assert len(written.names) > 20
    small, copy = (states(folder, dtype) for folder in (written.quantized, written.copy))
    assert same_states(small, copy)


INT8_TENSOR = dict(num_bits=8, strategy="tensor", symmetric=False)
INT4_TENSOR = INT8_TENSOR | dict(num_bits=4)
OF_A_TENSOR = {
    "int8": Form(compressed_config("int-quantized", **INT8_TENSOR), lambda w: integers_of_a_tensor(w, 8, packed=False)),
    "packed int4": Form(
        compressed_config("pack-quantized", **INT4_TENSOR), lambda w: integers_of_a_tensor(w, 4, packed=True)
    ),
}


@pytest.mark.parametrize("form", OF_A_TENSOR)
def test_a_zero_point_a_tensor_is_stored_as_one_number(qwen, tmp_path, form):
    """compressed-tensors stores it as int8 [1], beside a scale [1]."""
    names = quantize_folder(qwen.oracle.folder, tmp_path / "small", tmp_path / "copy", OF_A_TENSOR[form])
    points = [tensor for name, tensor in read_tensors(tmp_path / "small").items() if name.endswith("weight_zero_point")]
    assert len(points) == len(names) > 20 and any(point[0] for point in points)
    assert {(point.shape, point.dtype.name) for point in points} == {((1,), "int8")}
    assert same_states(states(tmp_path / "small"), states(tmp_path / "copy"))


def test_a_started_engine_serves_and_plans_bfloat16(qwen, tmp_path):
    """The plain tensors of a published checkpoint are bfloat16, and so is what is served."""
    tensors = read_tensors(qwen.quantized)
    plain = {name for name, tensor in tensors.items() if tensor.dtype == np.float32 and "scale" not in name}
    halved = {name: tensor.astype(ml_dtypes.bfloat16) if name in plain else tensor for name, tensor in tensors.items()}
    config = json.loads((qwen.quantized / "config.json").read_text())
    folder = write_folder(tmp_path / "half", config, halved)
    assert ModelFolder.open(folder).dtype("auto") == jnp.bfloat16
    model = inspect_model(ServerArgs(model_path=str(folder), **ENGINE))
    assert model.dtype == "bfloat16"
    line = model.memory_plan[0]
    assert line.startswith("checkpoint ") and line.endswith("59 tensors served as codes, products in bfloat16"), line
    plain = inspect_model(ServerArgs(model_path=str(folder), quantization="none", **ENGINE)).memory_plan[0]
    assert plain.endswith("fp8 (blocks 128 x 128), served as bfloat16"), plain
    with Engine(str(folder), **ENGINE) as engine:
        assert line in engine.memory_plan
        assert len(answers(engine)) == len(PROMPTS)


def test_a_plain_checkpoint_has_no_such_line(qwen):
    assert not any("checkpoint" in line for line in inspect_model(ServerArgs(model_path=str(qwen.copy))).memory_plan)


@pytest.mark.parametrize(("form", "described"), [(name, form.described) for name, form in forms().items()])
def test_a_form_is_described_in_words(tmp_path_factory, form, described):
    written = write(tmp_path_factory.mktemp("words"), "Qwen3-MoE", form)
    assert str(ModelFolder.open(written.quantized).quantization) == described


def test_headers_of_quantised_tensors_say_float32(qwen):
    folder = ModelFolder.open(qwen.quantized)
    assert set(qwen.names) == set(folder.quantized_tensors)
    assert all(folder.checkpoint.names()[name][1] == "float32" for name in qwen.names)


def test_slabs_of_a_large_array_are_dequantised_as_the_whole(qwen, monkeypatch):
    """Arrays above the host's budget are read in rows that begin and end within blocks."""
    whole, load = states(qwen.copy, "bfloat16"), weight_loader.load
    monkeypatch.setattr(weight_loader, "load", lambda *args, **kwargs: load(*args, host_bytes=20_000, **kwargs))
    assert same_states(states(qwen.quantized, "bfloat16"), whole)


@pytest.mark.parametrize("name", ["fp8-dynamic", "int4-g32-asym", "int8-asym"])
def test_a_checkpoint_of_compressed_tensors_itself_has_the_numbers_that_it_gives(name):
    """Written by compressed-tensors 0.20.0, and once more after its own `decompress_model`, both in bfloat16."""
    folder = Path(__file__).parent / "compressed_tensors_files" / name
    assert len(ModelFolder.open(folder / "small").quantized_tensors) == 23
    assert same_states(*(states(folder / kind, "bfloat16") for kind in ("small", "copy")))


def test_codes_of_compressed_tensors_itself_stay_in_memory_and_have_its_numbers():
    """Rounded once to bfloat16, as `decompress_model` gave them, to the bit. The file of the library that has symmetric
    codes; another one is dequantised."""
    folder = Path(__file__).parent / "compressed_tensors_files" / "fp8-dynamic"
    support = CodeSupport(formats=frozenset({"e4m3", "int4"}))
    coded = ModelFolder.open(folder / "small").with_codes(support)
    assert len(coded.config.coded_arrays) == 8
    served, numbers = nnx.state(coded.load(jnp.dtype("bfloat16"))), states(folder / "copy", "bfloat16")
    arrays = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(served)}
    for name, expected in numbers.items():
        if name not in coded.config.coded_arrays:
            assert np.asarray(arrays[name]).tobytes() == expected.tobytes(), name
            continue
        assert arrays[name].dtype == jnp.float8_e4m3fn
        stack = arrays[name].reshape(-1, *arrays[name].shape[-2:])
        scales = arrays[f"{name}_scale"].reshape(-1, *arrays[f"{name}_scale"].shape[-2:])
        exact = np.asarray(stack).astype(np.float64) * np.asarray(scales).astype(np.float64)  # one group of inputs
        assert exact.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes() == expected.tobytes(), name


@pytest.mark.usefixtures("lazy_compilation")
@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_codes_of_compressed_tensors_itself_answer_as_their_numbers(backend):
    folder = Path(__file__).parent / "compressed_tensors_files" / "fp8-dynamic" / "small"
    options, answered = dict(dtype="float32", moe_backend=backend, **ENGINE), {}
    for quantization in ("none", "auto"):
        with Engine(str(folder), quantization=quantization, **options) as engine:
            leaves = [leaf.dtype for _, leaf in nnx.to_flat_state(engine.components.served.arrays)]
            assert leaves.count(jnp.float8_e4m3fn) == (8 if quantization == "auto" else 0)
            answered[quantization] = engine.score([3, 1, 4, 1, 5, 9, 2, 6])
    codes, plain = answered["auto"], answered["none"]
    assert np.array_equal(codes.routed_experts.ids, plain.routed_experts.ids)
    assert np.abs(codes.logprobs - plain.logprobs).max() < ORDER_OF_SUMS


def test_an_export_holds_plain_weights(qwen):
    folder = ModelFolder.open(qwen.quantized)
    exported = hugging_face_tensors(folder.load(jnp.dtype("float32")), folder.sources, "float32")
    expected = read_tensors(qwen.copy)
    assert exported.keys() == expected.keys()
    assert all(exported[name].tobytes() == expected[name].tobytes() for name in expected)


def test_experts_of_another_folder_may_be_quantised(qwen):
    folder = ModelFolder.open(qwen.oracle.folder).with_experts_from(
        qwen.quantized, lambda target: target.endswith((".gate_up", ".down"))
    )
    state = nnx.state(folder.load(jnp.dtype("float32")))
    loaded = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state)}
    experts = {name: array for name, array in states(qwen.copy).items() if name.endswith((".gate_up", ".down"))}
    assert experts and all(loaded[name].tobytes() == array.tobytes() for name, array in experts.items())
    assert not same_states(loaded, states(qwen.copy)), "the other tensors are those of the plain folder"


@pytest.mark.parametrize("method", ["awq", "modelopt", "fbgemm_fp8", "bitsandbytes", "mxfp4"])
def test_experts_of_another_folder_are_refused_by_the_name_of_their_method(qwen, tmp_path, method):
    config = json.loads((qwen.oracle.folder / "config.json").read_text())
    tensors = read_tensors(qwen.oracle.folder)
    write_folder(tmp_path, config | {"quantization_config": {"quant_method": method}}, tensors)
    with pytest.raises(CheckpointError, match=f"config.json has quantization_config of quant_method='{method}'"):
        ModelFolder.open(qwen.oracle.folder).with_experts_from(tmp_path, lambda target: target.endswith(".down"))


def test_stacks_of_experts_are_read_before_their_axes_are_swapped(tmp_path):
    """Qwen3-VL-MoE holds the experts of a layer in one tensor, with a grid of scales an expert."""
    plain = Oracle(CASES["Qwen3VLMoe"], tmp_path / "plain").folder
    tensors, config = read_tensors(plain), json.loads((plain / "config.json").read_text())
    small, copy = dict(tensors), dict(tensors)
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    for name in stacks:
        written = [fp8(matrix, (32, 16)) for matrix in tensors[name]]
        small[name] = np.stack([one.stored["weight"] for one in written])
        small[f"{name}_scale_inv"] = np.stack([one.stored["weight_scale_inv"] for one in written])
        copy[name] = np.stack([one.numbers for one in written])
    write_folder(tmp_path / "small", config | {"quantization_config": fp8_config((32, 16))}, small)
    write_folder(tmp_path / "copy", config, copy)
    assert stacks and same_states(states(tmp_path / "small"), states(tmp_path / "copy"))


def one_tensor_an_expert(folder, target):
    """Llama 4 as its quantised files have it: stacks [E, I, O] are a tensor [O, I] an expert and matrix."""
    tensors = {}
    for name, tensor in read_tensors(folder).items():
        at, _, part = name.rpartition(".experts.")
        if not at:
            tensors[name] = tensor
            continue
        parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
        for expert, matrix in enumerate(tensor):
            for one, half in zip(parts, np.split(matrix.T, len(parts)), strict=True):
                tensors[f"{at}.experts.{expert}.{one}.weight"] = half
    return write_folder(target, json.loads((folder / "config.json").read_text()), tensors)


BLOCKS_OF_32 = Form(fp8_config((32, 32)), lambda w: fp8(w, (32, 32)))  # matrices are 64 wide
PUBLISHED = {  # by case: the form, the matrices that it quantises, and how many these are
    "Llama4": (
        Form(
            compressed_config(
                "float-quantized", strategy="channel", ignore=["re:.*self_attn", "re:.*router", "lm_head"]
            ),
            lambda w: fp8(w, (1, 0), scale="bfloat16", end="weight_scale"),
        ),
        r".*\.feed_forward\..*_proj\.weight",
        2 * 3 + 2 * 3 * (8 + 1),
    ),
    "Llama4 in blocks": (
        Form(fp8_config(), fp8),
        r".*_proj\.weight",
        4 * 4 + 2 * 3 + 2 * 3 * (8 + 1),
    ),
    "Qwen3Next": (BLOCKS_OF_32, r".*\.(.*_proj|in_proj_qkvz)\.weight", 6 * 2 + 2 * 4 + 7 * 3 * (8 + 1) + 3),
    "Qwen3_5Moe": (BLOCKS_OF_32, r".*\.(.*_proj|in_proj_qkv|in_proj_z)\.weight", 6 * 3 + 2 * 4 + 8 * 3 * (8 + 1)),
    "BailingMoeV2": (
        BLOCKS_OF_32,
        r".*\.(.*_proj|dense|query_key_value)\.weight",
        4 * 2 + 3 + 3 * 3 * (16 + 1),
    ),
}


def write_published(path, name):
    """A plain folder of transformers, and from the same numbers the quantised one and its copy."""
    form, chosen, count = PUBLISHED[name]
    case = CASES[name.partition(" ")[0]]
    if name == "Llama4 in blocks":  # gate and up are half a block each, so together they are one without being one
        case = dataclasses.replace(case, config=case.config | dict(intermediate_size=64))
    folder = Oracle(case, path / "plain").folder
    if case.name == "Llama4":
        folder = one_tensor_an_expert(folder, path / "single")
    names = quantize_folder(folder, path / "small", path / "copy", form, chosen=re.compile(chosen).fullmatch)
    assert len(names) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_forms_that_are_published_of_other_families_have_the_numbers_of_their_copy(tmp_path, name):
    write_published(tmp_path, name)
    numbers, plain = states(tmp_path / "copy"), states(tmp_path / "plain")
    assert same_states(states(tmp_path / "small"), numbers) and not same_states(plain, numbers)
    if name.startswith("Llama4"):
        assert same_states(states(tmp_path / "single"), plain), "the layout of experts changes no number"


@pytest.mark.usefixtures("lazy_compilation")
@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize(
    "name",
    [name if name == "Llama4 in blocks" else pytest.param(name, marks=pytest.mark.thorough) for name in PUBLISHED],
)
def test_codes_of_forms_that_are_published_of_other_families_answer_as_their_copy(tmp_path, name, backend):
    write_published(tmp_path, name)
    options = dict(dtype="float32", moe_backend=backend, **ENGINE)
    with Engine(str(tmp_path / "copy"), **options) as engine:
        expected = answers(engine)
    with Engine(str(tmp_path / "small"), **options) as engine:
        leaves = {path[-1]: leaf.dtype for path, leaf in nnx.to_flat_state(engine.components.served.arrays)}
        assert {leaves["gate_up"], leaves["down"]} == {jnp.dtype(jnp.float8_e4m3fn)}
        of_codes = answers(engine)
        assert_near(of_codes, expected)
    if name == "Llama4 in blocks":
        with Engine(str(tmp_path / "single"), quantization="fp8_block", **options) as engine:
            assert answers(engine) == of_codes, "plain experts of a tensor each are quantised in the same blocks"


@pytest.mark.devices(4)
@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.thorough), (4, 4)])
def test_shards_that_cut_blocks_answer_as_shards_of_the_copy(tmp_path, tp_size, ep_size):
    """Width 320 over 4 devices is 80 each, 192 is 48: no cut falls on a block of 128."""
    oracle = Oracle(
        sized_case("Qwen3Moe", dict(moe_intermediate_size=320, mlp_only_layers=[0], num_key_value_heads=4)),
        tmp_path / "plain",
    )
    quantize_folder(oracle.folder, tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    sizes = dict(tp_size=tp_size, ep_size=ep_size, dtype="float32", **ENGINE)
    with Engine(str(tmp_path / "copy"), **sizes) as engine:
        expected = answers(engine)
        engine.update_weights_from_disk(tmp_path / "plain")
        assert answers(engine) != expected
        engine.update_weights_from_disk(tmp_path / "small")
        assert answers(engine) == expected


# refused


ZERO_POINTS = {  # by words: a tensor of another shape or dtype, and how the error has it
    "two": (np.zeros(2, np.int8), "[2] I8"),
    "of each output": (np.zeros((192, 1), np.int8), "[192, 1] I8"),
    "of another dtype": (np.zeros(1, np.uint8), "[1] U8"),
    "as a word": (np.zeros(1, np.int32), "[1] I32"),
}


@pytest.mark.parametrize("fault", ZERO_POINTS)
@pytest.mark.parametrize("form", OF_A_TENSOR)
def test_zero_points_that_are_not_one_a_tensor_are_refused_by_name(qwen, tmp_path, form, fault):
    quantize_folder(qwen.oracle.folder, tmp_path / "small", tmp_path / "copy", OF_A_TENSOR[form])
    tensor, described = ZERO_POINTS[fault]
    message = refusal(tmp_path / "small", tmp_path / "bad", with_tensor("weight_zero_point", tensor))
    expected = "[1, 1] I8" if form == "int8" else "[1, 1] I8 or [1, 1] I32"
    assert f"down_proj.weight_zero_point is {described}; expected {expected}; copy" in message, message


@pytest.mark.parametrize("shape", [(0, 320), (192, 0), (0, 0)])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_an_empty_matrix_is_refused_by_name(qwen, tmp_path, strategy, shape):
    """As one of any other wrong shape is, by its scales or by the config's sizes."""
    config = compressed_config("int-quantized", num_bits=8, strategy=strategy, symmetric=strategy == "channel")
    channel = Form(config, lambda w: integers(w, 8, 0, packed=False))
    form = OF_A_TENSOR["int8"] if strategy == "tensor" else channel
    quantize_folder(qwen.oracle.folder, tmp_path / "small", tmp_path / "copy", form)
    message = refusal(tmp_path / "small", tmp_path / "bad", with_tensor("weight", np.zeros(shape, np.int8)))
    if strategy == "tensor":
        assert f"down_proj.weight is {list(shape)}, expected [192, 320]" in message, message
    else:
        assert "down_proj.weight_scale is [192, 1]; expected " in message and f" of {list(shape)}," in message, message


def of(end, name="model.layers.1.mlp.experts.0.down_proj"):
    return f"{name}.{end}"


def without(end):
    def change(tensors, config):
        del tensors[of(end)]

    return change


def with_tensor(end, value, name="model.layers.1.mlp.experts.0.down_proj"):
    def change(tensors, config):
        tensors[of(end, name)] = value(tensors.get(of(end, name))) if callable(value) else value

    return change


def with_config(**values):
    def change(tensors, config):
        config["quantization_config"] |= values

    return change


def with_weights(**values):
    def change(tensors, config):
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= values

    return change


def quantized_module(name):
    def change(tensors, config):
        stored = fp8(tensors[f"{name}.weight"].astype(np.float32)).stored
        tensors.update({f"{name}.{end}": array for end, array in stored.items()})

    return change


def widened(columns):
    """Words for another number of inputs than a multiple of the group."""

    def change(tensors, config):
        tensors[of("weight_packed")] = np.zeros((192, (columns + 7) // 8), np.int32)
        tensors[of("weight_shape")] = np.array([192, columns])
        tensors[of("weight_scale")] = np.ones((192, -(-columns // 32)), ml_dtypes.bfloat16)

    return change


E4M3 = ml_dtypes.float8_e4m3fn
FP8_FAULTS = {
    "a scale is missing": (without("weight_scale_inv"), ["down_proj.weight is F8_E4M3 and has no scale"]),
    "a scale of a plain matrix": (
        with_tensor("weight", lambda tensor: tensor.astype(np.float32)),
        ["down_proj.weight is float32 and has the scale", "F8_E4M3"],
    ),
    "a scale without a matrix": (without("weight"), ["down_proj.weight_scale_inv has no weight beside it"]),
    "another grid": (
        with_tensor("weight_scale_inv", np.ones((2, 2), np.float32)),
        ["down_proj.weight_scale_inv is [2, 2]", "[2, 3]", "blocks 128 x 128"],
    ),
    "integer scales": (
        with_tensor("weight_scale_inv", np.ones((2, 3), np.int32)),
        ["down_proj.weight_scale_inv is I32", "float32"],
    ),
    "e5m2": (
        with_tensor("weight", lambda tensor: tensor.astype(ml_dtypes.float8_e5m2)),
        ["down_proj.weight is F8_E5M2", "F8_E4M3"],
    ),
    "two scales": (with_tensor("weight_scale", np.ones((2, 3), np.float32)), ["both scale", "down_proj.weight"]),
    "a module of the skip list": (
        with_config(modules_to_not_convert=["model.layers.1.mlp.experts.0.down_proj"]),
        ["down_proj.weight is quantised", "config.json leaves the module out"],
    ),
    "a part of the skip list": (with_config(ignored_layers=["experts"]), ["is quantised", "leaves the module out"]),
    "a router": (quantized_module("model.layers.1.mlp.gate"), ["mlp.gate.weight is quantised", "plain embeddings"]),
    "the embeddings": (quantized_module("model.embed_tokens"), ["embed_tokens.weight is quantised", "routers"]),
    "an unknown key": (with_config(rotation="hadamard"), ["rotation", "may change weights"]),
    "another float": (with_config(fmt="e5m2"), ["fmt='e5m2'", "e4m3"]),
    "another scale": (with_config(scale_fmt="log"), ["scale_fmt='log'", "ue8m0"]),
    "fp4 experts": (with_config(expert_dtype="fp4"), ["expert_dtype='fp4'"]),
    "a block of three": (with_config(weight_block_size=[1, 2, 3]), ["weight_block_size=[1, 2, 3]"]),
    "a block of nothing": (with_config(weight_block_size=[0, 128]), ["weight_block_size=[0, 128]"]),
    "a list of numbers": (with_config(ignored_layers=[3]), ["ignored_layers=[3]", "strings"]),
}
INT4_FAULTS = {
    "a scale is missing": (without("weight_scale"), ["weight_packed has no", "weight_scale beside it"]),
    "a shape is missing": (without("weight_shape"), ["weight_packed has no", "weight_shape beside it"]),
    "a shape that words do not hold": (
        with_tensor("weight_shape", np.array([192, 300])),
        ["weight_shape is (192, 300)", "[192, 40]", "[192, 38] words"],
    ),
    "a shape of three": (with_tensor("weight_shape", np.array([1, 192, 320])), ["weight_shape is [3]"]),
    "another number of groups": (
        with_tensor("weight_scale", np.ones((192, 11), ml_dtypes.bfloat16)),
        ["weight_scale is [192, 11]", "[192, 10]"],
    ),
    "inputs that no group divides": (widened(330), ["has 330 inputs", "a multiple of group_size=32"]),
    "exponents for scales": (
        with_tensor("weight_scale", np.ones((192, 10), np.uint8)),
        ["weight_scale is U8", "bfloat16"],
    ),
    "words of another dtype": (
        with_tensor("weight_packed", lambda tensor: tensor.astype(np.int64)),
        ["weight_packed is I64", "I32"],
    ),
    "zero points of symmetric numbers": (
        with_tensor("weight_zero_point", np.zeros((24, 10), np.int32)),
        ["weight_zero_point is there", "symmetric: True"],
    ),
    "no zero points": (with_weights(symmetric=False), ["weight_zero_point is missing", "symmetric: False"]),
    "a map without actorder": (
        with_tensor("weight_g_idx", np.zeros(320, np.int32)),
        ["weight_g_idx is there", "actorder: False"],
    ),
    "no map": (with_weights(actorder="group"), ["weight_g_idx is missing", "actorder: True"]),
    "another actorder": (with_weights(actorder="best"), ["actorder='best'", "group or weight"]),
    "another format": (with_config(format="nvfp4-pack-quantized"), ["group_0", "format='nvfp4-pack-quantized'"]),
    "a plain word for packed numbers": (
        with_config(format="naive-quantized"),
        ["num_bits=4", "8 in the format naive-quantized"],
    ),
    "bits that are not packed": (with_weights(num_bits=3), ["num_bits=3", "4 or 8"]),
    "an unknown key of weights": (with_weights(rotation=1), ["rotation", "may change weights"]),
    "no group": (with_config(config_groups={}), ["config_groups", "at least one group"]),
    "rotated weights": (with_config(transform_config={"R1": {}}), ["transform_config", "rotates"]),
    "sparse weights": (with_config(sparsity_config={"format": "sparse-24-bitmask"}), ["sparse-24-bitmask", "dense"]),
    "a bad expression": (with_config(ignore=["re:("]), ["'re:('", "regular expression"]),
    "no group targets it": (
        with_config(
            config_groups=compressed_config(
                "pack-quantized", targets=["re:.*self_attn.*"], num_bits=4, strategy="group", group_size=32
            )["config_groups"]
        ),
        ["is quantised", "no group of config.json targets it"],
    ),
    "a module that is ignored": (with_config(ignore=[r"re:.*down_proj"]), ["is quantised", "leaves the module out"]),
}


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    return write(tmp_path_factory.mktemp("int4"), "Qwen3-MoE", "int4")


def refusal(source, folder, change):
    """The error for a good checkpoint after `change`; the engine must not start and no array may be made."""
    tensors = read_tensors(source)
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    num_arrays = len(jax.live_arrays())
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(write_folder(folder, config, tensors))
    assert len(jax.live_arrays()) <= num_arrays, "memory was taken"
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and "expected" in message
    return message


@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_a_faulty_fp8_checkpoint_is_refused_by_name(qwen, tmp_path, fault):
    change, words = FP8_FAULTS[fault]
    message = refusal(qwen.quantized, tmp_path / "bad", change)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("fault", INT4_FAULTS)
def test_a_faulty_packed_checkpoint_is_refused_by_name(int4, tmp_path, fault):
    change, words = INT4_FAULTS[fault]
    message = refusal(int4.quantized, tmp_path / "bad", change)
    assert all(word in message for word in words), message


DOWN = "model.layers.1.mlp.experts.0.down_proj"


def hold_plain(source, folder, targets, ignore=()):
    """The quantised folder with one matrix plain, whose groups have these targets. Returns its numbers."""
    tensors = read_tensors(source.quantized)
    config = json.loads((source.quantized / "config.json").read_text())
    for end in [name for name in tensors if name.startswith(f"{DOWN}.")]:
        del tensors[end]
    plain = read_tensors(source.copy)
    tensors[f"{DOWN}.weight"] = plain[f"{DOWN}.weight"] + np.float32(1)
    group, ignored = config["quantization_config"]["config_groups"]["group_0"], config["quantization_config"]["ignore"]
    group["targets"], config["quantization_config"]["ignore"] = targets, [*ignored, *ignore]
    write_folder(folder, config, tensors)
    return plain | {f"{DOWN}.weight": tensors[f"{DOWN}.weight"]}


@pytest.mark.parametrize("target", [DOWN, r"re:.*\.experts\.0\.down_proj", "re:.*_proj$"])
def test_a_plain_matrix_that_a_group_targets_by_name_is_refused(int4, tmp_path, target):
    hold_plain(int4, tmp_path / "bad", sorted({target, "re:.*_proj$"}))
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(tmp_path / "bad")
    message = str(caught.value)
    assert f"{DOWN}.weight is [192, 320] float32 without a scale; expected int4 (groups of 32)" in message
    assert "config.json targets it" in message and str(tmp_path) in message


@pytest.mark.parametrize("ignore", [DOWN, r"re:.*experts\.0\.down"])
def test_a_plain_matrix_that_the_config_ignores_is_read(int4, tmp_path, caplog, ignore):
    tensors = hold_plain(int4, tmp_path / "small", ["re:.*_proj$"], [ignore])
    write_folder(tmp_path / "copy", json.loads((int4.copy / "config.json").read_text()), tensors)
    with caplog.at_level(logging.INFO):
        assert same_states(states(tmp_path / "small"), states(tmp_path / "copy"))
    assert "are plain where" not in caplog.text


def test_a_plain_matrix_of_a_class_that_is_quantised_is_read_and_the_log_says_so(int4, qwen, tmp_path, caplog):
    """As those of DeepSeek-V3, whose config leaves no module out."""
    tensors = hold_plain(int4, tmp_path / "small", ["Linear"])
    write_folder(tmp_path / "copy", json.loads((int4.copy / "config.json").read_text()), tensors)
    with caplog.at_level(logging.INFO):
        assert same_states(states(tmp_path / "small"), states(tmp_path / "copy"))
    lines = [record.getMessage() for record in caplog.records if "are plain where" in record.getMessage()]
    assert lines == [
        f"1 matrices are plain where config.json quantises their class, and are read as such: {DOWN}.weight"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        ModelFolder.open(qwen.quantized)
    assert "are plain where" not in caplog.text, "embeddings, routers and the head are plain always"


def test_two_methods_are_refused(qwen, tmp_path):
    def change(tensors, config):
        config["compression_config"] = compressed_config("float-quantized", strategy="channel")

    message = refusal(qwen.quantized, tmp_path / "bad", change)
    assert "says twice how weights are quantised (quantization_config, compression_config)" in message


def test_a_file_of_modelopt_beside_it_is_refused(qwen, tmp_path):
    folder = shutil.copytree(qwen.quantized, tmp_path / "bad")
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json says that weights are quantised by ModelOpt"):
        ModelFolder.open(folder)


def test_codes_without_a_method_are_refused(qwen, tmp_path):
    message = refusal(qwen.quantized, tmp_path / "bad", lambda tensors, config: config.pop("quantization_config"))
    assert "look quantised by fp8 blocks" in message


def test_a_method_without_codes_is_refused(qwen, tmp_path):
    message = refusal(qwen.copy, tmp_path / "bad", lambda _, config: config.update(quantization_config=fp8_config()))
    assert "no tensor of the checkpoint is quantised" in message


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
def test_a_scale_that_no_matrix_has_stops_the_load(qwen, tmp_path, value):
    tensors = read_tensors(qwen.quantized)
    tensors[of("weight_scale_inv")][0, 0] = value
    config = json.loads((qwen.quantized / "config.json").read_text())
    folder = ModelFolder.open(write_folder(tmp_path / "bad", config, tensors))
    with pytest.raises(CheckpointError, match=rf"down_proj\.weight_scale_inv holds {value}; expected finite scales"):
        folder.load(jnp.dtype("float32"))


@pytest.fixture(scope="module")
def permuted(tmp_path_factory):
    """int4 with a map from inputs to groups, and zero points of int8, which can be out of range; packed ones cannot."""
    written = write(tmp_path_factory.mktemp("permuted"), "Qwen3-MoE", "int4 asymmetric, permuted")
    zeros = {}
    for name, words in read_tensors(written.quantized).items():
        if name.endswith("weight_zero_point"):
            nibbles = words.view(np.uint32)[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[None, :, None] & 15
            zeros[name] = nibbles.reshape(-1, words.shape[1]).astype(np.int8) - np.int8(8)
    return written.copy, rewrite_folder(written.quantized, tmp_path_factory.mktemp("zeros") / "small", zeros)


@pytest.mark.parametrize(
    ("end", "value", "expected"),
    [
        ("weight_g_idx", 10, "groups 0 to 9"),
        ("weight_g_idx", -1, "groups 0 to 9"),
        ("weight_zero_point", 8, "-8 to 7"),
        ("weight_zero_point", -9, "-8 to 7"),
    ],
)
def test_a_map_or_a_zero_point_out_of_range_stops_the_load_of_a_folder(permuted, tmp_path, end, value, expected):
    """The last number of the tensor; the same folder without it loads, and as its copy."""
    copy, good = permuted
    tensor = read_tensors(good)[of(end)]
    tensor.flat[-1] = value
    bad = ModelFolder.open(rewrite_folder(good, tmp_path / "bad", {of(end): tensor}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(of(end))} holds {value}; expected {expected}; copy the"):
        bad.load(jnp.dtype("float32"))
    if value == 10:
        assert same_states(states(good), states(copy))


@pytest.mark.devices(2)
@pytest.mark.usefixtures("lazy_compilation")
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("Kimi-K2", "int4"),  # width 160 is 80 for each, which cuts a group of 32
        pytest.param("Qwen3-MoE", "int4 asymmetric, permuted", marks=pytest.mark.thorough),
    ],
)
def test_int4_that_is_dequantised_on_two_devices_answers_as_on_one(tmp_path, family, form):
    """As one device up to the order of sums, and as the copy on two devices to the bit."""
    written, options = write(tmp_path, family, form), dict(dtype="float32", moe_backend="tiled", **ENGINE)
    with Engine(str(written.quantized), quantization="none", **options) as engine:
        expected = answers(engine)
    with Engine(str(written.copy), tp_size=2, **options) as engine:
        of_copy = answers(engine)
    with Engine(str(written.quantized), quantization="none", tp_size=2, **options) as engine:
        leaves = nnx.to_flat_state(engine.components.served.arrays)
        assert not any(leaf.dtype.itemsize == 1 for _, leaf in leaves)
        assert answers(engine) == of_copy
    assert_near(of_copy, expected)


def test_a_bad_push_leaves_the_served_weights(qwen, tmp_path):
    tensors = read_tensors(qwen.quantized)
    tensors[of("weight")] = np.full((192, 320), 0x7F, np.uint8).view(E4M3)
    config = json.loads((qwen.quantized / "config.json").read_text())
    bad = write_folder(tmp_path / "bad", config, tensors)
    with Engine(str(qwen.quantized), dtype="float32", **ENGINE) as engine:
        expected = answers(engine)
        with pytest.raises(CheckpointError, match=r"down_proj\.weight holds a NaN code"):
            engine.update_weights_from_disk(bad)
        assert answers(engine) == expected
