"""Run a notebook from its first cell to its last and store the outputs: python scripts/run_notebook.py FILE.ipynb"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

LIMIT_S = 600  # of a cell, on a busy machine; a whole notebook takes less than 60 s on two free cores


def main(path: Path) -> None:
    """Execute in a kernel of its own, in a temporary folder; the file is written only when every cell has run."""
    notebook = nbformat.read(path, as_version=4)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=LIMIT_S, kernel_name="python3", record_timing=False)
        client.execute(cwd=folder)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":  # without progress bars and warnings, which name folders of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)
    print(f"{path}: {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
