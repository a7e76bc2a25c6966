"""The distribution of two scales whose evidence is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_kscore._starts import scale_rounds
from numpyro_kscore._starts.interpolation import Scales
from numpyro_kscore._starts.scale_rounds import find_scales
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.stretch import unstretched
from numpyro_kscore._util.deadline import due_in
from support.dense_others import dense_others

SIZE = 60


def walk():
    """A random walk seen with noise: its energy, and the density of the logs of both sizes."""
    rng = np.random.default_rng(6)
    y = 0.3 * np.cumsum(rng.normal(size=SIZE)) + rng.normal(size=SIZE)
    days = jnp.arange(1, SIZE + 1)

    def energy(point):
        left = (y - jnp.exp(point[0]) * jnp.cumsum(point[2:])) * jnp.exp(-point[1])
        return 0.5 * jnp.sum(left**2) + SIZE * point[1] + 0.5 * jnp.sum(point**2)

    def log_density(sizes):
        whole = jnp.exp(2 * sizes[0]) * jnp.minimum(days[:, None], days)
        whole += jnp.exp(2 * sizes[1]) * jnp.eye(SIZE)
        fit = y @ jnp.linalg.solve(whole, y) + jnp.sum(sizes**2)
        return -0.5 * jnp.linalg.slogdet(whole)[1] - 0.5 * fit

    return energy, log_density


def moments_on_a_grid(log_density):
    axes = np.linspace(-4, 1.0, 200), np.linspace(-0.8, 0.8, 200)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    logs = np.asarray(jax.vmap(log_density)(jnp.asarray(grid)))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    mean = weights @ grid
    return mean, (grid - mean).T @ ((grid - mean) * weights[:, None])


def first_scales(at, mode):
    """The distribution of both sizes at first, around a point (d,) with a mode of the others."""
    gaussian = Affine(at[:2], 0.2 * np.eye(2))
    return Scales(gaussian, unstretched(2), mode.mean, np.zeros((2, SIZE)), mode.triangle)


def test_where_time_is_up_the_others_are_those_at_the_mean_of_the_scales():
    energy, _ = walk()
    with jax.enable_x64(True), due_in(1e-6):
        others, at, mode = dense_others(energy, [-1.0, 0.0], SIZE)
        found = find_scales(others, first_scales(at, mode), np.arange(2), is_small=False)
    noise = np.zeros((2, SIZE + 2))
    noise[1, :2] = 1.0
    # The Gaussian of the others does not change with the scales.
    middle, away = found.transport.push(noise)
    np.testing.assert_allclose(middle, np.concatenate([at[:2], mode.mean]), atol=0.05)
    np.testing.assert_allclose(away - middle, [0.2, 0.2, *np.zeros(SIZE)], atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [np.inf, 0.0], ids=["scores", "values alone"])
def test_scales_have_their_exact_moments(monkeypatch, limit):
    """Where mean scores are too noisy, values of the evidence in pairs take their place."""
    monkeypatch.setattr(scale_rounds, "ROUGH", limit)
    energy, log_density = walk()
    with jax.enable_x64(True):
        others, at, mode = dense_others(energy, [-1.0, 0.0], SIZE)
        found = find_scales(others, first_scales(at, mode), np.arange(2), is_small=False)
        mean, covariance = moments_on_a_grid(log_density)
    noise = np.random.default_rng(6).standard_normal((20_000, SIZE + 2))
    draws = found.transport.push(noise)[:, :2]
    sd = np.sqrt(np.diag(covariance))
    # Monte-Carlo errors are .007 and .005.
    np.testing.assert_allclose((draws.mean(0) - mean) / sd, 0, atol=0.1)
    np.testing.assert_allclose(draws.std(0) / sd, 1, atol=0.1)
    exact = covariance[0, 1] / np.prod(sd)
    np.testing.assert_allclose(np.corrcoef(draws.T)[0, 1], exact, atol=0.1)
