"""SGLang's `test_utils`: servers are `routed-experts serve`, models are names."""

import os
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

import requests
from compat_peers import serving
from compat_peers.cuts import cut
from compat_peers.placeholders import missing

DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = serving.START_S
DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{serving.free_port()}"
STDERR_FILENAME, STDOUT_FILENAME = "stderr.txt", "stdout.txt"  # in the folder of the run


class CustomTestCase(unittest.TestCase):
    """SGLang's adds a second try, which no test of ours has."""


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float = serving.START_S,
    api_key: str | None = None,
    other_args: Sequence[object] = (),
    env: Mapping[str, str] | None = None,
    return_stdout_stderr: tuple[IO[str], IO[str]] | None = None,
    device: str = "auto",
    **kwargs: object,
) -> "Popen[bytes]":
    """A server at `base_url`."""
    port = int(base_url.rstrip("/").rpartition(":")[2])
    args = ["--metrics-compat", "sglang", *(other_args or ())]
    if "--page-size" not in args:
        args += ["--page-size", 1]  # SGLang's own default
    server = serving.Server(model, args, port=port, api_key=api_key, env=env, outputs=return_stdout_stderr)
    return server.process


def is_in_ci() -> bool:
    """No: CI is the peer's."""
    return False


def is_rust_server_built() -> bool:
    """No."""
    return False


def __getattr__(name: str) -> Any:
    file = Path(os.environ["COMPAT_CHECKOUT"], "python", "sglang", "test", "test_utils.py")
    if name == "run_logprob_check":
        return cut(file, [name], {"requests": requests})[name]
    if name.isupper():  # a model's name, which some tests also spell out
        try:
            return cut(file, [name], {})[name]
        except (LookupError, NameError, OSError):
            return name.lower().replace("_", "-")
    return missing("sglang.test.test_utils")(name)
