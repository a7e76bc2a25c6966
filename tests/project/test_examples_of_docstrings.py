"""Every public name has an example, which runs, and gives what its comments show."""

import ast
import functools
import os
import time

import matplotlib
import numpy as np
import pytest
from support.documentation import DOCS, blocks, callables, example, shown_values

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

CALLABLES = callables()
SLOW: set[str] = set()
HEADING = "Examples on these pages start from"


def preamble() -> str:
    """The code on the first page of the reference that all examples start from."""
    page = (DOCS / "api.md").read_text()
    assert page.count(HEADING) == 1
    return blocks(page.partition(HEADING)[2])[0].code


@functools.cache
def start() -> dict[str, object]:
    """The names that the preamble defines, which takes a fit."""
    return run(preamble(), "api.md", {"__name__": "examples"})


def run(code: str, name: str, names: dict[str, object]) -> dict[str, object]:
    exec(compile(code, name, "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("name", CALLABLES)
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    t0 = time.process_time()
    names = dict(start())
    t1 = time.process_time()
    code = example(CALLABLES[name])
    assert code
    try:
        run(code, name, names)
        for expression, value in shown_values(code):
            assert_is_shown(eval(expression, names), value, f"{name}: {expression}")
    finally:
        plt.close("all")
        with open("/tmp/cpu.txt", "a") as f:
            print(f"{time.process_time() - t1:7.2f} {t1 - t0:7.2f}", name, file=f)


def assert_is_shown(found, shown, where):
    """A tuple shows the shape of an array, a number what is within 5 % of it."""
    if isinstance(shown, tuple) and hasattr(found, "shape"):
        assert found.shape == shown, where
    elif isinstance(shown, float):
        assert np.shape(found) == (), where
        assert float(found) == pytest.approx(shown, rel=0.05), where
    else:
        assert found == shown, where
