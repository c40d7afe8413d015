"""What the demo prints before a phase that takes long."""

from routed_experts.cli.bootstrap import announce_compilation
from routed_experts.demo.run import long_phase_after
from routed_experts.layers.native import toolchain


def test_kernels_that_are_not_compiled_yet_are_announced(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(toolchain, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "compiler", lambda: ("true",))  # whatever it is asked, it says nothing
    assert long_phase_after("config", None) == "compiling the C++ kernels (once) ..."
    announce_compilation()
    assert capsys.readouterr().err == "compiling the C++ kernels (once) ...\n"
    toolchain.library_file(("true",)).write_bytes(b"")
    assert long_phase_after("config", None) is None
    announce_compilation()
    assert capsys.readouterr().err == ""


def test_without_a_compiler_nothing_is_announced(monkeypatch):
    monkeypatch.setattr(toolchain, "compiler", lambda: None)
    assert long_phase_after("config", None) is None


def test_programs_are_announced_with_their_folder(tmp_path):
    assert str(tmp_path) in long_phase_after("allocate", tmp_path)
    assert "not cached" in long_phase_after("allocate", None)
    assert long_phase_after("load", tmp_path) is None
