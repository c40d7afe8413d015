"""Count the files and lines of the package that one request runs through.

Traces one call of Engine.generate(..., return_routed_experts=True), and one chat completion with rows over HTTP, in all
threads and after a warm-up of the same shapes. A file counts with all of its lines when a function of it is called.
Kernels and programs that JAX traces run as compiled code; a file of theirs that still runs is listed apart.

    scripts/request_path                  this clone
    scripts/request_path --root DIR       another clone, such as one of an earlier commit
    scripts/request_path --files          with the names of the files"""

import argparse
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parents[1]
TRACED = ("layers/", "models/", "execution/programs.py", "capture/device_cache.py")
PROMPT = "the cat sat on the mat"
READY_S = 300.0


class CalledFiles:
    """Notes the files whose functions are called while it `records`, in this thread and in all that start later."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.records = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self.records and event == "call" and frame.f_code.co_name != "<module>":
            self.paths.add(frame.f_code.co_filename)


def trace_generate(model: Path, out: Path) -> None:
    """Write the files of the second of two equal calls."""
    called = CalledFiles()
    engine_class = importlib.import_module("routed_experts").Engine  # of the clone that is traced
    with engine_class(str(model), enable_return_routed_experts=True) as engine:
        for records in (False, True):
            engine.flush_cache()
            called.records = records
            engine.generate(PROMPT, {"temperature": 0.0}, max_new_tokens=8, return_routed_experts=True)
            called.records = False
    out.write_text(json.dumps(sorted(called.paths)), encoding="utf-8")


def trace_chat(model: Path, out: Path) -> None:
    """Write the files of the second of two equal requests to `routed-experts serve`, which runs in this process."""
    called = CalledFiles()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def ask() -> None:
        try:
            wait_ready(f"{url}/ready")
            for records in (False, True):
                called.records = records
                chat(f"{url}/v1/chat/completions")
                called.records = False
            out.write_text(json.dumps(sorted(called.paths)), encoding="utf-8")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    sys.argv = ["routed-experts", "serve", str(model), "--port", str(port), "--enable-return-routed-experts"]
    runpy.run_module("routed_experts", run_name="__main__")  # ends the process


def wait_ready(url: str) -> None:
    """Poll until the server is ready."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            threading.Event().wait(0.2)
    raise TimeoutError(f"{url} was not ready within {READY_S:.0f} s")


def chat(url: str) -> None:
    """One chat completion with rows."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "return_routed_experts": True}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert "routed_experts" in json.dumps(json.load(response)), "the answer holds rows"


TRACES = {"generate": trace_generate, "chat": trace_chat}


def run_trace(name: str, root: Path, model: Path) -> set[str]:
    """The files that a trace recorded, by their names in the package; each trace has a process of its own."""
    package = root / "src" / "routed_experts"
    out = model.parent / f"{name}.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--trace", name, "--model", str(model), "--out", str(out)]
    print(f"tracing {name} ...", file=sys.stderr, flush=True)
    run(command, root)
    paths = json.loads(out.read_text(encoding="utf-8"))
    return {Path(path).relative_to(package).as_posix() for path in paths if Path(path).is_relative_to(package)}


def run(command: list[str], root: Path) -> None:
    """Run a command with the package of a clone."""
    env = {**os.environ, "PYTHONPATH": str(root / "src"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


def report(title: str, names: set[str], root: Path, *, show: bool) -> None:
    """Print counts of one trace."""
    lines = {
        name: len((root / "src" / "routed_experts" / name).read_text(encoding="utf-8").splitlines()) for name in names
    }
    for kind, chosen in (
        ("", sorted(name for name in names if not name.startswith(TRACED))),
        (", kernels and traced programs", sorted(name for name in names if name.startswith(TRACED))),
    ):
        print(f"{title}{kind}: {len(chosen)} files, {sum(lines[name] for name in chosen):,} lines")
        for name in chosen if show else ():
            print(f"    {lines[name]:5,}  {name}")


def main() -> None:
    """Trace both calls of a clone and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=HERE, help="the clone whose package is traced; default: this one")
    parser.add_argument("--files", action="store_true", help="name the files")
    parser.add_argument("--trace", choices=TRACES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trace:
        TRACES[options.trace](options.model, options.out)
        return
    root = options.root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        run([sys.executable, "-m", "routed_experts", "tiny", str(model)], root)
        generate, chat_files = run_trace("generate", root, model), run_trace("chat", root, model)
    report("Engine.generate", generate, root, show=options.files)
    report("HTTP chat completion beyond that", chat_files - generate, root, show=options.files)


if __name__ == "__main__":
    main()
