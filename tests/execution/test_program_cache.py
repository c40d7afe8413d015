"""A start caches its programs in the default folder, unless the user has configured another."""

from pathlib import Path

import jax
import pytest

from routed_experts.execution.compilation_cache import enable_compilation_cache


@pytest.fixture(autouse=True)
def no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)


def test_programs_are_stored_in_the_users_cache(tmp_path):
    folder = enable_compilation_cache()
    assert folder == tmp_path / ".cache" / "routed-experts" / "jax" and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert enable_compilation_cache() == folder


def test_a_folder_that_is_set_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert enable_compilation_cache() == tmp_path / "mine"


def test_who_keeps_none_keeps_none(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None and not list(tmp_path.iterdir())


def test_a_home_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / ".cache").write_text("a file")
    assert enable_compilation_cache() is None
    assert "every start compiles again" in caplog.text
