"""Functions of the example that are draws of a Gaussian process, corrected by data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro import handlers
from scipy.stats import multivariate_normal, norm

from examples.functions import data, fit, gp, pathwise

RNG = np.random.default_rng(0)
X = RNG.normal(size=(15, 2)).astype(np.float32)
Y = np.sin(2 * X[:, 0]).astype(np.float32)
POINTS = RNG.normal(size=(5, 2))
FOUND = gp.Hyperparameters(
    jnp.asarray([0.2, -0.5]), jnp.asarray([[0.5, 1.0], [0.2, 0.3]]), jnp.asarray(-1.5)
)


def dense_covariance(points, others):
    """Squared exponential plus Matérn-3/2, from their formulas."""
    total = 0.0
    for part in range(2):
        scaled = np.exp(-np.asarray(FOUND.log_scales[part], float))
        difference = (points[:, None] - others[None]) * scaled
        r = np.sqrt(np.sum(difference**2, axis=2))
        shape = np.exp(-0.5 * r**2) if part == 0 else (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r)
        total = total + np.exp(2 * float(FOUND.log_amplitudes[part])) * shape
    return total


def dense_posterior():
    noise = float(FOUND.noise)
    joint = dense_covariance(X.astype(float), X.astype(float)) + noise**2 * np.eye(len(X))
    across = dense_covariance(POINTS, X.astype(float))
    mean = across @ np.linalg.solve(joint, Y.astype(float))
    covariance = dense_covariance(POINTS, POINTS) - across @ np.linalg.solve(joint, across.T)
    return mean, covariance


def test_process_has_the_covariance_and_the_posterior_of_its_formulas():
    np.testing.assert_allclose(
        gp.covariance(FOUND, POINTS, X), dense_covariance(POINTS, X), rtol=1e-6
    )
    mean, sd = gp.condition(FOUND, X, Y).moments(POINTS)
    exact_mean, exact = dense_posterior()
    np.testing.assert_allclose(mean, exact_mean, rtol=1e-6)
    np.testing.assert_allclose(sd, np.sqrt(np.diag(exact)), rtol=1e-5)


@pytest.mark.thorough
def test_fit_maximizes_the_marginal_likelihood():
    """The value is SciPy's, the gradient vanishes, and the noise keeps its lower limit."""
    x, y = jnp.asarray(X), jnp.asarray(Y)
    found = gp.fit_hyperparameters(x, y, 0.1, num_parts=1)
    assert found.noise >= 0.1
    assert found.log_scales.shape == (1, 2)
    noise = float(FOUND.noise)
    with jax.enable_x64(True):
        wide = gp.Hyperparameters(*(jnp.asarray(np.asarray(v, float)) for v in FOUND))
        value = gp._loss(wide, X.astype(float), Y.astype(float))[0]
        found = gp.Hyperparameters(*(jnp.asarray(np.asarray(v, float)) for v in found))
        gradient = gp._loss(found, X.astype(float), Y.astype(float))[1]
    joint = dense_covariance(X.astype(float), X.astype(float)) + noise**2 * np.eye(len(X))
    prior = norm.logpdf(FOUND.log_scales, np.log(2), gp.SCALE_PRIOR).sum()
    prior += norm.logpdf(FOUND.log_amplitudes, 0, gp.AMPLITUDE_PRIOR).sum()
    exact = multivariate_normal.logpdf(Y, np.zeros(len(Y)), joint) + prior
    np.testing.assert_allclose(value, -exact / len(Y), rtol=1e-6)
    for leaf in gradient[:3]:
        # L-BFGS stops at gradients of 1e-5; the result is rounded to float32.
        np.testing.assert_allclose(leaf, 0.0, atol=1e-4)


def test_prior_functions_have_the_covariance_of_the_process():
    process = gp.condition(FOUND, X, Y)
    draws = [pathwise.draw_prior(process, seed)(POINTS) for seed in range(8)]
    exact = dense_covariance(POINTS, POINTS)
    found = np.mean([each.T @ each / len(each) for each in draws], axis=0)
    # Covariances of 4096 Gaussian draws have errors of √(2/4096) of the variance; the frequencies,
    # which 32 draws share, add the error of 128 groups of 256 cosines, far less.
    error = np.abs(found - exact) / exact[0, 0]
    assert error.max() < 4 * (2 / 4096) ** 0.5 + 4 / (128 * 256) ** 0.5


def test_paths_are_draws_of_the_exact_posterior():
    """The mean is exact at the start, and the covariance that of 1024 draws."""
    process = gp.condition(FOUND, X, Y)
    zero = np.zeros(len(Y))
    draws = pathwise.draw_paths(process, pathwise.draw_prior(process), zero, zero, 1)(POINTS)
    mean, covariance = dense_posterior()
    np.testing.assert_allclose(draws.mean(0), mean, rtol=1e-6)
    sd = np.sqrt(np.diag(covariance))
    found = np.cov(draws.T) / sd / sd[:, None]
    # Draws come in pairs, so 512 are independent; .05 allows for the shared frequencies.
    assert np.abs(found - covariance / sd / sd[:, None]).max() < 4 * (2 / 512) ** 0.5 + 0.05


@pytest.mark.thorough
def test_the_guide_draws_what_the_predictions_do():
    """Values in the guide at the data and the pool have the moments of ``draw_paths``."""
    process = gp.condition(FOUND, X, Y)
    prior = pathwise.draw_prior(process)
    paths = pathwise.make_paths(process, prior, POINTS)
    shift, log_size = RNG.normal(size=15), RNG.normal(size=15)
    params = {"shift": jnp.asarray(shift), "log_size": jnp.asarray(log_size)}
    at = jnp.asarray([0, 3, 15, 16])

    def draw(key):
        return handlers.substitute(handlers.seed(paths, key), params)(at)

    found = np.asarray(jax.vmap(draw)(random.split(random.key(0), 4000)))
    points = np.concatenate([X[[0, 3]], POINTS[:2]])
    exact = pathwise.draw_paths(process, prior, shift, log_size, 1)(points)
    sd = exact.std(0)
    # 4000 draws, and 1024 in pairs, whose mean is exact.
    assert np.all(np.abs(found.mean(0) - exact.mean(0)) < 4 * sd / 4000**0.5)
    assert np.all(np.abs(found.std(0) / sd - 1) < 4 * (1 / 8000 + 1 / 1024) ** 0.5)


def test_the_noise_is_at_least_the_rounding_of_the_targets():
    x = RNG.normal(size=(200, 1))
    parts = data.split(x, np.round(3 * x[:, 0]), 0)
    np.testing.assert_allclose(parts.rounding * parts.unit, 12**-0.5, rtol=1e-6)
    assert data.split(x, x[:, 0], 0).rounding < 1e-3
    assert data.split(x, np.ones(200), 0).rounding == 0.0


@pytest.mark.slow
def test_the_fit_returns_from_a_wrong_start(monkeypatch):
    """All targets start off by two noises; with all data in every set the shift takes them back."""
    process = gp.condition(FOUND, X, Y)
    offset = 2 * process.noise
    start = pathwise.Paths.__call__

    def wrong(self, at):
        return start(self._replace(mean=self.mean + offset * self.response.sum(1)), at)

    monkeypatch.setattr(pathwise.Paths, "__call__", wrong)
    settings = fit.Settings(num_steps=3000, batch_size=len(Y), num_points=5, step_size=1e-2)
    pool = jnp.asarray(POINTS, jnp.float32)
    # Predictions have the learned shift without the offset that it makes up for.
    fitted, _ = fit.pathwise_fit(process, pool, settings, random.key(0), learn_noise=False)
    found = fitted.draw(X).mean(0)
    response = process.cross(X) @ process.inverse
    restored = found + offset * response.sum(1)
    mean, _ = process.moments(X)
    # The offset is one to two posterior standard deviations. The end of a stochastic fit is within
    # a tenth of it.
    assert np.abs(restored - mean).max() < 0.1 * offset
    assert np.abs(found - mean).max() > 0.5 * offset
