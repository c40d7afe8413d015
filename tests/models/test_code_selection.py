"""Which matrices are codes: by the kernels' formats, the checkpoint's scales, cuts between devices, and stacks."""

import dataclasses
import json
import logging
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from oracles.families import Oracle
from routed_experts.engine.build.backends import KERNELS
from routed_experts.layers.quantized import CODE_DTYPES, E4M3, QuantizedWeight, packed_run
from routed_experts.layers.tpu.backends import tpu_kernels
from routed_experts.models.base.partitioning import ParallelConfig
from routed_experts.models.decoder.code_selection import NO_CODES, CodeSupport, fit_stacks, without_codes
from routed_experts.models.decoder.layer_regrouping import regroup
from routed_experts.models.model_folder import ModelFolder
from support.quantized_checkpoints import forms, quantize_folder, read_tensors, rewrite_folder, write_folder
from support.quantized_families import FAMILIES, GPT_OSS, sized_case, write

DENSE = ("qkv", "out", "dense_gate_up", "dense_down")
SPARSE = ("qkv", "out", "gate_up", "down")
ALL = [*(f"blocks.0.0.{name}" for name in DENSE), *(f"blocks.1.0.{name}" for name in SPARSE)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write(tmp_path_factory.mktemp("qwen"), "Qwen3-MoE", "fp8 blocks")


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    return write(tmp_path_factory.mktemp("int4"), "Qwen3-MoE", "int4")


def support(**options):
    return CodeSupport(formats=frozenset({E4M3}), **options)


def test_kernels_without_the_format_get_numbers(qwen):
    folder = ModelFolder.open(qwen.quantized)
    assert folder.with_codes(NO_CODES) == folder
    assert not folder.with_codes(NO_CODES).config.coded_arrays


def test_all_matrices_of_layers_are_codes_and_nothing_else(qwen):
    folder = ModelFolder.open(qwen.quantized).with_codes(support())
    assert sorted(folder.config.coded_arrays) == sorted(ALL)
    assert without_codes(folder.config) == ModelFolder.open(qwen.copy).config
    shapes = folder.shapes(jnp.dtype("bfloat16"))
    plain = ModelFolder.open(qwen.copy).shapes(jnp.dtype("bfloat16"))
    for name in ALL:
        _, block, kind, last = name.split(".")
        own, numbers = shapes["blocks"][int(block)][int(kind)], plain["blocks"][int(block)][int(kind)]
        assert own[last].shape == numbers[last].shape and own[last].dtype == jnp.float8_e4m3fn
        *lead, inputs, outputs = own[last].shape
        assert own[f"{last}_scale"].shape == (*lead, -(-inputs // 128), outputs)


def test_codes_of_the_checkpoints_order_have_their_last_axes_swapped(qwen):
    folder = ModelFolder.open(qwen.quantized)
    ours, stored = (folder.with_codes(support(outputs_first=first)) for first in (False, True))
    ours, stored = (one.load(jnp.dtype("bfloat16")) for one in (ours, stored))
    for block, names in ((0, DENSE), (1, SPARSE)):
        for name in names:
            left, right = ours.blocks[block][0], stored.blocks[block][0]
            assert (left[name][...].view(jnp.uint8) == right[name][...].view(jnp.uint8).swapaxes(1, 2)).all()
            assert (left[f"{name}_scale"][...] == right[f"{name}_scale"][...]).all()


@pytest.mark.parametrize("devices", [2, 4])
def test_a_cut_of_the_inputs_makes_groups_smaller_and_too_small_ones_numbers(qwen, devices):
    config = ModelFolder.open(qwen.quantized).with_codes(support(parallel=ParallelConfig(devices))).config
    groups = {array.name: array.group for layer in config.layers for array in layer.coded}
    for name, shape in (("out", config.layers[1].mixer), ("down", config.layers[1].feed)):
        inputs = shape.num_heads * shape.head_dim if name == "out" else shape.width
        cut = inputs // devices
        largest = max(group for group in (128, 64, 32, 16) if cut % group == 0)
        assert groups[name] == largest, (name, cut)
    assert groups["qkv"] == groups["gate_up"] == 128
    whole = ParallelConfig(devices, expert_parallel=True)
    groups = {
        array.name: array.group
        for layer in ModelFolder.open(qwen.quantized).with_codes(support(parallel=whole)).config.layers
        for array in layer.coded
    }
    assert groups["down"] == 128, "whole experts are not cut"


WIDE = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
WIDE |= dict(moe_intermediate_size=128, intermediate_size=384, mlp_only_layers=[0])


def spans(folder, **options):
    """By name, where the kernels read spans of 128 outputs."""
    config = ModelFolder.open(folder).with_codes(support(spans=(128, 1), **options)).config
    return {name.split(".", 1)[1]: array.span for name, array in config.coded_arrays.items()}


@pytest.mark.parametrize(("form", "shared"), [("fp8 blocks", 128), ("fp8 tensor", 128), ("float channel", 1)])
def test_outputs_share_scales_where_each_tensor_has_them_so(tmp_path, form, shared):
    Oracle(sized_case("Qwen3Moe", WIDE), tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "small", tmp_path / "copy", forms()[form])
    actual = spans(tmp_path / "small")
    assert len(actual) == len(ALL) and set(actual.values()) == {shared}
    for parallel, own in ((ParallelConfig(2), ("out", "down", "dense_down", "qkv")), (ParallelConfig(4), ("out",))):
        cut = spans(tmp_path / "small", parallel=parallel)
        assert {cut[name] for name in cut if name.rsplit(".", 1)[-1] in own} == {shared}
        assert cut["1.0.gate_up"] == 1, "a device has 64 or 32 outputs of each tensor"
    config = ModelFolder.open(tmp_path / "small").with_codes(support()).config
    assert {array.span for array in config.coded_arrays.values()} == {1}, "these kernels read no spans"


def test_tensors_that_end_inside_a_span_have_a_scale_for_each_output(qwen):
    actual = spans(qwen.quantized)  # of 192, 320 and fewer outputs
    assert set(actual.values()) == {1}


def test_stacks_that_kernels_do_not_read_are_numbers(qwen, caplog):
    """The experts of a layer together, and only they."""
    config = ModelFolder.open(qwen.quantized).config
    codes = 2 * config.layers[1].feed.width * config.hidden_size * 16  # of gate and up
    with caplog.at_level(logging.WARNING):
        retained = ModelFolder.open(qwen.quantized).with_codes(support(stack_fits=lambda count: count != codes)).config
    assert sorted(retained.coded_arrays) == sorted(set(ALL) - {"blocks.1.0.gate_up", "blocks.1.0.down"})
    assert "['down', 'gate_up'] of layers 1 to 1 are dequantised" in caplog.text
    halved = support(stack_fits=lambda count: count != codes, parallel=ParallelConfig(2, expert_parallel=True))
    assert "blocks.1.0.down" in ModelFolder.open(qwen.quantized).with_codes(halved).config.coded_arrays


def test_a_block_is_cut_where_its_stacks_are_too_large_together(tmp_path):
    """A load fills all of them with what is in one block otherwise."""
    name, sizes, _ = FAMILIES["Qwen3-MoE"]
    case = dataclasses.replace(sized_case(name, sizes | {"num_hidden_layers": 6}), layer_ids=(1, 2, 3, 4, 5))
    oracle = Oracle(case, tmp_path / "plain")
    quantize_folder(oracle.folder, tmp_path / "small", tmp_path / "copy", forms()["fp8 blocks"])
    folder = ModelFolder.open(tmp_path / "small")
    _, sparse = folder.config.blocks
    assert sparse.repeats == 5
    codes = 2 * sparse.pattern[0].feed.width * folder.config.hidden_size * 16  # of gate and up of a layer
    cut, whole = (
        folder.with_codes(support(stack_fits=lambda size, most=most: size <= most * codes)) for most in (2, 5)
    )
    assert [(run.first, run.repeats) for run in cut.config.blocks] == [(0, 1), (1, 2), (3, 2), (5, 1)]
    assert [run.repeats for run in whole.config.blocks] == [1, 5]
    assert all(len(layer.coded) == 4 for layer in cut.config.layers)
    assert without_codes(cut.config) == folder.config, "a trainer's module has them in one block"
    parts, stacks = (
        {
            ".".join(map(str, path)): leaf[...]
            for path, leaf in nnx.to_flat_state(nnx.state(one.load(jnp.dtype("float32"))))
        }
        for one in (cut, whole)
    )
    regrouped = regroup(stacks, whole.config, cut.config)
    assert regrouped.keys() == parts.keys() and len(parts) > len(stacks)
    for path, array in parts.items():
        assert (array.astype(jnp.float32) == regrouped[path].astype(jnp.float32)).all(), path


RUNS = dict(formats=frozenset(CODE_DTYPES), outputs_first=True, runs=(64, 32, 16))


@pytest.mark.parametrize("parallel", [ParallelConfig(1), ParallelConfig(2), ParallelConfig(4)], ids=["1", "2", "4"])
def test_runs_of_codes_of_4_bits_are_whole_on_each_device(int4, parallel):
    """The longest that the inputs of a device, and the group, hold; where none is, numbers."""
    folder = ModelFolder.open(int4.quantized).with_codes(CodeSupport(**RUNS, parallel=parallel))
    layer = folder.config.layers[1]
    runs = {array.name: (array.group, array.run) for array in layer.coded}
    width, heads = layer.feed.width, layer.mixer.num_heads * layer.mixer.head_dim
    for name, inputs in (
        ("qkv", folder.config.hidden_size),
        ("gate_up", folder.config.hidden_size),
        ("out", heads // parallel.tensor),
        ("down", width // parallel.tensor),
    ):
        group = math.gcd(32, inputs)
        fits = [run for run in (64, 32, 16) if group % run == 0 and inputs % (2 * run) == 0] if group >= 16 else []
        if name in ("gate_up", "down") and not {"gate_up", "down"} <= runs.keys():
            assert name not in runs, "experts are codes together"
            continue
        assert runs.get(name) == ((group, fits[0]) if fits else None), (name, inputs)


def test_a_large_stack_is_cut_beside_experts_that_no_cut_helps(qwen):
    """Experts are dequantised where one layer is too large, and `fit_stacks` then looks again at all other stacks."""
    config = ModelFolder.open(qwen.quantized).with_codes(support()).config
    sparse = config.layers[1]
    config = dataclasses.replace(config, layers=(sparse,) * 6)
    own = {spec.name: math.prod(spec.shape) for spec in sparse.weights(config)}
    qkv, experts = own["qkv"], own["gate_up"]
    sizes = {count * qkv for count in range(3, 7)} | {count * experts for count in range(1, 7)}
    assert sizes.isdisjoint(count * own[name] for count in (1, 2) for name in ("qkv", "out"))
    cut = fit_stacks(config, support(stack_fits=lambda size: size not in sizes))
    assert [run.repeats for run in cut.blocks] == [2, 2, 2]
    names = {array.name for layer in cut.layers for array in layer.coded}
    assert "qkv" in names and not names & {"gate_up", "down"}
    assert fit_stacks(cut, support()) == cut, "a limit that is set stays"


@pytest.mark.parametrize("group", [128, 64, 32, 16])
def test_a_kernel_finds_the_run_that_the_loader_chose(group):
    """From the shapes of a device's arrays alone, for all inputs and numbers of devices."""
    runs = (64, 32, 16)
    for inputs in range(group, 1600, 16):
        for devices in (1, 2, 3, 4, 8):
            own = inputs // devices
            if inputs % devices or own % 2 or (common := math.gcd(group, own) if devices > 1 else group) < 16:
                continue
            chosen = packed_run(math.gcd(inputs, own), common, runs)
            if chosen is None:
                continue
            codes, scales = jnp.zeros((1, 1, own // 2), jnp.int8), jnp.zeros((1, math.ceil(own / common), 1))
            assert QuantizedWeight.create(codes, scales, outputs_first=True, runs=runs).run == chosen, (inputs, devices)


def test_codes_in_runs_are_loaded_as_the_same_numbers(int4):
    folders = [ModelFolder.open(int4.quantized).with_codes(CodeSupport(**RUNS)), ModelFolder.open(int4.copy)]
    coded, plain = (folder.load(jnp.dtype("float32")) for folder in folders)
    for array in folders[0].config.layers[1].coded:
        arrays = {name: coded.blocks[1][0][name][...] for name in (array.name, f"{array.name}_scale")}
        weight = QuantizedWeight.create(*arrays.values(), outputs_first=True, runs=RUNS["runs"])
        assert weight.run == array.run > 1
        numbers = plain.blocks[1][0][array.name][...]
        assert (weight.dequantize() == numbers.reshape(weight.shape)).all(), array.name


@pytest.fixture(scope="module")
def int4_of_scales(int4, tmp_path_factory):
    """By dtype, the checkpoint of codes of 4 bits with scales of that dtype; "mixed" has one tensor in float32."""
    tensors, folders = read_tensors(int4.quantized), {}
    scales = [name for name in tensors if name.endswith(".weight_scale")]
    assert all(tensors[name].dtype == ml_dtypes.bfloat16 for name in scales)
    for dtype, names in (("float32", scales), ("float16", scales), ("mixed", ["model.layers.1.mlp.experts.3.up_proj"])):
        cast = np.float16 if dtype == "float16" else np.float32
        changed = {name: tensors[name].astype(cast) for name in scales if any(name.startswith(own) for own in names)}
        assert changed
        folders[dtype] = rewrite_folder(int4.quantized, tmp_path_factory.mktemp(dtype) / "folder", changed)
    return {"bfloat16": int4.quantized, **folders}


@pytest.mark.parametrize("stored", ["bfloat16", "float32", "float16", "mixed"])
def test_scales_of_codes_of_4_bits_are_kept_in_bfloat16_where_all_are_stored_in_it(int4_of_scales, stored):
    folder = ModelFolder.open(int4_of_scales[stored])
    short, wide = (folder.with_codes(CodeSupport(**RUNS, takes_bf16_scales=reads)) for reads in (True, False))
    model, expected = (own.load(jnp.dtype("float32")) for own in (short, wide))
    for array in short.config.layers[1].coded:
        is_short = stored == "bfloat16" or (stored == "mixed" and array.name != "gate_up")
        own, other = (one.blocks[1][0][f"{array.name}_scale"][...] for one in (model, expected))
        assert own.dtype == (jnp.bfloat16 if is_short else jnp.float32) and other.dtype == jnp.float32, array.name
        assert (own.astype(jnp.float32) == other).all(), "exact"


def test_kernels_that_read_no_scales_of_bfloat16_get_float32(int4):
    """Those of a TPU, and array code, which would copy them."""
    for kernels in (tpu_kernels(), *(KERNELS[name].load() for name in ("tiled", "reference"))):
        assert not kernels.takes_bf16_scales, kernels.moe.name
    folder = ModelFolder.open(int4.quantized).with_codes(CodeSupport(**RUNS))
    assert {array.scale_dtype for array in folder.config.layers[1].coded} == {jnp.dtype(jnp.float32)}


def test_a_short_scale_takes_half_the_memory_and_a_subnormal_one_is_loaded(tmp_path):
    """2^-127 is subnormal in bfloat16, as in float32."""
    written = write(tmp_path, GPT_OSS)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    exponents = read_tensors(written.quantized)[name].copy()
    exponents[0, 0, 0] = 0
    folder = ModelFolder.open(rewrite_folder(written.quantized, tmp_path / "subnormal", {name: exponents}))
    sizes = {}
    for short in (True, False):
        own = folder.with_codes(CodeSupport(formats=frozenset(CODE_DTYPES), takes_bf16_scales=short))
        arrays = nnx.to_flat_state(nnx.state(own.load(jnp.dtype("float32"))))
        scales = [leaf[...] for path, leaf in arrays if path[-1] == "down_scale"]
        sizes[short] = sum(array.nbytes for array in scales)
        assert min(float(np.asarray(array).astype(np.float64).min()) for array in scales) == 2.0**-127
    assert sizes[False] == 2 * sizes[True] > 0


def test_powers_of_two_and_no_scales_of_e4m3_are_kept_in_bfloat16(tmp_path):
    support = CodeSupport(formats=frozenset(CODE_DTYPES), takes_bf16_scales=True)
    for family, form, dtype in ((GPT_OSS, None, "bfloat16"), ("Qwen3-MoE", "float channel", "float32")):
        written = write(tmp_path / family, family, form)
        folder = ModelFolder.open(written.quantized).with_codes(support)
        states = [folder.shapes(jnp.dtype("bfloat16"))]
        states += [nnx.state(own.load(jnp.dtype("float32"))) for own in (folder, ModelFolder.open(written.copy))]
        shapes, coded, plain = (
            {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)} for state in states
        )
        assert folder.config.coded_arrays
        for name in folder.config.coded_arrays:
            codes, scales = coded[name][...], coded[f"{name}_scale"][...]
            assert shapes[f"{name}_scale"].dtype == scales.dtype == dtype
            weight = QuantizedWeight.create(codes, scales)
            assert (weight.dequantize() == plain[name][...].reshape(weight.shape)).all(), "exact"


def test_experts_are_codes_together_or_not_at_all(qwen, tmp_path):
    """One plain tensor of a layer's experts makes all of them numbers."""
    tensors, copy = read_tensors(qwen.quantized), read_tensors(qwen.copy)
    name = "model.layers.1.mlp.experts.3.down_proj"
    del tensors[f"{name}.weight_scale_inv"]
    tensors[f"{name}.weight"] = copy[f"{name}.weight"]
    config = json.loads((qwen.quantized / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [name]
    folder = ModelFolder.open(write_folder(tmp_path / "mixed", config, tensors)).with_codes(support())
    assert sorted(folder.config.coded_arrays) == sorted(
        name for name in ALL if not name.endswith((".gate_up", ".1.0.down"))
    )
