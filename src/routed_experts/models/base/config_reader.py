"""config.json of a checkpoint: refused by name when it cannot be served, read key by key with types.

Code of a checkpoint (`auto_map`) is never imported. `null` means absent, but for `with_default`, `with_null`, and
`ConfigReader.bool` of a switch that is on by default, which refuses it. A family that serves one value of a switch
alone reads it through `has`, so that null is absent there, too. Integers are never taken from booleans, strings or
fractions."""

import builtins
import dataclasses
import json
import math
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

from routed_experts.core.errors import CheckpointError
from routed_experts.core.paths import is_folder, shown_path

_SYNONYMS: Mapping[str, tuple[str, ...]] = MappingProxyType(  # newer spellings of transformers; a file may hold either
    {
        "num_experts": ("num_local_experts",),
        "num_local_experts": ("num_experts",),
        "num_nextn_predict_layers": ("num_mtp_layers",),
        "torch_dtype": ("dtype",),
    }
)

_QUANTIZATION_FILES: Mapping[str, str] = MappingProxyType(
    {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt"}
)

MAX_HEAD_DIM = 16_384  # dims of a head of any family: checked before frequencies are made for each pair


def read_json_object(file: Path) -> dict[str, object]:
    """Read one JSON object; CheckpointError names the file when it is missing, not JSON, or not an object."""
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} does not exist; expected the file that every Hugging Face checkpoint has; check the path"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); make it readable") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(
            f"{file} is not JSON ({error}); expected one JSON object; copy the checkpoint again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{file} holds a JSON {type(value).__name__}; expected one object; copy the checkpoint again"
        )
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedQuirks:
    """Checkpoint features that are accepted for one architecture: `code`, an auto_map that names Python code, which
    is still never run; and names of readable quantisations."""

    code: bool = False
    quantization: tuple[str, ...] = ()


NOTHING = AcceptedQuirks()


def read_config(
    path: Path | str,
    *,
    architectures: Mapping[str, AcceptedQuirks] | Collection[str],
    quantization: Collection[str] = (),
) -> dict[str, object]:
    """Read config.json of the checkpoint folder `path`, whose architecture must be one of `architectures`.
    `quantization`: methods that the caller reads."""
    folder = Path(path)
    if not is_folder(folder):
        raise CheckpointError(
            f"no checkpoint folder {shown_path(folder)}; expected a folder with config.json and safetensors; check "
            "the path"
        )
    file = folder / "config.json"
    config = read_json_object(file)
    declared = config.get("architectures")
    only = str(declared[0]) if isinstance(declared, list) and len(declared) == 1 else ""
    accepted = architectures.get(only, NOTHING) if isinstance(architectures, Mapping) else NOTHING
    if config.get("auto_map") is not None and not accepted.code:
        raise CheckpointError(
            f"{file} has auto_map, which names Python code of the checkpoint; remote code is never run here; expected "
            "a "
            "config without; if "
            f"the weights are of one of the architectures {_listed(architectures)}, remove auto_map from config.json"
        )
    check_quantization(folder, config, (*accepted.quantization, *quantization))
    if only not in architectures:
        raise CheckpointError(
            f"{file}: architectures={declared!r} is not known here; expected one of {_listed(architectures)}"
        )
    return config


def quantization_sections(path: Path, config: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    """The objects of config.json, or of its text model's part, that say how weights are quantised, with their keys.
    Raises CheckpointError for one that is no object; `path` names the file there."""
    inner = config.get("text_config")
    matches: list[tuple[str, Mapping[str, object]]] = []
    for section in (config, inner if isinstance(inner, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            value = section.get(key)
            if isinstance(value, dict):
                matches.append((key, value))
            elif value is not None:
                raise CheckpointError(f"{path} has {key}={value!r}; expected an object; correct the file")
    return matches


def check_quantization(folder: Path, config: Mapping[str, object], readable: Collection[str]) -> None:
    """Raise CheckpointError where config.json, its text model's part, or a file beside it says that weights are
    quantised by a method that is not `readable`."""
    sections = quantization_sections(folder / "config.json", config)
    for key, section in sections:
        method = section.get("quant_method", "compressed-tensors" if key == "compression_config" else None)
        if method in readable:
            continue
        named = "" if method is None else f" of quant_method={method!r}"
        others = f" or {', '.join(readable)}" if readable else ""
        raise CheckpointError(
            f"{folder / 'config.json'} has {key}{named}; expected plain bfloat16, float16 or float32 "
            f"weights{others}; "
            "use an unquantised one"
        )
    if any(section != sections[0][1] for _, section in sections):
        raise CheckpointError(
            f"{folder / 'config.json'} says twice how weights are quantised ({', '.join(key for key, _ in sections)}), "
            "and differently; expected one method; remove the wrong one"
        )
    for name, method in _QUANTIZATION_FILES.items():
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder / name} says that weights are quantised by {method}; expected plain bfloat16, float16 or "
                "float32 weights; "
                "use an unquantised one, or remove the file if it is a leftover"
            )


def parse_architecture(config: Mapping[str, object]) -> str:
    """Return the one architecture of a config that read_config accepted."""
    architectures = config["architectures"]
    assert isinstance(architectures, list), architectures
    return str(architectures[0])


def read_eos_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end a sequence, as generation_config.json and config.json of a checkpoint name them; where the
    latter names none, those of its text_config. Raises CheckpointError for an id that is negative or above 2^31 - 1."""
    ids: set[int] = set()
    for file in (folder / "generation_config.json", folder / "config.json"):
        if file.exists():
            reader = ConfigReader(read_json_object(file), file)
            named = reader if reader.has("eos_token_id") else reader.section("text_config")
            own = named.ints("eos_token_id", default=())
            named.require(all(0 <= id < 2**31 for id in own), "eos_token_id", "ids from 0 to 2147483647")
            ids.update(own)
    return frozenset(ids)


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed access to one JSON object; `path` names the file in errors. Without a default a key is
    required. `synonyms`: other spellings of a key, of which a file may hold any."""

    values: Mapping[str, object]
    path: Path | str
    synonyms: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: _SYNONYMS)

    def has(self, key: str) -> builtins.bool:
        """Whether the key, or its other spelling, is there and not null."""
        return self._find(key) is not None

    def with_default(self, key: str, value: object) -> "ConfigReader":
        """The same object, with `value` where the key is left out. null stays null: transformers tells the two apart
        where its own default is a number."""
        return self if key in self.values else dataclasses.replace(self, values={**self.values, key: value})

    def with_synonyms(self, synonyms: Mapping[builtins.str, tuple[builtins.str, ...]]) -> "ConfigReader":
        """The same, with other spellings of a family's keys besides."""
        return dataclasses.replace(self, synonyms={**self.synonyms, **synonyms})

    def with_null(self, value: object, *keys: str) -> "ConfigReader":
        """The same object, with `value` where one of the keys is null."""
        nulls = {key: value for key in keys if key in self.values and self.values[key] is None}
        return dataclasses.replace(self, values={**self.values, **nulls}) if nulls else self

    def require(self, holds: builtins.bool, key: str, expected: str) -> None:
        """Raise unless `holds`; `expected` describes a valid value of `key`."""
        if not holds:
            raise self._error(key, expected)

    def int(
        self,
        key: str,
        *,
        default: builtins.int | None = None,
        minimum: builtins.int | None = None,
        maximum: builtins.int | None = None,
    ) -> builtins.int:
        value = self._value(key, default, "an integer")
        at_least, at_most = -math.inf if minimum is None else minimum, math.inf if maximum is None else maximum
        if not _is_int(value) or not at_least <= value <= at_most:
            bounds = [f"at least {minimum}"] * (minimum is not None) + [f"at most {maximum}"] * (maximum is not None)
            raise self._error(key, " ".join(["an integer", " and ".join(bounds)]).strip())
        return value

    def float(self, key: str, *, default: builtins.float | None = None) -> builtins.float:
        value = self._value(key, default, "a finite number")
        if not (_is_int(value) or isinstance(value, builtins.float)) or not abs(value) <= sys.float_info.max:
            raise self._error(key, "a finite number")
        return builtins.float(value)

    def bool(self, key: str, *, default: builtins.bool | None = None) -> builtins.bool:
        """A switch. Where it is on by default null is refused: transformers refuses it, or takes it as off."""
        nulls = [name for name in (key, *self.synonyms.get(key, ())) if name in self.values]
        if default and nulls and not self.has(key):
            raise self._error(nulls[0], "true or false, or no such key, which is true")
        value = self._value(key, default, "true or false")
        if not isinstance(value, builtins.bool):
            raise self._error(key, "true or false")
        return value

    def str(
        self, key: builtins.str, *, default: builtins.str | None = None, choices: Collection[builtins.str] = ()
    ) -> builtins.str:
        expected = f"one of {_listed(choices)}" if choices else "a string"
        value = self._value(key, default, expected)
        if not isinstance(value, builtins.str) or (choices and value not in choices):
            raise self._error(key, expected)
        return value

    def ints(self, key: builtins.str, *, default: tuple[builtins.int, ...] | None = None) -> tuple[builtins.int, ...]:
        """A list of integers; one integer alone counts as a list of one (eos_token_id has both forms)."""
        value = self._value(key, default, "a list of integers")
        items = value if isinstance(value, list | tuple) else [value]
        numbers = tuple(item for item in items if _is_int(item))
        if len(numbers) != len(items):
            raise self._error(key, "a list of integers")
        return numbers

    def floats(self, key: builtins.str) -> tuple[builtins.float, ...]:
        """A required list of finite numbers; one number alone counts as a list of one."""
        value = self._value(key, None, "a list of numbers")
        items = value if isinstance(value, list | tuple) else [value]
        numbers = tuple(
            builtins.float(item)
            for item in items
            if _is_int(item) or (isinstance(item, builtins.float) and math.isfinite(item))
        )
        if len(numbers) != len(items):
            raise self._error(key, "a list of numbers")
        return numbers

    def strings(
        self, key: builtins.str, *, choices: Collection[builtins.str], default: tuple[builtins.str, ...]
    ) -> tuple[builtins.str, ...]:
        """A list of words out of `choices`."""
        value = self._value(key, default, f"a list of {_listed(choices)}")
        if not isinstance(value, list | tuple) or any(item not in choices for item in value):
            raise self._error(key, f"a list of {_listed(choices)}")
        return tuple(builtins.str(item) for item in value)

    def section(self, key: builtins.str) -> "ConfigReader":
        """The JSON object under `key`, empty when absent; its errors name the outer key too."""
        value = self._value(key, {}, "an object")
        if not isinstance(value, dict):
            raise self._error(key, "an object")
        return ConfigReader(value, f"{self.path}: {key}")

    def _find(self, key: builtins.str) -> object:
        spellings = [name for name in (key, *self.synonyms.get(key, ())) if self.values.get(name) is not None]
        values = [self.values[name] for name in spellings]
        if any(value != values[0] for value in values):
            raise CheckpointError(
                f"{self.path}: {' and '.join(spellings)} differ: {values}; expected one value; correct the file"
            )
        return values[0] if values else None

    def _value(self, key: builtins.str, default: object, expected: builtins.str) -> object:
        value = self._find(key)
        if value is None and default is None:
            raise CheckpointError(f"{self.path}: {key} is missing; expected {expected}; correct the file")
        return default if value is None else value

    def _error(self, key: builtins.str, expected: builtins.str) -> CheckpointError:
        text = repr(self._find(key))
        text = text if len(text) <= 80 else text[:77] + "..."
        spellings = [name for name in self.synonyms.get(key, ()) if self.values.get(name) is not None]
        key = key if not spellings or self.values.get(key) is not None else spellings[0]
        return CheckpointError(f"{self.path}: {key}={text}; expected {expected}; correct the file")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"
