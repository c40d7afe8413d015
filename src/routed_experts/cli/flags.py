"""Flags of the engine, made from the fields of ServerArgs and of its nested configs, and those of other servers.

Flags of `core/peer_names.py` are taken out of a command line before argparse sees it: 900 hidden actions in every
parser would slow each command down, and a value after a flag that argparse does not know would become the MODEL."""

import argparse
import ast
import dataclasses
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn, cast, get_args, get_origin

from routed_experts.cli.flag_help import describe
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.error_text import nearest_name, short_repr, short_text
from routed_experts.core.errors import ConfigError, InvalidRequestError
from routed_experts.core.expert_offload_config import RESIDENCIES, ExpertOffloadConfig
from routed_experts.core.keywords import FLAG_NAMES, log_without_effect, own_value
from routed_experts.core.peer_names import INVERSES, OTHER_NAMES, OTHER_UNITS, OTHER_VALUES, SHORT_FLAGS, Arity
from routed_experts.core.placement import ResidencyMap
from routed_experts.core.placement_config import ON_EXHAUSTED, PLACEMENT_MODES, PlacementConfig
from routed_experts.core.sampling_params import SamplingParams
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.fleet.settings import FleetSettings

MODEL_HELP = "checkpoint folder, Hugging Face id (org/name), or demo: the small model of this package"
LOAD_FORMATS = ("auto", "dummy")
JSON = "JSON"  # metavar of flags that take an object
_RESIDENCY_METAVAR = "|".join((*RESIDENCIES, "FILE.npz"))
_PLACEMENT_FLAGS: Mapping[str, str] = MappingProxyType(
    {"plan": "placement", "mode": "placement_mode"}
)  # other names than the field's
_PLACEMENT_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"mode": PLACEMENT_MODES, "on_exhausted": ON_EXHAUSTED}
)
_INVALID_CHOICE = re.compile(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)")  # argparse's own text
_REQUIRED = re.compile(r"\b(?:are|is) required(?:: |$)")  # argparse's own text
_LONG_VALUE = re.compile(  # in argparse's own text: the repr() of a value longer than errors show
    r"""((?:value|choice): )('(?:[^'\\]|\\.){61,}'|"(?:[^"\\]|\\.){61,}")"""
)
# In an error: what is quoted and calls, which stay; page_size=0, deterministic=True, a name with an underscore alone
_FIELD_VALUE = re.compile(
    r"""(?<!\w)'(?:[^'\\]|\\.)*'|(?<!\w)"(?:[^"\\]|\\.)*"|\w+\(\.\.\.[^)]*\)|"""
    r"""(?<![\w./'"-])"""
    r"""(?:(?P<name>[a-z][a-z0-9_]*)=(?P<value>True\b|(?!False\b|None\b)(?=\S))"""
    r"""|(?P<bare>[a-z][a-z0-9]*_[a-z0-9_]+)(?![\w=/'"(-]))"""
)
_WORD = re.compile(r"[\w.-]+")
_NUMBER = re.compile(r"-?[0-9.]+")


def _to_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is no integer; give one, such as 8") from error


def _to_number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is no number; give one, such as 0.5") from error


_NUMBER_TYPES: Mapping[type, Callable[[str], object]] = MappingProxyType({int: _to_integer, float: _to_number})


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are two lines instead of a page of usage, and name the nearest known word; where
    several flags of other servers are refused, a line for each. Each command's parser refuses what it does not know, so
    that the error is about this command."""

    takes_peer_flags = False  # those of other servers; set by `add_engine_flags`
    keyword_flags: Mapping[str, str] = MappingProxyType({})  # flags by the keyword of a library call; set by a command
    _parsed_words: Sequence[str] = ()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        for kind, convert in _NUMBER_TYPES.items():  # `type=int` and `type=float` of every flag
            self.register("type", kind, convert)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # overloads that differ in their result
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse all words; the list of unknown ones is always empty. `ignored_flags` of the result are flags of other
        servers that have no effect."""
        words: list[str] = list(sys.argv[1:] if args is None else args)
        ignored: list[str] = []
        if self.takes_peer_flags:
            words, ignored = _PeerFlags(self, self._option_string_actions).take(words)
        self._parsed_words = words
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._unknown_words(unknown))
        if self.takes_peer_flags:
            parsed.ignored_flags = tuple(ignored)
        return parsed, unknown

    def command_parser(self, command: str) -> "Parser":
        """The parser of a subcommand."""
        return cast("Parser", self._command_parsers()[command])

    def name_flags(self, text: str) -> str:
        """Name flags in the text of an error where it names fields and keywords: --page-size 0 for page_size=0, or
        --block-size 0 where this name of it was given. What is quoted, and a call such as Engine(...), stays as it
        is."""
        flags = self._flags_by_name()
        return _FIELD_VALUE.sub(lambda field: _show_flag(field, flags), text)

    def _flags_by_name(self) -> dict[str, str]:
        parsers = [self, *cast("Mapping[str, Parser]", self._command_parsers()).values()]
        flags = {action.dest: parser._name_action(action) for parser in parsers for action in parser._actions}
        placement = {dest.removeprefix("placement_"): flag for dest, flag in flags.items()}
        return {name: flag for name, flag in {**placement, **flags, **self.keyword_flags}.items() if flag}

    def _name_action(self, action: argparse.Action) -> str:
        """The flag of this action that was given last, else the first of its long ones; empty where it has none."""
        words = [word.partition("=")[0] for word in self._parsed_words]
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        given = next((word for word in reversed(words) if word in flags), None)
        return given or next(iter(flags), "")

    def _command_parsers(self) -> Mapping[str, argparse.ArgumentParser]:
        group = self._subparsers
        return {} if group is None else group._group_actions[0].choices  # pyright: ignore[reportReturnType]

    def _unknown_words(self, unknown: Sequence[str]) -> str:
        """The error of unknown words, with the flag that is nearest to the first of them."""
        flag = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
        nearest = nearest_name(flag, (*self._option_string_actions, *(peer_flags() if self.takes_peer_flags else ())))
        fix = "" if nearest is None else f"; did you mean {nearest}?"
        return f"unrecognized arguments: {' '.join(map(short_text, unknown))}{fix}"

    def _misspelt_flags(self) -> list[str]:
        """Words that argparse took for flags that it does not know, which it only reports when nothing is missing."""
        words = self._parsed_words
        words = words[: words.index("--")] if "--" in words else words
        heads = {word: word.partition("=")[0] for word in words if word.startswith("--")}
        return [word for word, head in heads.items() if " " not in head and head not in self._option_string_actions]

    def _print_message(self, message: str, file: Any = None) -> None:
        """Raise OSError where the text of --help or --version cannot be written; argparse's own method ignores it."""
        if file is sys.stdout:
            sys.stdout.write(message)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        if self._subparsers is None and _REQUIRED.search(message) and (misspelt := self._misspelt_flags()):
            message = self._unknown_words(misspelt)
        message = with_short_values(message)
        if (choice := _INVALID_CHOICE.search(message)) is not None:
            nearest = nearest_name(choice[1], _WORD.findall(choice[2]))
            message += "" if nearest is None else f"; did you mean {nearest}?"
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")


def with_short_values(message: str) -> str:
    """An error of argparse, in which a long value is cut."""
    return _LONG_VALUE.sub(lambda shown: shown[1] + short_repr(ast.literal_eval(shown[2])), message)


def _show_flag(field: re.Match[str], flags: Mapping[str, str]) -> str:
    flag = flags.get(field["name"] or field["bare"])
    if flag is None:
        return field[0]
    return flag if field["bare"] or field["value"] == "True" else f"{flag} "


class _PeerFlags:
    """Takes the flags of other servers out of a command line."""

    def __init__(self, parser: Parser, own: Mapping[str, argparse.Action]) -> None:
        self._parser, self._own = parser, own
        self._ignored: list[str] = []
        self._refused: list[str] = []

    def take(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the words that are left, with flags as this program spells them, and the flags that have no effect.
        Ends the program, or raises as `Parser.error` does, where some are refused: one line names each."""
        left = self._take(words)
        if self._refused:
            self._parser.error("\n".join(dict.fromkeys(self._refused)))
        return left, self._ignored

    def _take(self, words: Sequence[str]) -> list[str]:
        left: list[str] = []
        waiting = list(reversed(words))
        while waiting:
            word = waiting.pop()
            if word == "--":
                return [*left, word, *reversed(waiting)]
            head, equals, text = word.partition("=")
            own = self._own_flag(head)
            if own is not None:
                following = text if equals else waiting[-1] if waiting else ""
                if not self._is_other_unit(own, following):
                    left.append(own + equals + text)
                elif not equals:
                    waiting.pop()
            elif (peer := _peer_name(head)) is None:
                left.append(word)
            else:
                name, arity, is_on = peer
                values = [text] if equals else self._values(head, arity, waiting)
                value: object = values
                if arity == "switch":
                    value = is_on and (text.lower() not in ("false", "0") if equals else True)
                elif arity == "value":
                    (value,) = values
                self._accept(head, name, value)
        return left

    def _own_flag(self, head: str) -> str | None:
        """The flag of this program that is meant, or None: `--tp_size` and `-tp` are --tp-size."""
        if head in self._own or not head.startswith("-"):
            return head if head in self._own else None
        flag = _flag(SHORT_FLAGS[head]) if head in SHORT_FLAGS else head.replace("_", "-")
        return flag if flag in self._own else None

    def _is_other_unit(self, flag: str, value: str) -> bool:
        """Whether a value of a flag of ours counts what it counts elsewhere; notes values that mean `auto`."""
        name = self._own[flag].dest
        is_other = name in OTHER_UNITS and re.fullmatch(OTHER_UNITS[name], value) is not None
        if is_other or own_value(name, value) == "auto" != value:
            self._ignored.append(f"{flag}={value}")
        return is_other

    def _values(self, head: str, arity: Arity, waiting: list[str]) -> list[str]:
        """Take the values of a flag off the words that wait, last first."""
        values: list[str] = []
        most = {"switch": 0, "value": 1, "list": len(waiting)}[arity]
        while waiting and len(values) < most and (waiting[-1][:1] != "-" or _NUMBER.fullmatch(waiting[-1])):
            values.append(waiting.pop())
        if not values and most:
            self._parser.error(f"argument {head}: expected one argument")
        return values

    def _accept(self, head: str, name: str, value: object) -> None:
        if (reason := FLAG_NAMES.refusal(name, value)) is not None:
            suffix = "" if value is True else f": {short_repr(value)}"
            self._refused.append(f"argument {head}{suffix} is refused: {reason}")
        if name in FLAG_NAMES.no_effect:
            self._ignored.append(head)


def _peer_name(head: str) -> tuple[str, Arity, bool] | None:
    """The name of a flag of another server, what it takes, and whether it switches on; None for any other word.
    vLLM's `--name.field` gives one field of the value of `name`."""
    flag, dot, _ = head.partition(".")
    if re.fullmatch("-O[0-9]*", flag):
        return "optimization_level", "value" if head == "-O" or dot else "switch", True
    name = SHORT_FLAGS.get(flag, flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else "")
    if name in INVERSES:
        return name, "switch", True
    for plain, is_on in ((name, True), (name.removeprefix("no_"), False)):
        arity = FLAG_NAMES.arity(plain)
        if arity is not None and (is_on or (arity == "switch" and plain != name)):
            return plain, "value" if dot else arity, is_on
    return None


def peer_flags() -> list[str]:
    """The flags of other servers."""
    return [_flag(name) for name in (*FLAG_NAMES.no_effect, *FLAG_NAMES.refused)]


def peer_arity(name: str) -> Arity | None:
    """What a flag of another server takes, by its name without dashes; None for any other."""
    peer = _peer_name(f"--{name}")
    return None if peer is None else peer[1]


def log_ignored_flags(options: argparse.Namespace) -> None:
    """Log, in one line, flags that were accepted and have no effect."""
    log_without_effect(f"routed-experts {options.command}", vars(options).get("ignored_flags", ()))


def add_engine_flags(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Add one flag a field of ServerArgs; a flag that is not given leaves the field at its default. The parser takes
    flags of other servers from now on."""
    if isinstance(parser, Parser):
        parser.takes_peer_flags = True
    group = _add_field_flags(parser, ServerArgs, "engine", leave_out=leave_out)
    group.add_argument(
        "--enable-expert-parallel", action="store_true", default=argparse.SUPPRESS, help="--ep-size is --tp-size"
    )
    group.add_argument(
        "--load-format",
        type=_load_format,
        metavar="|".join(LOAD_FORMATS),
        default=argparse.SUPPRESS,
        help="dummy: random weights in the shapes of config.json; no file of weights is read; default: auto",
    )
    meaning = "SGLang's name for what --dp-size does, which it requires"
    group.add_argument("--enable-dp-attention", action="store_true", default=argparse.SUPPRESS, help=meaning)


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerArgs that were given on the command line."""
    fields = _given_fields(options, ServerArgs)
    if "enable_expert_parallel" in options:
        fields.setdefault("ep_size", fields.get("tp_size", 1))
    if "enable_dp_attention" in options and "dp_size" not in fields:
        raise ConfigError("--enable-dp-attention without --dp-size: give the number of data ranks, or leave it out")
    return {
        name: tuple(cast("list[int]", value)) if isinstance(value, list) else value for name, value in fields.items()
    }


def check_sampling_flags(options: argparse.Namespace) -> None:
    """Raise ConfigError for a wrong --max-new-tokens or --temperature, before a model is loaded."""
    fields = {"max_tokens": options.max_new_tokens, "temperature": options.temperature}
    flags = {"max_tokens": "--max-new-tokens", "temperature": "--temperature"}
    try:
        SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    except InvalidRequestError as error:
        raise ConfigError(str(error.with_names(flags))) from error


def load_format(options: argparse.Namespace) -> str:
    """Where weights come from: "auto" (the folder) or "dummy" (none: they are random)."""
    return vars(options).get("load_format", "auto")


def _load_format(text: str) -> str:
    """A load format by any server's name for it."""
    name = str(own_value("load_format", text))
    if name not in LOAD_FORMATS:
        known = f"choose one of {', '.join(LOAD_FORMATS)}: weights are the folder's safetensors, or random"
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not supported; {known}")
    return name


def add_expert_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a field of ExpertOffloadConfig; `residency` takes a name or the file of a plan."""
    plan = {"metavar": _RESIDENCY_METAVAR}
    _add_field_flags(parser, ExpertOffloadConfig, "experts on the host", keywords={"residency": plan})


def expert_args(options: argparse.Namespace) -> ExpertOffloadConfig:
    """The offload of experts to the host; without any of its flags none. Reads a plan; raises ConfigError."""
    fields = _given_fields(options, ExpertOffloadConfig)
    if str(fields.get("residency", "")).endswith(".npz"):
        fields["residency"] = ResidencyMap.read(fields["residency"])
    return ExpertOffloadConfig(**fields)


def add_placement_flags(parser: argparse.ArgumentParser) -> None:
    """Add --placement, and one flag a further field of PlacementConfig."""
    group = parser.add_argument_group("experts on several devices")
    for field in dataclasses.fields(PlacementConfig):
        dest = f"placement_{field.name}"
        has_default = field.default is not dataclasses.MISSING
        keywords: dict[str, Any] = {"help": describe(dest, field.default if has_default else None)}
        if field.name == "plan":
            keywords |= {"metavar": "FILE.npz"}
        elif field.name in _PLACEMENT_CHOICES:
            keywords["choices"] = _PLACEMENT_CHOICES[field.name]
        else:
            keywords |= {"metavar": "X"} if field.name == "capacity_factor" else _argument_keywords(field.type)
        flag = _flag(_PLACEMENT_FLAGS.get(field.name, field.name))
        group.add_argument(flag, dest=dest, default=argparse.SUPPRESS, **keywords)


def placement_args(options: argparse.Namespace) -> PlacementConfig | None:
    """The placement of experts on devices; None without any of its flags. Reads the plan; raises ConfigError."""
    fields = _given_fields(options, PlacementConfig, prefix="placement_")
    if fields and "plan" not in fields:
        flags = ", ".join(_flag(_PLACEMENT_FLAGS.get(name, name)) for name in fields)
        text = f"{flags} without --placement FILE.npz, the plan that is meant"
        raise ConfigError(f"{text}; make one with routed-experts placement --save")
    return PlacementConfig.create(PlacementConfig(**fields)) if fields else None


def add_speculative_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a field of SpeculativeConfig, and vLLM's --speculative-config."""
    switch = {"action": argparse.BooleanOptionalAction}
    switches = {field.name: switch for field in dataclasses.fields(SpeculativeConfig) if field.type is bool}
    title = "speculative decoding"
    group = _add_field_flags(parser, SpeculativeConfig, title, prefix="speculative_", keywords=switches)
    example = 'speculative decoding in the form of vLLM: {"method": "ngram", "num_speculative_tokens": 3}'
    group.add_argument("--speculative-config", metavar=JSON, default=argparse.SUPPRESS, help=example)


def speculative_args(options: argparse.Namespace) -> SpeculativeConfig | None:
    """Speculative decoding; None without any of its flags. Raises ConfigError."""
    fields, values = _given_fields(options, SpeculativeConfig, prefix="speculative_"), vars(options)
    tp_size = values.get("tp_size", ServerArgs().tp_size)
    return SpeculativeConfig.create(None, fields, values.get("speculative_config"), tp_size=tp_size)


def add_dist_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a field of DistConfig."""
    _add_field_flags(parser, DistConfig, "several processes")


def dist_args(options: argparse.Namespace) -> DistConfig:
    """The process group; without any of its flags one process. Raises ConfigError."""
    return DistConfig.create(_given_fields(options, DistConfig))


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag a field of FleetSettings."""
    _add_field_flags(parser, FleetSettings, "a fleet of engines")


def fleet_args(options: argparse.Namespace) -> FleetSettings:
    """The fleet; without any of its flags one engine. Raises ConfigError."""
    return FleetSettings(**_given_fields(options, FleetSettings))


def replica_dist_args(options: argparse.Namespace) -> DistConfig:
    """The processes of each replica of a fleet. Raises ConfigError."""
    from routed_experts.fleet.spec import group_template

    defaults: dict[str, Any] = {"nnodes": 1, "node_rank": None, "dist_init_addr": None}
    return group_template(**(defaults | _given_fields(options, DistConfig)))


def _add_field_flags(
    parser: argparse.ArgumentParser,
    config: type,
    title: str,
    *,
    prefix: str = "",
    leave_out: Sequence[str] = (),
    keywords: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Any:
    """Add a group with one flag, by all its names, a field of a config class. `keywords`: of `add_argument`, where they
    do not follow from the field's type. Returns the group."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(config):
        if field.name not in leave_out:
            name = prefix + field.name
            own = keywords.get(field.name) or _argument_keywords(field.type, name)
            flags, text = map(_flag, (name, *OTHER_NAMES.get(name, ()))), describe(name, field.default)
            group.add_argument(*flags, dest=name, default=argparse.SUPPRESS, help=text, **own)
    return group


def _given_fields(options: argparse.Namespace, config: type, *, prefix: str = "") -> dict[str, Any]:
    """The fields of a config class whose flags were given."""
    values, names = vars(options), [field.name for field in dataclasses.fields(config)]
    return {name: values[prefix + name] for name in names if prefix + name in values}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _argument_keywords(kind: object, name: str = "") -> dict[str, Any]:
    """Keywords of `add_argument` for a field of this type; `name`: of a field that takes other servers' values, too."""
    if isinstance(kind, types.UnionType):
        other = (types.NoneType, os.PathLike[str])  # unset, and what Python alone can give
        (kind,) = (member for member in get_args(kind) if member not in other)
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "type": _own_type(name, str)}
    if get_origin(kind) is tuple:
        return {"type": get_args(kind)[0], "nargs": "+", "metavar": "N"}
    assert isinstance(kind, type), kind
    return {
        "type": _own_type(name, cast("Callable[[str], object]", kind)),
        "metavar": {int: "N", float: "X"}.get(kind, "NAME"),
    }


def _own_type(name: str, kind: Callable[[str], object]) -> Callable[[str], object]:
    """A converter of words to values of a field that knows the values of other servers."""
    if name not in OTHER_VALUES:
        return kind
    read = _NUMBER_TYPES.get(kind, kind) if isinstance(kind, type) else kind

    def convert(text: str) -> object:
        value = own_value(name, text)
        return read(value) if isinstance(value, str) else value

    convert.__name__ = getattr(kind, "__name__", "value")  # which argparse shows
    return convert
