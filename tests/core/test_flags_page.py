"""Pages of flags: docs/flags.md shows the table of `core/peer_names.py` and names the versions that its names were read
from; docs/settings.md shows the flags of `serve`, each with its meaning."""

import dataclasses
import importlib.util
import json
from pathlib import Path

from routed_experts.cli.flag_help import MEANINGS
from routed_experts.core.dist_config import DistConfig
from routed_experts.core.expert_offload_config import ExpertOffloadConfig
from routed_experts.core.placement_config import PlacementConfig
from routed_experts.core.server_args import ServerArgs
from routed_experts.core.speculative_config import SpeculativeConfig
from routed_experts.engine.build.backends import ATTENTION, KERNELS
from routed_experts.fleet.settings import FleetSettings

ROOT = Path(__file__).parents[2]


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
    module = load_script("settings_page")
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.render(), "run python scripts/settings_page.py"
    rows = [[cell.strip() for cell in row.split(" | ")] for row in page.splitlines() if row.startswith("| `--")]
    assert len(rows) > len(MEANINGS) and all(len(row) == 5 and row[3] for row in rows)


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
