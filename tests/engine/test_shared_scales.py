"""Engines of a model whose tensors are whole blocks of 128 outputs, which share scales in memory: answers are those of
the dequantised numbers up to the order of sums, and alike to the bit wherever the codes come from."""

import dataclasses
import json
import logging
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oracles.families import CASES, Oracle
from routed_experts import Engine, WeightsMismatchError
from routed_experts.layers.quantized import QuantizedWeight
from routed_experts.models.decoder.code_selection import CodeSupport
from routed_experts.models.model_folder import ModelFolder
from support.quantized_checkpoints import (
    PROJECTIONS,
    Form,
    compressed_config,
    forms,
    fp8,
    quantize_folder,
    read_tensors,
    write_folder,
)
from support.quantized_families import ENGINE, Written, answers, assert_near

pytestmark = pytest.mark.usefixtures("fast_compilation", "lazy_compilation")

SIZES = dict(
    num_hidden_layers=2,
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    moe_intermediate_size=128,
    intermediate_size=384,
    mlp_only_layers=[0],
)
FLOAT32 = dict(dtype="float32", **ENGINE)
ARRAY_CODE = dict(moe_backend="tiled", attention_backend="paged", **FLOAT32)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    case = CASES["Qwen3Moe"]
    oracle = Oracle(dataclasses.replace(case, config=case.config | SIZES, layer_ids=(1,)), folder / "plain")
    small, copy = folder / "small", folder / "copy"
    names = quantize_folder(oracle.folder, small, copy, forms()["fp8 blocks"], chosen=PROJECTIONS.fullmatch)
    return Written(oracle, small, copy, names)


@pytest.fixture(scope="module")
def expected(qwen):
    """What the numbers answer."""
    with Engine(str(qwen.copy), **ARRAY_CODE) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def served(qwen):
    with Engine(str(qwen.quantized), **ARRAY_CODE) as engine:
        yield engine


@pytest.fixture(scope="module")
def codes(served):
    return answers(served)


def support(**options):
    return CodeSupport(formats=frozenset({"e4m3"}), spans=(128, 1), **options)


def scales_of(engine):
    """Shapes of the scales of an engine's codes, by the name of these."""
    flat = nnx.to_flat_state(engine.components.served.arrays)
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in flat}
    return {name.removesuffix("_scale"): shape for name, shape in shapes.items() if name.endswith("_scale")}


def test_array_code_answers_as_the_numbers_with_a_scale_a_block(qwen, served, codes, expected):
    assert_near(codes, expected)
    shapes = scales_of(served)
    assert shapes["blocks.1.0.gate_up"] == (CASES["Qwen3Moe"].config["num_experts"], 2, 2)
    assert shapes["blocks.1.0.qkv"] == (1, 2, 8) and shapes["blocks.0.0.dense_down"] == (1, 3, 2)
    stored = read_tensors(qwen.quantized)
    loaded = ModelFolder.open(qwen.quantized).with_codes(support()).load(jnp.dtype("float32"))
    of_expert = loaded.blocks[1][0]["gate_up_scale"][...][3]
    for index, projection in enumerate(("gate_proj", "up_proj")):
        tensor = stored[f"model.layers.1.mlp.experts.3.{projection}.weight_scale_inv"]
        assert np.array_equal(of_expert[:, index : index + 1], tensor.T)


def test_native_kernels_answer_as_the_numbers(qwen, expected):
    with Engine(str(qwen.quantized), moe_backend="native", **FLOAT32) as engine:
        assert scales_of(engine)["blocks.1.0.down"][-1] == 2
        assert_near(answers(engine), expected)


def test_codes_are_the_same_from_wherever_they_come(qwen, served, codes):
    """Of the checkpoint, of the plain one as it is loaded, and of pushes of plain weights, of codes and of a folder."""
    plain = nnx.state(ModelFolder.open(qwen.oracle.folder).load(jnp.dtype("float32")))
    with Engine(str(qwen.oracle.folder), quantization="fp8_block", **ARRAY_CODE) as engine:
        assert scales_of(engine) == scales_of(served)
        assert answers(engine) == codes
    stored = nnx.state(ModelFolder.open(qwen.quantized).with_codes(support()).load(jnp.dtype("float32")))
    for push in (plain, stored):
        served.update_weights(nnx.state(ModelFolder.open(qwen.copy).load(jnp.dtype("float32"))))
        served.update_weights(push)
        assert answers(served) == codes
    for folder in (qwen.oracle.folder, qwen.quantized):
        served.update_weights_from_disk(folder)
        assert answers(served) == codes


def test_scales_by_output_are_refused_where_outputs_share_them(qwen, served, codes):
    by_output = CodeSupport(formats=frozenset({"e4m3"}))
    stored = nnx.state(ModelFolder.open(qwen.quantized).with_codes(by_output).load(jnp.dtype("float32")))
    with pytest.raises(WeightsMismatchError, match=r"qkv_scale: .*1024.*\[1, 2, 8\]"):
        served.update_weights(stored)
    assert answers(served) == codes


def test_codes_with_a_scale_a_channel_are_quantised_again_where_blocks_are_served(
    qwen, served, codes, tmp_path, caplog
):
    channel, copy = tmp_path / "channel", tmp_path / "copy"
    quantize_folder(qwen.oracle.folder, channel, copy, forms()["float channel"], chosen=PROJECTIONS.fullmatch)
    with Engine(str(copy), quantization="fp8_block", **ARRAY_CODE) as engine:
        expected = answers(engine)
    with caplog.at_level(logging.WARNING):
        served.update_weights_from_disk(channel)
    assert answers(served) == expected != codes
    assert "are codes, but not in the blocks that are served: they are quantised again" in caplog.text
    served.update_weights_from_disk(qwen.quantized)
    assert answers(served) == codes


def test_tensors_of_one_array_with_and_without_blocks_have_a_scale_for_each_output(qwen, tmp_path):
    """k_proj and gate_proj by channel, which are not last in their arrays, beside blocks."""
    blocks = Form(
        compressed_config("float-quantized", strategy="block", block_structure=[128, 128]),
        lambda weights: fp8(weights, scale="bfloat16", end="weight_scale"),
    )
    folders = {name: (tmp_path / name, tmp_path / f"{name} copy") for name in ("blocks", "channel")}
    for name, form in (("blocks", blocks), ("channel", forms()["float channel"])):
        quantize_folder(qwen.oracle.folder, *folders[name], form, chosen=PROJECTIONS.fullmatch)
    is_channel = re.compile(r".*(k_proj|gate_proj)\..*").fullmatch
    mixed = []
    for own, others in zip(folders["blocks"], folders["channel"], strict=True):
        tensors, by_channel = read_tensors(own), read_tensors(others)
        config = json.loads((own / "config.json").read_text())
        if "quantization_config" in config:
            groups = config["quantization_config"]["config_groups"]
            other = json.loads((others / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
            groups["group_1"] = groups.pop("group_0") | {"targets": [r"re:.*(q_proj|v_proj|o_proj|up_proj|down_proj)$"]}
            groups["group_0"] = other | {"targets": [r"re:.*(k_proj|gate_proj)$"]}
        chosen = {name: (by_channel if is_channel(name) else tensors)[name] for name in tensors}
        mixed.append(write_folder(tmp_path / f"mixed {own.name}", config, chosen))
    with Engine(str(mixed[1]), **ARRAY_CODE) as engine:
        expected = answers(engine)
    with Engine(str(mixed[0]), **ARRAY_CODE) as engine:
        shapes = scales_of(engine)
        assert shapes["blocks.1.0.qkv"][-1] == 1024 and shapes["blocks.1.0.gate_up"][-1] == 256
        assert shapes["blocks.1.0.out"][-1] == shapes["blocks.1.0.down"][-1] == 2
        assert_near(answers(engine), expected)


def test_random_weights_have_scales_of_spans(qwen):
    folder = ModelFolder.open(qwen.oracle.folder, load_format="dummy").with_codes(support(quantizes=True))
    arrays = folder.load(jnp.dtype("float32")).blocks[1][0]
    qkv = QuantizedWeight.create(arrays["qkv"][...], arrays["qkv_scale"][...])
    assert qkv.span == 128 and np.std(qkv.dequantize()) == pytest.approx(256**-0.5, rel=0.1)


@pytest.mark.devices(4)
def test_a_tensor_of_q_k_and_v_is_cut_between_its_parts(tmp_path):
    """Of 64, 32 and 32 outputs, together a span, in two data ranks of one device each; experts are whole."""
    oracle = Oracle(CASES["BailingMoeV2"], tmp_path / "plain")
    options = dict(quantization="fp8_block", **ARRAY_CODE)
    with Engine(str(oracle.folder), **options) as engine:
        expected = answers(engine)
    with Engine(str(oracle.folder), tp_size=2, dp_size=2, ep_size=2, **options) as engine:
        assert_near(answers(engine), expected)


@pytest.mark.devices(4)
@pytest.mark.parametrize(("tp_size", "ep_size", "spans"), [(2, 1, {"qkv": 8, "gate_up": 256}), (2, 2, {"gate_up": 2})])
def test_shards_answer_as_the_numbers(qwen, expected, tp_size, ep_size, spans):
    """A device's part of the experts' width, 64 outputs of each tensor, cuts a block; whole experts do not."""
    with Engine(str(qwen.quantized), tp_size=tp_size, ep_size=ep_size, **ARRAY_CODE) as engine:
        shapes = scales_of(engine)
        assert {name: shapes[f"blocks.1.0.{name}"][-1] for name in spans} == spans
        assert_near(answers(engine), expected)
        of_checkpoint = answers(engine)
        engine.update_weights(nnx.state(ModelFolder.open(qwen.oracle.folder).load(jnp.dtype("float32"))))
        assert answers(engine) == of_checkpoint
        engine.update_weights_from_disk(qwen.copy)  # numbers, which are quantised part by part
        engine.update_weights_from_disk(qwen.oracle.folder)
        assert answers(engine) == of_checkpoint
