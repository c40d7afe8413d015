"""`routed-experts tiny DIR`: writes a small checkpoint with tokenizer and chat template, to try clients and servers."""

import argparse
import shutil
from contextlib import ExitStack
from pathlib import Path

from routed_experts.core.atomic_write import atomic_write
from routed_experts.core.errors import ConfigError
from routed_experts.demo import demo_model_path


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `tiny`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="must not exist, or be empty")


def run(options: argparse.Namespace, start_time: float) -> int:
    """Copy the checkpoint of the package."""
    folder: Path = options.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name another")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # no file has its name before all are written
        for file in filter(Path.is_file, demo_model_path().iterdir()):  # without the folder of the draft head
            shutil.copyfile(file, stack.enter_context(atomic_write(folder / file.name)))
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"wrote {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))} ({size / 1e6:.1f} MB)")
    print(f"try: routed-experts serve {folder} --enable-return-routed-experts")
    return 0
