"""Couplings found from scores, on densities that have them."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_kscore import AutoImplicit, initial_gaussian
from numpyro_kscore._model.dependencies import seeded
from numpyro_kscore._starts.fit_sizes import rates_by_regression
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.transport import pulled_back
from support.compiling import quick_jit
from support.searches import without_structure

DIM = 6
ANY = np.ones(DIM, bool)
RATES = np.zeros((DIM, DIM))
RATES[3:, 0] = [0.9, 0.5, -0.7]
SIZES = Sizes(RATES, np.linspace(-0.5, 0.5, DIM))


def gaussian_energy(points):
    """A correlated Gaussian in coordinates with couplings."""
    rng = np.random.default_rng(4)
    factor = 0.3 * np.tril(rng.normal(size=(DIM, DIM))) + np.eye(DIM)
    moved = np.linalg.solve(factor, (points - 0.4).T)
    return 0.5 * np.sum(moved**2, axis=0), np.linalg.solve(factor.T, moved).T


def funnel(latents):
    """The density of the latents, which are sizes times coordinates, and its gradient."""
    # The others have no rates: sizes are the same at latents and coordinates.
    sizes = np.exp(SIZES.log_sizes(latents))
    energies, gradients = gaussian_energy(latents / sizes)
    through = (gradients * latents / sizes - 1) * SIZES.slopes(latents)
    energies = energies + np.sum(np.log(sizes), axis=1)
    return energies, gradients / sizes + through @ RATES


def test_energies_in_coordinates_whose_sizes_vary():
    """Gradients by central differences; the change of volume by going there and back."""
    points = np.random.default_rng(0).normal(size=(5, DIM))
    inside = pulled_back(funnel, SIZES)
    energies, gradients = inside(points)
    np.testing.assert_allclose(energies, gaussian_energy(points)[0], rtol=1e-10)
    np.testing.assert_allclose(gradients, gaussian_energy(points)[1], rtol=1e-8, atol=1e-10)
    step = 1e-5
    _, gradients = funnel(points)
    for k in range(DIM):
        move = step * np.eye(DIM)[k]
        slope = (funnel(points + move)[0] - funnel(points - move)[0]) / (2 * step)
        np.testing.assert_allclose(gradients[:, k], slope, rtol=1e-6, atol=1e-8)


def test_rates_are_read_off_scores():
    """They are right to first order: narrow draws see less of the curvature of the sizes."""
    rng = np.random.default_rng(1)
    errors = []
    for width in (0.8, 0.2):
        draws = SIZES.center + width * rng.normal(size=(4000, DIM))
        rates = rates_by_regression(draws, -funnel(draws)[1], ANY)
        assert not np.any(rates[RATES == 0])
        errors.append(np.max(np.abs(rates - RATES)))
        # The first latent is the only one that sizes vary with.
        assert not np.any(rates_by_regression(draws, -funnel(draws)[1], np.arange(DIM) > 0))
    assert errors[0] < 0.5
    assert errors[1] < 0.5 * errors[0]


def test_a_gaussian_has_no_couplings():
    rng = np.random.default_rng(2)
    draws = 0.4 + 0.7 * rng.normal(size=(500, DIM))
    assert not np.any(rates_by_regression(draws, -gaussian_energy(draws)[1], ANY))


def test_residuals_that_vary_are_no_rates():
    """Only residuals vary in size: errors that took them for equal would be 3.6 times too small.

    With products p = 1 - x² and residuals e = x² y, (E p² e² / (E p² E e²))^½ = (78 / 6)^½. Beyond
    four errors by chance 27 % would then be, and of 80 rates of x and y with others none is.
    """
    found = 0
    for seed in range(40):
        draws = np.random.default_rng(seed).normal(size=(512, 3))
        x, y, z = draws.T
        scores = np.stack([-x, -y * (1 + x**2), -z], axis=1)
        rates = rates_by_regression(draws, scores, np.ones(3, bool))
        found += np.count_nonzero(rates[[0, 2], [1, 1]])
    assert found == 0


def varying(y):
    scale = numpyro.sample("scale", dist.HalfNormal(5.0))
    with numpyro.plate("groups", 8):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        # The model's own deterministic site would make no difference.
        numpyro.sample("y", dist.Normal(scale * z, 0.2), obs=y)


@pytest.fixture(scope="module")
def guide():
    guide = AutoImplicit(varying)
    with pytest.MonkeyPatch.context() as patch:
        without_structure(patch)
        guide.set_up(random.key(3), jnp.array([1.5, -1.0, 2.0, -0.3, 0.9, -1.8, 0.2, -0.6]))
    return guide


def counted(counts):
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("groups", len(counts)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("counts", dist.Poisson(jnp.exp(mean + scale * z)), obs=counts)


@pytest.mark.slow
def test_a_mean_of_effects_that_bend_is_no_cause_of_their_sizes(monkeypatch):
    """Effects of small counts are skewed, and move with their mean.

    With any latents as causes the mean was one, and the bound .1 nats lower.
    """
    without_structure(monkeypatch)
    guide = AutoImplicit(counted)
    guide.set_up(random.key(0), jnp.array([2, 0, 0, 0, 1, 4, 6, 5, 0, 0, 0, 1, 0, 0, 1, 0]))
    causes = np.any(guide.start.sizes.rates != 0, axis=0)
    np.testing.assert_array_equal(np.flatnonzero(causes), [1])


@pytest.mark.thorough
def test_a_non_centered_model_with_informative_data_is_centered(guide):
    """z = effect / scale with a well-determined effect: its rate with log scale is nearly one."""
    rates = guide.start.sizes.rates
    # Fraction of the variance that the data explain, at the scale's posterior mean of about 1.3.
    np.testing.assert_allclose(rates[1:, 0], 0.97, atol=0.1)
    assert not np.any(rates[:, 1:])
    assert not np.any(rates[0])


@pytest.mark.thorough
def test_a_start_for_other_guides_is_one_in_unconstrained_coordinates():
    """The same model: its Gaussian must be one of the latents themselves."""
    data = jnp.array([1.5, -1.0, 2.0, -0.3, 0.9, -1.8, 0.2, -0.6])
    start = initial_gaussian(random.key(0), varying, data)
    flat = AutoMultivariateNormal(varying)
    svi = SVI(varying, flat, optax.adam(1e-3), Trace_ELBO(num_particles=200))

    @quick_jit
    def first_loss(key):
        state = svi.init(key, data, init_params=start.init_params(flat))
        return svi.evaluate(state, data)

    # Standard error of the loss: about .1 nats at 200 draws.
    np.testing.assert_allclose(-first_loss(random.key(1)), start.elbo, atol=0.5)


@pytest.mark.thorough
def test_draws_are_those_of_the_latents(guide):
    """Effects, scale times z, hardly depend on the scale; z does, and is not the coordinate."""
    params = {f"auto_{name}": jnp.asarray(value, jnp.float32) for name, value in (
        ("start_mean", guide.start.gaussian.mean), ("start_factor", guide.start.gaussian.factor),
        ("sizes_rates", guide.start.sizes.rates), ("sizes_center", guide.start.sizes.center),
        ("sizes_causes_shift", guide.start.marginals.shift),
        ("sizes_causes_slopes", guide.start.marginals.slopes),
        ("marginals_shift", guide.start.marginals.shift),
        ("marginals_slopes", guide.start.marginals.slopes),
    )}  # fmt: skip
    trace = handlers.trace(seeded(guide, random.key(0), params)).get_trace(jnp.zeros(8))
    fn = trace["z"]["fn"]
    scale = np.log(trace["scale"]["value"])
    causes = guide.start.sizes.causes
    coordinates = np.concatenate([causes.invert(np.full((1, 9), scale))[0, :1], fn.unconstrained])
    size = np.exp(guide.start.sizes.log_sizes(coordinates))[1:]
    np.testing.assert_allclose(trace["z"]["value"], fn.unconstrained * size, rtol=1e-4)
