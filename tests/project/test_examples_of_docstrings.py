"""Every public name has an example, which runs, and gives what its comments show."""

import ast
import functools

import matplotlib
import numpy as np
import pytest

from support.documentation import DOCS, blocks, callables, example, shown_values

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

CALLABLES = callables()
HEADING = "Examples on these pages start from"
# What examples start from that takes a fit, and examples that take more than a second of a core.
FITTED = {"guide", "svi", "result", "draws"}
LONG = {
    "KernelExponentialFamily",
    "Score",
    "diagnostics.importance_resample",
    "estimators.InformationEstimate",
    "estimators.Normalization",
    "estimators.StreamState",
    "estimators.entropy",
    "estimators.kl_divergence",
    "estimators.truncated_tikhonov",
    "functions.LearnedPrior",
    "functions.LearnedPriorInfo",
    "functions.learn_prior",
    "functions.sampled_prior",
}


def names_in(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def is_slow(name: str) -> bool:
    return name in LONG or bool(names_in(example(CALLABLES[name])) & FITTED)


FAST = [name for name in CALLABLES if not is_slow(name)]
SLOW = [name for name in CALLABLES if is_slow(name)]


@functools.cache
def start(fitted: bool) -> dict[str, object]:
    """The names that examples start from, by the first page of the reference."""
    page = (DOCS / "api.md").read_text()
    assert page.count(HEADING) == 1
    code = blocks(page.partition(HEADING)[2])[0].code
    before, fit, after = code.partition("\nguide = ")
    assert fit
    return run(code if fitted else before, "api.md", {"__name__": "examples"})


def run(code: str, name: str, names: dict[str, object]) -> dict[str, object]:
    exec(compile(code, name, "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_name_has_an_example(name):
    code = example(CALLABLES[name])
    assert code
    shown_values(code)


@pytest.mark.parametrize("name", FAST)
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(name, dict(start(fitted=False)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_an_example_that_takes_long_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(name, dict(start(fitted=True)))


def check(name: str, names: dict[str, object]) -> None:
    code = example(CALLABLES[name])
    try:
        run(code, name, names)
        for expression, value in shown_values(code):
            assert_is_shown(eval(expression, names), value, f"{name}: {expression}")
    finally:
        plt.close("all")


def assert_is_shown(found, shown, where):
    """A tuple shows the shape of an array, a number what is within 5 % of it."""
    if isinstance(shown, tuple) and hasattr(found, "shape"):
        assert found.shape == shown, where
    elif isinstance(shown, float):
        assert np.shape(found) == (), where
        assert float(found) == pytest.approx(shown, rel=0.05), where
    else:
        assert found == shown, where
