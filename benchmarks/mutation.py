"""Mutation testing: small errors are put into a module, one at a time, to see if a test fails.

    pip install cosmic-ray
    python -m benchmarks.mutation --csv mutants.csv [--modules kernels._matrix ...] [--sample 40]
        [--quick]

Cosmic Ray lists the changes that can be made to a module: another operator, another number, a
negated condition. A random sample of them is applied in a copy of the repository, and the module's
tests run until one fails: the mutant is *killed*. A mutant that survives is a line that no test
checks, or a change without effect. Mutants of annotations are left out, because they say nothing
about the tests, and so are mutants that any run kills, which would flatter the tests: operators
that numbers do not have, such as shifts, and code that does not compile. Finished rows are kept, so
an interrupted script continues where it stopped.

Each mutant runs in a new process, forked from a server that has imported JAX and other libraries
but nothing of this project, and has not used a device: importing them takes longer than most kills.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.common.tables import Row, fill

ROOT = Path(__file__).parents[1]
# Modules of the package and their own tests. Tests of code built on a module would add few kills,
# and minutes for each mutant that survives.
FILES = {
    "kernels._matrix": ("kernels/test_kernels.py", "kernels/test_profiles.py"),
    "kernels._profiles": ("kernels/test_profiles.py",),
    "regularizers._filters": ("regularizers/test_filters.py",),
    "regularizers._iterations": (
        "regularizers/test_filters.py",
        "regularizers/test_iterations.py",
    ),
    "_objective.elbo": ("objective/test_elbo_options.py",),
}
QUICK = "kernels._profiles"
# Operators that may replace each other.
OPERATORS = {"Add", "Sub", "Mul", "Div"}
COUNTERPARTS = {"BitAnd": "BitOr", "BitOr": "BitAnd"}
COLUMNS = ("line", "outcome", "by", "seconds")
PRELOADED = ("jax", "numpyro.contrib.module", "flax.linen", "optax", "scipy.stats", "pytest")
CPU_LIMIT = 300  # seconds, for a mutant that never ends; several times that of a survivor


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Starts and ends of a module's annotations, as (line, column)."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
    return [
        ((a.lineno, a.col_offset), (a.end_lineno or 0, a.end_col_offset or 0)) for a in found if a
    ]


def is_fair(operator: str) -> bool:
    """True if the changed operator works on numbers, so that only the value is wrong."""
    if operator.endswith(("_Invert", "USub_Not")):
        return False
    if not operator.startswith("ReplaceBinaryOperator"):
        return True
    _, old, new = operator.split("_")
    return new in OPERATORS if old not in COUNTERPARTS else new == COUNTERPARTS[old]


def is_program(source: str) -> bool:
    """True if the source compiles without a warning: Cosmic Ray takes ``*,`` for a product."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(source, "mutant", "exec")
        except SyntaxError:
            return False
    return True


def module_path(module: str) -> Path:
    """Path of a module in the repository."""
    return Path("numpyro_kscore", *module.split(".")).with_suffix(".py")


def mutants(module: str) -> Iterator[tuple[str, Any]]:
    """All changes to a module, named by operator and occurrence, in Cosmic Ray's order."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    path = module_path(module)
    spared = annotations((ROOT / path).read_text())
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/db", WorkDB.Mode.create) as db:
        init([path], db, {})
        for item in db.work_items:
            (mutation,) = item.mutations
            operator = mutation.operator_name.rpartition("/")[2]
            hidden = any(low <= mutation.start_pos < high for low, high in spared)
            if is_fair(operator) and not hidden:
                yield f"{operator} {mutation.occurrence}", mutation


def mutated(mutation: Any) -> str:
    """The module's source with one change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    operator = get_operator(mutation.operator_name)(**(mutation.operator_args or {}))
    return mutate_code((ROOT / mutation.module_path).read_text(), operator, mutation.occurrence)


def sample(module: str, size: int, seed: int) -> dict[str, tuple[int, str]]:
    """Lines and sources of a random sample; a larger sample starts with the smaller one."""
    every = list(mutants(module))
    chosen = {}
    for k in np.random.default_rng(seed).permutation(len(every)):
        if len(chosen) == size:
            break
        name, mutation = every[k]
        source = mutated(mutation)
        if is_program(source):
            chosen[name] = mutation.start_pos[0], source
    return chosen


class Watch:
    """A pytest plugin that remembers the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def run_tests(folder: str, files: Sequence[str], found: Connection, is_mutant: bool) -> None:
    """Run tests in the copy and send the name of the first failure, "" if there is none."""
    os.chdir(folder)
    # Forget modules that the parent imported from the repository instead of the copy.
    for name in list(sys.modules):
        if name.partition(".")[0] in ("examples", "benchmarks"):
            del sys.modules[name]
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).absolute() != ROOT)]
    # Byte code is matched to its source by a time stamp in seconds, and mutants follow faster.
    sys.dont_write_bytecode = is_mutant
    if is_mutant:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))
    watch = Watch()
    code = pytest.main(
        ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files], plugins=[watch]
    )
    found.send((watch.failed or f"exit {code}") if code else "")
    # Do not wait for threads of XLA.
    os._exit(0)


def first_failure(folder: str, module: str, is_mutant: bool = True) -> str:
    """The test that fails first in the copy, or how else the run ended; "" if all passed."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    files = [f"tests/{name}" for name in FILES[module]]
    process = context.Process(target=run_tests, args=(folder, files, sender, is_mutant))
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = None
    process.join()
    return f"exit {process.exitcode}" if found is None else found


def judge(folder: str, module: str, line: int, source: str) -> Row:
    """Run the tests on one mutant."""
    path = Path(folder) / module_path(module)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
    original = path.read_text()
    start = time.perf_counter()
    path.write_text(source)
    try:
        failed = first_failure(folder, module)
    finally:
        path.write_text(original)
    return {
        "line": line,
        "outcome": "killed" if failed else "survived",
        "by": failed.removeprefix("tests/"),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run mutants, keep their rows and print how many were killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, help="table to write, and to resume from")
    parser.add_argument("--modules", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"one mutant of {QUICK}")
    options = parser.parse_args(arguments)
    if options.quick:
        options.modules, options.sample = [QUICK], 1
    if importlib.util.find_spec("cosmic_ray") is None:
        parser.error("expected cosmic-ray; got none. Run: pip install cosmic-ray")
    table = options.csv and options.csv.absolute()
    os.chdir(ROOT)
    chosen = {module: sample(module, options.sample, options.seed) for module in options.modules}
    # Read by the server that processes are forked from.
    os.environ["JAX_PLATFORMS"] = "cpu"
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("numpyro_kscore", "tests", "examples", "benchmarks", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        # All runs compile the same programs, except for those that a mutant changes.
        os.environ.setdefault("NUMPYRO_KSCORE_TEST_CACHE", f"{folder}/compiled")
        for module in options.modules:
            if failed := first_failure(folder, module, is_mutant=False):
                raise SystemExit(
                    f"expected tests that pass; got a failure without an error: {failed}"
                )
        cells = [{"module": module, "mutant": name} for module in chosen for name in chosen[module]]
        rows = fill(
            cells,
            lambda module, mutant: judge(folder, module, *chosen[module][mutant]),
            COLUMNS,
            table,
        )
    print(f"\n{'module':26}{'killed':>12}")
    for module in chosen:
        outcomes = [row["outcome"] == "killed" for row in rows if row["module"] == module]
        print(f"{module:26}{sum(outcomes):>6} of {len(outcomes):>3}")


if __name__ == "__main__":
    main()
