"""Compiled programs that outlive a process."""

import os
from pathlib import Path

import jax


def keep_compiled() -> Path:
    """Keep what XLA compiles, for the next run with the same versions and settings.

    In the folder that ``JAX_COMPILATION_CACHE_DIR`` names, or one of the user's caches. Nothing
    there is needed: it may be deleted at any time.
    """
    chosen = jax.config.jax_compilation_cache_dir
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else caches / "numpyro_kscore" / "compiled"
    if not chosen:
        # NumPyro runs a model operation by operation before anything is compiled as a whole, so
        # small programs count, too.
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
