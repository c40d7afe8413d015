"""Pages of flags: docs/flags.md shows the table of `core/peer_names.py` and names the versions that its names were read
from; docs/settings.md shows the flags of `serve`, each with its meaning."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from routed_experts.cli.flag_help import MEANINGS
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.backends import ATTENTION, KERNELS
from routed_experts.fleet.settings import FleetSettings

ROOT = Path(__file__).parents[1]
ROW = "| `--flag` | `N` | yes | what it means | 3 |"
CONFIGS = (ExpertOffloadConfig, PlacementConfig, SpeculativeConfig)
REFERS = re.compile(r"\b(these|those(?! (of|that)\b)|of them|for the same|of the same)\b")  # to another row


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_flags_is_current():
    module = load_script("flags_page")
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.render(), "run python scripts/flags_page.py"
    servers = json.loads(module.NAMES.read_text(encoding="utf-8"))["servers"]
    for server in servers.values():
        assert all(version in page for version in server["version"].replace(" and ", ", ").split(", "))
    names = {name for server in servers.values() for name in " ".join(server["names"]).split()}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_page_of_settings_is_current_and_every_flag_has_a_meaning():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == load_script("settings_page").render(), "run python scripts/settings_page.py"
    assert len(rows_of(page)) > len(MEANINGS)
    assert wrong_rows(page) == []


def rows_of(page):
    """The cells of each flag: flags, values, whether it is a keyword of Engine, meaning, default."""
    rows = [row.removeprefix("| ").removesuffix(" |") for row in page.splitlines() if row.startswith("| `--")]
    return [[cell.strip() for cell in row.split(" | ")] for row in rows]


def wrong_rows(page):
    """Rows without a meaning, or with one that only another row explains, and rows whose default says nothing."""
    return [
        cells
        for cells in rows_of(page)
        if len(cells) != 5 or not cells[3] or REFERS.search(cells[3]) or cells[4] == "None"
    ]


@pytest.mark.parametrize(
    ("cell", "other"),
    [
        ("| 3 |", "| None |"),
        ("what it means", ""),
        ("| what it means ", ""),
        ("what it means", "seconds for which these are there"),
        ("what it means", "bytes a second, for the same"),
        ("what it means", "which of them this is"),
    ],
)
def test_a_row_that_says_too_little_is_detected(cell, other):
    assert wrong_rows(ROW) == [] != wrong_rows(ROW.replace(cell, other))


def test_the_page_of_settings_has_every_spelling_of_a_switch():
    flags = {cells[0] for cells in rows_of((ROOT / "docs" / "settings.md").read_text(encoding="utf-8"))}
    for name in ("adaptive", "remember"):
        assert f"`--speculative-{name}`, `--no-speculative-{name}`" in flags


def test_the_page_of_settings_names_where_flags_that_are_no_keywords_belong():
    """The head names the config of each flag without "yes", and the flags that no config has."""
    head, *tables = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").split("\n## ")
    configs = {config: {field.name for field in dataclasses.fields(config)} for config in CONFIGS}
    needed = set()
    for title, rows in ((table.partition("\n")[0], rows_of(table)) for table in tables):
        if title in ("Options", "Server", "A fleet of engines"):
            continue  # of no engine
        for name in (cells[0].split("`")[1].removeprefix("--").replace("-", "_") for cells in rows if not cells[2]):
            owner = [config for config, fields in configs.items() if {name, name.removeprefix("speculative_")} & fields]
            needed.add(owner[0].__name__ if owner else f"--{name.replace('_', '-')}")
    assert needed >= {config.__name__ for config in CONFIGS} | {"--enable-dp-attention", "--placement-mode"}
    assert [name for name in sorted(needed) if f"`{name}`" not in head] == []


def test_meanings_name_fields_and_every_kernel():
    fields = {
        prefix + field.name
        for prefix, config in (
            ("", ServerArgs),
            ("", ExpertOffloadConfig),
            ("", DistConfig),
            ("", FleetSettings),
            ("placement_", PlacementConfig),
            ("speculative_", SpeculativeConfig),
        )
        for field in dataclasses.fields(config)
    }
    assert set(MEANINGS) == fields
    for name, kernels in (("attention_backend", ATTENTION), ("moe_backend", KERNELS)):
        assert all(kernel in MEANINGS[name].replace(",", "").split(";")[0].split() for kernel in kernels)
