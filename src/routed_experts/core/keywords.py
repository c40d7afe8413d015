"""Unknown keywords of public functions: refused with an error of ours that names the nearest known keyword.

Python's own TypeError names no neighbour, and `**kwargs` would hide the signature from editors. So a function spells
out its keywords, and `refuse_unknown` compares each call with that signature."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")


def refuse_unknown(
    make_error: Callable[[str, Sequence[str]], Exception],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function, or a coroutine function, so that a keyword which is not in its signature raises
    `make_error(name, names of all keywords)`."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = tuple(name for name in inspect.signature(function).parameters if name != "self")

        def check(keywords: Mapping[str, object]) -> None:
            unknown = next((name for name in keywords if name not in known), None)
            if unknown is not None:
                raise make_error(unknown, known)

        if inspect.iscoroutinefunction(function):
            coroutine_function: Any = function

            @functools.wraps(function)
            async def checked_coroutine(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                check(kwargs)
                return await coroutine_function(*args, **kwargs)

            return cast("Callable[_P, _R]", checked_coroutine)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            check(kwargs)
            return function(*args, **kwargs)

        return checked

    return decorate
