"""Decode with llama-server and its drafts by n-grams, `--spec-type ngram-map-k`: the tokens that followed the last two
before. Of llama.cpp's types and lengths this one has the most drafts accepted on the prompts of this benchmark.
Prefill is a run of one new token; no prefix is cached."""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from llama_gguf import SOURCE, write_gguf
from protocol import serve

NGRAM = 2  # tokens
MOST_SEQUENCES, LONGEST = 32, 512
READY_S = 120  # in which the server loads the model


def start(file: Path, drafts: int, port: int) -> subprocess.Popen:
    """Start llama-server; its log goes to standard error."""
    sizes = {"--parallel": MOST_SEQUENCES, "--ctx-size": MOST_SEQUENCES * LONGEST, "--threads": 2}
    speculation = {
        "--spec-type": "ngram-map-k",
        "--spec-ngram-map-k-size-n": NGRAM,
        "--spec-ngram-map-k-size-m": drafts,
    }
    flags = {"--model": file, "--host": "127.0.0.1", "--port": port, **sizes, **speculation}
    command = [
        str(SOURCE / "build/bin/llama-server"),
        "--kv-unified",
        *(str(x) for pair in flags.items() for x in pair),
    ]
    return subprocess.Popen(command, stdout=sys.stderr)


class Client:
    """Requests to a llama-server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> dict:
        """A GET request."""
        with urllib.request.urlopen(self._url + path) as answer:
            return json.load(answer)

    def wait(self, process: subprocess.Popen) -> None:
        """Wait until the model is loaded."""
        end = time.monotonic() + READY_S
        while time.monotonic() < end and process.poll() is None:
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
            else:
                return
        raise RuntimeError("llama-server is not ready")

    def generate(self, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        """Seconds and tokens of one request with all prompts."""
        body = {
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "n_predict": count,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(self._url + "/completion", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        start = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            answers = json.load(response)
        seconds = time.perf_counter() - start
        answers = sorted([answers] if isinstance(answers, dict) else answers, key=lambda answer: answer["index"])
        return seconds, [answer["tokens"] for answer in answers]


def serve_drafting(folder: Path, dtype: str, drafts: int) -> None:
    """Convert, start the server, then serve."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        write_gguf(folder, file, dtype, with_tokens=True)
        process, client = start(file, drafts, port), Client(port)
        try:
            client.wait(process)

            def run(prompts: list[list[int]], new: int) -> tuple[float, float, list[list[int]]]:
                first, _ = client.generate(prompts, 1)
                whole, tokens = client.generate(prompts, new)
                return first, whole - first, tokens

            build = client.get("/props")["build_info"]
            serve("llama.cpp", f"llama-server {build}, ngram-map-k of {NGRAM} tokens", run)
        finally:
            process.terminate()
            process.wait()
