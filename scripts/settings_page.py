"""Write the tables of docs/settings.md: python scripts/settings_page.py. A test holds the page to it."""

import argparse
import inspect
from pathlib import Path

from routed_experts.cli.main import make_parser
from routed_experts.engine.engine import Engine

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
_HEAD = "\n## {}\n\n| flag | values | `Engine` | meaning | default |\n|---|---|---|---|---|\n"


def render() -> str:
    """The page: what stands before the first table, and new tables."""
    commands = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)).choices
    keywords = inspect.signature(Engine.__init__).parameters
    parts = [PAGE.read_text(encoding="utf-8").partition("\n## ")[0]]
    for group in commands["serve"]._action_groups:
        actions = [action for action in group._group_actions if action.option_strings and action.dest != "help"]
        if actions:
            parts.append(_HEAD.format((group.title or "").capitalize()))
            parts += [_row(action, is_keyword=action.dest in keywords) for action in actions]
    return "".join(parts)


def _row(action: argparse.Action, *, is_keyword: bool) -> str:
    # of a switch with two values both; other spellings are names of other servers
    flags = action.option_strings if isinstance(action, argparse.BooleanOptionalAction) else action.option_strings[:1]
    values = () if action.nargs == 0 else action.choices or (action.metavar,)
    meaning, _, default = (action.help or "").rpartition("default: ")
    if not meaning:
        meaning, default = default, ""
    cells = (
        ", ".join(f"`{flag}`" for flag in flags),
        ", ".join(f"`{value}`" for value in values),
        "yes" if is_keyword else "",
        meaning.strip(" ;"),
        default,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
