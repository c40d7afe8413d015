"""Disk full at export: one sentence and code 1, nothing half-written, and the engine goes on. The disk is full for
real: the system refuses the bytes above a limit of file sizes, and /dev/full all of them."""

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from routed_experts import demo
from routed_experts.analysis import RoutedText, draw_routing
from routed_experts.cli import main
from routed_experts.core.errors import WriteError
from routed_experts.core.placement import ExpertPlacement
from routed_experts.core.routing_stats import RoutingStats
from routed_experts.formats import record_from_meta_info
from routed_experts.models.loading.checkpoint import save
from support.engines import SMALL
from support.lazy_compile import lazy_compilation
from support.tiny_checkpoint import write_tiny_checkpoint


@contextlib.contextmanager
def room_for(num_bytes):
    """No file may grow above this; Python ignores the signal, so writes fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def answer(engine_factory):
    with engine_factory(enable_return_routed_experts=True) as engine:
        return engine.generate(
            "The cat sat", {"max_new_tokens": 40, "seed": 1, "ignore_eos": True}, return_routed_experts=True
        )


EXPORTS = (
    "convert answer.json out.safetensors",
    "convert answer.json out.json --format list",
    "convert answer.json out.npy",
    "convert answer.json out.npz --to megatron",
    "analyze report answer.json --output out.html",
    "analyze plot answer.json --output out.png",
    "analyze plot answer.json --output out.svg",
    "placement answer.json --instances 20 --devices 4 --save out.npz",
    "tiny out",
)
# Pictures take seconds: in every run one is where a file stood, and one where none did.
PICTURES = {"analyze plot answer.json --output out.png": False, "analyze plot answer.json --output out.svg": True}
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("there", "command"),
    [
        pytest.param(there, command, marks=[] if command not in PICTURES or PICTURES[command] is there else THOROUGH)
        for there in (False, True)
        for command in EXPORTS
    ],
)
def test_commands_leave_nothing_half_written(there, command, answer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    words = command.split()
    target = next(word for word in words if word.startswith("out"))
    if there and target != "out":
        (tmp_path / target).write_text("what stood there")
    before = contents(tmp_path)
    with room_for(300):
        code = main(words)
    err = capsys.readouterr().err
    assert code == 1 and err.count("\n") == 1 and target in err and "File too large" in err and "ulimit" in err, err
    assert contents(tmp_path) == before
    assert main(words) == 0 and len(contents(tmp_path)) > len(before) - there


def test_the_library_leaves_nothing_and_the_engine_goes_on(answer, tmp_path, engine_factory):
    record, tensors = record_from_meta_info(answer), {"a": np.zeros(5000, np.float32)}
    text = RoutedText(title="a", pieces=("x",) * record.num_tokens, record=record)
    exports = (
        lambda: save(tmp_path / "model", {"model_type": "x"}, tensors),
        lambda: RoutingStats.from_records([record]).save(tmp_path / "stats.npz"),
        lambda: ExpertPlacement.identity(48, 256, 4).save(tmp_path / "plan.npz"),
        lambda: draw_routing([text], tmp_path / "a.png", title="a", column=0),
    )
    with engine_factory(enable_return_routed_experts=True) as engine:
        expected = {"max_new_tokens": 40, "seed": 1, "ignore_eos": True}
        stream = engine.generate("The cat sat", expected, return_routed_experts=True, stream=True)
        events = [next(stream)]
        for trial in (0, 4):
            with room_for(50 + 40 * trial):
                for export in exports:
                    with pytest.raises(WriteError, match="File too large"):
                        export()
            assert contents(tmp_path) == {}
            events.append(next(stream))
        *_, last = [*events, *stream]
        assert last["output_ids"] == answer["output_ids"] and record_from_meta_info(last) == record
        for export in exports:
            export()


def test_generate_reports_a_full_disk_at_the_end(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "out.jsonl").write_text("yesterday's")
    sizes = [word for name, sizes in SMALL.items() for word in (f"--{name.replace('_', '-')}", *map(str, sizes))]
    with monkeypatch.context() as fault, lazy_compilation():
        fault.setattr(os, "fsync", full)  # where a network disk reports it
        flags = ["--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "4", *sizes]
        code = main(["generate", str(folder), "--prompt", "The cat", *flags])
    err = capsys.readouterr().err.splitlines()[-1]
    assert code == 1 and "out.jsonl could not be written: No space left on device, after" in err
    assert (tmp_path / "out.jsonl").read_text() == "yesterday's"
    (partial,) = [file for file in tmp_path.iterdir() if file.name not in ("model", "out.jsonl")]
    assert str(partial) in err and json.loads(partial.read_text())["prompt"] == "The cat"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [["inspect", str(demo.demo_model_path()), "--json"], ["--version"], ["serve", "--help"], ["tiny", "--help"]],
)
def test_standard_output_on_a_full_disk_ends_with_a_sentence(words, unbuffered):
    script = "import sys; from routed_experts.cli import main; sys.exit(main(sys.argv[1:]))"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-W", "error", "-c", script, *words]
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False, env=env
        )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "No space left on device" in done.stderr, (
        done.stderr
    )
