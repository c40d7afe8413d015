"""What the demo prints before a phase that takes long."""

import dataclasses

import pytest

from routed_experts.cli.bootstrap import announce_compilation
from routed_experts.core.server_args import ServerArgs
from routed_experts.demo.run import long_phase_after
from routed_experts.layers.native import toolchain

ARGS = ServerArgs(model_path="demo")


def test_kernels_that_are_not_compiled_yet_are_announced(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(toolchain, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "compiler", lambda: ("true",))  # whatever it is asked, it says nothing
    assert long_phase_after("config", None) == "compiling the C++ kernels (once) ..."
    announce_compilation(ARGS)
    assert capsys.readouterr().err == "compiling the C++ kernels (once) ...\n"
    toolchain.library_file(("true",)).write_bytes(b"")
    assert long_phase_after("config", None) is None
    announce_compilation(ARGS)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "announced"),
    [
        ({"moe_backend": "reference", "attention_backend": "paged"}, False),
        ({"tp_size": 2}, False),
        ({"moe_backend": "reference"}, True),
        ({"moe_backend": "native", "attention_backend": "paged"}, True),
    ],
)
def test_only_kernels_that_the_engine_may_load_are_announced(monkeypatch, tmp_path, capsys, changes, announced):
    monkeypatch.setattr(toolchain, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "compiler", lambda: ("true",))
    announce_compilation(dataclasses.replace(ARGS, **changes))
    assert capsys.readouterr().err == ("compiling the C++ kernels (once) ...\n" if announced else "")


def test_without_a_compiler_nothing_is_announced(monkeypatch):
    monkeypatch.setattr(toolchain, "compiler", lambda: None)
    assert long_phase_after("config", None) is None


def test_programs_are_announced_with_their_folder(tmp_path):
    assert str(tmp_path) in long_phase_after("allocate", tmp_path)
    assert "not cached" in long_phase_after("allocate", None)
    assert long_phase_after("load", tmp_path) is None
