"""Sphinx configuration: MyST pages, some of them run; API reference from the docstrings."""

import hashlib
import os
import re
import urllib.request
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import numpyro_kscore

BUILD = Path(__file__).parent / "_build"

project = "numpyro_kscore"
author = "The numpyro_kscore developers"
copyright = author
version = release = numpyro_kscore.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",  # formulas without a network
]
exclude_patterns = ["_build"]

# --- Pages that are run ----------------------------------------------------------------------
# Those with a kernelspec in their header. A failing cell fails the build. What a page printed is
# kept until the page or the package changes: myst-nb looks at the page only, so the folder is
# named after the package's source.
_SOURCE = b"".join(
    path.read_bytes() for path in sorted(Path(numpyro_kscore.__file__).parent.rglob("*.py"))
)
nb_execution_mode = "cache"
nb_execution_cache_path = str(BUILD / "cells" / hashlib.sha256(_SOURCE).hexdigest()[:12])
nb_execution_raise_on_error = True
nb_execution_timeout = 900  # of a cell: a busy machine is no error
nb_execution_show_tb = True
# Kernels inherit these. What several pages need is compiled once; no page depends on what
# accelerator is at hand.
os.environ["JAX_PLATFORMS"] = "cpu"
# tqdm misses a widget that no page shows.
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(BUILD / "compilations")

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an "Attributes" section next to documented members, no duplicates
napoleon_use_rtype = False

html_theme = "furo"
html_title = "numpyro_kscore " + release.partition("+")[0]  # the commit would not fit a phone
html_static_path = ["_static"]
html_css_files = ["pages.css"]

# --- Links into other projects -------------------------------------------------------------
# The outcome of a `-W -n` build must not depend on the network. So inventories are fetched
# here, once, into the build folder; one that cannot be had is left out, and a link into
# another project that finds no target is plain text. Our own names are always checked.
_EXTERNAL = {
    "python": "https://docs.python.org/3/",
    "jax": "https://docs.jax.dev/en/latest/",
    "numpy": "https://numpy.org/doc/stable/",
    "numpyro": "https://num.pyro.ai/en/stable/",
}
_INVENTORIES = BUILD / "inventories"


def _inventory(name: str, url: str) -> str | None:
    """Path of the project's inventory, or None where there is none and none can be fetched."""
    path = _INVENTORIES / f"{name}.inv"
    if not path.exists():
        try:
            with urllib.request.urlopen(f"{url}objects.inv", timeout=5) as response:
                content = response.read()
        except OSError:
            return None
        if not content.startswith(b"# Sphinx inventory version 2"):
            return None  # a login or error page served as if it were the file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(path)


intersphinx_mapping = {
    name: (url, path) for name, url in _EXTERNAL.items() if (path := _inventory(name, url))
}
nitpick_ignore_regex = [
    (r"py:.*", rf"{re.escape(package)}(\..*)?")
    for package in (
        "arviz",
        "collections.abc",
        "flax",
        "jax",
        "jaxlib",
        "numpy",
        "numpyro",
        "optax",
        "os",
        "pathlib",
        "typing",
    )
]
# A type variable of a decorator's signature.
nitpick_ignore = [
    ("py:class", "numpyro_kscore._util.pytree.T"),
    # What jax.sharding exports is defined without a module of its own.
    ("py:class", "NamedSharding"),
    # Parts of other objects, which nobody makes by hand.
    ("py:class", "numpyro_kscore._model.package_guide.Split"),
    ("py:class", "numpyro_kscore._model.control_variate.ControlVariate"),
    ("py:class", "numpyro_kscore._util.batches.Batches"),
    ("py:class", "numpyro_kscore._starts.start.ExactDraws"),
    ("py:class", "numpyro_kscore.estimators._base.base_scores.Base"),
    ("py:class", "numpyro_kscore.estimators._base.standardization.Coordinates"),
    ("py:class", "numpyro_kscore.estimators._operators.features.FeatureExpansion"),
    ("py:class", "numpyro_kscore.estimators._operators.features.Features"),
    ("py:class", "numpyro_kscore.estimators._operators.features.FeatureMoments"),
    ("py:class", "numpyro_kscore.estimators._operators.features.Rows"),
    ("py:class", "numpyro_kscore.kernels._pairwise.Expansion"),
    ("py:class", "numpyro_kscore.kernels._smoothing.Centers"),
]


# --- Docstrings ------------------------------------------------------------------------------
def _escape_bars(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Let |x - y|² in a docstring be a norm: reStructuredText would see a substitution."""
    for i, line in enumerate(lines):
        lines[i] = re.sub(r"(`+[^`]*`+)|\|", lambda m: m[1] or r"\|", line)


def _find_public(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """Resolve a reference by its last name, where just one documented object has that name.

    Docstrings say :class:`CurlFree`, and annotations name the private module of a class; both are
    documented as numpyro_kscore.kernels.CurlFree.
    """
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not re.match(r"numpyro_kscore\.|[A-Z]\w*|\w+$", target):
        return None
    short = target.rpartition(".")[2] if target.startswith("numpyro_kscore.") else target
    python = env.domains.python_domain
    found = {
        name
        for name, entry in python.objects.items()
        if name.endswith(f".{short}") and entry.objtype != "module" and not entry.aliased
    }
    if len(found) != 1:
        return None
    name = found.pop()
    entry = python.objects[name]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def _gallery_last(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Notebooks that the gallery links to exist once their pages have been read."""
    docnames.sort(key=lambda name: (name == "gallery", name))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("env-before-read-docs", _gallery_last)
    app.connect("autodoc-process-docstring", _escape_bars)
    app.connect("missing-reference", _find_public)
