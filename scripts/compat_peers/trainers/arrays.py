"""Functions of a trainer's checkout, taken one by one, and a record to give them: its packages are not needed.

Dims: S tokens, M MoE layers, L hidden layers, K experts per token, E experts."""

import ast
import os
from pathlib import Path
from typing import Any

import numpy as np

from routed_experts import RoutedExperts

CHECKOUT = Path(os.environ["COMPAT_CHECKOUT"])
LAYERS, HIDDEN, TOP_K, EXPERTS = (1, 2, 4), 5, 4, 32  # two dense layers


def functions(*files: str, names: tuple[str, ...], **given: object) -> dict[str, Any]:
    """The functions and methods of these names in the first of the files that is there, with `given` as globals."""
    path = next(path for path in (CHECKOUT / file for file in files) if path.is_file())
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    chosen = [node for node in nodes if node.name in names]
    assert sorted(node.name for node in chosen) == sorted(names), f"{path} has other functions"
    found: dict[str, Any] = dict(given)
    exec(compile(ast.Module(list(chosen), []), str(path), "exec"), found)
    return found


def record(num_tokens: int = 9, *, seed: int = 0) -> RoutedExperts:
    """A rollout of S tokens: S - 1 rows."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((num_tokens - 1, len(LAYERS), EXPERTS)), axis=-1)[..., :TOP_K].astype(np.uint8)
    return RoutedExperts(
        ids=ids,
        start=0,
        num_tokens=num_tokens,
        num_prompt_tokens=4,
        layer_ids=LAYERS,
        num_hidden_layers=HIDDEN,
        num_experts=EXPERTS,
        version_spans=((0, num_tokens - 1, 0),),
    )
