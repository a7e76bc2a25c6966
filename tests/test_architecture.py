"""Modules import what docs/architecture.md says they may, and nothing else."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "numpyro_kscore"
PAGE = ROOT / "docs" / "architecture.md"
FILES = {path.stem: path for path in sorted(PACKAGE.glob("*.py")) if path.stem != "__init__"}
RUN_TIME = {"jax", "numpy", "numpyro"}
MOST_LINES = 500


def read_rooms(page: str) -> list[tuple[str, ...]]:
    """Modules of every room, in the order of the table."""
    rows = re.findall(r"^\| \d+ \w+ \| ([^|]*) \|", page, flags=re.MULTILINE)
    return [tuple(re.findall(r"`(\w+)`", row)) for row in rows]


def top_imports(source: str) -> Iterator[tuple[str, str]]:
    """Modules imported when the source is run: not in functions, nor for the type checker."""

    def walk(node: ast.AST) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, "") for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                # A relative one would pass by unseen: names are written out in this package.
                assert child.level == 0, f"relative import: {ast.unparse(child)}"
                yield from ((str(child.module), alias.name) for alias in child.names)
            yield from walk(child)

    return walk(ast.parse(source))


def own_imports(source: str) -> set[str]:
    """Modules of the package among them, whichever way they are named."""
    found = set()
    for module, name in top_imports(source):
        head, _, rest = module.partition(".")
        if head == PACKAGE.name:
            found.add(rest.split(".")[0] or name)
    return found


def foreign_imports(source: str) -> set[str]:
    """Other packages among them, less the standard library."""
    heads = {module.partition(".")[0] for module, _ in top_imports(source)}
    return heads - set(sys.stdlib_module_names) - {PACKAGE.name}


IMPORTS = {name: own_imports(path.read_text()) for name, path in FILES.items()}
ROOMS = read_rooms(PAGE.read_text())
LEVEL = {name: level for level, room in enumerate(ROOMS) for name in room}


def test_every_module_has_one_room():
    named = [name for room in ROOMS for name in room]
    assert len(named) == len(set(named))
    assert set(named) == set(FILES), "give every module a room in the table of docs/architecture.md"
    assert {path.stem for path in PACKAGE.rglob("*.py")} - set(FILES) == {"__init__"}


@pytest.mark.parametrize("name", FILES)
def test_imports_point_up_the_table(name):
    below = sorted(other for other in IMPORTS[name] if LEVEL[other] > LEVEL[name])
    assert not below, f"{name} imports {below}, from rooms below its own"


def test_no_cycles():
    assert set().union(*IMPORTS.values()) <= set(FILES)
    TopologicalSorter(IMPORTS).prepare()  # CycleError names the modules


@pytest.mark.parametrize("name", FILES)
def test_optional_packages_are_imported_where_they_are_used(name):
    assert foreign_imports(FILES[name].read_text()) <= RUN_TIME


@pytest.mark.parametrize("name", FILES)
def test_size(name):
    lines = FILES[name].read_text().count("\n")
    assert lines <= MOST_LINES, f"{name}: {lines} lines; split it"


def test_the_reader_of_imports():
    """What is looked for is seen, in every form it can have."""
    source = """
import numpyro_kscore.kernels._gram as gram, arviz
from numpyro_kscore import elbo
from numpyro_kscore.kernels import CurlFree
if TYPE_CHECKING:
    from numpyro_kscore.diagnostics._plots import plot_pairs
try:
    import scipy.linalg
except ImportError:
    pass
class A:
    import optax
    def f(self):
        import matplotlib
        from numpyro_kscore._fit.chunks import Chunk
"""
    assert own_imports(source) == {"gram", "elbo", "kernels"}
    assert foreign_imports(source) == {"arviz", "scipy", "optax"}
    with pytest.raises(AssertionError, match="relative"):
        own_imports("from .gram import Gram")
    assert read_rooms("| 1 a b |\n| 2 up | `x`, `_y` | `z` |\n") == [("x", "_y")]
