"""What searches for drafts in these tests: Python, and compiled code."""

import pytest

from routed_experts.layers.native import toolchain
from routed_experts.layers.native.text_drafts import text_draft_functions


@pytest.fixture(scope="session")
def compiled_functions(request):
    """The compiled search."""
    if toolchain.compiler() is None:
        reason = "this machine has no C++ compiler"
        if request.config.getoption("--require-tpu-aot"):  # as CI does: there these tests always run
            pytest.fail(reason)
        pytest.skip(reason)
    functions = text_draft_functions()
    assert functions is not None
    return functions


@pytest.fixture(scope="session", params=["python", "compiled"])
def functions(request):
    """The compiled search, or None for that in Python."""
    return None if request.param == "python" else request.getfixturevalue("compiled_functions")
