"""Marks for SGLang's own CI, which do nothing here."""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: None
