"""What searches for drafts in these tests: Python, and compiled code."""

import pytest

from routed_experts.layers.native import toolchain
from routed_experts.layers.native.text_drafts import text_drafts_function


@pytest.fixture(scope="session")
def compiled_function():
    """The compiled search."""
    if toolchain.compiler() is None:
        pytest.skip("this machine has no C++ compiler")
    function = text_drafts_function()
    assert function is not None
    return function


@pytest.fixture(scope="session", params=["python", "compiled"])
def function(request):
    """The compiled search, or None for that in Python."""
    return None if request.param == "python" else request.getfixturevalue("compiled_function")
