"""Write the tables of docs/flags.md: python scripts/flags_page.py. A test holds the page to it."""

import argparse
import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from routed_experts.cli.main import make_parser
from routed_experts.core import peer_names
from routed_experts.core.peer_names import NameGroup
from routed_experts.engine.engine import Engine

ROOT = Path(__file__).parents[1]
PAGE, NAMES = ROOT / "docs" / "flags.md", ROOT / "tests" / "core" / "data" / "peer_names.json"
_FIRST, _LAST = "## Served\n", "## Methods of an engine\n"  # what stands outside is written in the page itself


def render() -> str:
    """The page, with new tables."""
    page, names = PAGE.read_text(encoding="utf-8"), json.loads(NAMES.read_text(encoding="utf-8"))["servers"]
    before, after = page[: page.index(_FIRST)], page[page.index(_LAST) :]
    known = sorted({name for server in names.values() for name in " ".join(server["names"]).split()})
    return "".join(
        (
            before,
            _served(known),
            _translated(),
            _table("Accepted without effect", ("because", "names"), peer_names.NO_EFFECT),
            _values_without_effect(),
            _table("Refused", ("use instead", "names"), peer_names.REFUSED),
            _in_python(),
            after,
        )
    )


def _served(names: Iterable[str]) -> str:
    commands = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    flags = {flag[2:].replace("-", "_") for flag in commands["serve"]._option_string_actions}
    others = {other for values in peer_names.OTHER_NAMES.values() for other in values}
    keywords = inspect.signature(Engine.__init__).parameters
    served = [name for name in names if name in flags - others]
    in_process = [name for name in served if name in keywords]
    alone = [name for name in served if name not in keywords]
    return (
        f"## Served\n\nFlags, and keywords of `Engine`: {_listed(in_process)}.\n\n"
        f"Flags of `serve` alone: {_listed(alone)}.\n\n"
    )


def _translated() -> str:
    rows = [f"| {_listed(others)} | `{name}` |" for name, others in peer_names.OTHER_NAMES.items()]
    rows += [f"| `{name}` | `{other}`, the reverse |" for name, other in peer_names.INVERSES.items()]
    values: list[str] = []
    for name, mapping in peer_names.OTHER_VALUES.items():
        by_own: dict[object, list[str]] = {}
        for value, own in mapping.items():
            by_own.setdefault(own, []).append(str(value))
        values += [
            f"| `{name}` | {_listed(dict.fromkeys(others))} | {'the default' if own is None else f'`{own}`'} |"
            for own, others in by_own.items()
            if own != "auto"
        ]
    return (
        "## Translated\n\n| there | here |\n|---|---|\n"
        + "\n".join(rows)
        + "\n\n| name | value there | here |\n|---|---|---|\n"
        + "\n".join(values)
        + "\n\n"
    )


def _table(title: str, columns: tuple[str, str], groups: Iterable[NameGroup]) -> str:
    rows = [f"| {_reason(group)} | {_listed(sorted(group.names()))} |" for group in groups]
    return f"## {title}\n\n| {columns[0]} | {columns[1]} |\n|---|---|\n" + "\n".join(rows) + "\n\n"


def _values_without_effect() -> str:
    rows = [
        f"| `{name}` | {_listed(str(value) for value, own in values.items() if own == 'auto')} |"
        for name, values in peer_names.OTHER_VALUES.items()
        if "auto" in values.values()
    ]
    intro = "Values without effect, which mean `auto`, the default:"
    return f"{intro}\n\n| name | values |\n|---|---|\n" + "\n".join(rows) + "\n\n"


def _reason(group: NameGroup) -> str:
    values = [str(value) for value in group.own if value != ""]
    numbers = [value for value in group.own if isinstance(value, int)]
    if len(numbers) > 5:
        values = [f"{min(numbers)} to {max(numbers)}"]
    return group.reason if not values else f"{group.reason}; accepted: {_listed(values)}"


def _in_python() -> str:
    groups = (peer_names.SERVER_SETTINGS, *peer_names.IN_PROCESS)
    requests = (peer_names.REQUEST_NO_EFFECT, *peer_names.REQUEST_REFUSED)
    others: Mapping[str, tuple[str, ...]] = peer_names.OTHER_REQUEST_NAMES
    text = "; ".join(
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} `{name}`" for name, names in others.items()
    )
    calls = _table("Keywords of generate", ("instead", "names"), requests)
    intro = (
        f"Of `Engine.generate` and `async_generate`: {text}. `LLM.generate` reads `cache_salt` from a prompt,\n"
        '`{"prompt": ..., "cache_salt": ...}`. The first line of the table is accepted without effect '
        "by these methods,\n"
        "by `LLM.chat` and as a key of a prompt; the others are refused.\n\n"
    )
    before, _, after = calls.partition("\n\n")
    return _table("In Python", ("in Python", "flags"), groups) + f"{before}\n\n{intro}{after}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
