"""An unknown keyword raises the error of the function that was called; all other errors are Python's."""

import asyncio
import inspect
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routed_experts.core.errors import ConfigError
from routed_experts.core.keywords import PeerNames, check_keywords, own_value
from routed_experts.core.peer_names import NameGroup


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


PEERS = PeerNames.create(
    {"size": ("length", "len"), "cache": ("no_memory",)},
    {"enable_forgetting": "cache"},
    (NameGroup(reason="nothing is logged", switches="log_all", values="log_level"),),
    (NameGroup(reason="give size", own=(1, "auto"), values="width"),),
)


class Machine:
    @check_keywords(unknown, peers=PEERS)
    def __init__(self, path="here", *, size=2, cache=True, kernel=None):
        self.values = path, size, cache, kernel


def test_names_of_others_are_translated():
    assert Machine(length=5).values == ("here", 5, True, None)
    assert Machine(len=5, no_memory=False).values == ("here", 5, False, None)
    assert Machine(enable_forgetting=True).values[2] is False and Machine(enable_forgetting=False).values[2] is True


def test_two_names_of_one_parameter_are_refused():
    for keywords in ({"size": 1, "length": 1}, {"len": 1, "length": 2}, {"cache": True, "enable_forgetting": False}):
        with pytest.raises(ConfigError, match=r" and .* are one parameter; give one of them"):
            Machine(**keywords)


def test_none_means_the_default_of_a_parameter_that_has_one():
    assert Machine(size=None).values[1] == Machine(length=None).values[1] == 2
    assert Machine(kernel=None).values[3] is None and Machine(kernel=7).values[3] == 7


def test_names_without_effect_are_logged_in_one_line_and_no_other_is(caplog):
    with caplog.at_level(logging.DEBUG):
        Machine(log_all=True, log_level=3, width="auto", size=4)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "Machine: accepted without effect: log_all, log_level (docs/flags.md says why)"
    caplog.clear()
    Machine(size=4, width=1, log_level=None)
    assert not caplog.records


def test_a_refused_name_says_its_value_and_what_to_use():
    with pytest.raises(ConfigError, match=r"^width=2 is refused: give size$"):
        Machine(width=2)
    with pytest.raises(ConfigError, match=r"width='x{60}'\.\.\. \(100000 characters\) is refused: give size"):
        Machine(width="x" * 100_000)
    with pytest.raises(ConfigError, match="wideness is none of path, size, cache, kernel"):
        Machine(wideness=2)


def test_values_of_others_become_ours():
    assert own_value("dtype", "half") == "float16" and own_value("dtype", "bfloat16") == "bfloat16"
    assert own_value("chunked_prefill_size", -1) is None and own_value("chunked_prefill_size", 8) == 8
    assert own_value("attention_backend", ["fa"]) == ["fa"]


def test_a_value_is_never_compared_as_a_truth():
    """Arrays have none."""
    array = np.zeros((2, 2))
    assert Machine(kernel=array, log_all=array).values[3] is array
    with pytest.raises(ConfigError, match=r"width=a ndarray .* is refused: give size"):
        Machine(width=array)


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4))
def test_any_value_is_accepted_or_refused_and_nothing_else(value):
    for name in ("width", "log_level"):
        assert PEERS.refusal(name, value) in (None, "give size")
