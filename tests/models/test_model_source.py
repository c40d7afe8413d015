"""Where a model comes from: a folder, the package, or a hub, here a fake one on the loopback. Each case is a process of
its own, because huggingface_hub reads its settings when it is imported."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import routed_experts
from routed_experts.core.errors import CheckpointError, ConfigError
from routed_experts.core.server_args import ServerArgs
from routed_experts.models.loading.model_source import (
    demo_model_path,
    find_model,
    full_path,
    local_folder,
    model_name,
    with_local_model,
)
from support.tiny_checkpoint import write_tiny_checkpoint

SRC = Path(routed_experts.__file__).parents[1]
COMMIT, OLDER = "a" * 40, "b" * 40
FIND = """
import sys
from routed_experts.models.loading.model_source import find_model
from routed_experts.core.errors import ConfigError
def find():
    try:
        print(find_model(sys.argv[1], revision=sys.argv[2] or None, weights=sys.argv[3] == "weights"))
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}")
find()
"""
TWICE = FIND + "find()"
WITH_A_SMALL_DISK = "import resource, signal\nresource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n" + FIND


class FakeHub(ThreadingHTTPServer):
    """Repositories by id; counts requests."""

    daemon_threads = True

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.gated = repositories, set()
        self.cut_at = None  # bytes of a weight file after which the connection ends
        self.requests, self.ranges, self.tokens = [], [], set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The routes of the hub that a download takes."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.reply()

    def do_GET(self):
        self.reply()

    def reply(self):
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        self.server.tokens.add(self.headers.get("Authorization"))
        if (match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+).*)?", path)) is not None:
            self.api(*match.groups())
        elif (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) is not None:
            self.file(*match.groups())
        else:
            self.fail(404)

    def files(self, repository, revision):
        """The files of a revision; None after a refusal."""
        if repository in self.server.gated:
            return self.fail(403, "GatedRepo")
        if repository not in self.server.repositories:
            return self.fail(401, "RepoNotFound")
        if revision not in (None, "main", "v1", COMMIT, OLDER):
            return self.fail(404, "RevisionNotFound")
        return self.server.repositories[repository]

    def api(self, repository, kind, revision):
        files = self.files(repository, revision)
        if files is None:
            return
        if kind == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for name, text in files.items()
            ]
        else:
            sha = OLDER if revision in ("v1", OLDER) else COMMIT
            answer = {"id": repository, "modelId": repository, "sha": sha, "private": False, "tags": [], "downloads": 0}
            answer["siblings"] = [{"rfilename": name} for name in files]
        self.send(200, json.dumps(answer).encode())

    def file(self, repository, revision, name):
        files = self.files(repository, revision)
        if files is None:
            return
        if name not in files:
            self.fail(404, "EntryNotFound")
            return
        text, first = files[name], 0
        if (expected := self.headers.get("Range")) is not None and self.command == "GET":
            first = int(re.match(r"bytes=(\d+)-", expected)[1])
            self.server.ranges.append((name, first))
        headers = {"ETag": f'"{hashlib.sha1(text).hexdigest()}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(text) - 1}/{len(text)}"
        self.send(206 if first else 200, text[first:], headers, cut=name.endswith(".safetensors"))

    def send(self, status, body, headers=(), *, cut=False):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut and self.server.cut_at is not None:
            self.wfile.write(body[: self.server.cut_at])
            self.close_connection = True
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body)

    def fail(self, status, code="NotFound"):
        self.send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def hub(checkpoint):
    """A hub with a whole repository, one without safetensors and one in two shards."""
    whole = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    weights = whole["model.safetensors"]
    noise = {"pytorch_model.bin": b"pickle", "README.md": b"#", "original/model.safetensors": weights, "run.py": b"1"}
    small = {name: text for name, text in whole.items() if name != "model.safetensors"}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {name: weights for name in index["weight_map"].values()}
    shards["model.safetensors.index.json"] = json.dumps(index).encode()
    repositories = {"org/whole": whole | noise, "org/pickle": small | noise, "org/shards": small | shards}
    del repositories["org/pickle"]["original/model.safetensors"]
    server = FakeHub(repositories)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def find(hub, tmp_path):
    """`find_model` in a process that knows this hub, with a cache of its own."""

    def find(model, *, revision="", weights=True, code=FIND, **environment):
        argv = [sys.executable, "-c", code, model, revision, "weights" if weights else ""]
        run = subprocess.run(
            argv, capture_output=True, text=True, env=settings(hub, tmp_path, environment), timeout=120
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    return find


def settings(hub, tmp_path, environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
    return {**inherited, **own, "PYTHONPATH": str(SRC), **environment}


def test_a_folder_the_demo_and_an_id_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_folder("demo") == demo_model_path() == find_model("demo") and model_name("demo") == "demo"
    assert local_folder("org/name.v1-x") is None and model_name("org/name") == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "demo").mkdir()
    assert local_folder("org/name") == Path("org/name") and model_name("org/name") == "name"
    assert local_folder("demo") == Path("demo")  # a folder of that name is meant
    (tmp_path / "org" / "file").touch()
    for model in ("name", "/org/name", "./org/nothing", "a/b/c", "org/", "~/model", "org/file", "org/na me", ""):
        if not Path(model).is_dir():
            with pytest.raises(CheckpointError, match=r"no checkpoint folder .* such as org/name, or demo"):
                local_folder(model)


def test_the_tokenizer_of_the_package_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ServerArgs(model_path=str(demo_model_path()), tokenizer_path="demo")
    assert with_local_model(args).tokenizer_path == str(demo_model_path())
    (tmp_path / "demo").mkdir()
    assert with_local_model(args).tokenizer_path == "demo"  # a folder of that name is meant


def test_a_revision_is_for_repositories(tmp_path):
    with pytest.raises(ConfigError, match=r"revision='v1' with the folder .* which has no revisions"):
        find_model(str(tmp_path), revision="v1")


def test_a_missing_library_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"no folder org/name.*huggingface_hub is not installed; run .*\[hf\]"):
        find_model("org/name")


def test_safetensors_json_and_tokenizer_are_fetched_once_and_nothing_else(hub, find, checkpoint):
    folder = Path(find("org/whole", HF_TOKEN="hf_mine"))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in checkpoint.iterdir()
    }
    assert "Bearer hf_mine" in hub.tokens
    fetched = len([path for path in hub.requests if "/resolve/" in path])
    assert find("org/whole") == str(folder)
    assert len([path for path in hub.requests if "/resolve/" in path]) == fetched
    assert find("org/whole", HF_HUB_OFFLINE="1") == str(folder)


def test_a_revision_is_another_folder_and_weights_may_be_left_out(find):
    folder = Path(find("org/whole", revision="v1", weights=False))
    assert folder.name == OLDER and not list(folder.glob("*.safetensors")) and (folder / "config.json").is_file()
    text = find("org/whole", revision="v1", HF_HUB_OFFLINE="1")
    assert re.match(r"CheckpointError: no folder org/whole; as a repository it is not whole in the cache .*", text)
    assert text.endswith("HF_HUB_OFFLINE is set; unset it, or give the folder of a checkpoint")
    assert Path(find("org/whole")).name == COMMIT


@pytest.mark.parametrize(
    ("model", "revision", "match"),
    [
        (
            "org/missing",
            "",
            r"CheckpointError: no folder org/missing, and \S+ shows no such repository .*hf auth login",
        ),
        (
            "org/gated",
            "",
            r"CheckpointError: org/gated is gated; accept its terms at http://\S+/org/gated, then log in",
        ),
        ("org/whole", "v9", r"CheckpointError: org/whole has no revision 'v9'; choose a branch, tag or commit"),
        ("org/pickle", "", r"CheckpointError: org/pickle has only pytorch_model.bin, which cannot be read; choose"),
        ("org/a..b", "", r"CheckpointError: org/a..b is neither a folder nor the id of a repository"),
    ],
)
def test_a_repository_that_cannot_be_had_is_one_error(hub, find, model, revision, match):
    hub.gated.add("org/gated")
    first, again = find(model, revision=revision, code=TWICE).splitlines()
    assert re.match(match, first) and again == first


def test_without_a_network_only_a_whole_cache_will_do(hub, find):
    offline = {"HF_HUB_OFFLINE": "1"}
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}  # the port of `discard`: refused
    text = r"CheckpointError: no folder org/whole; as a repository it is not in the cache \S+, and {}, or give .*"
    assert re.fullmatch(text.format("HF_HUB_OFFLINE is set; unset it"), find("org/whole", **offline))
    unreachable = "http://127.0.0.1:9 cannot be reached; connect"
    assert re.fullmatch(text.format(unreachable), find("org/whole", **nobody)), "without the hub's own words"
    folder = find("org/whole")
    assert find("org/whole", **offline) == find("org/whole", **nobody) == folder


def test_a_connection_that_ends_early_is_resumed_where_it_ended(hub, find):
    weights = bytes(range(256)) * (24 << 12)  # 24 MiB: more than the library reads at once
    hub.repositories["org/shards"]["model-00002-of-00002.safetensors"] = weights
    hub.cut_at = 15 << 20
    folder = Path(find("org/shards"))
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == weights
    assert [name for name, first in hub.ranges if first > 0] == ["model-00002-of-00002.safetensors"]


def test_an_interrupted_download_is_no_checkpoint_and_goes_on(hub, find):
    hub.cut_at = 1000
    hub.repositories["org/shards"]["model-00001-of-00002.safetensors"] = b"arrives"
    match = r"CheckpointError: fetching org/shards was interrupted \(.*\); start again: what was fetched is kept"
    assert re.match(match, find("org/shards"))
    assert "as a repository it is not whole in the cache" in find("org/shards", HF_HUB_OFFLINE="1")
    hub.cut_at = None
    hub.requests.clear()
    folder = find("org/shards")
    assert not any(path.endswith(("config.json", "model-00001-of-00002.safetensors")) for path in hub.requests)
    assert find("org/shards", HF_HUB_OFFLINE="1") == folder


def test_a_full_disk_is_one_error_and_fetched_files_stay(hub, find):
    text = find("org/whole", code=WITH_A_SMALL_DISK)
    assert re.match(
        r"WriteError: no space for org/whole in \S+ \(File too large\); make room, or set HF_HOME .* kept", text
    )
    assert "is not whole" in find("org/whole", HF_HUB_OFFLINE="1")
    assert Path(find("org/whole")).is_dir()


def command(hub, tmp_path, *words, text=""):
    argv = [sys.executable, "-W", "error", "-m", "routed_experts", *words]
    env = settings(hub, tmp_path, {})
    return subprocess.run(argv, input=text, capture_output=True, text=True, env=env, timeout=300, check=True).stdout


SMALL = ("--precompile-bs-paddings", "1", "--precompile-token-paddings", "32", "--max-total-tokens", "64")


def test_commands_take_ids_and_revisions(hub, tmp_path):
    printed = command(hub, tmp_path, "inspect", "org/whole", "--config-only", "--json")
    assert json.loads(printed)["num_experts"] > 0 and not any("model.safetensors" in path for path in hub.requests)
    words = ("generate", "org/whole", "--revision", "v1", "--prompt", "a", "--max-new-tokens", "2", *SMALL)
    assert command(hub, tmp_path, *words)
    assert any(path.endswith(f"/org/whole/resolve/{OLDER}/model.safetensors") for path in hub.requests)


@pytest.mark.thorough  # every run finds that model here, and chats with a folder in test_cli_commands.py
def test_chat_takes_the_model_of_the_package(hub, tmp_path):
    assert command(hub, tmp_path, "chat", "demo", "--max-new-tokens", "2", *SMALL, text="Hello\n/quit\n").strip()
    assert not hub.requests


def test_a_path_is_told_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert full_path("demo") == str(demo_model_path().resolve()) and full_path("org/name") == "org/name"
    Path("demo").mkdir()
    assert full_path("demo") == str(tmp_path / "demo"), "a folder of that name comes first"
