"""Install real clients, run each against a server of the demo model, and write docs/compatibility.md. Called by
scripts/compat.

A client that fails, or cannot be installed, is marked in the table and makes the exit code 1. Each has a folder of its
own. With --ci: the quick ones of them, two at a time, installed while the server starts; and no page. With --peers
FOLDER and what follows, the tests of other servers run instead: compat_peers/run.py."""

import argparse
import contextlib
import dataclasses
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from compat_peers import run as peers
from compat_peers.model import model_with_tools

from routed_experts.demo import demo_model_path

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "scripts" / "compat_clients"
INSTALL_S, CI_INSTALL_S, RUN_S, START_S = 1200, 240, 300, 180
LATE = 124  # the exit code of a command that was ended at its limit
TRIES = 3  # of an installation: registries have bad moments
TORCH = "torch==2.13.0"  # for clients that need one: the build of the tests


@dataclasses.dataclass(frozen=True)
class Client:
    """A program of ours that drives a client, and what it needs. The first requirement is the client itself."""

    name: str
    program: str
    requirements: tuple[str, ...]
    in_ci: bool = False
    alone: bool = False  # a load under which no other client should compare answers: run by itself, last

    @property
    def is_node(self) -> bool:
        """Is it installed by npm."""
        return self.program.endswith(".mjs")

    @property
    def needs_what_is_missing(self) -> bool:
        """True if it needs node, and there is none."""
        return self.is_node and (shutil.which("npm") is None or shutil.which("node") is None)


CLIENTS = (
    Client("openai-python", "openai_python.py", ("openai==3.52.0",), in_ci=True),
    Client("openai-npm", "openai_npm.mjs", ("openai@7.55.0",), in_ci=True),
    Client("ai-npm", "ai_npm.mjs", ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92"), in_ci=True),
    Client("page", "page_browser.mjs", ("playwright-core@1.65.1", "@sparticuz/chromium@153.0.0"), in_ci=True),
    Client("litellm", "litellm_client.py", ("litellm==1.106.2",), in_ci=True),  # 1.107.0 was withdrawn: keep the pin
    Client("langchain-openai", "langchain_client.py", ("langchain-openai==1.7.3",), in_ci=True),
    Client("locust", "locust_client.py", ("locust==2.47.0",), in_ci=True, alone=True),
    Client("lm-eval", "lm_eval_client.py", ("lm-eval[api]==0.4.13", TORCH)),
    Client("inspect-ai", "inspect_client.py", ("inspect-ai==0.3.285", "openai")),
    Client("guidellm", "guidellm_client.py", ("guidellm==0.8.1", TORCH)),
    Client("aiperf", "aiperf_client.py", ("aiperf==0.13.0",)),
    Client("evalscope", "evalscope_client.py", ("evalscope[perf]==1.14.1", TORCH)),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """How a client fared: pass, fail, not installed, or not run; and a line on it."""

    client: Client
    verdict: str
    detail: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Where clients are installed and logged, and how long an installation may take."""

    folder: Path
    install_s: float

    @property
    def logs(self) -> Path:
        """What clients, pip, npm and the server printed."""
        return self.folder / "logs"

    def log(self, client: Client) -> Path:
        """That of one client."""
        return self.logs / f"{client.name}.log"


def main() -> int:
    if "--peers" in sys.argv:
        at = sys.argv.index("--peers")
        sys.argv.remove("--peers")
        return peers.main(sys.argv[at:] + sys.argv[1:at])
    parser = argparse.ArgumentParser(description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", action="append", metavar="NAME", choices=names, help="and leave the page as it is")
    parser.add_argument(
        "--ci", action="store_true", help="those of continuous integration, two at a time, and leave the page as it is"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where clients are installed, and stay (default: a temporary folder)",
    )
    options = parser.parse_args()
    chosen = [
        client
        for client in CLIENTS
        if (client.name in options.only if options.only else client.in_ci or not options.ci)
    ]
    with contextlib.ExitStack() as stack:
        folder = (options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))).absolute()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        workspace = Workspace(folder, CI_INSTALL_S if options.ci else INSTALL_S)
        early = ThreadPoolExecutor(1)
        stack.callback(early.shutdown, cancel_futures=True)
        begun = {
            client.name: early.submit(install, client, workspace)
            for client in chosen
            if options.ci and not client.needs_what_is_missing
        }
        url = stack.enter_context(serving(model_with_tools(folder), folder / "logs" / "server.log"))
        with ThreadPoolExecutor(2 if options.ci else 1) as pool:
            together = (client for client in chosen if not client.alone)
            ended = dict(
                pool.map(
                    lambda client: (client.name, try_client(client, workspace, url, begun.get(client.name))), together
                )
            )
        ended |= {
            client.name: try_client(client, workspace, url, begun.get(client.name)) for client in chosen if client.alone
        }
    results = [ended[client.name] for client in chosen]
    if options.only is None and not options.ci:
        (ROOT / "docs" / "compatibility.md").write_text(page(results), encoding="utf-8")
    # Without node some clients cannot run. With --ci outside of CI, that is only reported; in CI it
    # is a failure.
    forgiven = ("pass", "not run") if options.ci and not os.environ.get("CI") else ("pass",)
    return 0 if all(client.verdict in forgiven for client in results) else 1


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """A server process of a model; its address once it is ready. One that is not within START_S is killed, and nothing
    runs."""
    command = [
        sys.executable,
        "-m",
        "routed_experts",
        "serve",
        str(model),
        "--port",
        "0",
        "--served-model-name",
        "demo",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, "--enable-return-routed-experts"], stdout=subprocess.PIPE, stderr=stderr, text=True, env=env
        ) as process,
    ):
        late = threading.Timer(START_S, process.kill)
        late.start()
        try:
            line = process.stdout.readline() if process.stdout else ""
            late.cancel()
            if "ready in" not in line:
                raise SystemExit(f"the server did not start: {' '.join(log.read_text().splitlines()[-3:])}")
            yield line.rsplit(" ", 1)[1].strip()
        finally:
            late.cancel()
            process.terminate()


def try_client(client: Client, workspace: Workspace, url: str, begun: Future[str] | None) -> Result:
    """Install a client, or wait for its installation that has begun, and run its program; a line on it is printed."""
    began, log = time.monotonic(), workspace.log(client)
    if client.needs_what_is_missing:
        verdict, detail = "not run", "there is no node with npm on this machine: install node 18 or newer"
    elif detail := install(client, workspace) if begun is None else begun.result():
        verdict = "not installed"
    else:
        began = time.monotonic()
        verdict, detail = run_client(client, workspace, url)
    result = Result(client, verdict, detail, time.monotonic() - began)
    shown = {"pass": "PASS", "not run": "NOT RUN"}.get(verdict, "FAIL")
    print(f"{shown} {client.name}: {detail}" + ("" if shown == "PASS" else f" ({verdict})"), flush=True)
    if shown == "FAIL" and log.is_file():
        print("    " + "\n    ".join(log.read_text(encoding="utf-8").splitlines()[-25:]), flush=True)
    return result


def install(client: Client, workspace: Workspace) -> str:
    """Install a client's packages unless they are there; why that cannot be, or nothing."""
    folder, expected, log = workspace.folder / client.name, " ".join(client.requirements), workspace.log(client)
    stamp, output = folder / "installed", ""
    if stamp.is_file() and stamp.read_text() == expected:
        return ""
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if client.is_node:
            (folder / "package.json").write_text("{}")
            command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *client.requirements]
        else:  # our pip installs into it: a pip of its own would take longer than most clients
            status, output = run(
                [sys.executable, "-m", "venv", "--without-pip", str(folder)], folder, log, limit_s=workspace.install_s
            )
            if status != 0:
                break
            pip = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(folder / "bin" / "python"),
                "install",
                "--disable-pip-version-check",
            ]
            command = [*pip, "--no-input", "--no-compile", *client.requirements]
        status, output = run(command, folder, log, limit_s=workspace.install_s)
        if status == 0:
            stamp.write_text(expected)
            return ""
        if status == LATE:  # as long again would not end well
            break
    return last_line(output, folder)


def run_client(client: Client, workspace: Workspace, url: str) -> tuple[str, str]:
    """Run a client's program; the verdict and its last line."""
    folder, program, log = workspace.folder / client.name, PROGRAMS / client.program, workspace.log(client)
    if client.is_node:  # node looks for packages beside the program
        program = [Path(shutil.copy(source, folder)) for source in (PROGRAMS / "rows.mjs", program)][-1]
    command = ["node", str(program)] if client.is_node else [str(folder / "bin" / "python"), str(program)]
    env = {
        "COMPAT_URL": url,
        "COMPAT_MODEL": "demo",
        "COMPAT_TOKENIZER": str(demo_model_path()),
        "TMPDIR": str(log.parent),
    }
    status, output = run(command, folder, log, limit_s=RUN_S, **env)
    return ("pass" if status == 0 else "fail"), last_line(output, folder)


def run(command: Sequence[str], folder: Path, log: Path, *, limit_s: float, **kwargs: str) -> tuple[int, str]:
    """Run a command; its exit code and what it printed, which also goes to the log. Beyond the limit it ends with
    LATE."""
    env = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | kwargs  # a client sees its own packages alone
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        status, output = LATE, f"it took longer than {limit_s:g} s"
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"$ {' '.join(command)}\n{output}\n[{status}]\n")
    return status, output


def last_line(output: str, folder: Path) -> str:
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in output.splitlines()]
    filled = [line for line in lines if line]
    return (filled[-1] if filled else "it said nothing").replace(str(folder), "FOLDER")[:300]


def page(results: Sequence[Result]) -> str:
    """docs/compatibility.md."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = [
        f"| {result.client.requirements[0].replace('==', ' ')} | {result.verdict} | {result.detail.replace('|', '/')} "
        f"| {'yes' if result.client.in_ci else ''} | {result.seconds:.0f} |"
        for result in results
    ]
    passed = sum(result.verdict == "pass" for result in results)
    return "\n".join(
        [
            "# Clients that work",
            "",
            "`scripts/compat` installs each client by itself and runs a short program of `scripts/compat_clients/`",
            "with it. The server is `routed-experts serve` on the demo model. The script writes this page; the last",
            "line of each program says what was done.",
            "",
            f"{passed} of {len(results)} pass. {date}, Python {platform.python_version()}, {platform.system()}, CPU.",
            "",
            "| client | result | what was done | in CI | s |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Clients marked CI run in each `.ci/run` (`scripts/compat --ci`). playwright-core drives headless Chromium",
            "over the page at `/`. The test suite has OpenAI's Python client and raw HTTP",
            "(`tests/server/test_serve_command.py`), and the checks of slime and verl on an answer",
            "(`tests/server/test_sglang_generate.py`).",
            "",
            "sglang-jax's `bench_serving.py` was not tried: no package index has it. The tests of `/generate` cover",
            "the fields that it reads.",
            "",
            *peers.page_section(peers.read_table()),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
