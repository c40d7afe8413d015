"""Enables JAX's persistent compilation cache, so that only a first start compiles.

A folder that was set by jax.config or JAX_COMPILATION_CACHE_DIR is kept."""

import logging
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


def enable_compilation_cache() -> Path | None:
    """Let JAX keep programs in the user's cache folder, unless a folder is set or jax_enable_compilation_cache is off.
    Returns the folder that holds."""
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"]:
        return None
    if settings["jax_compilation_cache_dir"] is not None:
        return Path(settings["jax_compilation_cache_dir"])
    try:
        folder = Path.home() / ".cache" / "routed-experts" / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        logger.warning("compiled programs are not kept: %s; every start compiles again", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
