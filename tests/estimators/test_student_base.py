"""The Student t base: the shrunk Gaussian without heavy tails, a t distribution with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_kscore import KernelExponentialFamily, ScoreEstimator
from numpyro_kscore.estimators._base.base_scores import Base, EllipticalBase
from numpyro_kscore.estimators._base.fitted_base import make_base
from numpyro_kscore.estimators._base.gaussian import fit_gaussian
from numpyro_kscore.estimators._base.standardization import Coordinates
from numpyro_kscore.estimators._base.student import INVERSE_DEGREES, fit_student
from numpyro_kscore.regularizers import NuMethod
from support import oracle
from support.compiling import quick_jit

MIXING = np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.5, 0.4]])


def student_samples(seed, n, d, degrees=4.0):
    """Draws of a t distribution, correlated and off the origin where d = 3."""
    rng = np.random.default_rng(seed)
    draws = rng.normal(size=(n, d)) / np.sqrt(rng.chisquare(degrees, (n, 1)) / degrees)
    return draws @ MIXING.T + np.array([5.0, -2.0, 0.5]) if d == 3 else draws


N = 60
SAMPLES = student_samples(3, N, 3)


# -------------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize(
    ("n", "d"), [(64, 1), (5, 8), *(pytest.param(64, d, marks=pytest.mark.slow) for d in (2, 8))]
)
@pytest.mark.thorough
def test_gaussian_samples_have_the_gaussian_base_to_the_last_bit(n, d):
    """Off the origin; one in a hundred sets would be taken for draws of a t distribution."""
    rng = np.random.default_rng(1)
    for _ in range(3):
        x = jnp.asarray(100.0 + rng.normal(size=(n, d)) * np.linspace(1.0, 3.0, d), jnp.float32)
        # By JAX's own options: those of quick_jit let XLA round differently in every program.
        student, gaussian = (jax.jit(f.__wrapped__)(x) for f in (fit_student, fit_gaussian))
        assert float(student.inverse_degrees) == 0.0
        pairs = ((fit.coordinates, fit.held_out) for fit in (student, gaussian))
        for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_degrees_of_freedom_are_found():
    """1/ν of 24 sets of draws of t(4): their mean is off by no more than its own error.

    Three standard errors of that mean, from the spread of the 24, and half of the step between
    the values that are tried, .05.
    """
    sets = jnp.asarray([student_samples(seed, 400, 2) for seed in range(24)], jnp.float32)
    found = quick_jit(jax.vmap(lambda x: fit_student(x).inverse_degrees))(sets)
    assert abs(np.mean(found) - 0.25) < 3 * np.std(found) / 24**0.5 + 0.025


@functools.cache
def whole_and_left_out():
    """The base of samples; for each of them its score by the base of the others, and its 1/ν."""

    @quick_jit
    def evaluate(x):
        def others(i):
            rest = jnp.delete(x, i, axis=0, assume_unique_indices=True)
            base = make_base("student", rest, None)
            return base.score(x[i][None])[0], base.inverse_degrees

        return make_base("student", x, None), *jax.lax.map(others, jnp.arange(N))

    return jax.device_get(evaluate(jnp.asarray(SAMPLES)))


@pytest.mark.thorough
def test_a_left_out_student_by_leaving_out(x64):
    """Fits to the others with the same degrees of freedom agree with the factors to O(1/n)."""
    whole, expected, inverse_degrees = whole_and_left_out()
    assert whole.inverse_degrees > 0
    same = inverse_degrees == whole.inverse_degrees
    assert np.mean(same) > 0.9
    scores, expected = whole.at_samples[same], expected[same]
    factors = whole.held_out[same][:, None]
    assert oracle.relative_error(factors * scores, expected) < 0.5 / N
    assert oracle.relative_error(scores, expected) > 1 / N


# ------------------------------------------------------------------------------ the distribution


@pytest.mark.thorough
def test_the_base_is_a_multivariate_t_distribution(x64):
    base = whole_and_left_out()[0]
    root, degrees = np.asarray(base.whitening().root()), 1 / float(base.inverse_degrees)
    mean, scatter = np.asarray(base.whitening().mean), root @ root.T
    points = np.concatenate([SAMPLES[:5], mean[None], mean + 1e3 * np.eye(3)])

    @quick_jit
    def evaluate(base, x):
        gradient = jax.grad(lambda x: jnp.sum(base.log_density(x)))(x)
        # By automatic differentiation of the score.
        divergence = Base.divergence(base, x)
        return base.log_density(x), base.score(x), gradient, base.divergence(x), divergence

    density, score, gradient, divergence, by_jacobian = evaluate(base, points)
    exact = stats.multivariate_t(mean, scatter, degrees)
    np.testing.assert_allclose(density, exact.logpdf(points), rtol=1e-10)
    deviation = points - mean
    along = np.linalg.solve(scatter, deviation.T).T
    squared = np.sum(along * deviation, axis=1, keepdims=True)
    np.testing.assert_allclose(score, -(degrees + 3) / (degrees + squared) * along, rtol=1e-9)
    np.testing.assert_allclose(gradient, score, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(divergence, by_jacobian, rtol=1e-9)


def test_densities_of_all_degrees_integrate_to_one(x64):
    """The integrals are in one dimension; at one degree of freedom the tail is 1/x²."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, 4001)[1:-1]
    x = np.tan(angles)
    place = Coordinates(jnp.array([0.3]), jnp.array([1.7]), None, jnp.ones(()))

    @quick_jit
    @jax.vmap
    def log_density(inverse):
        return EllipticalBase(coordinates=place, inverse_degrees=inverse).log_density(x[:, None])

    densities = np.exp(log_density(jnp.array(INVERSE_DEGREES)))
    # The integrand over angles is smooth and of period π: the trapezoid rule converges fast, but
    # for the two ends, whose values are at most 1 and are left out.
    totals = np.sum(densities * (1 + x**2), axis=1) * (angles[1] - angles[0])
    np.testing.assert_allclose(totals, 1.0, atol=1e-3)
    np.testing.assert_allclose(densities[0], stats.norm(0.3, 1.7).pdf(x), rtol=1e-9)
    np.testing.assert_allclose(densities[-1], stats.cauchy(0.3, 1.7).pdf(x), rtol=1e-9)


def test_draws_have_the_distribution(x64):
    """Squared distances by a Kolmogorov-Smirnov test at the level .001, directions by moments."""
    base, count = whole_and_left_out()[0], 4000
    draw = quick_jit(lambda base, key: base.whitening().to_kernel(base.draw(key, count)))
    for inverse in (base.inverse_degrees, np.zeros(())):
        given = dataclasses.replace(base, inverse_degrees=inverse)
        z = np.asarray(draw(given, random.key(0)))
        squared = np.sum(z**2, axis=1)
        exact = stats.f(3, 1 / inverse, scale=3) if inverse > 0 else stats.chi2(3)
        assert stats.kstest(squared, exact.cdf).pvalue > 1e-3
        units = z / np.sqrt(squared)[:, None]
        # Entries of u and of u uᵀ have a variance of at most 1/3: four standard errors.
        assert np.all(np.abs(np.mean(units, axis=0)) < 4 / (3 * count) ** 0.5)
        assert np.all(np.abs(units.T @ units / count - np.eye(3) / 3) < 4 / (3 * count) ** 0.5)


@pytest.mark.thorough
def test_an_exponential_family_with_the_tails_of_a_student():
    """Far away the density falls as ``|x|^-(ν+1)``, and it integrates to one."""
    samples = np.float32(student_samples(6, 200, 1))
    estimator = ScoreEstimator(regularizer=NuMethod(20), base="student")
    angles = np.linspace(-np.pi / 2, np.pi / 2, 2001)[1:-1]
    far = [1e4, 1e6]

    @quick_jit
    def evaluate(samples, points):
        density = KernelExponentialFamily(samples, estimator).normalize(random.key(0))
        base = density.score.base
        # Squares of the second overflow.
        beyond = base.score(jnp.array([[1e18], [1e25]]))
        return density.log_prob(points), density.normalization, base.inverse_degrees, beyond

    points = np.float32(np.concatenate([np.tan(angles), far])[:, None])
    values, constant, inverse_degrees, beyond = jax.device_get(evaluate(samples, points))
    assert inverse_degrees > 0
    assert np.all(np.abs(beyond) < 1e-6)
    slope = (values[-1] - values[-2]) / np.log(far[1] / far[0])
    assert slope == pytest.approx(-1 - 1 / inverse_degrees, rel=1e-3)
    constant.raise_if_failed()
    # Four standard errors of the constant, and the error of the rule.
    inner = np.exp(values[:-2].astype(float))
    total = np.sum(inner * (1 + np.tan(angles) ** 2)) * (angles[1] - angles[0])
    assert abs(np.log(total)) < 4 * constant.standard_error + 1e-3
