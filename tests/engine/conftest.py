"""The engine of most tests of this folder: the tiny MoE with capture on."""

import pytest


@pytest.fixture(scope="module")
def engine(tiny_engine):
    return tiny_engine
