"""Write docs/models.md from the table of families: python scripts/models_page.py. A test holds the page to it."""

from pathlib import Path

from routed_experts.models.registry import FAMILIES, Family

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_HEAD = """# Models

`scripts/models_page.py` writes this page from `models/registry.py`. Every family is compared with an independent
implementation, token by token and expert id by expert id, in the test that is named. Mostly that is transformers, on
random checkpoints in the true format.

In the routing laws, z are a router's logits and s its scores. b is a bias that changes the choice and no weight, and
v are the scores of the chosen experts.

| family | checkpoints | architecture | routing | captured | refused | test |
|---|---|---|---|---|---|---|
"""
_FOOT = """
A record holds the K experts that each token ran, best first, as logical ids. Shared experts and layers without a
router have no column. A dense model is served; capturing it is refused.

Weights are bfloat16, float16 or float32. A quantised checkpoint (fp8, AWQ, GPTQ) is refused by the name of its method
before any memory is taken. An architecture that is not in the table is refused with the list of those that are.

Rotary positions may be plain, linear, yarn or llama3. Dynamic scaling works up to the trained length, longrope up to
the length of its short factors. Where layers keep a state of fixed size (Qwen3-Next, Qwen3.5), the prefix cache is
off: `get_server_info()["prefix_cache"]` says so.

To add a family, see "Where to add things" in `CONTRIBUTING.md`.
"""


def render() -> str:
    """The whole page."""
    rows = "".join(_row(architecture, family) for architecture, family in FAMILIES.items())
    return f"{_HEAD}{rows}{_FOOT}"


def _row(architecture: str, family: Family) -> str:
    captured = "K ids of each MoE layer" if family.routing else "nothing"
    cells = (
        family.title,
        family.checkpoints,
        f"`{architecture}`",
        family.routing or "dense",
        captured,
        family.refused or "-",
        f"`{family.test}`",
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
