"""An unknown keyword raises the error of the function that was called; all other errors are Python's."""

import asyncio
import inspect

import pytest

from routed_experts.core.errors import ConfigError
from routed_experts.core.keywords import check_keywords


def unknown(name, known):
    return ConfigError(f"{name} is none of {', '.join(known)}")


class Endpoint:
    @check_keywords(unknown)
    def enter(self, first, *, second=2):
        """Enter."""
        return first, second

    @check_keywords(unknown)
    async def wait(self, *, first=1):
        """Wait."""
        return first


def test_known_keywords_pass_and_an_unknown_one_is_named():
    assert Endpoint().enter(1) == (1, 2) and Endpoint().enter(first=1, second=3) == (1, 3)
    with pytest.raises(ConfigError, match="third is none of first, second"):
        Endpoint().enter(1, third=3)
    with pytest.raises(TypeError, match="positional"):
        Endpoint().enter(1, 2)


def test_a_coroutine_function_stays_one_and_raises_when_it_is_awaited():
    assert inspect.iscoroutinefunction(Endpoint.wait) and asyncio.run(Endpoint().wait(first=4)) == 4
    wrong = Endpoint().wait(frist=4)
    with pytest.raises(ConfigError, match="frist is none of first"):
        asyncio.run(wrong)


def test_the_signature_and_the_docstring_are_those_of_the_function():
    assert list(inspect.signature(Endpoint.enter).parameters) == ["self", "first", "second"]
    assert Endpoint.enter.__doc__ == "Enter."
