"""Random configs against transformers: a few of those that tests/oracles/random_configs.py draws, which runs for as
long as requested."""

import pytest

from oracles.random_configs import drawn
from oracles.variations import compare

pytestmark = pytest.mark.usefixtures("fast_compilation")

DRAWN = (("Phimoe", 1), ("DeepseekV3", 3), ("Llama4", 2), ("GraniteMoe", 4))


@pytest.mark.parametrize(("name", "seed"), DRAWN)
def test_a_config_by_chance_is_what_transformers_makes_of_it(tmp_path, name, seed):
    verdict = compare(drawn(name, seed), tmp_path)
    print(f"{name} {seed}: {verdict}")
    assert verdict.agrees, verdict
