"""`serve --config FILE`: flags from a YAML or JSON file, named as on the command line without the leading dashes.

    model: /models/qwen
    port: 8000
    enable-return-routed-experts: true        # a switch: true, or false for its default
    precompile-bs-paddings: [1, 8, 32]
    speculative-config: {method: ngram, num_speculative_tokens: 7}

Values are taken as they are written, not as YAML reads numbers. As with vLLM and SGLang, a flag on the command line
wins over the file, and the file over the default. It also wins over another flag for the same setting (`--api-key-file`
over `api-key`)."""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from routed_experts.cli.flags import JSON, Parser, peer_arity, peer_flags, with_short_values
from routed_experts.core.error_text import short_repr, short_text, suggestion
from routed_experts.core.errors import ConfigError
from routed_experts.core.installation import import_optional

SUFFIXES = (".yaml", ".yml", ".json")
_NOT_IN_FILES = ("help", "config")
_SAME_SETTING = (
    ("api_key", "api_key_file"),
    ("admin_api_key", "admin_api_key_file"),
    ("ep_size", "enable_expert_parallel"),
)
_INTEGER = re.compile("-?[0-9]{1,18}")
_RESOLVED = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:null")  # all other scalars stay text


def with_config(
    options: argparse.Namespace, file: Path, add_flags: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Merge the options of the command line over those of the file.

    `add_flags` gives a parser the flags that a file may name; none of them may have a default. Raises ConfigError with
    the file and the key that is unknown (and the nearest known one), repeated, or without a valid value."""
    parser = _FileParser(file)
    add_flags(parser)
    known = {
        flag.removeprefix("--"): action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--") and flag.removeprefix("--") not in _NOT_IN_FILES
    }
    words: list[str] = []
    keys: dict[str, str] = {}  # by destination
    for key, value in _read(file).items():
        name = key.replace("_", "-")
        if name not in known and peer_arity(name) is not None:
            words += _peer_words(key, value)
            continue
        if name not in known:
            fix = suggestion(
                name,
                (*known, *(flag[2:] for flag in peer_flags())),
                otherwise="routed-experts serve --help lists them all",
            )
            raise ConfigError(f"{file}: {short_text(key)} is no flag of serve; {fix}")
        action = known[name]
        if value is None:
            raise ConfigError(f"{file}: {key} has no value; write one, or leave it out for its default")
        if action.dest in keys:
            raise ConfigError(f"{file}: {key} and {keys[action.dest]} are one flag; leave one of them out")
        keys[action.dest] = key
        words += _as_words(file, key, value, action)
    typed = vars(options)
    overridden = {name for names in _SAME_SETTING if any(name in typed for name in names) for name in names}
    filed = {name: value for name, value in vars(parser.parse_args(words)).items() if name not in overridden}
    ignored = (*filed.get("ignored_flags", ()), *typed.get("ignored_flags", ()))
    return argparse.Namespace(**{**filed, **typed, "ignored_flags": ignored})


class _FileParser(Parser):
    """Raises ConfigError with the name of the file."""

    def __init__(self, file: Path) -> None:
        super().__init__(allow_abbrev=False, add_help=False)
        self._file = file

    def error(self, message: str) -> NoReturn:
        complaints = (line.replace("argument --", "", 1) for line in with_short_values(message).splitlines())
        raise ConfigError(f"{self._file}: {'; '.join(complaints)}")


def _peer_words(key: str, value: object) -> list[str]:
    """A flag of another server and its value as words of a command line."""
    if isinstance(value, bool) and peer_arity(key) == "switch":
        return [f"--{key}={str(value).lower()}"]
    if isinstance(value, list):
        items = cast("list[object]", value)
        return [f"--{key}", *map(str, items)] if items else []
    return [] if value is None else [f"--{key}={value if isinstance(value, str) else json.dumps(value)}"]


def _as_words(file: Path, key: str, value: object, action: argparse.Action) -> list[str]:
    """A key and its value as words of a command line."""
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{file}: {key} is {_shown(value)}; expected true or false")
        if isinstance(action, argparse.BooleanOptionalAction):
            on, off = action.option_strings
            says_on = f"--{key.replace('_', '-')}" == on
            return [on if value == says_on else off]
        return [flag] if value else []
    if isinstance(value, dict) and action.metavar == JSON:
        return [f"{flag}={_object_text(file, key, cast('dict[str, object]', value))}"]
    values = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in values):
        expected = "a list of numbers" if action.nargs else "text or a number"
        raise ConfigError(f"{file}: {key} is {_shown(value)}; expected {expected}")
    if action.nargs:
        return [flag, *map(str, values)]
    if isinstance(value, list):
        raise ConfigError(f"{file}: {key} is a list; expected one value")
    return [f"{flag}={value}"]


def _shown(value: object) -> str:
    """A value of the file for an error: as it is written where that is short."""
    text = repr(value)
    return text if len(text) == len(short_text(text)) else short_repr(value)


def _object_text(file: Path, key: str, fields: Mapping[str, object]) -> str:
    """An object's JSON. Whole numbers, which are text in a file, are numbers in it."""
    for name, item in fields.items():
        if item is not None and not isinstance(item, str | bool):
            kind = "a list" if isinstance(item, list) else "an object"
            raise ConfigError(f"{file}: {short_text(name)} of {key} is {kind}; expected one value")
    return json.dumps(
        {
            name: int(item) if isinstance(item, str) and _INTEGER.fullmatch(item) else item
            for name, item in fields.items()
        }
    )


def _read(file: Path) -> Mapping[str, object]:
    """The keys of the file, each once. Values are bool, None, text (numbers too, as they are written) or lists."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"--config {file} ends in {file.suffix!r}; name a file that ends in {', '.join(SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}; name a file of flags") from error
    content = _parse_json(file, text) if file.suffix == ".json" else _parse_yaml(file, text)
    if not isinstance(content, tuple):
        kind = "list" if isinstance(content, list) else "single value"
        raise ConfigError(f"--config {file} holds a {kind}; write flags and their values, such as port: 8000")
    values: dict[str, object] = {}
    for key, value in cast("tuple[tuple[object, object], ...]", content):
        if str(key) in values:
            raise ConfigError(f"{file}: {short_text(str(key))} is written twice; leave one of them out")
        pairs = cast("tuple[tuple[object, object], ...]", value if isinstance(value, tuple) else ())
        values[str(key)] = {str(name): item for name, item in pairs} if isinstance(value, tuple) else value
    return values


def _parse_json(file: Path, text: str) -> object:
    """JSON with its numbers as text and its objects as tuples of pairs."""
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {file} is no JSON: {error}; write an object of flags and their values") from error


def _parse_yaml(file: Path, text: str) -> object:
    """YAML in the same form."""
    yaml: Any = import_optional("yaml", purpose=f"--config {file}", extra="serve", otherwise="write JSON")

    resolvers = {
        first: [(tag, pattern) for tag, pattern in patterns if tag in _RESOLVED]
        for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})
    loader.add_constructor("tag:yaml.org,2002:map", lambda self, node: tuple(self.construct_pairs(node)))
    try:
        content = loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text = f"--config {file} is no YAML: {error}; write a flag and its value a line, such as port: 8000"
        raise ConfigError(text) from error
    return () if content is None else content
