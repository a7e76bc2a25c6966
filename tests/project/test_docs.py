"""The documentation runs as it is written, names what there is, and quotes what is said."""

import ast
import contextlib
import csv
import dataclasses
import importlib
import inspect
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

import matplotlib
import numpy as np
import pytest

from support.documentation import DOCS, PUBLIC, ROOT, Block, blocks, public_names

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# What the reference documents although nobody imports it: an entry of FitInfo.trace, and what
# initial_gaussian returns.
RECEIVED = {
    "numpyro_kscore._fit.portable.PortableGuide",
    "numpyro_kscore._fit.progress.Look",
    "numpyro_kscore._starts.initial_gaussian.InitialGaussian",
}
# What pages import although it may change: the count of operations on the page about devices.
INTERNAL = {"numpyro_kscore.kernels._gram"}


PAGES = {path.stem: path.read_text() for path in sorted(DOCS.glob("*.md"))}
RUN = [name for name, page in PAGES.items() if blocks(page)]
PROSE = {
    **PAGES,
    **{name: (ROOT / f"{name}.md").read_text() for name in ("README", "CONTRIBUTING", "CHANGELOG")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_code_of_a_page(name, tmp_path, monkeypatch):
    """All blocks of a page in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    try:
        for block in blocks(PAGES[name]):
            doubt = pytest.warns(UserWarning, match="not converged")
            with doubt if block.warns else contextlib.nullcontext():
                exec(compile(block.code, f"{name}.md", "exec"), names)
            # A fit on a page is one that works.
            if "result" in names:
                assert np.isfinite(names["result"].losses[-1])
    finally:
        plt.close("all")


def test_the_readme_shows_what_the_start_page_shows():
    first, second = blocks(PROSE["README"])
    assert [first] == blocks(PAGES["index"])
    assert {module for module, _ in imports(first.code + second.code)} == {"numpyro_kscore"}


@pytest.mark.slow
def test_the_readmes_second_example():
    names = {}
    exec(compile(blocks(PROSE["README"])[1].code, "README.md", "exec"), names)
    assert np.all(np.isfinite(names["score"].at_samples))


def test_the_readmes_table_is_that_of_the_benchmark():
    """Every figure of it, from the rows that are kept in benchmarks/results."""
    with (ROOT / "benchmarks" / "results" / "posterior_accuracy.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["seed"] == "0"]
    exact = [row for row in rows if row["method"] != "reference again"]
    best: dict[str, float] = {}
    for row in exact:
        best[row["target"]] = min(best.get(row["target"], np.inf), float(row["distance"]))
    table = re.findall(
        r"^\| (\w+) \| (\d+)(?: of (\d+))? \| (\d+) \| ([\d.]+) \| (\d+) s \| (?:yes|no) \|$",
        (ROOT / "README.md").read_text(),
        flags=re.MULTILINE,
    )
    assert {line[0] for line in table} == {row["method"] for row in exact}
    for method, right, of, near, median, seconds in table:
        own = [row for row in exact if row["method"] == method]
        assert len(own) == int(of or 23)
        distances = [float(row["distance"]) for row in own]
        is_right = [
            float(row["mean_error"]) < 0.15
            and 0.9 <= float(row["sd_low"])
            and float(row["sd_high"]) <= 1.1
            for row in own
        ]
        assert sum(is_right) == int(right), method
        is_near = [float(row["distance"]) <= 1.1 * best[row["target"]] for row in own]
        assert sum(is_near) == int(near), method
        digits = len(median.partition(".")[2])
        assert f"{statistics.median(distances):.{digits}f}" == median, method
        assert f"{sum(float(row['cpu_seconds']) for row in own):.0f}" == seconds, method


def test_blocks_are_read():
    page = '```{code-cell} python\n:tags: [warns]\n\na = 1\n```\n\n```python\nb = "```"\n```\n'
    assert blocks(page) == [Block("a = 1\n", True), Block('b = "```"\n', False)]
    assert {"tour", "guides", "plates", "prior", "diagnostics", "which"} <= set(RUN)
    fences = sum(page.count("\n```{code-cell}") for page in PAGES.values())
    cells = [block for page in PAGES.values() for block in blocks(page)]
    # A cell that is spelled in another way would be run by the build and not here.
    assert fences + sum(page.count("\n```python\n") for page in PAGES.values()) == len(cells)


def test_cells_are_formatted(tmp_path):
    """Ruff formats blocks of Markdown, but does not know cells."""
    for name, page in PAGES.items():
        code = [block.code for block in blocks(page)] if "code-cell" in page else []
        for k, cell in enumerate(code):
            (tmp_path / f"{name}_{k}.py").write_text(cell)
    command = [sys.executable, "-m", "ruff", "format", "--check", "--diff", "--no-cache"]
    config = f"--config={ROOT / 'pyproject.toml'}"
    done = subprocess.run([*command, config, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def menus() -> list[tuple[str, list[str]]]:
    """Captions of the menus, and the pages in them."""
    found = [
        menu
        for page in PAGES.values()
        for menu in re.findall(r"```\{toctree\}\n(.*?)```", page, flags=re.DOTALL)
    ]
    caption = re.compile(r"^:caption: (.*)$", flags=re.MULTILINE)
    return [
        (
            (caption.search(menu) or ["", ""])[1],
            [line for line in menu.split("\n") if re.fullmatch(r"\w+", line)],
        )
        for menu in found
    ]


def test_exceptions_to_the_check_of_links_exist():
    """A private class that moves takes its exception in the settings along."""
    settings = (DOCS / "conf.py").read_text()
    names = re.findall(r'"(numpyro_kscore[\w.]+)\.(\w+)"\)', settings)
    assert names
    for module, name in names:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_every_page_is_in_one_menu():
    listed = [page for _, pages in menus() for page in pages]
    assert sorted(listed) == sorted(set(PAGES) - {"index"})


def count_numbers(page: str) -> int:
    """Numbers that a reader of a page meets, formulas, code and addresses apart."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`|\$\$[^$]*\$\$|\$[^$]*\$|\]\([^)]*\)", " ", text)
    return len(re.findall(r"(?<![\w.])\d*\.?\d+", text))


def test_numbers_are_in_reports():
    """Others tell a story, and link to the figures behind it."""
    (reports,) = (pages for caption, pages in menus() if caption == "Reports")
    counts = {name: count_numbers(PROSE[name]) for name in [*PAGES, "README"]}
    assert {name for name, count in counts.items() if count > 150} <= set(reports)
    assert counts["accuracy"] > 150
    assert count_numbers("3 of `4` at $5$, .6 [7](8) $$\n0\n$$\n```\n9\n```\n") == 3


def test_the_table_of_folders_says_what_they_may_import():
    """And all that a folder imports stands above it in the table."""
    page = PAGES["architecture"].partition("\n## ")[0]
    table = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*)\|$", page, flags=re.MULTILINE)
    package = ROOT / "numpyro_kscore"
    assert {folder for folder, _ in table} == {p.parent.name for p in package.glob("*/__init__.py")}
    above: set[str] = set()
    for folder, cell in table:
        source = "".join(path.read_text() for path in (package / folder).rglob("*.py"))
        found = set(re.findall(r"^from numpyro_kscore\.(\w+)", source, flags=re.MULTILINE))
        assert found - {folder} <= set(re.findall(r"`(\w+)`", cell)) <= above, folder
        above.add(folder)


@pytest.mark.parametrize("name", PROSE)
def test_scripts_that_a_page_names_exist(name):
    page = PROSE[name]
    found = re.findall(r"\b(?:examples|benchmarks|tests|docs)/[\w/]+\.\w+", page)
    modules = re.findall(r"python -m ((?:examples|benchmarks)[\w.]*\w)", page)
    found += [f"{module.replace('.', '/')}.py" for module in modules]
    assert not [path for path in found if not (ROOT / path).exists()]


# --- Reference -------------------------------------------------------------------------------

REFERENCE = {name: page for name, page in PAGES.items() if re.match(r"api(_|$)", name)}


def documented(page: str) -> list[str]:
    """Full names of what the directives of a page document."""
    found, current = [], ""
    for directive, target in re.findall(r"^\.\. (\w+):: (\S+)", page, flags=re.MULTILINE):
        if directive == "currentmodule":
            current = target
        elif directive in ("autoclass", "autofunction"):
            found.append(target if "." in target else f"{current}.{target}")
    return found


def find(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


DOCUMENTED = [name for page in REFERENCE.values() for name in documented(page)]


def described(doc: str) -> set[str]:
    """Names under "Args:" and "Attributes:"."""
    found = set()
    for section in ("Args", "Attributes"):
        body = re.search(rf"^{section}:\n((?:    .*\n|\n)+)", doc + "\n", flags=re.MULTILINE)
        if body:
            found |= set(re.findall(r"^    \*{0,2}(\w+):", body[1], flags=re.MULTILINE))
    return found


def parameters(thing: object) -> set[str]:
    """Names of a callable's arguments, or of a result's fields."""
    if inspect.isclass(thing) and hasattr(thing, "_fields"):
        return set(thing._fields)
    if dataclasses.is_dataclass(thing):
        return {f.name for f in dataclasses.fields(thing) if not f.name.startswith("_")}
    function = thing.__init__ if inspect.isclass(thing) else thing
    # validate_args is NumPyro's, and the same for every distribution.
    names = set(inspect.signature(function).parameters) - {"self", "validate_args"}
    return names - {"args", "kwargs"} if inspect.isclass(thing) else names


@pytest.mark.parametrize(("module", "name"), list(public_names()))
def test_reference_is_complete(module, name):
    thing = getattr(importlib.import_module(module), name)
    # A name of a namespace may be one of numpyro_kscore too, and is documented as that.
    times = sum(find(other) is thing for other in DOCUMENTED)
    assert times == 1, f"document it once in docs/api*.md; it is there {times} times"
    doc = inspect.getdoc(thing)
    assert doc
    # A subclass need not say again what its base class says.
    family = thing.__mro__ if inspect.isclass(thing) else [thing]
    said = set().union(*(described(inspect.getdoc(member) or "") for member in family))
    assert parameters(thing) - said == set()
    if inspect.isfunction(thing):
        assert "\nReturns:\n" in doc


def test_reference_has_public_names_only():
    public = {".".join(pair) for pair in public_names()}
    assert set(DOCUMENTED) - public == RECEIVED
    assert len(REFERENCE) == len(PUBLIC)
    for name, page in REFERENCE.items():
        module = ".".join(["numpyro_kscore", *name.split("_")[1:]])
        assert f".. automodule:: {module}\n" in page


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Names that code imports from modules of the package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("numpyro_kscore"):
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("name", [*RUN, "README"])
def test_pages_import_public_names(name):
    for module, imported in imports("".join(block.code for block in blocks(PROSE[name]))):
        assert module in PUBLIC or module in INTERNAL
        assert hasattr(importlib.import_module(module), imported)
        assert not imported.startswith("_")


# --- Messages --------------------------------------------------------------------------------

HOLE = "\N{OBJECT REPLACEMENT CHARACTER}"


def templates() -> list[str]:
    """All strings of the package, with a hole where something is put in."""

    def text(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return re.sub(r"\{\w+\}", HOLE, str(node.value))
        if isinstance(node, ast.JoinedStr):
            return "".join(text(value) for value in node.values)
        return HOLE

    return [
        text(node)
        for path in (ROOT / "numpyro_kscore").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]


def is_said(quote: str, said: list[str]) -> bool:
    """True if a message holds the quote: "…" is anything, and its first word may be put in."""
    forms = {quote, re.sub(r"^[\w()]+(?=: )", HOLE, quote)}
    patterns = [".*".join(map(re.escape, form.split("…"))) for form in forms]
    return any(re.search(pattern, text) for pattern in patterns for text in said)


def test_quoted_messages_are_those_of_the_package():
    said = templates()
    quotes = [
        quote
        for bold in re.findall(r"^\*\*`.*", PAGES["troubleshooting"], flags=re.MULTILINE)
        for quote in re.findall(r"\*\*`([^`]*)`\*\*", bold)
    ]
    assert len(quotes) > 60
    missing = [quote for quote in quotes if not is_said(quote, said)]
    assert not missing
    assert not is_said("samples: expected a tensor", said)
    assert not is_said("guide: expected … a tensor", said)


# --- Files for a code host -------------------------------------------------------------------


HOSTING = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]  # no .github in an sdist


@pytest.mark.parametrize("path", HOSTING, ids=lambda path: path.name)
def test_files_for_a_code_host_parse(path):
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    if path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config":
        assert content["name"]
        assert content["description"]
        names = [item["id"] for item in content["body"] if item["type"] != "markdown"]
        assert len(set(names)) == len(names)
        assert all(item["attributes"] for item in content["body"])
    if path.suffix == ".cff":
        assert {"cff-version", "message", "title", "authors"} <= set(content)
        assert content["references"][0]["title"] in (ROOT / "README.md").read_text()


def test_the_workflow_runs_what_is_there():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.exists():
        pytest.skip("an sdist has no workflows")
    text = workflow.read_text()
    commands = re.findall(r"^ +- run: (.*)$", text, flags=re.MULTILINE)
    assert commands == ["bash .ci/run", "make docs"]
    assert (ROOT / ".ci" / "run").exists()
    assert "\ndocs:" in (ROOT / "Makefile").read_text()
    assert text.count("fetch-depth: 0") == text.count("actions/checkout")
