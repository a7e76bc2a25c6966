"""Folders of the package import one way, and modules stay small and few floors deep."""

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "numpyro_kscore"
RUN_TIME = {"jax", "numpy", "numpyro"}
MOST_LINES = 500
MOST_LINES_OF_A_FUNCTION = 60
MOST_FLOORS = 12
MOST_NAMES = 30


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def top_imports(source: str) -> Iterator[tuple[str, str]]:
    """Modules and names imported when the source runs: not in functions."""

    def walk(node: ast.AST) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, "") for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                # Names are written out in this package, or a relative one would pass unseen.
                assert child.level == 0, f"relative import: {ast.unparse(child)}"
                yield from ((str(child.module), alias.name) for alias in child.names)
            yield from walk(child)

    return walk(ast.parse(source))


def own_imports(source: str, modules: frozenset[str] = frozenset(FILES)) -> set[str]:
    """Modules of the package that a source imports, whichever way they are named."""
    found = set()
    for module, name in top_imports(source):
        if module.partition(".")[0] == PACKAGE.name:
            whole = f"{module}.{name}"
            found.add(whole if whole in modules else module)
    return found


def foreign_imports(source: str) -> set[str]:
    """Other packages a source imports, less the standard library."""
    heads = {module.partition(".")[0] for module, _ in top_imports(source)}
    return heads - set(sys.stdlib_module_names) - {PACKAGE.name}


IMPORTS = {name: own_imports(path.read_text()) for name, path in FILES.items()}


def folder(module: str, depth: int = 1) -> str:
    """The folder of a module, with at most so many parts: ``estimators._fit`` with two."""
    parts = module.split(".")[1:]
    is_folder = FILES[module].name == "__init__.py"
    return ".".join((parts if is_folder else parts[:-1])[:depth])


@functools.cache
def floor(module: str) -> int:
    """1 for a module that imports none of the package, otherwise one above the highest of them."""
    return 1 + max((floor(other) for other in IMPORTS[module]), default=0)


def test_imports_name_modules_that_exist():
    assert set().union(*IMPORTS.values()) <= set(FILES)


def test_no_cycle_between_modules():
    order = list(TopologicalSorter(IMPORTS).static_order())  # CycleError names the modules
    assert sorted(order) == sorted(FILES)


def imports_between_folders(depth: int) -> dict[str, set[str]]:
    """Folders with so many parts in their names, each with the others that its modules import.

    A name with fewer parts stands for itself: a folder that has no folders inside, or an
    ``__init__``.
    """
    graph: dict[str, set[str]] = {}
    for name, imported in IMPORTS.items():
        own = folder(name, depth)
        others = {folder(other, depth) for other in imported} - {own}
        graph.setdefault(own, set()).update(others)
    return graph


def test_no_cycle_between_folders():
    graph = imports_between_folders(1)
    del graph[""]
    assert "" not in set().union(*graph.values()), "a folder imports the top of the package"
    TopologicalSorter(graph).prepare()


def test_no_cycle_between_folders_inside_of_folders():
    graph = imports_between_folders(2)
    assert {"estimators._base", "estimators._fit"} <= set(graph)
    TopologicalSorter(graph).prepare()


def test_a_folder_holds_modules_or_folders():
    """No folder holds both: such modules would belong to none of the inner folders."""
    for inner in {path.parent for path in FILES.values()} - {PACKAGE}:
        if any(path.is_dir() and list(path.glob("*.py")) for path in inner.iterdir()):
            assert {path.name for path in inner.glob("*.py")} == {"__init__.py"}


def test_few_floors():
    tower = max(FILES, key=floor)
    assert floor(tower) <= MOST_FLOORS, f"{tower} stands on floor {floor(tower)}"


def test_every_module_is_in_a_folder():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py"}


@pytest.mark.parametrize("name", FILES)
def test_module(name):
    source = FILES[name].read_text()
    assert foreign_imports(source) <= RUN_TIME, "import optional packages where they are used"
    lines = source.count("\n")
    assert lines <= MOST_LINES, f"{lines} lines; split it"
    assert "TYPE_CHECKING" not in source, "a type that cannot be imported lives too high"
    private = [part for part in name.split(".")[1:] if part.startswith("_")]
    assert private or FILES[name].name == "__init__.py", "a public module is a folder's __init__"


def code_lines(node: ast.AST) -> int:
    """Lines of a function without its docstring."""
    assert isinstance(node, ast.FunctionDef)
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
    return node.end_lineno - node.lineno + 1 - docstring


@pytest.mark.parametrize("name", FILES)
def test_functions_are_short(name):
    functions = [
        n for n in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(n, ast.FunctionDef)
    ]
    long = {n.name: code_lines(n) for n in functions if code_lines(n) > MOST_LINES_OF_A_FUNCTION}
    assert not long


def public_names() -> dict[str, set[str]]:
    import numpyro_kscore

    found = {"numpyro_kscore": set(numpyro_kscore.__all__)}
    for name, path in FILES.items():
        if path.name == "__init__.py" and name.count(".") == 1 and "._" not in name:
            found[name] = set(getattr(numpyro_kscore, folder(name)).__all__)
    return found


def test_small_face():
    names = public_names()
    assert len(names["numpyro_kscore"]) <= MOST_NAMES
    assert all(folder(name) in names["numpyro_kscore"] for name in names if folder(name))


def test_no_public_names_differ_by_case_alone():
    every = set().union(*public_names().values())
    assert len({name.lower() for name in every}) == len(every)


def test_the_reader_of_imports():
    """The reader sees an import in every form it can have."""
    source = """
import numpyro_kscore._fit.fit, arviz
from numpyro_kscore import kernels
from numpyro_kscore.kernels import _gram, CurlFree
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
    assert own_imports(source) == {
        "numpyro_kscore._fit.fit",
        "numpyro_kscore.kernels",
        "numpyro_kscore.kernels._gram",
    }
    assert foreign_imports(source) == {"arviz", "scipy", "optax"}
    with pytest.raises(AssertionError, match="relative"):
        own_imports("from .gram import Gram")
    long = "def f():\n    '''Two\n    lines.'''\n" + "    x = 1\n" * 61
    assert code_lines(ast.parse(long).body[0]) == 62
