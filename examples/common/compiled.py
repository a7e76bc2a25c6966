"""A cache of compiled programs that several processes use, one after another."""

import os
from pathlib import Path

import jax


def keep_compiled() -> Path:
    """Keep compiled programs for the next run with the same versions and settings.

    Returns the folder: the one that ``JAX_COMPILATION_CACHE_DIR`` names, otherwise one in the
    user's cache folder. It can be deleted at any time.
    """
    chosen = jax.config.jax_compilation_cache_dir
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else caches / "numpyro_kscore" / "compiled"
    if not chosen:
        # NumPyro runs a model operation by operation before it compiles the whole, so caching
        # small programs saves time, too.
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
