"""Functions cut from a peer's file at run time: the file itself imports what is not there."""

import ast
from collections.abc import Collection
from pathlib import Path
from typing import Any


def cut(file: Path, names: Collection[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the definitions `names` of a file in `namespace`, which gives what they use; the namespace. Annotations are
    dropped. Raises LookupError for a name that the file does not define at its top level."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    chosen = [node for node in tree.body if _defines(node, names)]
    found = {name for node in chosen for name in names if _defines(node, [name])}
    if lacking := sorted(set(names) - found):
        raise LookupError(f"{file} does not define {', '.join(lacking)}")
    for node in chosen:
        for inner in ast.walk(node):
            if isinstance(inner, ast.arg):
                inner.annotation = None
            elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                inner.returns = None
    module = ast.fix_missing_locations(ast.Module(chosen, []))
    exec(compile(module, str(file), "exec"), namespace)
    return namespace


def _defines(node: ast.stmt, names: Collection[str]) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name in names
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id in names for target in targets)
