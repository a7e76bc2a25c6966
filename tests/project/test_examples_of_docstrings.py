"""Every public name has an example, which runs, and gives what its comments show."""

import ast
import functools
import inspect
import subprocess
import sys

import matplotlib
import numpy as np
import pytest

from support.documentation import DOCS, ROOT, blocks, callables, example, shown_values

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
    "diagnostics.pareto_smooth",
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
# Examples that take a third of a second are thorough.
THOROUGH = {
    "ScoreEstimator",
    "diagnostics.Discrepancy",
    "diagnostics.SteinTest",
    "diagnostics.mmd_squared",
    "diagnostics.sliced_wasserstein",
    "diagnostics.spread_ratios",
    "estimators.AtSamples",
    "estimators.AutoBandwidth",
    "estimators.KernelDensity",
    "estimators.KernelDensityInfo",
    "estimators.KernelDensityScore",
    "estimators.Landmarks",
    "estimators.Median",
    "estimators.RandomFeatures",
    "estimators.Score",
    "estimators.Subset",
    "estimators.kef",
    "estimators.kef_cg",
    "estimators.landweber",
    "estimators.nkef",
    "estimators.nu_method",
    "estimators.spectral_cutoff",
    "estimators.ssge",
    "estimators.stein",
    "functions.Measurement",
    "functions.measure",
    "kernels.Diagonal",
    "pytree",
    "regularizers.LandweberIteration",
    "regularizers.NuMethod",
    "regularizers.Regularizer",
    "regularizers.SpectralCutoff",
    "regularizers.Tikhonov",
    "regularizers.TruncatedTikhonov",
    "sliced.NeuralInfo",
    "sliced.NeuralScore",
    "sliced.SlicedState",
    "sliced.sliced_loss",
    "solvers.ConjugateGradient",
    "solvers.Krylov",
    "solvers.Recursion",
    "solvers.Solution",
    "solvers.Solver",
}


def names_in(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def is_slow(name: str) -> bool:
    return name in LONG or bool(names_in(example(CALLABLES[name])) & FITTED)


FAST = [
    pytest.param(name, marks=pytest.mark.thorough) if name in THOROUGH else name
    for name in CALLABLES
    if not is_slow(name)
]
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
        assert is_about(CALLABLES[name], code, names)
        for expression, value in shown_values(code):
            assert_is_shown(eval(expression, names), value, f"{name}: {expression}")
    finally:
        plt.close("all")


def is_about(thing: object, code: str, names: dict[str, object]) -> bool:
    """True if code uses the thing, or reads a field of an instance of it."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and names.get(node.id) is thing:
            return True
        if isinstance(node, ast.Attribute) and inspect.isclass(thing):
            owner = ast.unparse(node.value)
            # A chain of names: a call would be done a second time.
            if owner.replace(".", "").isidentifier() and owner.partition(".")[0] in names:
                if isinstance(eval(owner, names), thing):
                    return True
    return False


def assert_is_shown(found, shown, where):
    """A tuple shows the shape of an array, a number what is within 5 % of it."""
    if isinstance(shown, tuple) and hasattr(found, "shape"):
        assert found.shape == shown, where
    elif isinstance(shown, float):
        assert np.shape(found) == (), where
        assert float(found) == pytest.approx(shown, rel=0.05), where
    else:
        assert found == shown, where


def test_values_are_read():
    code = "a = f(1)  # 2\na[0]  # (5, 2): words\nb  # words\nc  # 'x'\nd == 1  # True: words\ne\n"
    assert shown_values(code) == [("a[0]", (5, 2)), ("c", "x"), ("d == 1", True)]
    with pytest.raises(SyntaxError):
        shown_values("a  # (5, 2: words\n")
    assert_is_shown(np.zeros((5, 2)), (5, 2), "")
    for found, shown in ((np.zeros((2, 5)), (5, 2)), (1.1, 1.0), (np.zeros(1), 0.0), ("b", "a")):
        with pytest.raises(AssertionError):
            assert_is_shown(found, shown, "")
    assert is_about(dict, "a.b.keys", {"a": type("A", (), {"b": {}})})
    assert not is_about(dict, "a.keys", {"a": []})


def test_examples_are_formatted(tmp_path):
    """Ruff accepts them in the width that a docstring leaves, and they import what they use."""
    for name, thing in CALLABLES.items():
        (tmp_path / f"{name}.py").write_text(example(thing))
    for command in (["format", "--check", "--diff"], ["check", "--select=E,F401,F841,I,UP"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "--line-length=92"]
            + [f"--config={ROOT / 'pyproject.toml'}", tmp_path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
