"""Write docs/models.md from the table of families: python scripts/models_page.py. A test holds the page to it."""

from pathlib import Path

from routed_experts.models.registry import FAMILIES, Family

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_HEAD = """# Models

Written by `scripts/models_page.py` from `models/registry.py`; do not edit. z are a router's logits, s its scores, b a bias that moves the
choice and no weight, v the scores of the chosen experts. Every family is compared with an independent implementation, token by token
and expert id by expert id, in the test that is named: mostly transformers, on random checkpoints in the true format.

| family | checkpoints | architecture | routing law | captured | refused | test |
|---|---|---|---|---|---|---|
"""
_FOOT = """
Captured are the K experts that each token ran, best first, as logical ids; experts that every token shares have no column, and layers
without a router none either. A dense model is served, and capture of it is refused. Weights are bfloat16, float16 or float32; a
quantised checkpoint (fp8, AWQ, GPTQ) is refused by the name of its method before any memory is taken. Rotary positions may be plain,
linear, yarn, llama3, dynamic up to the trained length, or longrope up to the length where its short factors hold. An architecture that
is not in the table is refused with the list of those that are. Where layers keep a state of fixed size (Qwen3-Next, Qwen3.5), the
prefix cache is off: `get_server_info()["prefix_cache"]` says so.
"""


def render() -> str:
    """The whole page."""
    rows = "".join(_row(architecture, family) for architecture, family in FAMILIES.items())
    return f"{_HEAD}{rows}{_FOOT}"


def _row(architecture: str, family: Family) -> str:
    captured = "K ids of each MoE layer" if family.law else "nothing"
    cells = (
        family.title,
        family.checkpoints,
        f"`{architecture}`",
        family.law or "dense",
        captured,
        family.refused or "-",
        f"`{family.proof}`",
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
