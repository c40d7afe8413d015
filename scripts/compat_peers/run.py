"""Run the peers' own tests against this project, and compare what they say with the committed table.

scripts/compat --peers FOLDER: FOLDER has checkouts named vllm, sglang and sglang-jax, or some of them; nothing of them
is committed here. expected.json says of each test: pass, not applicable (with the reason) or fails (with the reason).
The exit code is 1 if a test of a checkout differs from the table. Checkouts of other commits have other tests: those
that the table does not know are listed and count for nothing."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from compat_peers.model import model_of_tests
from compat_peers.serving import LEAVE_OUT
from compat_peers.suites import CORE, OURS, SUITES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = HERE / "expected.json"
PAGE = ROOT / "docs" / "compatibility.md"
REQUIREMENTS = (
    "pytest>=8.3",
    "pytest-asyncio",
    "pytest-timeout",
    "aiohttp",
    "anthropic",
    "orjson",
    "prometheus_client",
    "jsonschema",
)
# In a Python of the peer's own: verifiers as it was when prime-rl was at the commit that was run.
PEER_REQUIREMENTS = {"prime-rl": ("verifiers==0.3.2.dev20", "renderers==0.1.11")}
TEST_S, FILE_S = 300, 1800
WORSE = ("pass", "skipped", "not applicable", "fails")  # of a test's phases the last of these counts

Outcome = tuple[str, str]  # pass, not applicable or fails; and the reason
Table = dict[str, dict[str, dict[str, Outcome]]]  # peer -> file -> test -> outcome


def main(args: list[str]) -> int:
    """Run what is chosen; print the differences and the shares."""
    parser = argparse.ArgumentParser(prog="scripts/compat --peers", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the checkouts vllm, sglang, sglang-jax")
    parser.add_argument("--file", action="append", metavar="TEXT", help="only files whose path has this text in it")
    parser.add_argument("--test", metavar="EXPRESSION", help="only tests that pytest's -k chooses; no shares then")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where packages are installed and logs stay")
    parser.add_argument(
        "--leave-out",
        metavar="FLAG:VALUES",
        default="",
        help="flags that servers are started without, with the number of their values: to see what the tests of a "
        "server say that would not start",
    )
    parser.add_argument("--write", action="store_true", help="take what was seen into the table; reasons stay")
    options = parser.parse_args(args)
    os.environ[LEAVE_OUT] = options.leave_out
    table = read_table()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        seen: Table = {}
        for peer, files in suites(options.folder.absolute(), options.file or [""]):
            for file in files:
                print(f"... {peer} {file}", flush=True)
                seen.setdefault(peer, {})[file] = run_file(options.folder.absolute() / peer, file, folder, options.test)
                if options.write:  # a long run may be ended
                    write_table(merged(table, seen, whole=options.test is None))
    if not seen:
        raise SystemExit(f"{options.folder} has no checkout named vllm, sglang or sglang-jax with the tests asked for")
    differing = list(differences(table, seen))
    print("\n".join(differing) or "no test differs from the table")
    judged = merged(table, seen, whole=False)  # what is not applicable may have passed or failed
    for peer, files in seen.items():
        outcomes = (judged[peer][file][test] for file, tests in files.items() for test in tests)
        print(f"{peer}: {shares(outcomes)}")
    if options.write:
        table = merged(table, seen, whole=options.test is None)
        write_table(table)
        write_section(table)
        return 0
    return 1 if differing else 0


def suites(folder: Path, texts: list[str]) -> Iterable[tuple[str, list[str]]]:
    """The files of each checkout that is there. Prints those that it lacks."""
    for peer, files in SUITES.items():
        if not (folder / peer).is_dir():
            print(f"{peer}: no checkout in {folder}, its tests are not run")
            continue
        chosen = [file for file in files if any(text in file for text in texts)]
        for file in chosen:
            if not path_of(folder / peer, file).is_file():
                print(f"{peer}: this checkout has no {file}")
        yield peer, [file for file in chosen if path_of(folder / peer, file).is_file()]


def path_of(checkout: Path, file: str) -> Path:
    """A test file of the checkout, or one of ours."""
    return (HERE if file.startswith(OURS) else checkout) / file


def environment(folder: Path, peer: str) -> Path:
    """The Python that runs a peer's tests: this one's packages, and those that the tests need."""
    more = PEER_REQUIREMENTS.get(peer, ())
    venv = folder / (f"venv-{peer}" if more else "venv")
    python = venv / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *REQUIREMENTS, *more], check=True)
        site = next((venv / "lib").glob("python*")) / "site-packages"
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (site / "zz_project.pth").write_text("\n".join(ours))
    return python


def run_file(checkout: Path, file: str, folder: Path, expression: str | None) -> dict[str, Outcome]:
    """Run a test file in a process of its own; the outcome of each test by its id within the file."""
    results, log = folder / "results.jsonl", folder / "logs" / f"{checkout.name}-{file.replace('/', '.')}.log"
    results.unlink(missing_ok=True)
    log.parent.mkdir(exist_ok=True)
    workspace = folder / "run"
    workspace.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "COMPAT_PEER": checkout.name,
        "COMPAT_CHECKOUT": str(checkout),
        "COMPAT_MODEL_PATH": str(model_of_tests(folder)),
        "COMPAT_RESULTS": str(results),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(HERE.parent), str(HERE / "stand_ins"))),
        "TMPDIR": str(workspace),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        str(environment(folder, checkout.name)),
        "-m",
        "pytest",
        "-p",
        "compat_peers.plugin",
        "-c",
        os.devnull,
        "--noconftest",
    ]
    command += [
        f"--rootdir={HERE if file.startswith(OURS) else checkout}",
        "--import-mode=importlib",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-rA",
    ]
    command += [f"--timeout={TEST_S}", "-o", "asyncio_default_fixture_loop_scope=function"]
    command += ["-k", expression] if expression else []
    with log.open("w") as stream:
        try:
            subprocess.run(
                [*command, str(path_of(checkout, file))],
                cwd=workspace,
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=FILE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            stream.write(f"\nended after {FILE_S} s\n")
    return read_outcomes(results, file)


def read_outcomes(results: Path, file: str) -> dict[str, Outcome]:
    """The worst outcome that the plugin wrote of each test."""
    found: dict[str, Outcome] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.is_file() else ():
        nodeid, outcome, reason = json.loads(line)
        test = nodeid.partition("::")[2] or "collection"
        if test not in found or WORSE.index(outcome) > WORSE.index(found[test][0]):
            found[test] = (outcome, reason)
    return {
        test: ("not applicable", reason) if outcome == "skipped" else (outcome, reason)
        for test, (outcome, reason) in found.items()
    } or {"collection": ("fails", f"no test of {file} was run")}


def read_table() -> Table:
    """The committed table."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}


def write_table(table: Table) -> None:
    """Commit a table: sorted, a line a test."""
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def merged(table: Table, seen: Table, *, whole: bool) -> Table:
    """The table with what was seen. A test whose outcome is the same keeps its reason; one that the table says is not
    applicable stays so. `whole`: tests of a file that were not seen are dropped."""
    result: Table = {peer: dict(files) for peer, files in table.items()}
    for peer, files in seen.items():
        for file, tests in files.items():
            before = result.setdefault(peer, {}).get(file, {})
            after = {} if whole else dict(before)
            for test, outcome in tests.items():
                old = before.get(test)
                same = old is not None and old[0] in (outcome[0], "not applicable")
                after[test] = old if same and old is not None else outcome
            result[peer][file] = after
    return result


def differences(table: Table, seen: Table) -> Iterable[str]:
    """A line for each test that is not as the table says. One that is not applicable may end in any way."""
    for peer, files in seen.items():
        for file, tests in files.items():
            expected = table.get(peer, {}).get(file, {})
            for test, (outcome, reason) in tests.items():
                name = f"{peer} {file}::{test}"
                if test not in expected:
                    yield f"NEW  {name}: {outcome} {reason}"
                elif expected[test][0] not in (outcome, "not applicable"):
                    yield f"DIFF {name}: {outcome} {reason} (the table: {expected[test][0]} {expected[test][1]})"


def shares(results: Iterable[Outcome]) -> str:
    """How many pass of those that are applicable."""
    counts = {outcome: 0 for outcome in ("pass", "fails", "not applicable")}
    for outcome, _ in results:
        counts[outcome] += 1
    applicable = counts["pass"] + counts["fails"]
    percent = 100 * counts["pass"] / applicable if applicable else 100
    passing = f"{counts['pass']} of {applicable} applicable tests pass ({percent:.0f} %)"
    return f"{passing}, {counts['not applicable']} are not applicable"


HEADING = "## Other servers' and trainers' own tests"
ABOUT = """
`scripts/compat --peers FOLDER` runs test files of vLLM, SGLang and sgl-jax, from checkouts named vllm, sglang and
sglang-jax in a folder of yours, against `routed-experts serve` or the engine in process. Nothing of theirs is part of
this project. Their helpers have stand-ins in `scripts/compat_peers/stand_ins`, which start our server under the name of
the model that a test asks for, and pass its flags on. The model is the demo model with 8,192 positions, an end token
that it hardly chooses, and a chat template with a place for tools. Servers have the dialect and the page size of their
peer, and read new weights from beside that model. Flags of adapters, devices and random weights are left out, and
sizes and tokenizers of a model that a test names are ours. For slime, Miles, SkyRL and prime-rl (slime, miles, skyrl,
prime-rl) their own functions that talk to a server are called; prime-rl's rollouts go through the clients of verifiers
and renderers, which are installed. For Megatron-LM, verl, NeMo-RL and MaxText (megatron-lm, verl, nemo-rl, maxtext)
those that read rows are.

`scripts/compat_peers/expected.json` has the expected outcome of every test, with the reason where one fails or is not
applicable: a unit test of the peer's own code, a model's text or vocabulary, adapters, images. The command prints what
differs from it.
"""


def page_section(table: Table) -> list[str]:
    """The lines of docs/compatibility.md on these tests."""
    lines = [
        HEADING,
        *ABOUT.splitlines(),
        "",
        "| peer | file | pass | fail | not applicable |",
        "|---|---|---|---|---|",
    ]
    failing: list[str] = []
    for peer, unordered in sorted(table.items()):
        files = dict(sorted(unordered.items()))
        outcomes = [outcome for tests in files.values() for outcome, _ in tests.values()]
        for file, tests in files.items():
            found = [outcome for outcome, _ in tests.values()]
            lines.append(f"| {peer} | {file} | {_counts(found)} |")
            failing += [
                f"| {peer} | `{Path(file).stem}` | `{test.split('::')[-1].partition('[')[0]}` | {reason} |"
                for test, (outcome, reason) in sorted(tests.items())
                if outcome == "fails"
            ]
        if peer in CORE:
            name, parts = CORE[peer]
            core = [
                test for file, tests in files.items() if any(part in file for part in parts) for test in tests.values()
            ]
            found = [outcome for outcome, _ in core]
            if len(found) < len(outcomes):
                lines.append(f"| **{peer}: {name}** | **{_share(found)}** | {_counts(found)} |")
        lines.append(f"| **{peer}: all** | **{_share(outcomes)}** | {_counts(outcomes)} |")
    heading = ["", "What fails:", "", "| peer | file | test | why |", "|---|---|---|---|"]
    return [*lines, *heading, *dict.fromkeys(line.replace("\n", " ") for line in failing), ""]


def _share(outcomes: Sequence[str]) -> str:
    passing, failed = outcomes.count("pass"), outcomes.count("fails")
    return f"{100 * passing / max(1, passing + failed):.0f} % of the applicable"


def _counts(outcomes: Sequence[str]) -> str:
    passing, failing = outcomes.count("pass"), outcomes.count("fails")
    return f"{passing} | {failing} | {len(outcomes) - passing - failing}"


def write_section(table: Table) -> None:
    """Put the section into the page, in place of the one that is there."""
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
    PAGE.write_text("\n".join([text, "", *page_section(table)]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
