"""Readers of the documentation for tests: code of pages, public names, examples of docstrings."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpyro_kscore

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Modules whose names the reference documents, one page for each.
PUBLIC = ["numpyro_kscore"] + [
    f"numpyro_kscore.{name}"
    for name in numpyro_kscore.__all__
    if inspect.ismodule(getattr(numpyro_kscore, name))
]


class Block(NamedTuple):
    """Code of a page."""

    code: str
    warns: bool  # that a fit did not converge: says so by the tag "warns"


def blocks(page: str) -> list[Block]:
    """Code of a page in the order of the page: of plain pages, and cells of those run at build."""
    found = re.findall(
        r"^```(?:python|\{code-cell\} python)\n((?::[^\n]*\n)*)(.*?)^```",
        page,
        flags=re.DOTALL | re.MULTILINE,
    )
    return [Block(code.strip("\n") + "\n", "warns" in options) for options, code in found]


def public_names() -> Iterator[tuple[str, str]]:
    """Pairs of a public module and a name of it; some names are in two modules."""
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            if f"{module}.{name}" not in PUBLIC:
                yield module, name


def callables() -> dict[str, object]:
    """Public callables by their first name, such as ``fit`` and ``kernels.CurlFree``."""
    found: dict[int, tuple[str, object]] = {}
    for module, name in public_names():
        thing = getattr(importlib.import_module(module), name)
        short = f"{module}.{name}".removeprefix("numpyro_kscore.")
        found.setdefault(id(thing), (short, thing))
    return dict(found.values())


def example(thing: object) -> str:
    """The code under ``Example::`` in the thing's own docstring; empty if there is none.

    What a class inherits does not count.
    """
    own = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    doc = inspect.cleandoc(own or "")
    # Up to the end: nothing follows it.
    _, header, code = ("\n" + doc).partition("\nExample::\n\n")
    return textwrap.dedent(code) + "\n" if header else ""


class Shown(NamedTuple):
    """An expression on a line of its own, and the value that the comment behind it shows."""

    expression: str
    value: object


def shown_values(code: str) -> list[Shown]:
    """Values that comments show, ``score(x)  # (5, 2): words``.

    A comment behind an expression is a literal, which words may follow after a colon; a comment of
    words only has to begin with a letter.
    """
    lines, found = code.splitlines(), []
    for node in ast.parse(code).body:
        if not isinstance(node, ast.Expr):
            continue
        comment = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
        # Not the colon in a dict or a string.
        literal = re.match(r"(.*?)(?:: [^'\"{}\[\]()]*)?$", comment)[1]
        if not comment or (comment[0].isalpha() and literal not in ("True", "False", "None")):
            continue
        found.append(Shown(ast.unparse(node.value), ast.literal_eval(literal)))
    return found
