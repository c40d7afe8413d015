"""`routed-experts serve` on the model of the tests, under the name that a test asks for.

Flags are passed as the test gives them, but for those of LEFT_OUT: of the machine (tests ask for four chips), of
adapters and random weights (the model of the tests has weights and no adapters), and of code that tests send (it is
never run; other tests of such a server are run all the same)."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

LEAVE_OUT = "COMPAT_LEAVE_OUT"  # the environment variable of scripts/compat --peers --leave-out
CONTEXT = 3584  # where a test sets none: answers without a limit, of a model that hardly ends them, do end in time
POOL = 65536  # tokens of KV where a test sets none: fractions of the memory are meant for accelerators
START_S = 240
END_S = 40
# Flags that are left out, with the number of their values.
LEFT_OUT = {
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size", "--device", "--download-dir"), 1),
    **dict.fromkeys(("--lora-modules", "--max-lora-rank", "--max-cpu-loras"), 1),
    "--load-format": 1,
    **dict.fromkeys(("--enable-lora", "--enable-custom-logit-processor"), 0),
    **{flag: int(count) for flag, _, count in (word.partition(":") for word in os.environ.get(LEAVE_OUT, "").split())},
}
_RUNNING: dict[int, subprocess.Popen[bytes]] = {}  # by port


def model_path() -> str:
    """The folder of the model of the tests."""
    return os.environ["COMPAT_MODEL_PATH"]


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve_command(model: str, args: Sequence[object]) -> list[str]:
    """The command that serves the model under the name `model` with a peer's flags."""
    words, kept = [str(arg) for arg in args], []
    while words:
        word = words.pop(0)
        flag, has_value, _ = word.partition("=")
        if flag not in LEFT_OUT:
            kept.append(word)
        elif not has_value:
            del words[: LEFT_OUT[flag]]
    given = {word.partition("=")[0] for word in kept}
    added = [] if "--served-model-name" in given else ["--served-model-name", model]
    if not given & {"--context-length", "--max-model-len"}:
        added += ["--context-length", str(CONTEXT)]
    if not given & {"--max-total-tokens", "--max-total-token"}:
        added += ["--max-total-tokens", str(POOL)]
    if "--weights-root" not in given:  # where other servers take any folder
        added += ["--weights-root", str(Path(model_path()).parent)]
    return [sys.executable, "-m", "routed_experts", "serve", model_path(), *added, *kept]


class Server:
    """A running server. `process` is its process, `log` what it printed."""

    def __init__(
        self,
        model: str,
        args: Sequence[object],
        *,
        port: int,
        health: str = "/health",
        api_key: str | None = None,
        env: Mapping[str, str] | None = None,
        outputs: tuple[IO[str], IO[str]] | None = None,
    ) -> None:
        """Start it and wait until it is healthy. Raises RuntimeError with its last words."""
        end(port)
        self.log = Path(tempfile.mkstemp(prefix="server-", suffix=".log")[1])
        command = [*serve_command(model, args), "--port", str(port), *(["--api-key", api_key] if api_key else [])]
        with self.log.open("w") as log:
            stdout, stderr = outputs or (log, log)
            self.process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, env={**os.environ, **(env or {})}, start_new_session=True
            )
        _RUNNING[port] = self.process
        deadline = time.monotonic() + START_S
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(OSError, urllib.error.URLError):
                asked = urllib.request.Request(f"http://127.0.0.1:{port}{health}", headers=headers)
                with urllib.request.urlopen(asked, timeout=5) as response:
                    if response.status == 200:
                        return
            time.sleep(0.2)
        end(port)
        texts = [self.log.read_text(), *(Path(output.name).read_text() for output in outputs or ())]
        lines = [line for text in texts for line in text.splitlines() if line.strip()]
        raise RuntimeError("the server did not start: " + " ".join(lines[-2:])[:400])


def end(port: int) -> None:
    """End the server on a port, if one of ours is there."""
    process = _RUNNING.pop(port, None)
    if process is None:
        return
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_process(pid: int) -> None:
    """End one of our servers by its process id."""
    for port, process in list(_RUNNING.items()):
        if process.pid == pid:
            end(port)


def end_all() -> None:
    """End every server that was started here."""
    for port in list(_RUNNING):
        end(port)
