"""Whether the tests notice: errors made on purpose, one at a time, and what becomes of them.

    pip install cosmic-ray
    python -m benchmarks.mutation --csv mutants.csv [--modules kernels elbo ...] [--sample 40]

Cosmic Ray lists the changes that can be made to a module: another operator, another number, a
condition turned round. A random sample of them is applied, in a copy of the repository, and the
tests that are there for the module run until one fails: the mutant is killed. One that survives is
a line that no test holds, or a change that changes nothing. Left out are annotations, which nothing
evaluates, operators that numbers do not have, such as shifts, and what is no Python: those mutants
die by themselves and would flatter. Finished rows are kept; the script goes on where it was.

Each mutant has a process of its own, forked where JAX and its like are imported but nothing of this
project is and no device was touched: importing them would take longer than most kills.
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

import jax
import numpy as np
import pytest

from examples.common.tables import Row, fill

ROOT = Path(__file__).parents[1]
# The tests of a module by itself. Those of what is built on it would add few kills, and minutes for
# each mutant that survives.
FILES = {
    "kernels": "kernels profiles",
    "profiles": "profiles",
    "regularizers": "filters",
    "iterations": "filters iterations",
    "elbo": "elbo_options",
}
# What an operator between values may turn into.
OPERATORS = {"Add", "Sub", "Mul", "Div"}
COUNTERPARTS = {"BitAnd": "BitOr", "BitOr": "BitAnd"}
COLUMNS = ("line", "outcome", "by", "seconds")
PRELOADED = ("jax", "numpyro.contrib.module", "flax.linen", "optax", "scipy.stats", "pytest")
CPU_LIMIT = 300  # seconds, for a mutant that never ends; several times what a survivor takes


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a module's annotations begin and end: lines and columns."""
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
    """Whether what a mutant does can be done to numbers, so that only its value is wrong."""
    if operator.endswith(("_Invert", "USub_Not")):
        return False
    if not operator.startswith("ReplaceBinaryOperator"):
        return True
    _, old, new = operator.split("_")
    return new in OPERATORS if old not in COUNTERPARTS else new == COUNTERPARTS[old]


def is_program(source: str) -> bool:
    """Whether it compiles, without a warning: Cosmic Ray takes ``*,`` for a product."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(source, "mutant", "exec")
        except SyntaxError:
            return False
    return True


def module_path(module: str) -> Path:
    return Path("numpyro_kscore") / f"{module}.py"


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
    """Lines and sources of some, in random order; a larger sample begins with a smaller one."""
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
    """A plugin of pytest's: remembers what failed first, and has every program kept."""

    failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # After the fixture that asks for the slow ones only: here the same run comes often.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def run_tests(folder: str, files: Sequence[str], found: Connection, is_mutant: bool) -> None:
    """In a process of its own: sends the first failure's name, "" if there is none."""
    os.chdir(folder)
    # What the parent imported is not the copy's.
    for name in list(sys.modules):
        if name.partition(".")[0] in ("examples", "benchmarks"):
            del sys.modules[name]
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).absolute() != ROOT)]
    # Byte code is known by the second its source was written in, and mutants are quicker.
    sys.dont_write_bytecode = is_mutant
    if is_mutant:
        sys.stdout = sys.stderr = Path(os.devnull).open("w")
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))
    watch = Watch()
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files], plugins=[watch])
    found.send((watch.failed or f"exit {code}") if code else "")
    # Threads of XLA's are not waited for.
    os._exit(0)


def first_failure(folder: str, module: str, is_mutant: bool = True) -> str:
    """The test that fails first in the copy, or what else ended the run; "" if nothing did."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    files = [f"tests/test_{name}.py" for name in FILES[module].split()]
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
    """The tests' word on one mutant."""
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
    """Runs mutants, keeps their rows and prints the share that was killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, required=True, help="table to write, and to go on from")
    parser.add_argument("--modules", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    table = options.csv.absolute()
    os.chdir(ROOT)
    chosen = {module: sample(module, options.sample, options.seed) for module in options.modules}
    # Of the server that processes are forked from.
    os.environ["JAX_PLATFORMS"] = "cpu"
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("numpyro_kscore", "tests", "examples", "benchmarks", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        # The same programs again and again, but for one.
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
    print(f"\n{'module':16}{'killed':>12}")
    for module in chosen:
        outcomes = [row["outcome"] == "killed" for row in rows if row["module"] == module]
        print(f"{module:16}{sum(outcomes):>6} of {len(outcomes):>3}")


if __name__ == "__main__":
    main()
