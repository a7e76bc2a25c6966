"""The experiments of the paper run from end to end on small sizes, and compute what they say."""

import csv
import importlib

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest

from examples.paper import conditioning, convergence, grid
from numpyro_kscore.regularizers import NuMethod
from support.compiling import quick_jit

mpl.use("Agg")


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grid", "spiral", "conditioning", "convergence"])
def test_example_runs_and_resumes(name, tmp_path, monkeypatch, capsys):
    module = importlib.import_module(f"examples.paper.{name}")
    table, figure = tmp_path / "table.csv", tmp_path / "figure.png"
    arguments = ["--quick", "--csv", str(table), "--figure", str(figure)]
    module.main(arguments)
    printed = capsys.readouterr().out
    rows = read(table)
    assert len(rows) >= 4
    assert figure.stat().st_size > 10_000
    assert not jax.config.jax_enable_x64  # double precision ends with the run

    # A second run computes nothing, says the same, and leaves the file as it is.
    def fail(**cell):
        raise AssertionError(f"computed again: {cell}")

    monkeypatch.setattr(module, "compute", fail)
    module.main(arguments[:3])
    assert capsys.readouterr().out == printed
    assert read(table) == rows


@pytest.mark.parametrize("num_steps", [1, 20, 100])
def test_traced_step_count_is_the_nu_method(num_steps):
    """g by its polynomials: the recursion of ZSZ C.4 at each eigenvalue, in float64."""
    sigma = np.array([0.0, 1e-6, 1e-4, 1e-2, 0.3, 1.0])
    g, before = np.zeros_like(sigma), np.zeros_like(sigma)
    for t in range(1, num_steps + 1):
        u = (t - 1) * (2 * t - 3) * (2 * t + 1) / ((t + 1) * (2 * t + 3) * (2 * t - 1))
        w = 4 * (2 * t + 1) * t / ((t + 1) * (2 * t + 3))
        g, before = g + u * (g - before) + w * (1 - sigma * g), g
    traced = jax.jit(lambda t: grid.NuSteps(t).evaluate(jnp.asarray(sigma, jnp.float32)))(num_steps)
    np.testing.assert_allclose(traced.g, g, rtol=2e-5)
    np.testing.assert_allclose(traced.g0, g[0], rtol=2e-5)
    np.testing.assert_allclose(traced.r[3:], (g - g[0])[3:] / sigma[3:], rtol=1e-4)
    plain = NuMethod(num_steps).evaluate(jnp.asarray(sigma, jnp.float32))
    np.testing.assert_allclose(traced.r, plain.r, rtol=2e-5)


def test_grid_score_is_that_of_the_mixture():
    rng = np.random.default_rng(0)
    vertices = rng.integers(0, 2, (3, 3)).astype(np.float32)
    x = rng.normal(size=3).astype(np.float32)
    density = np.exp(-0.5 * np.sum((x - vertices) ** 2, axis=1).astype(np.float64))
    expected = density @ (vertices - x) / density.sum()
    found = quick_jit(jax.grad(grid.log_density, 1))(vertices, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_convergence_problem_solves_the_integral_equation(x64):
    """L ψ = σ ψ by another quadrature, and L^r f has the coefficients that it claims."""
    problem = convergence.make_problem(0.5)
    nodes = np.linspace(-7, 7, 4001)
    weights = np.exp(-0.5 * nodes**2)
    weights = weights / weights.sum()
    x = np.array([-1.5, 0.2, 1.0])
    s = (x[:, None] - nodes) / convergence.BANDWIDTH
    # -φ'' of the Matérn profile (1 + z + z²/3) exp(-z), z = sqrt(5) |s|, scaled to SIZE at 0.
    z = np.sqrt(5) * np.abs(s)
    kernel = convergence.SIZE * (1 + z - z**2) * np.exp(-z)
    for k in (0, 3, 6):
        function = np.interp(np.r_[x, nodes], problem.nodes[:, 0], problem.functions[:, k])
        image = kernel @ (weights * function[len(x) :])
        np.testing.assert_allclose(image, problem.sigma[k] * function[: len(x)], atol=2e-6)
    values = problem.functions @ problem.coefficients
    np.testing.assert_allclose(problem.target(problem.nodes)[:, 0], values, rtol=1e-6, atol=1e-6)


def test_saturation_shows_in_the_exponents(x64):
    """Theorem 4.1: with r = 3/2 a filter of qualification 1 stops at λ, others reach λ²."""
    x = np.log(convergence.BIAS_LAMBDAS)
    found = {
        name: convergence.slope(x, np.log(convergence.bias(name, 1.5)[:, 0]))[0]
        for name in ("Tikhonov", "spectral cut-off")
    }
    assert abs(found["Tikhonov"] - 1.0) < 0.05
    assert abs(found["spectral cut-off"] - 2.0) < 0.15


@pytest.mark.thorough
def test_conditioning_of_a_small_problem(x64):
    """Steps and eigenvalues, against a dense matrix made by automatic differentiation."""
    row = conditioning.compute("normal", 12, 2, 1e-3, 1e-4, 1, 0)
    key = jax.random.split(jax.random.fold_in(jax.random.key(0), 2), 1)[0]
    x = np.asarray(conditioning.make_samples("normal", key, 12, 2))
    distances = np.sqrt(((x[:, None] - x) ** 2).sum(-1))
    h = np.median(distances[np.triu_indices(12, 1)])
    phi = lambda r: 1 / jnp.sqrt(1 + r @ r / h**2)  # noqa: E731
    blocks = quick_jit(jax.vmap(jax.vmap(jax.hessian(phi))))(x[:, None] - x)
    matrix = -np.asarray(blocks).transpose(0, 2, 1, 3).reshape(24, 24) / 12
    sigma = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(row["largest"], sigma[-1], rtol=1e-9)
    np.testing.assert_allclose(row["smallest"], sigma[0], rtol=1e-6)
    np.testing.assert_allclose(row["largest_share"], sigma[-1] / sigma.sum(), rtol=1e-9)
