"""A quantised checkpoint shown as plain matrices: its headers are compared with its config, and each matrix that has
codes and scales becomes one virtual tensor.

A matrix is quantised where its codes and scales are there. What the config says of its module must agree. A matrix that
is plain although the config quantises its class is read as it is; one that the config targets by name is an error
(model_folder.py, which knows the model's matrices). All other faults that headers show are raised here, before any
weight is read.

    fp8                 X.weight, X.weight_scale_inv | X.weight_scale | X.scale | X.qscale_weight
    float, int codes    X.weight, X.weight_scale, X.weight_zero_point?
    packed              X.weight_packed, X.weight_scale, X.weight_shape, X.weight_zero_point?, X.weight_g_idx?"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from routed_experts.core.errors import CheckpointError
from routed_experts.layers.quantized import FLOAT32
from routed_experts.models.base.quantization_config import FP8, Codes, QuantizationConfig, StorageFormat
from routed_experts.models.loading.checkpoint import Checkpoint
from routed_experts.models.loading.kv_scales import is_kv_scale, is_read
from routed_experts.models.loading.quantized_tensors import QuantizedMatrix
from routed_experts.models.loading.virtual_tensors import (
    CodedTensor,
    ExactScales,
    Header,
    PackedRuns,
    VirtualCheckpoint,
    VirtualTensor,
)

logger = logging.getLogger(__name__)

_STORED: Mapping[Codes, str] = {Codes.E4M3: "F8_E4M3", Codes.INT8: "I8", Codes.PACKED: "I32"}
_FLOAT_SCALES = ("float32", "bfloat16", "float16")
_EXPONENTS = ("F8_E8M0", "U8")
_PACKED = ".weight_packed"
_SCALES = ("_scale_inv", "_scale")  # behind the name of the codes
_MODULE_SCALES = (".qscale_weight", ".scale")  # behind the name of the module
_ACTIVATIONS = (  # of products with quantised activations
    ".input_scale .activation_scale .input_zero_point .output_scale .qscale_act .weight_input_scale".split()
)
GROUP_SCALES = ".group_scales"  # behind the name of a matrix
NONE_RETAINED: Mapping[str, "RetainedCodes"] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetainedCodes:
    """How the codes of a matrix are kept: inputs and outputs that share a scale, the run in which codes of 4 bits are
    packed (layers/quantized.py), and the dtype of the scales."""

    group: int
    span: int = 1
    run: int = 1
    scale_dtype: np.dtype = FLOAT32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCheckpoint:
    """A checkpoint, and its quantised matrices by their plain names. Tensors of `hidden` are not in the model's table:
    scales of keys and values (kv_scales.py)."""

    stored: Checkpoint
    matrices: Mapping[str, QuantizedMatrix]
    hidden: tuple[str, ...]

    def shown(self, retained: Mapping[str, RetainedCodes] = NONE_RETAINED) -> VirtualCheckpoint:
        """The checkpoint with plain matrices; those of `retained` as `show_codes` has them."""
        return VirtualCheckpoint(self.stored, show_codes(self.matrices, retained), hidden=self.hidden)


def show_codes(tensors: Mapping[str, VirtualTensor], retained: Mapping[str, RetainedCodes]) -> dict[str, VirtualTensor]:
    """The tensors, and in place of those of `retained` their codes, and a tensor of scales for groups of inputs and
    spans of outputs, `<name>.group_scales`. Names of `retained` that are not among them are not looked at."""
    shown = dict(tensors)
    for name, form in retained.items():
        tensor = tensors.get(name)
        if isinstance(tensor, CodedTensor):
            codes = tensor.as_codes() if form.run == 1 else PackedRuns(tensor.as_codes(), form.run)
            scales = tensor.as_scales(form.group, form.span)
            if form.scale_dtype != FLOAT32 and not tensor.has_bf16_scales:
                scales = ExactScales(scales, f"the scales of {name}", form.scale_dtype)
            shown |= {name: codes, f"{name}{GROUP_SCALES}": scales}
    return shown


def open_quantized(checkpoint: Checkpoint, config: QuantizationConfig) -> QuantizedCheckpoint:
    """Compare headers and config. Raises CheckpointError naming the tensor that is missing, misshapen, of another
    dtype, or not as config.json says."""
    reader = _Reader(checkpoint, config, checkpoint.names())
    matrices = reader.matrices()
    hidden = tuple(name for name in reader.headers if is_kv_scale(name))
    unused = {name for matrix in matrices.values() for name in matrix.unused}.difference(hidden)
    if unused:
        logger.info("%d scales of activations are not read: activations are not quantised", len(unused))
    if readable := sum(map(is_read, hidden)):
        logger.info("%d scales of keys and values are read where kv_cache_dtype='fp8_e4m3'", readable)
    return QuantizedCheckpoint(stored=checkpoint, matrices=matrices, hidden=hidden)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    checkpoint: Checkpoint
    config: QuantizationConfig
    headers: Mapping[str, Header]

    def matrices(self) -> dict[str, QuantizedMatrix]:
        """Every quantised matrix by its plain name."""
        by_name: dict[str, QuantizedMatrix] = {}
        for name in self.headers:
            if name.endswith(_PACKED):
                matrix = self._packed(name.removesuffix(_PACKED))
            elif (codes := self._codes_of(name)) is not None:
                matrix = self._scaled(codes, name)
            else:
                continue
            if matrix.name in by_name:
                raise self._error(name, f"and {by_name[matrix.name].scales} both scale {matrix.name}", "one of them")
            by_name[matrix.name] = matrix
        self._check_scaled({matrix.codes for matrix in by_name.values()})
        if not by_name and (self.config.groups or not any(is_kv_scale(name) for name in self.headers)):
            raise CheckpointError(
                f"{self.config.path} has quantization_config of quant_method={self.config.method!r}, but no tensor of "
                "the checkpoint is quantised; expected codes and scales; remove the key, or copy the checkpoint again"
            )
        return by_name

    def _codes_of(self, name: str) -> str | None:
        """The tensor that is scaled by this one, if it is a scale."""
        for end in _MODULE_SCALES:
            codes = f"{name.removesuffix(end)}.weight"
            if name.endswith(end) and self._dtype(codes) == _STORED[Codes.E4M3]:
                return codes
        for end in _SCALES:
            codes = name.removesuffix(end)
            if name.endswith(end) and codes in self.headers:
                return codes
            packed = f"{codes.removesuffix('.weight')}{_PACKED}"
            if name.endswith(f".weight{end}") and packed not in self.headers:
                raise self._error(name, "has no weight beside it", codes)
        return None

    def _scaled(self, codes: str, scales: str) -> QuantizedMatrix:
        module = codes.removesuffix(".weight")
        shape, dtype = self.headers[codes]
        storage = self._storage(module, codes)
        if dtype != _STORED[storage.codes]:
            raise self._error(codes, f"is {dtype} and has the scale {scales}", f"{_STORED[storage.codes]}: {storage}")
        if len(shape) < 2:
            raise self._error(codes, f"is {list(shape)}", "a matrix [O, I]")
        matrix = QuantizedMatrix(
            name=codes,
            shape=shape,
            storage=storage,
            codes=codes,
            scales=scales,
            zero_points=self._zero_points(module, storage),
            unused=self._unused(module),
        )
        return self._checked(matrix)

    def _packed(self, module: str) -> QuantizedMatrix:
        words, sizes, scales = f"{module}{_PACKED}", f"{module}.weight_shape", f"{module}.weight_scale"
        storage = self._storage(module, words)
        if storage.codes is not Codes.PACKED or self.headers[words][1] != _STORED[Codes.PACKED]:
            raise self._error(words, f"is {self.headers[words][1]}", f"{_STORED[storage.codes]}: {storage}")
        for name in (sizes, scales):
            if name not in self.headers:
                raise self._error(words, f"has no {name} beside it", "it")
        if self.headers[sizes][0] != (2,) or self.headers[sizes][1] not in ("I64", "I32"):
            raise self._error(sizes, f"is {list(self.headers[sizes][0])} {self.headers[sizes][1]}", "[2] of I64 or I32")
        stored, count = self.headers[words][0], 32 // storage.bits
        outputs, inputs = (int(size) for size in self.checkpoint.read(sizes))
        if min(outputs, inputs) < 1 or stored != (outputs, math.ceil(inputs / count)):
            held = f"[{outputs}, {math.ceil(inputs / count)}] words"
            raise self._error(sizes, f"is ({outputs}, {inputs}), but {words} is {list(stored)}", held)
        group_map = f"{module}.weight_g_idx"
        if (group_map in self.headers) != storage.is_permuted:
            is_there = "is there" if group_map in self.headers else "is missing"
            raise self._error(group_map, is_there, f"as config.json says by actorder: {storage.is_permuted}")
        if storage.is_permuted and (
            self.headers[group_map][0] != (inputs,) or self.headers[group_map][1] not in ("I32", "I64")
        ):
            raise self._error(group_map, f"is {list(self.headers[group_map][0])}", f"[{inputs}] integers")
        matrix = QuantizedMatrix(
            name=f"{module}.weight",
            shape=(outputs, inputs),
            storage=storage,
            codes=words,
            scales=scales,
            zero_points=self._zero_points(module, storage),
            group_map=group_map if storage.is_permuted else None,
            unused=(sizes, *self._unused(module)),
        )
        return self._checked(matrix)

    def _storage(self, module: str, name: str) -> StorageFormat:
        if self.config.is_ignored(module):
            raise self._error(name, "is quantised", f"plain numbers, as {self.config.path.name} leaves the module out")
        storage = self.config.storage(module)
        if storage is None:
            raise self._error(name, "is quantised", f"plain numbers, as no group of {self.config.path.name} targets it")
        return storage

    def _zero_points(self, module: str, storage: StorageFormat) -> str | None:
        name = f"{module}.weight_zero_point"
        if (name in self.headers) == storage.is_symmetric:
            is_there = "is there" if name in self.headers else "is missing"
            raise self._error(name, is_there, f"as config.json says by symmetric: {storage.is_symmetric}")
        return None if storage.is_symmetric else name

    def _unused(self, module: str) -> tuple[str, ...]:
        return tuple(name for end in _ACTIVATIONS if (name := f"{module}{end}") in self.headers)

    def _checked(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """The matrix, if shapes and dtypes of its scales and zero points are right."""
        storage = matrix.storage
        shape, dtype = self.headers[matrix.scales]
        if storage.codes is Codes.PACKED and storage.columns and matrix.shape[-1] % storage.columns:
            raise self._error(
                matrix.codes, f"has {matrix.shape[-1]} inputs", f"a multiple of group_size={storage.columns}"
            )
        if not _fits_grid(shape, matrix):
            fits = f"{list(matrix.grid)}: {storage} of {list(matrix.shape)}, the last ones cut short"
            raise self._error(matrix.scales, f"is {list(shape)}", fits)
        allowed = (*_FLOAT_SCALES, *(_EXPONENTS if self.config.method == FP8 else ()))
        if dtype not in allowed:
            raise self._error(matrix.scales, f"is {dtype}", " or ".join(allowed))
        matrix = dataclasses.replace(matrix, scale_dtype=dtype)
        if matrix.zero_points is None:
            return matrix
        self._check_zero_points(matrix.zero_points, matrix)
        return dataclasses.replace(matrix, has_packed_zeros=self.headers[matrix.zero_points][1] == "I32")

    def _check_zero_points(self, name: str, matrix: QuantizedMatrix) -> None:
        count = 32 // matrix.storage.bits
        plain = (matrix.grid, "I8")
        packed = ((math.ceil(matrix.grid[0] / count), *matrix.grid[1:]), "I32")
        allowed = (plain, packed) if matrix.storage.codes is Codes.PACKED else (plain,)
        shape, dtype = self.headers[name]
        if (shape, dtype) not in allowed and not (dtype == "I8" and _fits_grid(shape, matrix)):
            fits = " or ".join(f"{list(sides)} {kind}" for sides, kind in allowed)
            raise self._error(name, f"is {list(shape)} {dtype}", fits)

    def _check_scaled(self, scaled: set[str]) -> None:
        """Raise for codes without scales, and for floats of 8 bits that are no codes."""
        for name, (_, dtype) in self.headers.items():
            if dtype == "F8_E5M2":
                raise self._error(name, "is F8_E5M2", "F8_E4M3: e5m2 is not loaded")
            if dtype in (_STORED[Codes.E4M3], "I8") and name.endswith("weight") and name not in scaled:
                ends = ", ".join(f"{name}{end}" for end in _SCALES)
                raise self._error(name, f"is {dtype} and has no scale", ends)

    def _dtype(self, name: str) -> str | None:
        return self.headers[name][1] if name in self.headers else None

    def _error(self, name: str, fault: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.checkpoint.path}: {name} {fault}; expected {expected}; copy the checkpoint again, or use an "
            "unquantised one"
        )


def _fits_grid(shape: tuple[int, ...], matrix: QuantizedMatrix) -> bool:
    """Whether a tensor has the shape of the grid; one entry a tensor may also be [] or [1]."""
    is_single = matrix.storage.rows == 0 and matrix.storage.columns == 0 and len(matrix.grid) == 2
    return shape == matrix.grid or (is_single and shape in ((), (1,)))
