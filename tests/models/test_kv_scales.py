"""Scales of keys and values as checkpoints publish them: which names are read, for which layers; what is refused."""

import json
import logging

import ml_dtypes
import numpy as np
import pytest

from routed_experts.core.errors import CheckpointError
from routed_experts.models.model_folder import ModelFolder
from support.family_folders import write_family
from support.quantized_checkpoints import (
    compressed_config,
    forms,
    quantize_folder,
    read_tensors,
    rewrite_folder,
    write_folder,
)
from support.tiny_checkpoint import write_tiny_checkpoint

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False, "group_size": None}
LAYERS = 4
AT = "model.layers.{}.self_attn.{}"
OLD = ("k_proj.output_scale", "v_proj.output_scale")


def scales_of(layers=range(LAYERS), *, names=("k_scale", "v_scale"), dtype="bfloat16", shape=(1,)):
    """Scales that bfloat16 holds, by tensor: 2^-6 of layer 0 upwards for keys, 3 * 2^-9 for values."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    pairs = {layer: (2.0 ** (layer - 6), 3 * 2.0 ** (layer - 9)) for layer in layers}
    return {
        AT.format(layer, name): np.full(shape, value, dtype)
        for layer, pair in pairs.items()
        for name, value in zip(names, pair, strict=True)
    }


EXPECTED = tuple((2.0 ** (layer - 6), 3 * 2.0 ** (layer - 9)) for layer in range(LAYERS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The tiny MoE by fp8 and by compressed-tensors."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path / "plain", tokenizer=False)
    for name in ("fp8 blocks", "float channel"):
        quantize_folder(path / "plain", path / name, path / "copy", forms()[name])
    return path


@pytest.fixture(params=["fp8 blocks", "float channel"])
def folder(request, folders):
    return folders / request.param


def opened(folder, tmp_path, tensors, scheme=SCHEME):
    more = {"kv_cache_scheme": scheme} if folder.name == "float channel" else {}
    return ModelFolder.open(rewrite_folder(folder, tmp_path / "scaled", tensors, **more))


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), OLD])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_published_names_shapes_and_dtypes_are_read(folder, tmp_path, names, dtype, shape):
    assert opened(folder, tmp_path, scales_of(names=names, dtype=dtype, shape=shape)).kv_scales() == (EXPECTED,)


def test_scales_are_no_tensors_of_the_model(folder, tmp_path):
    plain, scaled = ModelFolder.open(folder), opened(folder, tmp_path, scales_of())
    assert scaled.config == plain.config and scaled.sources == plain.sources
    assert scaled.checkpoint.names().keys() == plain.checkpoint.names().keys()
    assert plain.kv_scales() == ()


def test_a_checkpoint_whose_scales_are_1_has_none(folder, tmp_path):
    ones = {name: np.ones(1, np.float32) for name in scales_of()}
    assert opened(folder, tmp_path, ones).kv_scales() == ()


def test_layers_without_scales_have_1_and_are_counted(folder, tmp_path, caplog):
    scaled = opened(folder, tmp_path, scales_of([1, 3]))
    with caplog.at_level(logging.WARNING):
        assert scaled.kv_scales() == (((1.0, 1.0), EXPECTED[1], (1.0, 1.0), EXPECTED[3]),)
    assert "2 of 4 layers have scales" in caplog.text and "model.layers.0.self_attn, have scale 1" in caplog.text


def test_scales_of_queries_and_those_of_an_old_form_are_named_and_not_read(folder, tmp_path, caplog):
    old = {AT.format(layer, "kv_scale"): np.float32(0.5).reshape(1) for layer in range(LAYERS)}
    queries = {AT.format(layer, "q_scale"): np.float32(np.nan).reshape(1) for layer in range(LAYERS)}
    with caplog.at_level(logging.INFO):
        scaled = opened(folder, tmp_path, old | queries)
        assert "are read where kv_cache_dtype" not in caplog.text, "none of them is"
        assert scaled.kv_scales() == ()
        opened(folder, tmp_path / "read", scales_of() | queries)
    assert "8 scales of keys and values are read where kv_cache_dtype='fp8_e4m3'" in caplog.text
    assert "4 scales such as model.layers.0.self_attn.kv_scale are of an old form" in caplog.text


def test_a_checkpoint_may_quantise_keys_and_values_alone(tmp_path):
    write_tiny_checkpoint(tmp_path / "plain", tokenizer=False)
    config = compressed_config("float-quantized") | {"config_groups": {}, "kv_cache_scheme": SCHEME, "format": "dense"}
    tensors = read_tensors(tmp_path / "plain") | scales_of()
    own = json.loads((tmp_path / "plain" / "config.json").read_text())
    written = write_folder(tmp_path / "scaled", own | {"quantization_config": config}, tensors)
    folder = ModelFolder.open(written)
    assert folder.kv_scales() == (EXPECTED,)
    assert folder.stored_form(np.dtype("float32")) == (0, "")
    write_folder(tmp_path / "bare", own | {"quantization_config": config}, read_tensors(tmp_path / "plain"))
    with pytest.raises(CheckpointError, match="no tensor of the checkpoint is quantised"):
        ModelFolder.open(tmp_path / "bare")


@pytest.mark.parametrize("value", [0.0, -0.5, np.nan, np.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_that_is_not_finite_and_above_0_is_refused_by_name(folder, tmp_path, name, value):
    tensors = scales_of()
    tensors[AT.format(2, name)] = np.full(1, value, np.float32)
    message = rf"model\.layers\.2\.self_attn\.{name} holds {value}; expected a finite number above 0; .*kv_cache_dtype"
    with pytest.raises(CheckpointError, match=message):
        opened(folder, tmp_path, tensors).kv_scales()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_scale": None}, r"layers\.1\.self_attn\.k_scale is there alone; expected .*1\.self_attn\.v_scale"),
        ({"k_scale": None}, r"layers\.1\.self_attn\.v_scale is there alone; expected .*1\.self_attn\.k_scale"),
        ({"k_scale": np.ones((2, 1, 1), np.float32)}, r"k_scale is \[2, 1, 1\]; expected \[\] or \[1\]"),
        ({"v_scale": np.ones(2, np.float32)}, r"v_scale is \[2\]; expected \[\] or \[1\]"),
        ({"k_scale": np.ones(1, np.uint8)}, r"k_scale is U8; expected bfloat16 or float16 or float32"),
        (
            dict.fromkeys(OLD, np.ones(1, np.float32)),
            r"k_proj\.output_scale and .*k_scale both scale the keys of a layer; expected one of them",
        ),
    ],
)
def test_scales_that_are_not_one_number_a_layer_are_refused_by_name(folder, tmp_path, changes, message):
    tensors = scales_of()
    for name, tensor in changes.items():
        tensors[AT.format(1, name)] = tensor
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        opened(folder, tmp_path, tensors).kv_scales()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_bits", 4, "num_bits=4; expected 8"),
        ("type", "int", "type='int'; expected 'float'"),
        ("strategy", "attn_head", "strategy='attn_head'; expected 'tensor'"),
        ("strategy", "channel", "strategy='channel'; expected 'tensor'"),
        ("symmetric", False, "symmetric=False; expected true"),
        ("dynamic", True, "dynamic=True; expected false"),
    ],
)
def test_another_form_of_keys_and_values_is_refused_where_it_would_be_read(folders, tmp_path, key, value, message):
    folder = opened(folders / "float channel", tmp_path, scales_of(), SCHEME | {key: value})
    with pytest.raises(CheckpointError, match=f"kv_cache_scheme: {message}.*kv_cache_dtype left out"):
        folder.kv_scales()


def test_layers_with_a_state_have_no_scales(tmp_path):
    write_family(tmp_path / "plain", "qwen3-next")
    quantize_folder(tmp_path / "plain", tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    scaled = rewrite_folder(tmp_path / "small", tmp_path / "scaled", scales_of([1]))
    assert ModelFolder.open(scaled).kv_scales() == ((EXPECTED[1],),)


def test_layers_whose_rows_differ_in_shape_are_apart(tmp_path):
    """Of three layers the last two have rows of another shape."""
    write_family(tmp_path / "plain", "gemma4")
    quantize_folder(tmp_path / "plain", tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    stem = ModelFolder.open(tmp_path / "small").config.stem
    scales = {name.replace("model.", stem, 1): tensor for name, tensor in scales_of([0, 1, 2]).items()}
    scaled = rewrite_folder(tmp_path / "small", tmp_path / "scaled", scales)
    assert ModelFolder.open(scaled).kv_scales() == (EXPECTED[:1], EXPECTED[1:3])


def test_a_plain_checkpoint_with_scales_is_no_checkpoint_of_its_config(tmp_path):
    write_tiny_checkpoint(tmp_path / "plain", tokenizer=False)
    own = json.loads((tmp_path / "plain" / "config.json").read_text())
    write_folder(tmp_path / "scaled", own, read_tensors(tmp_path / "plain") | scales_of())
    with pytest.raises(CheckpointError, match=r"8 unexpected .*k_scale"):
        ModelFolder.open(tmp_path / "scaled")
