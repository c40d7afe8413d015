"""What keeps `serve` from starting: three lines at most, no traceback, 2 for what the user wrote and 1 for the machine.
Each is refused before anything is compiled, and leaves no port bound."""

import json
import re
import socket

import pytest

from routed_experts.cli import main
from support.tiny_checkpoint import write_tiny_checkpoint

SIZES = ["--precompile-bs-paddings", "4", "--precompile-token-paddings", "32"]


def rewrite_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_config(folder):
    (folder / "config.json").unlink()


def no_json(folder):
    (folder / "config.json").write_text("{")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def no_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def no_folder(folder):
    folder.rename(folder.with_name("elsewhere"))


def dense(folder):
    write_tiny_checkpoint(folder, mlp_only_layers=[0, 1, 2, 3])


CASES = {
    "no folder": (no_folder, [], 2, "no checkpoint folder"),
    "no config.json": (no_config, [], 2, "config.json"),
    "config.json is no JSON": (no_json, [], 2, "config.json"),
    "unknown architecture": (lambda folder: rewrite_config(folder, architectures=["Abacus"]), [], 2, "Abacus"),
    "no weights": (no_weights, [], 2, "safetensors"),
    "truncated weights": (cut, [], 2, "model.safetensors"),
    "weights of another shape": (
        lambda folder: rewrite_config(folder, moe_intermediate_size=64),
        [],
        2,
        "shape|expected",
    ),
    "pickled weights": (pickled, [], 2, "safetensors"),
    "no tokenizer": (no_tokenizer, [], 2, "tokenizer"),
    "capture of a dense model": (dense, ["--enable-return-routed-experts"], 2, "no MoE layer"),
    "no root of weights": (None, ["--weights-root", "/nowhere/weights"], 2, "--weights-root '/nowhere/weights' is not"),
    "no root of weights here": (
        None,
        ["--weights-root", "weights"],
        2,
        r"'weights' is not there .*looked for /.*/weights",
    ),
    "a file as root of weights": (None, ["--weights-root", __file__], 2, "--weights-root .* is no folder; make"),
    "unknown backend": (None, ["--moe-backend", "sealed", "--enable-return-routed-experts"], 2, "sealed"),
    "unsupported combination": (None, ["--deterministic", "--moe-backend", "tiled"], 2, "deterministic"),
    "more devices than there are": (None, ["--tp-size", "4"], 1, "is above the .*device_count=4"),
    "a plan that does not fit": (None, ["--max-total-tokens", "1000000000000"], 1, "--max-total-tokens"),
}  # and a port in use: below


@pytest.mark.parametrize("case", CASES)
def test_a_start_that_cannot_work_ends_with_a_sentence(case, tmp_path, capfd):
    spoil, flags, code, message = CASES[case]
    folder = write_tiny_checkpoint(tmp_path / "model")
    if spoil is not None:
        spoil(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        exit_code = main(["serve", str(folder), "--port", str(port), *SIZES, *flags])
    except SystemExit as exit_:
        exit_code = exit_.code
    out, err = capfd.readouterr()
    complaint = [line for line in err.splitlines() if "error:" in line]
    assert exit_code == code, err
    assert len(complaint) == 1 and re.search(message, complaint[0]), err
    assert "Traceback" not in err and "compile" not in err and "ready" not in out
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the port is free again"


def test_a_port_in_use_is_reported_before_the_model_is_read(tmp_path, capfd):
    folder = write_tiny_checkpoint(tmp_path / "model")
    no_weights(folder)
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port), *SIZES]) == 1
    err = capfd.readouterr().err
    assert f"error: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port" in err
    assert err.count("\n") <= 3 and "safetensors" not in err
