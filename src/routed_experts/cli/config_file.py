"""`serve --config FILE`: flags from a YAML or JSON file, named as on the command line without the dashes before them.
Knows no engine.

    model: /models/qwen
    port: 8000
    enable-return-routed-experts: true        # a switch: true, or false for its default
    precompile-bs-paddings: [1, 8, 32]

Values are taken as they are written, not as YAML reads numbers. As with vLLM and SGLang, a flag on the command line
wins over the file, and the file over the default; so does one that says the same thing by another name
(`--api-key-file` over `api-key`)."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from routed_experts.cli.flags import Parser
from routed_experts.core.error_text import suggestion
from routed_experts.core.errors import ConfigError
from routed_experts.core.installation import import_optional

SUFFIXES = (".yaml", ".yml", ".json")
_NOT_IN_FILES = ("help", "config")
_ONE_THING = (
    ("api_key", "api_key_file"),
    ("admin_api_key", "admin_api_key_file"),
    ("ep_size", "enable_expert_parallel"),
)
_TAG = "tag:yaml.org,2002:"
_TEXTS = ("str", "int", "float", "timestamp")


def with_config(
    options: argparse.Namespace, file: Path, add_flags: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """These options over those of the file. `add_flags` gives a parser the flags that a file may name; none of them may
    have a default. Raises ConfigError naming the file and the key that is unknown (with the nearest known one), said
    twice, or of a wrong value or none."""
    parser = _FileParser(file)
    add_flags(parser)
    actions = {
        flag.removeprefix("--"): action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--")
    }
    known = {key: action for key, action in actions.items() if key not in _NOT_IN_FILES}
    known["model"] = known["model-path"]
    words: list[str] = []
    said: dict[str, str] = {}
    for key, value in _read(file).items():
        name = key.replace("_", "-")
        if name not in known:
            fix = suggestion(name, known, otherwise="routed-experts serve --help names them all")
            raise ConfigError(f"{file}: {key} is no flag of serve; {fix}")
        action = known[name]
        if value is None:
            raise ConfigError(f"{file}: {key} has no value; write one, or leave it out for its default")
        if action.dest in said:
            raise ConfigError(f"{file}: {key} and {said[action.dest]} are one flag; leave one of them out")
        said[action.dest] = key
        words += _typed(file, key, value, action)
    typed = vars(options)
    beaten = {name for names in _ONE_THING if any(name in typed for name in names) for name in names}
    filed = {name: value for name, value in vars(parser.parse_args(words)).items() if name not in beaten}
    return argparse.Namespace(**{**filed, **typed})


class _FileParser(Parser):
    """Says which file is wrong."""

    def __init__(self, file: Path) -> None:
        super().__init__(allow_abbrev=False, add_help=False)
        self._file = file

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._file}: {message.replace('argument --', '', 1)}")


def _typed(file: Path, key: str, value: object, action: argparse.Action) -> list[str]:
    """A key and its value as words of a command line."""
    flag = next(option for option in action.option_strings if option.startswith("--"))
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{file}: {key} is {value!r}; wanted true or false")
        return [flag] if value else []
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in listed):
        raise ConfigError(
            f"{file}: {key} is {value!r}; wanted {'a list of numbers' if action.nargs else 'text or a number'}"
        )
    if action.nargs:
        return [flag, *map(str, listed)]
    if isinstance(value, list):
        raise ConfigError(f"{file}: {key} is a list; wanted one value")
    return [f"{flag}={value}"]


def _read(file: Path) -> Mapping[str, object]:
    """The keys of the file, each once: truth values, None, texts (numbers too, as they are written) and lists of
    them."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"--config {file} ends in {file.suffix!r}; name a file that ends in {', '.join(SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}; name a file of flags") from error
    pairs = _json_pairs(file, text) if file.suffix == ".json" else _yaml_pairs(file, text)
    keys = [key for key, _ in pairs]
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise ConfigError(f"{file}: {twice} stands there twice; leave one of them out")
    return dict(pairs)


def _json_pairs(file: Path, text: str) -> list[tuple[str, object]]:
    try:
        # objects as tuples of pairs, which no list is
        said: object = json.loads(text, parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {file} is no JSON: {error}; write an object of flags and their values") from error
    if not isinstance(said, tuple):
        raise ConfigError(f"--config {file} holds a {type(said).__name__}; write an object of flags and their values")
    return [
        (key, dict(value) if isinstance(value, tuple) else value)
        for key, value in cast("tuple[tuple[str, Any], ...]", said)
    ]


def _yaml_pairs(file: Path, text: str) -> list[tuple[str, object]]:
    yaml = import_optional("yaml", purpose=f"--config {file}", extra="serve", otherwise="write JSON")
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is None:
            return []
        if isinstance(tree, yaml.MappingNode):
            return [(str(_plain(key, as_text=True)), _plain(value)) for key, value in tree.value]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--config {file} is no YAML: {error}; write a flag and its value a line, such as port: 8000"
        ) from error
    kind = "list" if isinstance(tree, yaml.SequenceNode) else "single value"
    raise ConfigError(f"--config {file} holds a {kind}; write a flag and its value a line, such as port: 8000")


def _plain(node: Any, *, as_text: bool = False) -> object:
    """What a node of YAML says: the text of a scalar as it stands there. Raises ValueError for what only programs
    write."""
    kind = node.tag.removeprefix(_TAG)
    if node.id == "scalar" and (as_text or kind in _TEXTS):
        return node.value
    if kind == "null":
        return None
    if kind == "bool":
        return node.value.lower() in ("true", "yes", "on")
    if kind == "seq" and not as_text:
        return [_plain(one) if one.id == "scalar" else {} for one in node.value]
    if kind == "map" and not as_text:
        return {str(key.value): one.value for key, one in node.value}
    raise ValueError(f"{node.tag} is no value of a flag")
