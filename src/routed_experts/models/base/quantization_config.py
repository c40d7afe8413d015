"""How a checkpoint says that its weights are quantised: `quantization_config` of config.json, read for the methods that
are loaded; all others are refused by name.

fp8                 float8 codes (e4m3), one float32 scale a block of rows x columns, or one a tensor
compressed-tensors  float8 or int8 codes, or 4 or 8 bits packed in int32 words; scales by tensor, channel, group, block
mxfp4               of GPT-OSS, whose family reads it

Keys that change no number, such as the observer's, are ignored. A key that may change numbers and is not known is an
error. Letters: O outputs, I inputs of a matrix, R rows and C columns of a block."""

import dataclasses
import enum
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from routed_experts.core.errors import CheckpointError
from routed_experts.models.base.config_reader import ConfigReader, quantization_sections

FP8, COMPRESSED = "fp8", "compressed-tensors"
METHODS = (FP8, COMPRESSED)  # that every family loads

_FP8_KEYS = frozenset(
    "quant_method fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers scale_fmt expert_dtype "
    "dequantize weight_per_tensor kv_cache_scheme".split()
)
_IGNORED_KEYS = frozenset("observer observer_kwargs dynamic scale_dtype zp_dtype".split())
_WEIGHT_KEYS = frozenset("num_bits type strategy group_size symmetric actorder block_structure".split())
_TOP_KEYS = frozenset(
    "quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio version "
    "sparsity_config transform_config".split()
)
_FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {  # types and bits
    "float-quantized": (("float",), (8,)),
    "int-quantized": (("int",), (8,)),
    "naive-quantized": (("float", "int"), (8,)),  # the library's word for either without quantised activations
    "pack-quantized": (("int",), (4, 8)),
}
_LINEAR = "Linear"  # the class that every projection has


class Codes(enum.Enum):
    """What a quantised matrix is stored as."""

    E4M3 = "e4m3"  # float8_e4m3fn [O, I]
    INT8 = "int8"  # [O, I]
    PACKED = "packed"  # int32 words [O, ceil(I / numbers of a word)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageFormat:
    """How the matrices of some modules are stored. `rows`, `columns`: of the block that shares one scale; 0 for the
    whole axis. `exponents`: scales are powers of two (ue8m0). `is_symmetric`: without zero points. `is_permuted`: a
    matrix may have its own map from inputs to groups."""

    codes: Codes
    bits: int = 8
    rows: int = 0
    columns: int = 0
    exponents: bool = False
    is_symmetric: bool = True
    is_permuted: bool = False

    def __str__(self) -> str:
        kind = "fp8" if self.codes is Codes.E4M3 else f"int{self.bits}"
        if self.rows == 1:
            return f"{kind} ({f'groups of {self.columns}' if self.columns else 'a scale a channel'})"
        return f"{kind} ({f'blocks {self.rows} x {self.columns}' if self.rows else 'a scale a tensor'})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageGroup:
    """Modules and their format. A target is the name of a module, `re:` with an expression that matches from the start,
    or the class `Linear`; the first of these kinds that has a match counts, in whichever group."""

    name: str
    targets: tuple[str, ...]
    storage: StorageFormat


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """The quantisation of one checkpoint; `path` names its config.json in errors. `kv_cache_scheme`: how keys and
    values are to be stored; None where config.json does not say."""

    path: Path
    method: str
    groups: tuple[StorageGroup, ...]
    ignored: tuple[str, ...] = ()
    kv_cache_scheme: ConfigReader | None = None

    @staticmethod
    def read(folder: Path | str, values: Mapping[str, object]) -> "QuantizationConfig | None":
        """Read the quantisation of a config that `read_config` accepted; None where there is none that is read here.
        Raises CheckpointError for what is not loaded, naming the key."""
        path = Path(folder) / "config.json"
        for key, section in quantization_sections(path, values):
            reader = ConfigReader(section, f"{path}: {key}", {})
            method = section.get("quant_method", COMPRESSED if key == "compression_config" else None)
            if method == FP8:
                return _read_fp8(reader, path)
            if method == COMPRESSED:
                return _read_compressed(reader, path)
        return None

    def check_kv_codes(self) -> None:
        """Raise CheckpointError, naming the key, where keys and values are to be stored as other codes than e4m3 with a
        scale a layer that the checkpoint holds."""
        scheme = self.kv_cache_scheme
        if scheme is None:
            return
        what = "scales of e4m3 codes, one a layer, or kv_cache_dtype left out"
        scheme.require(scheme.int("num_bits", default=8) == 8, "num_bits", f"8: {what}")
        scheme.require(scheme.str("type", default="int") == "float", "type", f"'float': {what}")
        scheme.require(scheme.str("strategy", default="tensor") == "tensor", "strategy", f"'tensor': {what}")
        scheme.require(scheme.bool("symmetric", default=True), "symmetric", f"true: {what}")
        scheme.require(scheme.values.get("dynamic") in (None, False), "dynamic", f"false: {what}")

    def is_ignored(self, module: str) -> bool:
        """Whether the config leaves the module out."""
        if self.method == COMPRESSED:
            return any(_targets(pattern, module) for pattern in self.ignored if pattern != _LINEAR)
        return any(f".{name.strip('.')}." in f".{module}." for name in self.ignored)

    def names(self, module: str) -> bool:
        """Whether a group targets the module by its name or by an expression, not by its class."""
        return any(target != _LINEAR and _targets(target, module) for group in self.groups for target in group.targets)

    def storage(self, module: str) -> StorageFormat | None:
        """The format of a module's matrix; None where no group targets it."""
        ranked = [(_rank(target, module), group.storage) for group in self.groups for target in group.targets]
        matches = [(rank, storage) for rank, storage in ranked if rank is not None]
        return min(matches, key=lambda match: match[0])[1] if matches else None

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(str(group.storage) for group in self.groups))


def _targets(pattern: str, module: str) -> bool:
    return _rank(pattern, module) is not None


def _rank(pattern: str, module: str) -> int | None:
    """0 for the name of the module, 1 for an expression that matches it, 2 for its class; None for no match."""
    if pattern.startswith("re:"):
        return 1 if re.match(pattern[3:], module) else None
    return 0 if pattern == module else 2 if pattern == _LINEAR else None


def _read_fp8(reader: ConfigReader, path: Path) -> QuantizationConfig:
    _refuse_unknown(reader, _FP8_KEYS)
    reader.str("fmt", choices=("e4m3", "float8_e4m3fn"), default="e4m3")
    reader.str("activation_scheme", choices=("dynamic", "static"), default="dynamic")
    reader.require(reader.str("expert_dtype", default="fp8") == "fp8", "expert_dtype", "'fp8' (fp4 is not loaded)")
    scales = reader.str("scale_fmt", choices=("float", "ue8m0"), default="float")
    block = reader.ints("weight_block_size", default=())
    reader.require(len(block) in (0, 2) and all(side > 0 for side in block), "weight_block_size", "[rows, columns]")
    rows, columns = block or (0, 0)
    storage = StorageFormat(codes=Codes.E4M3, rows=rows, columns=columns, exponents=scales == "ue8m0")
    lists = [_words(reader, key) for key in ("modules_to_not_convert", "ignored_layers")]
    ignored = tuple(dict.fromkeys((*lists[0], *lists[1])))
    group = StorageGroup(name=FP8, targets=(_LINEAR,), storage=storage)
    keys = reader.str("kv_cache_scheme", choices=("static", "dynamic"), default="static")  # changes no weight
    scheme = (
        ConfigReader({"type": "float", "dynamic": True}, f"{reader.path}: kv_cache_scheme")
        if keys == "dynamic"
        else None
    )
    return QuantizationConfig(path=path, method=FP8, groups=(group,), ignored=ignored, kv_cache_scheme=scheme)


def _read_compressed(reader: ConfigReader, path: Path) -> QuantizationConfig:
    _refuse_unknown(reader, _TOP_KEYS)
    sparsity = reader.section("sparsity_config")
    if sparsity.values:
        sparsity.str("format", choices=("dense",))
    reader.require(not reader.section("transform_config").values, "transform_config", "none: it rotates weights")
    reader.str("quantization_status", choices=("compressed", "frozen"), default="compressed")
    top = reader.str("format")
    groups: list[StorageGroup] = []
    outer = reader.section("config_groups")
    for name in outer.values:
        group = outer.section(name)
        if not group.has("weights"):  # of activations alone
            continue
        fmt = group.str("format", default=top)
        if fmt not in _FORMATS:
            raise CheckpointError(
                f"{group.path}: format={fmt!r} is not loaded; expected one of {', '.join(sorted(_FORMATS))}; use a "
                "checkpoint of one of these, or an unquantised one"
            )
        storage = _read_weights(group.section("weights"), fmt)
        groups.append(StorageGroup(name=name, targets=_words(group, "targets"), storage=storage))
    scheme = reader.section("kv_cache_scheme")
    reader.require(bool(groups or scheme.values), "config_groups", "at least one group with weights")
    return QuantizationConfig(
        path=path,
        method=COMPRESSED,
        groups=tuple(groups),
        ignored=_words(reader, "ignore"),
        kv_cache_scheme=scheme if scheme.values else None,
    )


def _read_weights(reader: ConfigReader, fmt: str) -> StorageFormat:
    """The format of a group's weights."""
    _refuse_unknown(reader, _WEIGHT_KEYS | _IGNORED_KEYS)
    kinds, widths = _FORMATS[fmt]
    kind = reader.str("type", choices=kinds, default="int")
    bits = reader.int("num_bits", default=8)
    reader.require(bits in widths, "num_bits", f"{' or '.join(map(str, widths))} in the format {fmt}")
    size = reader.int("group_size", default=0)
    default = "group" if size > 0 else "channel" if size < 0 else "tensor"
    strategy = reader.str("strategy", choices=("tensor", "channel", "group", "block"), default=default)
    reader.require(strategy != "group" or size > 0, "group_size", "a positive integer with the strategy group")
    block = reader.ints("block_structure", default=()) if strategy == "block" else ()
    reader.require(
        strategy != "block" or (len(block) == 2 and min(block) > 0), "block_structure", "[rows, columns] with block"
    )
    symmetric = reader.bool("symmetric", default=True)
    reader.require(symmetric or kind == "int", "symmetric", "true for float codes")
    order = reader.values.get("actorder")
    reader.require(order in (None, False, True, "group", "weight", "static", "dynamic"), "actorder", "group or weight")
    reader.require(order not in ("group", True, "dynamic") or strategy == "group", "actorder", "the strategy group")
    rows, columns = block or {"tensor": (0, 0), "channel": (1, 0), "group": (1, size)}[strategy]
    codes = Codes.PACKED if fmt == "pack-quantized" else Codes.E4M3 if kind == "float" else Codes.INT8
    return StorageFormat(
        codes=codes,
        bits=bits,
        rows=rows,
        columns=columns,
        is_symmetric=symmetric,
        is_permuted=order in ("group", True, "dynamic"),
    )


def _words(reader: ConfigReader, key: str) -> tuple[str, ...]:
    value = reader.values.get(key)
    words = [] if value is None else value
    reader.require(isinstance(words, list) and all(isinstance(word, str) for word in words), key, "a list of strings")
    assert isinstance(words, list), words
    for word in words:
        if word.startswith("re:"):
            try:
                re.compile(word[3:])
            except re.error as error:
                raise CheckpointError(
                    f"{reader.path}: {key} holds {word!r}, which is no regular expression ({error}); expected one "
                    "after re:; correct the file"
                ) from None
    return tuple(words)


def _refuse_unknown(reader: ConfigReader, known: Collection[str]) -> None:
    """Raise for a key that is not known and says something."""
    unknown = [key for key, value in reader.values.items() if key not in known and value not in (None, False, [], {})]
    if unknown:
        raise CheckpointError(
            f"{reader.path}: {', '.join(unknown)} is not known and may change weights; expected keys out of "
            f"{', '.join(sorted(known))}; use an unquantised checkpoint, or remove what changes nothing"
        )
