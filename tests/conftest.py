"""Settings of the whole run: the CPU, how programs are compiled, fixtures several files use."""

import gc
import os

from support.flags import in_one_part, older_emitter

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
    os.environ["XLA_FLAGS"] = in_one_part(os.environ["XLA_FLAGS"])

import jax  # noqa: E402
import pytest  # noqa: E402

from numpyro_kscore._util import compiling  # noqa: E402

# Those of the package's own programs, which come before the settings below, and what they are in
# tests.
OPTIONS = compiling.OPTIONS
UNOPTIMIZED = compiling.AS_IT_IS

# Fifteen seconds and more.
LONGEST = (
    "test_sharding",
    "test_amortize",
    "test_loader",
    "test_fit",
    "test_enumeration",
    "test_subsampling",
    "test_centering",
    "test_blocks",
    "test_docs",
)

# JAX forgets all programs here, and what comes after would trace its own again.
FORGETFUL = ("test_pallas",)

# Programs need not know the lines that they come from: to find them takes time at every operation.
# What fails says so by Python's own traceback.
jax.config.update("jax_traceback_in_locations_limit", 0)


def pytest_collection_modifyitems(items):
    """Files that take longest come first, so that no process of a run has one of them at its end.

    Last are those that make JAX forget. Within a file the order stays.
    """
    place = {name: k for k, name in enumerate(LONGEST)}
    place |= dict.fromkeys(FORGETFUL, len(LONGEST) + 1)
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish():
    """Look for garbage seldom, and not among modules: tracing makes many objects, few in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs compiled more than once in a run, by new SVI objects or cleared caches, are kept.

    All of them: to look a program up takes a few milliseconds, to compile the smallest ten. The
    folder is this run's own, all processes of it share it: a cache that outlives it could hide a
    change of compiler. Runs that belong together may share one (``benchmarks/mutation.py``).
    """
    base = tmp_path_factory.getbasetemp()
    # A process of a parallel run has its own folder in that of the run.
    run = base.parent if WORKER else base
    folder = os.environ.get("NUMPYRO_KSCORE_TEST_CACHE") or run / "compilations"
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
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
    options = OPTIONS if optimized else OPTIONS | UNOPTIMIZED
    if compiling.OPTIONS != options:
        compiling.OPTIONS = options
        compiling._known_options.cache_clear()
    return (yield)


@pytest.fixture
def x64():
    """Double precision for one test."""
    with jax.enable_x64(True):
        yield
