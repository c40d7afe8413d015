"""docs/models.md is what its script writes, and the tests that it names are there."""

import importlib.util
from pathlib import Path

from oracles.families import CASES
from routed_experts.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_page_of_models_is_current():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts" / "models_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.render(), "run python scripts/models_page.py"


def test_every_family_names_a_test_that_exists():
    for architecture, family in FAMILIES.items():
        file, _, case = family.test.rstrip("]").partition("[")
        assert (ROOT / "tests" / "models" / file).is_file(), architecture
        assert not case or case in CASES, architecture
