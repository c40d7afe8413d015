"""Writes quantised checkpoints with NumPy alone, in the bytes of published ones, and the same weights dequantised.

A plain folder goes in. Each chosen matrix is quantised; its exact numbers, worked out in float64 and rounded once to
float32, go to the plain copy. Nothing of the package's reader is used.

Dims: O outputs, I inputs, R x C a block, G a group of inputs."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

E4M3 = ml_dtypes.float8_e4m3fn
PROJECTIONS = re.compile(r".*_proj(_with_mqa)?\.weight|.*\.w[123]\.weight")  # what published checkpoints quantise


@dataclass
class Quantized:
    """Tensors that replace one matrix, by the end of their names behind the module, and its numbers, float32."""

    stored: dict
    numbers: np.ndarray


def grid_of(shape, block):
    return tuple(math.ceil(size / (side or size)) for size, side in zip(shape, block, strict=True))


def exact(codes, scales, block, zeros=None, groups=None):
    """The law in float64, rounded once: a product of two float32 numbers is exact in float64."""
    rows, columns = codes.shape
    at = np.arange(rows) // (block[0] or rows)
    by = np.arange(columns) // (block[1] or columns) if groups is None else groups
    wide = codes.astype(np.float64) - (0 if zeros is None else zeros.astype(np.float64)[at][:, by])
    return (wide * scales.astype(np.float64)[at][:, by]).astype(np.float32)


def block_peaks(weights, block):
    """The largest absolute value of each block."""
    grid = grid_of(weights.shape, block)
    at = np.arange(weights.shape[0]) // (block[0] or weights.shape[0])
    by = np.arange(weights.shape[1]) // (block[1] or weights.shape[1])
    peaks = np.zeros(grid, np.float32)
    np.maximum.at(peaks, (at[:, None], by[None]), np.abs(weights))
    return np.where(peaks == 0, 1, peaks), at, by


def fp8(weights, block=(128, 128), *, scale="float32", end="weight_scale_inv", scalar=None):
    """float8 codes; `scale`: a dtype, "e8m0" or "u8" for powers of two. `scalar`: the shape of a single scale."""
    peaks, at, by = block_peaks(weights, block)
    scales = (peaks / 448).astype(np.float32)
    if scale in ("e8m0", "u8"):
        exponents = np.ceil(np.log2(scales)).astype(np.int32)
        scales, stored = np.ldexp(np.float32(1), exponents), (exponents + 127).astype(np.uint8)
        stored = stored.view(ml_dtypes.float8_e8m0fnu) if scale == "e8m0" else stored
    else:
        stored = scales.astype(np.dtype(getattr(ml_dtypes, scale, scale)))
        scales = stored.astype(np.float32)
    codes = np.clip(weights / scales[at][:, by], -448, 448).astype(E4M3)
    numbers = exact(codes.astype(np.float32), scales, block)
    return Quantized({"weight": codes, end: stored if scalar is None else stored.reshape(scalar)}, numbers)


def pack(integers, bits):
    """int32 words of a row, each number plus 2^(bits - 1), the lowest bits first; loops, as the format is told."""
    rows, columns = integers.shape
    count = 32 // bits
    words = np.zeros((rows, math.ceil(columns / count)), np.uint32)
    for column in range(columns):
        unsigned = (integers[:, column].astype(np.int64) + (1 << (bits - 1))).astype(np.uint32)
        words[:, column // count] |= unsigned << np.uint32(bits * (column % count))
    return words.view(np.int32)


def integers(weights, bits, group, *, scale="bfloat16", symmetric=True, permuted=False, packed=True, rng=None):
    """4 or 8 bits with a scale a group of inputs (0: a channel)."""
    outputs, inputs = weights.shape
    size = group or inputs
    groups = np.arange(inputs) // size
    if permuted:
        groups = rng.permutation(groups)
    low = np.full((outputs, math.ceil(inputs / size)), np.inf, np.float32)
    high = -low
    for number in range(low.shape[1]):
        low[:, number] = weights[:, groups == number].min(axis=1)
        high[:, number] = weights[:, groups == number].max(axis=1)
    half, dtype = 1 << (bits - 1), np.dtype(getattr(ml_dtypes, scale, scale))
    if symmetric:
        scales, zeros = np.maximum(np.abs(low), np.abs(high)) / (half - 0.5), None
    else:
        scales = (np.maximum(high, 0) - np.minimum(low, 0)) / (2 * half - 1)
    scales = np.where(scales == 0, 1, scales).astype(dtype)
    wide = scales.astype(np.float32)
    if not symmetric:
        zeros = np.clip(np.rint(-half - np.minimum(low, 0) / wide), -half, half - 1).astype(np.int8)
    shift = 0 if zeros is None else zeros[:, groups].astype(np.float32)
    codes = np.clip(np.rint(weights / wide[:, groups]) + shift, -half, half - 1).astype(np.int8)
    numbers = exact(codes, wide, (1, size), zeros, groups)
    stored = {"weight_scale": scales}
    if packed:
        stored |= {"weight_packed": pack(codes, bits), "weight_shape": np.array([outputs, inputs], np.int64)}
    else:
        stored["weight"] = codes
    if zeros is not None:
        stored["weight_zero_point"] = np.ascontiguousarray(pack(zeros.T, bits).T) if packed else zeros
    if permuted:
        stored["weight_g_idx"] = groups.astype(np.int32)
    return Quantized(stored, numbers)


def integers_of_a_tensor(weights, bits, *, zero_shape=(1,), packed):
    """4 or 8 bits with one scale, bfloat16 [1], and one zero point, int8 of `zero_shape`, for all numbers."""
    half, low, high = 1 << (bits - 1), min(float(weights.min()), 0), max(float(weights.max()), 0)
    scale = np.array([(high - low) / (2 * half - 1) or 1], ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(-half - low / wide), -half, half - 1).astype(np.int8)
    codes = np.clip(np.rint(weights / wide) + zero.astype(np.float32), -half, half - 1).astype(np.int8)
    stored = {"weight_scale": scale, "weight_zero_point": zero.reshape(zero_shape)}
    if packed:
        stored |= {"weight_packed": pack(codes, bits), "weight_shape": np.array(weights.shape, np.int64)}
    else:
        stored["weight"] = codes
    return Quantized(stored, exact(codes, wide[None], (0, 0), zero[None]))


def fp8_config(block=(128, 128), **more):
    return (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        | ({"weight_block_size": list(block)} if block else {})
        | more
    )


def compressed_config(form, *, ignore=("lm_head", r"re:.*\.gate$"), targets=("Linear",), **weights):
    """quantization_config of compressed-tensors with one group."""
    kind = "float" if form == "float-quantized" else "int"
    scheme = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False, "observer": "minmax"} | weights
    group = {"targets": list(targets), "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


@dataclass
class Form:
    """One published form: its config and the writer of a matrix."""

    config: dict
    write: object
    described: str = ""
    extra: dict = field(default_factory=dict)


def forms():
    """Every form that is read, by name."""
    rng = np.random.default_rng(11)
    return {
        "fp8 blocks": Form(fp8_config(), fp8, "fp8 (blocks 128 x 128)"),
        "fp8 ue8m0": Form(fp8_config(scale_fmt="ue8m0"), lambda w: fp8(w, scale="u8"), "fp8 (blocks 128 x 128)"),
        "fp8 e8m0": Form(
            fp8_config(scale_fmt="ue8m0"), lambda w: fp8(w, scale="e8m0", end="scale"), "fp8 (blocks 128 x 128)"
        ),
        "fp8 tensor": Form(
            fp8_config(None, activation_scheme="static"),
            lambda w: fp8(w, (0, 0), end="weight_scale", scalar=()),
            "fp8 (a scale a tensor)",
            {"input_scale": np.float32(0.5).reshape(())},
        ),
        "fp8 of a module": Form(  # Mistral's names, behind that of the module
            fp8_config(None, activation_scheme="static"),
            lambda w: fp8(w, (0, 0), scale="bfloat16", end="qscale_weight", scalar=()),
            "fp8 (a scale a tensor)",
            {"qscale_act": np.float32(0.5).reshape(())},
        ),
        "float channel": Form(
            compressed_config("float-quantized", strategy="channel"),
            lambda w: fp8(w, (1, 0), scale="bfloat16", end="weight_scale"),
            "fp8 (a scale a channel)",
        ),
        "float block": Form(
            compressed_config("float-quantized", strategy="block", block_structure=[128, 128]),
            lambda w: fp8(w, scale="bfloat16", end="weight_scale"),
            "fp8 (blocks 128 x 128)",
        ),
        "int4": Form(
            compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32),
            lambda w: integers(w, 4, 32),
            "int4 (groups of 32)",
        ),
        "int4 asymmetric, permuted": Form(
            compressed_config(
                "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False, actorder="group"
            ),
            lambda w: integers(w, 4, 32, scale="float16", symmetric=False, permuted=True, rng=rng),
            "int4 (groups of 32)",
        ),
        "float naive": Form(
            compressed_config("naive-quantized", type="float", strategy="tensor"),
            lambda w: fp8(w, (0, 0), scale="bfloat16", end="weight_scale", scalar=(1,)),
            "fp8 (a scale a tensor)",
        ),
        "packed int8": Form(
            compressed_config("pack-quantized", num_bits=8, strategy="channel"),
            lambda w: integers(w, 8, 0),
            "int8 (a scale a channel)",
        ),
        "int8": Form(
            compressed_config("int-quantized", num_bits=8, strategy="channel"),
            lambda w: integers(w, 8, 0, packed=False),
            "int8 (a scale a channel)",
        ),
        "int8 groups": Form(
            compressed_config("int-quantized", num_bits=8, strategy="group", group_size=32, symmetric=False),
            lambda w: integers(w, 8, 32, symmetric=False, packed=False),
            "int8 (groups of 32)",
        ),
    }


def mxfp4(weights):
    """Blocks [E, O, B, 16] and exponents [E, O, B] of experts [E, I, O], and their numbers, float32."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    experts, inputs, outputs = weights.shape
    rows = np.swapaxes(weights, 1, 2).reshape(experts, outputs, inputs // 32, 32)
    exponents = np.ceil(np.log2(np.maximum(np.abs(rows).max(-1), 2.0**-100) / 6)).astype(np.int32)
    sizes = np.ldexp(np.float32(1), exponents)[..., None]
    codes = np.abs(rows[..., None] / sizes[..., None] - grid).argmin(-1)
    numbers = np.swapaxes((grid[codes] * sizes).reshape(experts, outputs, inputs), 1, 2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return blocks, (exponents + 127).astype(np.uint8), np.ascontiguousarray(numbers)


def mxfp4_folder(plain, quantized, copy):
    """Write the folder `plain` of GPT-OSS with experts of MXFP4, and its dequantised `copy`. Returns their names."""
    tensors = load_file(Path(plain) / "model.safetensors")
    config = json.loads((Path(plain) / "config.json").read_text())
    names = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    stored, numbers = dict(tensors), dict(tensors)
    for name in names:
        blocks, scales, numbers[name] = mxfp4(stored.pop(name).astype(np.float32))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write_folder(quantized, config | {"quantization_config": {"quant_method": "mxfp4"}}, stored)
    write_folder(copy, config, numbers)
    return names


def quantize_folder(plain, quantized, copy, form, *, chosen=PROJECTIONS.fullmatch):
    """Write the folder `plain` quantised, and its dequantised `copy` of float32. Returns the names quantised."""
    tensors = load_file(Path(plain) / "model.safetensors")
    config = json.loads((Path(plain) / "config.json").read_text())
    stored, numbers, names = {}, {}, []
    for name, tensor in tensors.items():
        if chosen(name) and tensor.ndim == 2:
            written, module = form.write(tensor.astype(np.float32)), name.removesuffix(".weight")
            stored |= {f"{module}.{end}": array for end, array in (written.stored | form.extra).items()}
            numbers[name] = written.numbers
            names.append(name)
        else:
            stored[name] = numbers[name] = tensor
    write_folder(quantized, config | {"quantization_config": form.config}, stored)
    write_folder(copy, config, numbers)
    return names


def write_folder(folder, config, tensors):
    Path(folder).mkdir(parents=True, exist_ok=True)
    whole = {name: np.require(tensor, requirements="C") for name, tensor in tensors.items()}
    save_file(whole, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return Path(folder)


def rewrite_folder(folder, target, tensors, **quantization):
    """Write `folder` once more, as `target`, with these tensors beside or in place of its own, and these keys of
    quantization_config."""
    config = json.loads((Path(folder) / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | quantization
    return write_folder(target, config, read_tensors(folder) | tensors)


def read_tensors(folder):
    """Every tensor of model.safetensors, float8 among them, which safetensors' reader for NumPy lacks."""
    content = (Path(folder) / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, start = json.loads(content[8 : 8 + size]), 8 + size
    names = {"F8_E4M3": E4M3, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "BF16": ml_dtypes.bfloat16}
    names |= {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            flat = np.frombuffer(content[start + first : start + end], names[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"]).copy()
    return tensors
