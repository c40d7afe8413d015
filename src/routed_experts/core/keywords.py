"""Keywords of public functions. Names of SGLang, vLLM and sgl-jax are translated, accepted without effect or refused,
as `core/peer_names.py` says; any other unknown name is refused with the nearest known one.

Python's own TypeError names no neighbour, and `**kwargs` would hide the signature from editors. So a function spells
out the keywords that have an effect, and `check_keywords` compares each call with that signature: a name of another
server changes nothing in what an editor, a type checker or a reference page shows."""

import dataclasses
import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

from routed_experts.core import peer_names
from routed_experts.core.error_text import nearest_name, short_repr, suggestion
from routed_experts.core.errors import PARAM, ConfigError, InvalidRequestError
from routed_experts.core.peer_names import Arity, NameGroup

_P = ParamSpec("_P")
_R = TypeVar("_R")
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class PeerNames:
    """The names of other servers that one kind of entrance takes beside its own.

    `synonyms`: sets of names of one parameter; `inverses`: names whose True is the False of ours."""

    synonyms: tuple[frozenset[str], ...]
    inverses: Mapping[str, str]
    no_effect: Mapping[str, Arity]
    refused: Mapping[str, tuple[NameGroup, Arity]]

    @staticmethod
    def create(
        other_names: Mapping[str, tuple[str, ...]],
        inverses: Mapping[str, str],
        no_effect: Iterable[NameGroup],
        refused: Iterable[NameGroup],
    ) -> "PeerNames":
        """Build from groups of the table."""
        return PeerNames(
            tuple(frozenset((name, *others)) for name, others in other_names.items()),
            inverses,
            {name: arity for group in no_effect for name, arity in group.names().items()},
            {name: (group, arity) for group in refused for name, arity in group.names().items()},
        )

    def arity(self, name: str) -> Arity | None:
        """What a name takes on a command line; None for a name without effect that is not in the table."""
        if name in self.no_effect:
            return self.no_effect[name]
        return self.refused[name][1] if name in self.refused else None

    def suggest(self, name: str, known: Sequence[str]) -> str:
        """`suggestion` among `known` and the names of others; without a near one, all of `known`."""
        others = (
            *self.no_effect,
            *self.refused,
            *self.inverses,
            *(other for names in self.synonyms for other in names),
        )
        nearest = nearest_name(name, known) or nearest_name(name, others)
        return suggestion(name, known) if nearest is None else f"did you mean {nearest}?"

    def own_name(self, name: str, known: Iterable[str]) -> str | None:
        """The one of `known` that means the same, or None."""
        others = next((names for names in self.synonyms if name in names), frozenset[str]())
        return next((other for other in known if other in others), None)

    def refusal(self, name: str, value: object) -> str | None:
        """Why a name of the table is refused with this value, and what to use; None where it is accepted."""
        if name not in self.refused:
            return None
        group, _ = self.refused[name]
        plain = _plain(value)
        if plain is None or plain is False or any(type(plain) is type(own) and plain == own for own in group.own):
            return None
        return group.reason

    def translate(
        self, keywords: Mapping[str, object], parameters: Mapping[str, inspect.Parameter], make_error: "MakeError"
    ) -> tuple[dict[str, object], list[str]]:
        """Return keywords of `parameters`, with names that are still unknown, and the names that have no effect. Raises
        for a name that is refused, and for two names of one parameter."""
        translated: dict[str, object] = {}
        without_effect: list[str] = []
        names: dict[str, str] = {}  # as they were given
        for given, value in keywords.items():
            name = given if given in parameters else self.own_name(given, parameters) or given
            if given in self.inverses and self.inverses[given] in parameters and isinstance(value, bool):
                name, value = self.inverses[given], not value
            if name not in parameters and self.arity(name) is not None:
                if (reason := self.refusal(name, value)) is not None:
                    raise make_error(name, f"{name}={short_repr(value)} is refused: {reason}")
                if name in self.no_effect and value is not None:
                    without_effect.append(name)
                continue
            if name in names:
                raise make_error(given, f"{names[name]} and {given} are one parameter; give one of them")
            names[name] = given
            own = own_value(name, value)
            if own is not value and own == "auto":
                without_effect.append(f"{given}={value}")
            if own is None and name in parameters and parameters[name].default not in (None, inspect.Parameter.empty):
                continue  # None means the default, as with SGLang
            translated[name] = own
        return translated, without_effect


MakeError = Callable[[str, str], Exception]  # of a keyword and a text


def _engine_names(*, in_process: bool) -> PeerNames:
    no_effect = (*peer_names.NO_EFFECT, *((peer_names.SERVER_SETTINGS,) if in_process else ()))
    refused = (*peer_names.REFUSED, *(peer_names.IN_PROCESS if in_process else ()))
    return PeerNames.create(peer_names.OTHER_NAMES, peer_names.INVERSES, no_effect, refused)


FLAG_NAMES = _engine_names(in_process=False)  # of a command line
ENGINE_NAMES = _engine_names(in_process=True)  # of Engine and LLM
REQUEST_NAMES = PeerNames.create(
    peer_names.OTHER_REQUEST_NAMES, {}, (peer_names.REQUEST_NO_EFFECT,), peer_names.REQUEST_REFUSED
)


def own_value(name: str, value: object) -> object:
    """Another server's word for a value of the parameter `name` as ours; any other value as it is."""
    values = peer_names.OTHER_VALUES.get(name, {})
    return values.get(value, value) if isinstance(value, int | str) else value


def _plain(value: object) -> object:
    """A value as JSON would read it, so that a command line and a call mean the same; None for what is empty. A list of
    one value is the value."""
    if isinstance(value, str):
        text = value.strip()
        try:
            return _plain(json.loads(text)) if not text.startswith('"') else text
        except ValueError:
            return {"none": None, "": None, "true": True, "false": False}.get(text.lower(), text)
    if isinstance(value, list | tuple | dict | set | frozenset) and not value:
        return None
    if isinstance(value, list | tuple) and len(value) == 1:
        return _plain(value[0])
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def config_error(name: str, text: str) -> ConfigError:
    """The error of an engine's keyword."""
    return ConfigError(text)


def request_error(name: str, text: str) -> InvalidRequestError:
    """The error of a request's keyword."""
    return InvalidRequestError(text.replace(name, PARAM, 1), param=name)


def check_keywords(
    make_unknown: Callable[[str, Sequence[str]], Exception],
    *,
    peers: PeerNames | None = None,
    make_error: MakeError = config_error,
    log_level: int = logging.WARNING,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function, or a coroutine function, so that a keyword which is not in its signature is looked up in
    `peers`, names of other servers. One that is not there either raises `make_unknown(name, names of all keywords)`;
    one that is refused raises `make_error(name, text)`. Names without effect are logged at `log_level`, all in one
    line."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = {
            name: parameter for name, parameter in inspect.signature(function).parameters.items() if name != "self"
        }

        def translate(keywords: Mapping[str, Any]) -> dict[str, Any]:
            translated: dict[str, Any] = dict(keywords)
            if peers is not None:
                translated, without_effect = peers.translate(keywords, parameters, make_error)
                log_without_effect(function.__qualname__.removesuffix(".__init__"), without_effect, level=log_level)
            unknown = next((name for name in translated if name not in parameters), None)
            if unknown is not None:
                raise make_unknown(unknown, tuple(parameters))
            return translated

        if inspect.iscoroutinefunction(function):
            coroutine_function: Any = function

            @functools.wraps(function)
            async def checked_coroutine(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                return await coroutine_function(*args, **translate(kwargs))

            return cast("Callable[_P, _R]", checked_coroutine)

        plain_function: Any = function

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return plain_function(*args, **translate(kwargs))

        return checked

    return decorate


def log_without_effect(entrance: str, names: Sequence[str], *, level: int = logging.WARNING) -> None:
    """Log in one line which names were accepted and do nothing."""
    if names:
        logger.log(level, "%s: accepted without effect: %s (docs/flags.md says why)", entrance, ", ".join(names))
