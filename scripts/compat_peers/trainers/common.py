"""A server as trainers have it: rows are captured, and weights come from a folder."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from compat_peers import serving

NUM_LAYERS, TOP_K = 6, 4  # of the demo model


@contextlib.contextmanager
def trained_server(folder: Path, *args: str) -> Iterator[tuple[str, str]]:
    """The address of a server, and a folder with weights that it may be updated from."""
    weights = folder / "step"
    shutil.copytree(serving.model_path(), weights)
    port = serving.free_port()
    serving.Server("policy", ["--enable-return-routed-experts", "--weights-root", str(folder), *args], port=port)
    try:
        yield f"http://127.0.0.1:{port}", str(weights)
    finally:
        serving.end(port)
