"""docs/flags.md shows the table of `core/peer_names.py`, and names the versions that its names were read from."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_flags_is_current():
    spec = importlib.util.spec_from_file_location("flags_page", ROOT / "scripts" / "flags_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.render(), "run python scripts/flags_page.py"
    servers = json.loads(module.NAMES.read_text(encoding="utf-8"))["servers"]
    for server in servers.values():
        assert all(version in page for version in server["version"].replace(" and ", ", ").split(", "))
    names = {name for server in servers.values() for name in " ".join(server["names"]).split()}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
