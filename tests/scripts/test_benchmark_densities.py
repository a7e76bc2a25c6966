"""The benchmarks of rates, and of entropies and divergences."""

import numpy as np
import pytest
from scipy import integrate, special, stats

from benchmarks.accuracy import information, rates


def test_slopes_are_those_of_power_laws():
    sizes = np.array([10, 100, 1000])
    noise = np.array([[1.0], [2.0], [4.0]])
    mean, error = rates.slope(sizes, noise * sizes**-0.4)
    assert mean == pytest.approx(-0.4)
    assert error == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_exact_errors_fall_as_the_theorem_says_for_many_samples(dim):
    sizes = np.array([10**12, 10**13, 10**14])
    for name in ("plain", "debiased, exact score"):
        # What is left is of relative order h², with h below 0.1; in floating point 1e-16/1e-9.
        assert rates.exact_slope(name, dim, sizes) == pytest.approx(
            rates.rate_of(name, dim), abs=0.01
        )


@pytest.mark.parametrize("name", rates.SCORE_TARGETS)
def test_scores_are_the_derivatives_of_the_densities_drawn_from(name):
    each = rates.SCORE_TARGETS[name](0.2)
    middle = slice(150_000, 250_000)
    density = np.gradient(each.cdf, each.grid)
    slope = np.gradient(np.log(density[middle]), each.grid[middle])
    # Second differences of sums at a spacing of 6e-5.
    np.testing.assert_allclose(slope[5:-5], each.score(each.grid[middle])[5:-5], atol=1e-3)


@pytest.mark.thorough
def test_errors_of_scores_fall():
    errors = rates.score_errors("ripples", 1, np.array([200, 3200]), 2)
    # Sixteen times the samples: 0.33 by the theorem, with a spread over seeds of about a half.
    assert 0.1 < np.mean(errors[:, 1]) / np.mean(errors[:, 0]) < 0.8


def test_neighbors_are_right_for_normal_samples():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4000, 2)), 2**0.5 * rng.standard_normal((4000, 2))
    exact = information.truths("normal", 2)
    assert exact[0] == pytest.approx(np.log(2 * np.pi * np.e))
    # By a million draws: the divergence of each coordinate is (log 2 - 1/2)/2.
    assert exact[1] == pytest.approx(np.log(2) - 0.5, abs=0.005)
    # Spreads are about sqrt(1.4/4000) = .02.
    assert information.neighbor_entropy(x) == pytest.approx(exact[0], abs=0.08)
    assert information.neighbor_divergence(x, y) == pytest.approx(exact[1], abs=0.1)


def test_densities_of_the_targets_integrate_to_one():
    for name in ("normal", "mixture", "student"):
        density = information.TARGETS[name].log_density
        total = integrate.quad(
            lambda x, f=density: np.exp(f(np.array([[x]])))[0], -200, 200, limit=500
        )
        # Student t with three degrees of freedom has 1e-7 beyond 200.
        assert total[0] == pytest.approx(1.0, abs=1e-6)
    x = np.array([[0.5, 2.0]])
    # The banana's map keeps volumes.
    assert information.TARGETS["banana"].log_density(x)[0] == pytest.approx(
        stats.norm.logpdf(0.5) + stats.norm.logpdf(2.0 - 0.25 + 1.0)
    )
    entropy = information.truths("student", 1)[0]
    exact = 2 * (special.digamma(2.0) - special.digamma(1.5)) + np.log(
        3**0.5 * special.beta(1.5, 0.5)
    )
    assert entropy == pytest.approx(exact, abs=0.01)
