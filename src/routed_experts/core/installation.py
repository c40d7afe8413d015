"""Imports optional libraries, and gives the command that installs them for how this distribution was installed."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from routed_experts.core.errors import ConfigError

DISTRIBUTION = "routed-experts"


def install_command(extra: str) -> str:
    """The command that adds `extra`, such as `.venv/bin/python -m pip install -e ".[serve]"` in a clone.

    Paths below the working folder are relative to it."""
    python, requirement = _shown(sys.executable), _requirement(extra)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python} {requirement}"
    return f"{python} -m pip install {requirement}"


def import_optional(module: str, *, purpose: str, extra: str, otherwise: str = "") -> Any:
    """Import a module of an extra. Raises ConfigError with the command that installs it; `otherwise`: what else to
    do."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_library(error, purpose=purpose, extra=extra, otherwise=otherwise) from error


def missing_library(error: ImportError, *, purpose: str, extra: str, otherwise: str = "") -> ConfigError:
    """The error for a library of an extra that could not be imported."""
    library = (error.name or "a library").partition(".")[0]
    alternative = f", or {otherwise}" if otherwise else ""
    return ConfigError(f"{purpose}: {library} is not installed; run {install_command(extra)}{alternative}")


def _requirement(extra: str) -> str:
    source = _direct_url()
    if source is None:  # an index may have another project under this name: only the clone is known to be this one
        return f'-e ".[{extra}]" in a clone of {DISTRIBUTION}'
    url, folder = str(source["url"]), source.get("dir_info")
    if folder is None:
        if (origin := source.get("vcs_info")) is not None:
            url = f"{origin['vcs']}+{url}@{origin['commit_id']}"
        return f'"{DISTRIBUTION}[{extra}] @ {url}"'
    path = urllib.request.url2pathname(urllib.parse.urlsplit(url).path)
    return f'{"-e " if folder.get("editable") else ""}"{_shown(path)}[{extra}]"'


def _direct_url() -> Mapping[str, Any] | None:
    """Where the distribution came from (PEP 610), else the source tree that this module is of; None: neither."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if text is not None:
        return json.loads(text)
    root = Path(__file__).parents[3]
    return {"url": root.as_uri(), "dir_info": {"editable": True}} if (root / "pyproject.toml").is_file() else None


def _shown(path: str) -> str:
    """A path, relative where it is the working folder or below it. Links are kept: an environment's python is one."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
