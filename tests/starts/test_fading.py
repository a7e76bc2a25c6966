"""Correlations that fade with scales, against posteriors that are normal given them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_kscore import AutoImplicit
from numpyro_kscore._guides.faded import push_faded
from numpyro_kscore._guides.residual import LocalDensity
from numpyro_kscore._starts.batch_match import Gaussian
from numpyro_kscore._starts.couplings import Couplings
from numpyro_kscore._starts.fading import Fading, _of_one_sign, _shifted
from numpyro_kscore._starts.warp import warped
from support.compiling import quick_jit

DIM, DRIVERS = 7, 2


@pytest.fixture(scope="module")
def fading():
    """Three latents whose sizes change with two others, in an order of their own."""
    rng = np.random.default_rng(0)
    factor = 0.3 * np.tril(rng.normal(size=(DIM, DIM)))
    np.fill_diagonal(factor, 1 + rng.random(DIM))
    rates, offsets = np.zeros((DIM, DRIVERS)), np.zeros(DIM)
    rates[4:], offsets[4:] = rng.normal(size=(3, DRIVERS)), 0.3
    gaussian = Gaussian(rng.normal(size=DIM), factor)
    degrees, shifts = np.linspace(0.1, 0.9, DIM), np.where(rates[:, 0] != 0, 0.7, 0.0)
    return Fading(rng.permutation(DIM), gaussian, rates, offsets, degrees, shifts)


@pytest.fixture(scope="module")
def points():
    return np.random.default_rng(1).normal(size=(4, DIM))


def energy(coordinates):
    """Of a density that is not normal, and its gradients."""
    scales = np.linspace(0.5, 2, DIM)
    scaled = coordinates / scales
    return np.sum(np.log(np.cosh(scaled)), axis=1), np.tanh(scaled) / scales


def test_gradients_by_the_points_are_central_differences(fading, points):
    inside = warped(energy, fading)
    _, gradients = inside(points)
    step = 1e-6
    for k in range(DIM):
        move = step * np.eye(DIM)[k]
        slope = (inside(points + move)[0] - inside(points - move)[0]) / (2 * step)
        np.testing.assert_allclose(gradients[:, k], slope, rtol=1e-7, atol=1e-8)


def test_the_guide_pushes_the_same_with_its_volume_and_local_score(fading, points):
    """The score s of coordinates solves Jᵀ s = that of the points, with the derivative J."""

    def push(x, local=None):
        return push_faded(x, local, fading, lambda name, value: jnp.asarray(value))

    @quick_jit
    def at(x):
        coordinates, local = push(x, LocalDensity(-0.5 * x @ x, -x))
        return coordinates, jax.jacfwd(lambda x: push(x)[0])(x), local

    x = jnp.asarray(points)
    coordinates, jacobians, local = (jax.tree.map(np.asarray, out) for out in jax.vmap(at)(x))
    np.testing.assert_allclose(coordinates, fading.push(points), rtol=1e-4, atol=1e-4)
    volumes = np.linalg.slogdet(jacobians.astype(float))[1]
    np.testing.assert_allclose(volumes, fading.gaussian.log_volume, atol=1e-4)
    np.testing.assert_allclose(
        local.log_density, -0.5 * np.sum(points**2, axis=1) - volumes, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        np.einsum("mij,mi->mj", jacobians, local.score), -points, rtol=1e-3, atol=1e-3
    )


# Precision by the data of a slope and an intercept, and the intercept's prior precision.
OF_DATA, OF_INTERCEPT = np.array([[2.0, 5.0], [5.0, 20.0]]), 0.04


def exact_covariance(scale):
    """Of slope and intercept, given the scale of the slope's prior."""
    return np.linalg.inv(OF_DATA + np.diag([scale**-2, OF_INTERCEPT]))


@pytest.mark.parametrize("scale", [0.02, 0.3, 1.0, 4.0])
def test_correlations_of_two_effects_are_those_given_the_scale(scale):
    """A normal posterior given the scale: exact at all scales, from what it is at one of .6."""
    typical = 0.6
    at_typical = exact_covariance(typical)
    # The share of the data in the precision of the slope.
    degree = 1 - at_typical[0, 0] / typical**2
    joint = np.zeros((3, 3))
    joint[0, 0], joint[1:, 1:] = 1.0, at_typical
    gaussian = Gaussian(np.zeros(3), np.linalg.cholesky(joint))
    rates = np.array([[0.0], [1.0], [0.0]])
    degrees = np.array([0.5, degree, 0.5])
    fading = Fading(np.arange(3), gaussian, rates, np.zeros(3), degrees, np.zeros(3))
    driver = np.log(scale / typical)
    points = np.array([[driver, *noise] for noise in np.eye(2)])
    r = scale / typical
    sizes = np.array([r / np.sqrt(1 - degree + degree * r**2), 1.0])
    effects = fading.push(points)[:, 1:] * sizes
    np.testing.assert_allclose(effects.T @ effects, exact_covariance(scale), rtol=1e-9)


@pytest.mark.parametrize("scale", [0.02, 0.3, 4.0])
def test_means_in_units_of_a_scale_are_those_given_the_scale(scale):
    """The slope is in units of its scale: its posterior mean and the intercept's, exact as well."""
    typical, of_slope = 0.6, 0.8
    covariance = exact_covariance(typical)
    degree = 1 - covariance[0, 0] / typical**2
    # The intercept follows the slope by this much.
    follows = covariance[1, 0] / covariance[0, 0]
    # In units; changes with log scale are those of D for the slope, of D² for the other.
    mean = np.array([of_slope / typical, 2.0])
    change = (1 - degree) * np.array([mean[0], 2 * follows * of_slope])
    units = np.diag([1 / typical, 1.0])
    joint = np.eye(3)
    joint[0, 1:] = joint[1:, 0] = change
    joint[1:, 1:] = units @ covariance @ units + np.outer(change, change)
    rates = np.array([[0.0], [1.0], [0.0]])
    plain = Fading(
        np.arange(3),
        Gaussian(np.array([0.0, *mean]), np.linalg.cholesky(joint)),
        rates,
        np.zeros(3),
        np.array([0.5, degree, 0.5]),
        np.zeros(3),
    )
    fading = _shifted(plain, np.array([False, True, False]))
    r = scale / typical
    sizes = np.array([typical * r / np.sqrt(1 - degree + degree * r**2), 1.0])
    driver = np.log(r)
    ends = np.array([[driver, 0, 0], [driver, 1, 0], [driver, 0, 1]])
    center, *effects = fading.push(ends)[:, 1:] * sizes
    effects = np.array(effects) - center
    exact = exact_covariance(scale)
    np.testing.assert_allclose(effects.T @ effects, exact, rtol=1e-6)
    # Given the scale the slope's mean is its variance times what the data say of it.
    slope = of_slope * exact[0, 0] / covariance[0, 0]
    expected = [slope, mean[1] + follows * (slope - of_slope)]
    np.testing.assert_allclose(center, expected, rtol=1e-6, atol=1e-6)


def test_only_latents_with_rates_of_both_signs_lose_some():
    """And what they are stays the same Gaussian, but for how its sizes change."""
    rates = np.zeros((4, 4))
    rates[2:, :2] = [[0.8, -0.4], [0.0, -0.6]]
    couplings = Couplings(rates, np.array([0.2, -0.1, 0.0, 0.0]))
    gaussian = Gaussian(np.array([0.2, -0.1, 1.0, 2.0]), np.diag([0.2, 0.2, 0.5, 0.5]))
    fewer, found = _of_one_sign(couplings, gaussian, np.random.default_rng(0))
    np.testing.assert_array_equal(fewer.rates[2:, :2], [[0.8, 0.0], [0.0, -0.6]])
    # Means and deviations of 256 antithetic draws, whose sizes change by some percent.
    np.testing.assert_allclose(found.mean, gaussian.mean, atol=0.05)
    np.testing.assert_allclose(np.diag(found.factor), np.diag(gaussian.factor), rtol=0.2)
    same, found = _of_one_sign(fewer, gaussian, np.random.default_rng(0))
    assert same is fewer
    assert found is gaussian


GROUPS, NOISE = 6, 5.0
TIMES = np.array([2.0, 4.0, 6.0, 8.0])
FEATURES = np.stack([np.ones_like(TIMES), TIMES])


def lines(y):
    """A line for each group, through points far from where its intercept is."""
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", GROUPS):
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 20.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, jnp.exp(log_scale)))
    mean = intercept[:, None] + slope[:, None] * TIMES
    numpyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def non_centered_lines(y):
    """The same with slopes in units of their scale."""
    log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", GROUPS):
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 20.0))
        unit = numpyro.sample("unit", dist.Normal(0.0, 1.0))
    slope = numpyro.deterministic("slope", jnp.exp(log_scale) * unit)
    mean = intercept[:, None] + slope[:, None] * TIMES
    numpyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def _correlations(draws, chosen):
    """Of intercept and slope, in every group."""
    pairs = zip(
        *(np.asarray(draws[name])[chosen].T for name in ("intercept", "slope")), strict=True
    )
    return [np.corrcoef(*pair)[0, 1] for pair in pairs]


def _exact_correlations(y, scales):
    """The same of the normal posteriors given each of some scales, in equal shares."""
    of_data = FEATURES @ FEATURES.T / NOISE**2
    covariances = np.stack(
        [np.linalg.inv(of_data + np.diag([20.0**-2, scale**-2])) for scale in scales]
    )
    means = np.einsum("sij,gj->gsi", covariances, y @ FEATURES.T / NOISE**2)
    covariance = np.mean(covariances, axis=0)
    return [_correlation(covariance + np.cov(mean.T)) for mean in means]


def _correlation(covariance):
    return covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])


@pytest.mark.parametrize("model", [lines, non_centered_lines])
@pytest.mark.thorough
def test_a_guide_starts_with_the_correlations_of_small_and_large_scales(model):
    rng = np.random.default_rng(2)
    slopes = rng.normal(0, 0.5, GROUPS)
    y = rng.normal(0, 20, (GROUPS, 1)) + slopes[:, None] * TIMES
    y = jnp.asarray(y + NOISE * rng.normal(size=y.shape))
    guide = AutoImplicit(model)
    guide.set_up(random.key(0), y)
    assert isinstance(guide.start.warp, Fading)
    with numpyro.handlers.seed(rng_seed=0):
        params = {
            name: site["value"]
            for name, site in numpyro.handlers.trace(guide).get_trace(y).items()
            if site["type"] == "param"
        }
    draws = guide.sample_posterior(random.key(1), params, y, sample_shape=(8_000,))
    scale = np.exp(np.asarray(draws["log_scale"]))
    low, high = np.quantile(scale, [0.1, 0.9])
    everywhere = _correlations(draws, np.ones(len(scale), bool))
    errors, of_one = [], []
    for chosen in (scale < low, scale > high):
        exact = np.array(_exact_correlations(np.asarray(y), scale[chosen]))
        errors.append(np.mean(np.abs(_correlations(draws, chosen) - exact)))
        of_one.append(np.mean(np.abs(everywhere - exact)))
    # Correlations of 800 draws have errors of .02 or less. What is left of the change, about half,
    # comes from the shares of the data, which are estimates themselves.
    assert np.sum(errors) < 0.75 * np.sum(of_one)
