"""Settings of the whole run: the CPU, how programs are compiled, fixtures several files use."""

import os

from support.flags import older_emitter

# Read when JAX is imported: results must not depend on which accelerator is at hand. To run the
# tests on one on purpose, name it: cuda,cpu.
os.environ["JAX_PLATFORMS"] = os.environ.get("NUMPYRO_KSCORE_TEST_PLATFORMS", "cpu")
# Also what a run inherits by its environment; processes that tests start inherit it from here.
os.environ["XLA_FLAGS"] = older_emitter(os.environ.get("XLA_FLAGS", ""))

# Each process of a parallel run on a core of its own: XLA starts as many threads as it sees cores,
# and those of several processes get into each other's way.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(WORKER.removeprefix("gw")) % len(cores)]})

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs compiled more than once in a run, by new SVI objects or cleared caches, are kept.

    The folder is this run's own: a cache that outlives it could hide a change of compiler. Runs
    that belong together may share one (``benchmarks/mutation.py``).
    """
    folder = os.environ.get("NUMPYRO_KSCORE_TEST_CACHE") or tmp_path_factory.mktemp("compilations")
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.3,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Programs of a test and its fixtures are not optimized, unless it is marked ``optimized``.

    Compiling takes most of the suite's time, and most programs run once.
    """
    optimized = item.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not optimized)
    return (yield)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
