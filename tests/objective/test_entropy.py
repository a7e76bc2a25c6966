"""The entropy estimate behind the reported loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore import ScoreEstimator
from numpyro_kscore._objective.entropy import entropy
from numpyro_kscore.estimators._base.standardization import standardize_samples
from numpyro_kscore.kernels._pairwise import cancels, nearest_squared, squared_distances
from numpyro_kscore.regularizers import LandweberIteration, Tikhonov
from numpyro_kscore.solvers import Krylov
from support.compiling import quick_jit

REPETITIONS = 400


def neighbors(samples, standardize="full"):
    coordinates = standardize_samples(samples, standardize)
    z = coordinates.to_kernel(samples)
    return coordinates, nearest_squared(squared_distances(z, z, cancels(z)))


def estimate(samples, standardize="full"):
    coordinates, nearest = neighbors(samples, standardize)
    return entropy(nearest, coordinates, standardize, samples.shape[0])


# Operation by operation, compiling would take most of the time.
compiled = jax.jit(estimate, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def estimates(sets, standardize="full"):
    return jax.lax.map(lambda samples: estimate(samples, standardize), sets)


def gaussian_sets(n, factor, seed=0):
    """Sets of draws from N(0, F Fᵀ), and the exact entropy."""
    dim = len(factor)
    white = np.random.default_rng(seed + 1).standard_normal((REPETITIONS, n, dim))
    exact = 0.5 * dim * np.log(2 * np.pi * np.e) + np.linalg.slogdet(factor)[1]
    return jnp.asarray(white @ factor.T, jnp.float32), exact


def correlated_factor(dim):
    """Strong correlation, and scales over four orders of magnitude."""
    scales = np.logspace(-2, 2, dim)
    return np.diag(scales) @ np.linalg.cholesky(0.1 * np.eye(dim) + 0.9)


def stated_sd(n, dim):
    return np.sqrt((1.6 + dim / 2) / n)


@pytest.mark.parametrize(
    ("n", "dim"),
    [
        (128, 2),
        (64, 20),
        pytest.param(64, 2, marks=pytest.mark.slow),
        pytest.param(128, 20, marks=pytest.mark.slow),
    ],
)
def test_unbiased_for_correlated_gaussians(n, dim):
    sets, exact = gaussian_sets(n, correlated_factor(dim))
    values = np.asarray(estimates(sets))
    sd = stated_sd(n, dim)
    # The repetitions scatter, and so does the correction, which has 32 sets or more.
    assert abs(values.mean() - exact) < 4 * sd * np.sqrt(1 / REPETITIONS + 1 / 32)
    assert 0.8 < values.std() / sd < 1.25


@pytest.mark.parametrize("n", [32, pytest.param(128, marks=pytest.mark.slow)])
def test_unbiased_in_one_dimension(n):
    """Neighbors are close there, and the rows of a plate add up the error."""
    sets, exact = gaussian_sets(n, np.ones((1, 1)))
    values = np.asarray(estimates(sets))
    # The error of 400 repetitions and 1024 sets; rounding of the nearest distances made it .08 and
    # .2.
    assert abs(values.mean() - exact) < 3 * stated_sd(n, 1) * np.sqrt(1 / REPETITIONS + 1 / 1024)
    assert 0.8 < values.std() / stated_sd(n, 1) < 1.25


@pytest.mark.parametrize("standardize", ["diagonal", "none"])
def test_unbiased_for_independent_gaussians_in_other_coordinates(standardize):
    scale = 1.0 if standardize == "none" else 50.0
    sets, exact = gaussian_sets(64, scale * np.eye(3))
    values = np.asarray(estimates(sets, standardize))
    assert abs(values.mean() - exact) < 4 * stated_sd(64, 3) * np.sqrt(1 / REPETITIONS + 1 / 32)


def test_distributions_are_ordered_as_their_entropies():
    """The Gaussian has the largest entropy at a given variance, by known differences."""
    rng = np.random.default_rng(2)
    shape = (REPETITIONS, 128, 2)
    sets = {
        "gaussian": rng.standard_normal(shape),
        "uniform": rng.uniform(-np.sqrt(3), np.sqrt(3), shape),
        "exponential": rng.exponential(size=shape),
        "two lumps": rng.choice([-1.0, 1.0], shape) * np.sqrt(0.99) + 0.1 * rng.normal(size=shape),
    }
    means = {name: np.mean(estimates(jnp.asarray(x, jnp.float32))) for name, x in sets.items()}
    exact = {
        "gaussian": np.log(2 * np.pi * np.e),
        "uniform": 2 * np.log(np.sqrt(12)),
        "exponential": 2.0,
        "two lumps": 2 * (0.5 * np.log(2 * np.pi * np.e * 0.01) + np.log(2)),
    }
    assert sorted(means, key=means.get) == sorted(exact, key=exact.get)
    # Unbiased for Gaussians; the error from a boundary or lumps at 128 draws stays below 0.3.
    for name, value in means.items():
        assert abs(value - exact[name]) < 0.3, name


def test_units_shift_the_estimate_exactly():
    sets, _ = gaussian_sets(32, correlated_factor(3))
    samples = sets[0]
    plain = compiled(samples)
    for scale in (1e-6, 1e6):
        moved = compiled(scale * (samples + 3.0 * samples.std(0)))
        np.testing.assert_allclose(moved, plain + 3 * np.log(scale), rtol=1e-4, atol=2e-3)


def test_affine_maps_shift_the_estimate_by_their_determinant():
    sets, _ = gaussian_sets(32, np.eye(3))
    factor = np.array([[1.0, 0.9, 0.0], [0.0, 0.3, 0.2], [0.5, 0.0, 2.0]])
    mapped = compiled(sets[0] @ jnp.asarray(factor.T, jnp.float32))
    expected = compiled(sets[0]) + np.linalg.slogdet(factor)[1]
    np.testing.assert_allclose(mapped, expected, atol=1e-4)


def degenerate_sets():
    rng = np.random.default_rng(3)
    distinct = rng.standard_normal((16, 3))
    return {
        "copies": np.concatenate([distinct, distinct]),
        "few values": rng.integers(0, 2, (32, 3)).astype(float),
        "one coordinate constant": np.column_stack([rng.standard_normal((32, 2)), np.ones(32)]),
        "on a line": rng.standard_normal((32, 1)) * np.array([1.0, 2.0, 3.0]),
        "collapsed": np.full((32, 3), 0.7),
        "collapsed at the origin": np.zeros((32, 3)),
    }


@pytest.mark.parametrize("name", degenerate_sets())
@pytest.mark.parametrize("standardize", ["full", "diagonal", "none"])
def test_degenerate_samples_give_a_low_finite_value(name, standardize):
    samples = jnp.asarray(degenerate_sets()[name], jnp.float32)
    value = compiled(samples, standardize)
    assert np.isfinite(value)
    # Below a Gaussian of unit variance, which has 4.26.
    assert value < 4.26


def test_it_is_not_differentiated(x64):
    samples = jnp.asarray(np.random.default_rng(4).standard_normal((16, 2)))
    value, gradient = jax.jit(jax.value_and_grad(estimate))(samples)
    assert value.dtype == jnp.float64
    np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.thorough
def test_the_fit_hands_over_what_the_estimate_needs():
    samples = jnp.asarray(np.random.default_rng(0).normal(size=(32, 3)), jnp.float32)
    for standardize in ("full", "local"):
        estimator = ScoreEstimator(regularizer=Tikhonov(1e-2), standardize=standardize, base=None)
        at_samples = estimator.at_samples(samples)
        value = entropy(at_samples.nearest, at_samples.coordinates, standardize, samples.shape[0])
        np.testing.assert_allclose(value, compiled(samples, standardize), rtol=1e-4)


@pytest.mark.thorough
def test_correction_where_only_some_draws_are_looked_at():
    """Coordinates come from all draws, and neighbors from 1000 if all pairs are too many."""
    n, dim = 3000, 200
    regularizer = LandweberIteration(1)
    estimator = ScoreEstimator(
        regularizer=regularizer, solver=Krylov(1), bandwidth=1.0, standardize="full", base=None
    )
    samples = np.random.default_rng(2).standard_normal((n, dim), np.float32)
    at_samples = estimator.at_samples(samples)
    value = entropy(at_samples.nearest, at_samples.coordinates, "full", samples.shape[0])
    sd = stated_sd(at_samples.nearest.shape[0], dim)
    exact = 0.5 * dim * np.log(2 * np.pi * np.e)
    assert abs(value - exact) < 4 * sd * np.sqrt(1 + 1 / 10)  # 10 sets of so many draws


def test_one_correction_serves_traced_and_plain_calls():
    samples = np.random.default_rng(1).standard_normal((32, 3), np.float32)
    coordinates, nearest = quick_jit(neighbors)(samples)
    plain = entropy(nearest, coordinates, "full", len(samples))
    np.testing.assert_allclose(compiled(samples), plain, rtol=1e-4)
    mapped = quick_jit(jax.vmap(estimate))(np.stack([samples, 2 * samples]))
    np.testing.assert_allclose(mapped[1] - mapped[0], 3 * np.log(2), rtol=1e-4)
