"""`serve --config FILE`: flags from a YAML or JSON file, named as on the command line without the dashes before them. Knows no engine.

    model: /models/qwen
    port: 8000
    enable-return-routed-experts: true        # a switch: true, or false for its default
    precompile-bs-paddings: [1, 8, 32]

As with vLLM and SGLang, a flag on the command line wins over the file, and the file over the default."""

import argparse
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, cast

from routed_experts.cli.flags import Parser
from routed_experts.core.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")
_NOT_IN_FILES = ("help", "config")


def with_config(options: argparse.Namespace, file: Path, add_flags: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """These options over those of the file. `add_flags` gives a parser the flags that a file may name; none of them may have a default.
    Raises ConfigError naming the file and the key that is unknown (with the nearest known one), said twice, or of a wrong value."""
    parser = _FileParser(file)
    add_flags(parser)
    actions = {flag.removeprefix("--"): action for flag, action in parser._option_string_actions.items() if flag.startswith("--")}
    known = {key: action for key, action in actions.items() if key not in _NOT_IN_FILES}
    known["model"] = known["model-path"]
    words: list[str] = []
    said: dict[str, str] = {}
    for key, value in _read(file).items():
        name = key.replace("_", "-")
        if name not in known:
            close = get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]}?" if close else "routed-experts serve --help names them all"
            raise ConfigError(f"{file}: {key} is no flag of serve; {fix}")
        action = known[name]
        if value is None:
            continue
        if action.dest in said:
            raise ConfigError(f"{file}: {key} and {said[action.dest]} are one flag; leave one of them out")
        said[action.dest] = key
        words += _typed(file, key, value, action)
    return argparse.Namespace(**{**vars(parser.parse_args(words)), **vars(options)})


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
    if any(isinstance(one, bool) or not isinstance(one, str | int | float) for one in listed):
        raise ConfigError(f"{file}: {key} is {value!r}; wanted {'a list of numbers' if action.nargs else 'text or a number'}")
    if action.nargs:
        return [flag, *map(str, listed)]
    if isinstance(value, list):
        raise ConfigError(f"{file}: {key} is a list; wanted one value")
    return [f"{flag}={value}"]


def _read(file: Path) -> Mapping[str, object]:
    """The keys of the file, each once."""
    import yaml

    if file.suffix not in SUFFIXES:
        raise ConfigError(f"--config {file} ends in {file.suffix!r}; name a file that ends in {', '.join(SUFFIXES)}")
    try:
        text = file.read_text(encoding="utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)  # JSON is YAML
        said: object = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} cannot be read: {error}; name a file of flags") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {file} is no YAML: {error}; write a flag and its value a line, such as port: 8000") from error
    if said is None:
        return {}
    if not isinstance(tree, yaml.MappingNode) or not isinstance(said, dict):
        raise ConfigError(f"--config {file} holds a {type(said).__name__}; write a flag and its value a line, such as port: 8000")
    keys = [str(key.value) for key, _ in tree.value]
    twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if twice is not None:
        raise ConfigError(f"{file}: {twice} stands there twice; leave one of them out")
    return {str(key): value for key, value in cast("dict[object, object]", said).items()}
