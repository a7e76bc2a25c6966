"""Quasi-Newton paths against quadratics and functions with known minima."""

import numpy as np
import pytest

from numpyro_kscore._starts.bfgs import quasi_newton_paths


def quadratic(condition, dim=6, seed=0):
    """Energies of a Gaussian with a given condition number, its precision and mean."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    precision = basis * np.logspace(0, np.log10(condition), dim) @ basis.T
    mean = rng.normal(size=dim)

    def evaluate(points):
        moved = points - mean
        return 0.5 * np.sum(moved @ precision * moved, axis=1), moved @ precision

    return evaluate, precision, mean


@pytest.mark.parametrize("condition", [1.0, 1e8])
def test_paths_end_at_the_mode_of_a_gaussian(condition):
    evaluate, precision, mean = quadratic(condition)
    starts = np.random.default_rng(1).uniform(-2, 2, (3, 6))
    for path in quasi_newton_paths(evaluate, starts, 200):
        assert path.has_arrived
        last = path.iterates[-1]
        error = last.point - mean
        # It stops when a Newton step would gain less than 1e-6, in the metric it has.
        assert error @ precision @ error < 1e-5


def test_the_inverse_hessian_of_a_gaussian_is_its_covariance():
    evaluate, precision, _ = quadratic(100.0)
    (path,) = quasi_newton_paths(evaluate, np.full((1, 6), 5.0), 200)
    ratios = np.linalg.eigvals(path.iterates[-1].inverse_hessian @ precision).real
    # Directions that the path hardly moved in are known roughly; the identity is off by 100.
    assert np.all((ratios > 0.5) & (ratios < 2))


def test_widths_are_units():
    """A path with widths w is w times one in coordinates divided by them."""
    evaluate, _, _ = quadratic(100.0)
    widths = np.array([1e3, 1.0, 1e-2, 5.0, 1.0, 30.0])
    start = np.full(6, 0.7)

    def in_units(points):
        energies, gradients = evaluate(points * widths)
        return energies, gradients * widths

    (path,) = quasi_newton_paths(evaluate, start[None], 60, widths[None])
    (scaled,) = quasi_newton_paths(in_units, (start / widths)[None], 60)
    assert path.count == scaled.count > 5
    # Rounding grows along the path.
    for one, other in zip(path.iterates[:6], scaled.iterates[:6], strict=True):
        np.testing.assert_allclose(one.point, widths * other.point, rtol=1e-6)


def test_a_bent_valley():
    """Rosenbrock's function, whose minimum is at (1, 1)."""

    def evaluate(points):
        x, y = points.T
        gradient = [-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)]
        return 100 * (y - x**2) ** 2 + (1 - x) ** 2, np.stack(gradient, 1)

    paths = quasi_newton_paths(evaluate, np.array([[-1.2, 1.0], [2.0, -2.0]]), 200)
    for path in paths:
        np.testing.assert_allclose(path.iterates[-1].point, 1.0, atol=5e-3)


def test_energies_that_are_not_finite_are_stepped_back_from():
    """Minus the logarithm of x (1 - x), infinite outside of (0, 1)."""

    def evaluate(points):
        inside = np.all((points > 0) & (points < 1), axis=1, keepdims=True)
        x = np.where(inside, points, 0.5)
        energy = np.where(inside[:, 0], -np.sum(np.log(x * (1 - x)), axis=1), np.nan)
        return energy, np.where(inside, 1 / (1 - x) - 1 / x, np.nan)

    starts = np.array([[1e-3], [0.9999], [2.0]])
    first, second, outside = quasi_newton_paths(evaluate, starts, 100)
    for path in (first, second):
        assert path.has_arrived
        np.testing.assert_allclose(path.iterates[-1].point, 0.5, atol=1e-3)
    assert outside.is_done
    assert not outside.iterates


def test_a_density_without_bound_ends_with_the_budget():
    def evaluate(points):
        return np.sum(points, axis=1), np.ones_like(points)

    (path,) = quasi_newton_paths(evaluate, np.zeros((1, 3)), 30)
    assert not path.has_arrived
    assert path.iterates[-1].energy < -1e6
    assert np.all(np.isfinite(path.iterates[-1].inverse_hessian))


def test_memory_in_many_dimensions_is_bounded():
    evaluate, _, mean = quadratic(1e4, dim=400)
    (path,) = quasi_newton_paths(evaluate, np.zeros((1, 400)), 120)
    assert path.count > 70
    assert len(path.iterates) <= 62
    assert path.iterates[-1].energy < 0.05 * evaluate(np.zeros((1, 400)))[0][0]
    assert len(mean) == 400
