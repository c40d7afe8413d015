"""`bench`: its tables are complete and consistent. No figure is judged: tests measure no speed."""

import contextlib
import http.server
import json
import threading

import jax
import pytest

from routed_experts.cli import main, make_parser
from routed_experts.cli.bench import _start
from routed_experts.core.errors import ConfigError
from support.http_server import running
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint
from support.xla_options import FAST_FLAGS

SIZES = ["--precompile-bs-paddings", "4", "--precompile-token-paddings", "32"]
SMALL = ["--num-prompts", "3", "--input-len", "5", "--output-len", "6", "--rounds", "2"]


def run(capsys, *argv):
    with lazy_compilation():
        code = main(["bench", *(str(word) for word in argv)])
    return code, *capsys.readouterr()


def test_throughput_compares_capture_on_off_and_on_again(tmp_path, capsys):
    model, file = write_tiny_checkpoint(tmp_path / "model"), tmp_path / "told.json"
    code, out, _ = run(capsys, "throughput", model, *SMALL, *SIZES, "--output", file)
    report = json.loads(file.read_text())
    assert code == 0 and report["command"]["kind"] == "throughput" and report["command"]["output_len"] == "6"
    ways = [(row["capture"], row["rows asked"]) for row in report["rows"]]
    assert ways == [("on", False), ("on", True), ("off", False), ("on", False), ("on", True)]
    assert all(0 < row["lowest"] <= row["output tokens/s"] <= row["highest"] for row in report["rows"])
    assert len(out.splitlines()) == 6 and out.split()[0] == "capture"


def test_serve_reads_streams_of_a_server_with_and_without_rows(tmp_path, capsys, engine_factory):
    file = tmp_path / "told.json"
    with (
        engine_factory(enable_return_routed_experts=True) as engine,
        running(engine, api_key="a-key-for-tests") as server,
    ):
        before = engine.get_server_info()["requests_accepted"]
        code, _, _ = run(
            capsys, "serve", "--base-url", server.url, "--api-key", "a-key-for-tests", *SMALL, "--output", file
        )
        assert (
            engine.get_server_info()["requests_accepted"] - before == 2 * 3 * 3
        )  # both ways, a warm-up and two rounds of three
        with pytest.raises(SystemExit):
            main(["bench", "serve"])
        capsys.readouterr()
        code_without_key, _, err = run(capsys, "serve", "--base-url", server.url, *SMALL)
    rows = json.loads(file.read_text())["rows"]
    assert (
        code == 0 and [row["rows asked"] for row in rows] == [False, True] and "a-key-for-tests" not in file.read_text()
    )
    assert all(0 < row["first token p50 ms"] <= row["p99 ms"] and row["between tokens ms"] > 0 for row in rows)
    assert code_without_key == 2 and "401" in err


def test_a_start_reports_its_phases(tmp_path, monkeypatch):
    """One of the two starts of `bench startup`: with the programs that earlier tests have left, where they keep
    them."""
    monkeypatch.setenv("XLA_FLAGS", FAST_FLAGS)
    model, cache = write_tiny_checkpoint(tmp_path / "model"), jax.config.jax_compilation_cache_dir or tmp_path
    row = _start(make_parser().parse_args(["bench", "startup", str(model), *SIZES]), str(cache))
    phases = [
        row[name] for name in ("import", "config", "kernels", "load", "plan", "allocate", "compile", "self-check")
    ]
    assert min(phases) >= 0 and 0 < max(phases) <= row["ready"], row
    with pytest.raises(ConfigError, match="no checkpoint folder"):
        _start(make_parser().parse_args(["bench", "startup", "/no/such/model"]), str(cache))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["throughput", "/no/such/model"], "/no/such/model"),
        (["serve", "--base-url", "file:///etc/passwd"], "--base-url"),
        (["throughput", ".", "--num-prompts", "0"], "--num-prompts 0"),
        (["serve", "--base-url", "http://127.0.0.1:1"], "--base-url http://127.0.0.1:1: GET /get_model_info failed ("),
        (["serve", "--base-url", "http://h:notaport"], "--base-url 'http://h:notaport' must be such as"),
        (["serve", "--base-url", "http://[::1"], "--base-url 'http://[::1' must be such as"),
    ],
)
def test_what_cannot_be_measured_ends_with_a_sentence(argv, message, capsys):
    code, out, err = run(capsys, *argv)
    assert code in (1, 2) and message in err and err.count("\n") <= 3 and "Traceback" not in err and out == ""


@pytest.mark.parametrize("key", ["a\rb", "a\nb", "ключ", "a\u20ac", "\udcff", "a b", ""])
def test_a_key_that_no_server_has_is_refused_before_anything_is_sent(key, capsys):
    code, out, err = run(capsys, "serve", "--base-url", "http://127.0.0.1:1", "--api-key", key)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--api-key " in err and "; give the key that serve has" in err and (not key or key not in err)


def test_buckets_are_chosen_from_what_steps_cost_here(tmp_path, capsys):
    model, file, load = write_tiny_checkpoint(tmp_path / "model"), tmp_path / "told.json", tmp_path / "load.json"
    load.write_text(json.dumps({"decode": {"1": 5, "2": 1}, "extend": {"7": 1, "16": 2}}))
    limits = ["--max-num-seqs", "1", "--max-num-batched-tokens", "4"]  # of serving: sizes are measured without them
    sizes = ["--precompile-bs-paddings", "2", "--precompile-token-paddings", "16", *limits]
    code, out, _ = run(
        capsys, "buckets", model, *sizes, "--rounds", "1", "--most", "2", "--load", load, "--output", file
    )
    rows = json.loads(file.read_text())["rows"]
    measured = [row for row in rows if row["list"] == "measured"]
    pairs = {(row["step"], int(row["load"].split()[0]), int(row["buckets"])) for row in measured}
    decode = {("decode", size, bucket) for bucket in (1, 2) for size in (1, 2) if size <= bucket}
    assert pairs == decode | {("extend", 4, 16), ("extend", 16, 16)}
    assert all(row["ms"] > 0 for row in rows) and code == 0 and len(out.splitlines()) == len(rows) + 1
    for step, largest in (("decode", 2), ("extend", 16)):
        single, best = (row for row in rows if row["step"] == step and row["list"] != "measured")
        assert single["buckets"] == str(largest) and best["list"] == "best of 2" and best["ms"] <= single["ms"]
        assert len(best["buckets"].split()) <= 2 and best["buckets"].split()[-1] == str(largest)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--most", "0"], "--most 0 must be at least 1"),
        (["--load", "normal"], "load 'normal' is unknown; choose one of uniform"),
        (["--load", "no_such.json"], "no_such.json"),
        (["--context-length", "2"], "--context-length 2 has no decode step between two tokens; give at least 3"),
    ],
)
def test_buckets_that_cannot_be_chosen_end_with_a_sentence(flags, message, tmp_path, capsys):
    code, out, err = run(capsys, "buckets", write_tiny_checkpoint(tmp_path / "model"), *SIZES, *flags)
    assert code in (1, 2) and message in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    "text", ["[]", "{", "{}", '{"decode": {"0": 1}, "extend": {}}', '{"decode": {"5": 1}, "extend": {"2": 1}}']
)
def test_a_file_that_holds_no_load_is_refused_with_what_one_is(text, tmp_path, capsys):
    (tmp_path / "load.json").write_text(text)
    code, _, err = run(capsys, "buckets", "/no/such/model", *SIZES, "--load", tmp_path / "load.json")
    assert code == 2 and "holds no load" in err and '{"decode": {"SIZE": COUNT, ...}' in err


@contextlib.contextmanager
def serving(*, info=b'{"vocab_size": 9}', info_head=None, stream=b"", stream_head="Connection: close", status=200):
    """A server that answers /get_model_info and /generate so, with these headers, and closes the connection."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(info, info_head or f"Content-Length: {len(info)}")

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(stream, stream_head, status=status)

        def answer(self, content, head, status=200):
            self.send_response(status)
            self.send_header(*head.split(": "))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            """Write nothing on standard error."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "content",
    [
        *(b"{}", b"no json", b"[]", b'{"vocab_size": null}', b'{"vocab_size": 1e999}', b'{"vocab_size": 0}'),
        *(b'{"vocab_size": -3}', b'{"vocab_size": NaN}', b"[" * 100_000, b"\xff"),
    ],
)
def test_another_server_is_refused_by_its_url(content, capsys):
    with serving(info=content) as url:
        code, out, err = run(capsys, "serve", "--base-url", url, *SMALL)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"--base-url {url}: /get_model_info names no vocab_size" in err


CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("answers", "path"),
    [
        (dict(info_head="Content-Length: 100"), "GET /get_model_info"),
        (dict(info_head=CHUNKED, info=b"20\r\n{"), "GET /get_model_info"),
        (dict(info_head=CHUNKED, info=b"no size\r\n{"), "GET /get_model_info"),
        (dict(stream_head=CHUNKED, stream=b"20\r\ndata: {"), "POST /generate"),
        (dict(stream_head=CHUNKED, stream=b"20\r\n{", status=500), "POST /generate"),
    ],
)
def test_an_answer_that_is_cut_short_ends_with_a_sentence(answers, path, capsys):
    with serving(**answers) as url:
        code, out, err = run(capsys, "serve", "--base-url", url, *SMALL)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert f"--base-url {url}: {path} failed (IncompleteRead(" in err


@pytest.mark.parametrize(
    "stream",
    [
        *(b"", b"data: [DONE]\n\n", b"data: {\n\n", b'data: {"meta_info": null}\n\n', b'data: {"meta_info": {}}\n\n'),
        *(b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n', b'data: {"a": ' + b"[" * 100_000 + b"\n\n"),
    ],
)
def test_a_stream_without_an_end_ends_with_a_sentence(stream, capsys):
    with serving(stream=stream) as url:
        code, out, err = run(capsys, "serve", "--base-url", url, *SMALL)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "a stream ended early: " in err and len(err) < 500


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    code, out, err = run(capsys, "throughput", "/no/such/model", "--output", tmp_path / "no" / "x.json")
    assert (code, out, err.count("\n")) == (1, "", 1) and "x.json" in err and "/no/such/model" not in err
