"""Whether the tests notice: errors made on purpose, one at a time, and what becomes of them.

    pip install cosmic-ray
    python -m benchmarks.mutation --csv mutants.csv [--modules kernels elbo ...] [--sample 40]

Cosmic Ray lists the changes that can be made to a module: another operator, another number, a
condition turned round. A random sample of them is applied, in a copy of the repository, and the
tests that are there for the module run until one fails: the mutant is killed. One that survives is
a line that no test holds, or a change that changes nothing. Left out are annotations, which nothing
evaluates, and operators that numbers do not have, such as shifts: those mutants die by themselves
and would flatter. Finished rows are kept; the script goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.cells import Row, fill

ROOT = Path(__file__).parents[1]
FILES = {
    "kernels": "family profiles oracle_estimators selection",
    "regularizers": "family iterations oracle_estimators selection",
    "iterations": "iterations oracle_estimators derivatives selection",
    "elbo": "elbo aggregate blocks entropy functions",
}
TESTS = {
    module: " ".join(f"tests/test_{name}.py" for name in names.split())
    for module, names in FILES.items()
}
# What an operator between values may turn into.
OPERATORS = {"Add", "Sub", "Mul", "Div"}
COUNTERPARTS = {"BitAnd": "BitOr", "BitOr": "BitAnd"}
COLUMNS = ("line", "outcome", "seconds")
TIMEOUT = 900.0  # seconds, for a mutant that never ends


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
    if not operator.startswith("ReplaceBinaryOperator"):
        return not operator.endswith("_Invert")
    _, old, new = operator.split("_")
    return new in OPERATORS if old not in COUNTERPARTS else new == COUNTERPARTS[old]


def mutants(module: str) -> Iterator[tuple[str, Any]]:
    """All changes to a module, named by operator and occurrence, in Cosmic Ray's order."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    path = Path("numpyro_kscore") / f"{module}.py"
    spared = annotations((ROOT / path).read_text())
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/db", WorkDB.Mode.create) as db:
        init([path], db, {})
        for item in db.work_items:
            (mutation,) = item.mutations
            operator = mutation.operator_name.rpartition("/")[2]
            hidden = any(low <= mutation.start_pos < high for low, high in spared)
            if is_fair(operator) and not hidden:
                yield f"{operator} {mutation.occurrence}", mutation


def sample(module: str, size: int, seed: int) -> dict[str, Any]:
    """Some of them, in random order; a larger sample begins with a smaller one."""
    every = list(mutants(module))
    order = np.random.default_rng(seed).permutation(len(every))
    return dict(every[k] for k in order[:size])


def judge(module: str, mutation: Any) -> Row:
    """The tests' word on one mutant, in the current folder, which is a copy."""
    from cosmic_ray.mutating import mutate_and_test

    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {TESTS[module]}"
    start = time.perf_counter()
    result = mutate_and_test([mutation], command, TIMEOUT)
    outcome = getattr(result.test_outcome, "value", "none")
    return {
        "line": mutation.start_pos[0],
        "outcome": outcome,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs mutants, keeps their rows and prints the share that was killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--csv", type=Path, required=True, help="table to write, and to go on from")
    parser.add_argument("--modules", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    table = options.csv.absolute()
    os.chdir(ROOT)
    chosen = {module: sample(module, options.sample, options.seed) for module in options.modules}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("numpyro_kscore", "tests", "examples", "benchmarks", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        # The same programs again and again, but for one.
        os.environ["NUMPYRO_KSCORE_TEST_CACHE"] = f"{folder}/compiled"
        os.environ["PYTHONPATH"] = folder
        os.chdir(folder)
        for module in options.modules:
            command = [sys.executable, "-m", "pytest", "-q", "-x", *TESTS[module].split()]
            subprocess.run(command, check=True)
        cells = [{"module": module, "mutant": name} for module in chosen for name in chosen[module]]
        rows = fill(
            cells,
            lambda module, mutant: judge(module, chosen[module][mutant]),
            COLUMNS,
            table,
        )
    os.chdir(ROOT)
    print(f"\n{'module':16}{'killed':>12}")
    for module in chosen:
        outcomes = [row["outcome"] == "killed" for row in rows if row["module"] == module]
        print(f"{module:16}{sum(outcomes):>6} of {len(outcomes):>3}")


if __name__ == "__main__":
    main()
