"""Couplings found from scores, on densities that have them."""

from functools import partial

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
from numpyro_kscore._starts import gaussian_search
from numpyro_kscore._starts.candidates import Latents
from numpyro_kscore._starts.fit_basis import fit_basis
from numpyro_kscore._starts.fit_sizes import rates_by_regression
from numpyro_kscore._tracing.dependencies import seeded
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.transport import pulled_back
from support.compiling import quick_jit

DIM = 6
ANY = np.ones(DIM, bool)
RATES = np.zeros((DIM, DIM))
RATES[3:, 0] = [0.9, 0.5, -0.7]
SIZES = Sizes(RATES, np.linspace(-0.5, 0.5, DIM))
# The coordinate that sizes vary with stays as it is.
BASIS = np.eye(DIM)
BASIS[2:, 2:] += np.array([[0, 0.5, 0, 0], [0, 0, 0.3, 0], [0.2, 0, 0, 0], [0, 0.4, 0, 0]])
BASIS[2:, 2:] /= np.linalg.det(BASIS) ** (1 / 4)
IN_BASIS = Sizes(SIZES.rates, SIZES.center, BASIS)


def gaussian_energy(points):
    """A correlated Gaussian in coordinates with couplings."""
    rng = np.random.default_rng(4)
    factor = 0.3 * np.tril(rng.normal(size=(DIM, DIM))) + np.eye(DIM)
    moved = np.linalg.solve(factor, (points - 0.4).T)
    return 0.5 * np.sum(moved**2, axis=0), np.linalg.solve(factor.T, moved).T


def funnel(latents, basis=None):
    """The density of the latents, which are sizes times coordinates, and its gradient."""
    if basis is not None:
        energies, gradients = funnel(np.linalg.solve(basis, latents.T).T)
        return energies, np.linalg.solve(basis.T, gradients.T).T
    # The others have no rates: sizes are the same at latents and coordinates.
    sizes = np.exp(SIZES.log_sizes(latents))
    energies, gradients = gaussian_energy(latents / sizes)
    through = (gradients * latents / sizes - 1) * SIZES.slopes(latents)
    energies = energies + np.sum(np.log(sizes), axis=1)
    return energies, gradients / sizes + through @ RATES


@pytest.mark.parametrize("sizes", [SIZES, IN_BASIS])
def test_energies_in_coordinates_whose_sizes_vary(sizes):
    """Gradients by central differences; the change of volume by going there and back."""
    points = np.random.default_rng(0).normal(size=(5, DIM))
    inside = pulled_back(lambda latents: funnel(latents, sizes.basis), sizes)
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
    """To first order: what is left is the curvature of the sizes, which narrow draws see less."""
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
        # A Gaussian that changes with the scale is even closer.
        patch.setattr(gaussian_search, "fit_conditional", lambda *_: None)
        guide.set_up(random.key(3), jnp.array([1.5, -1.0, 2.0, -0.3, 0.9, -1.8, 0.2, -0.6]))
    return guide


def counted(counts):
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("groups", len(counts)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("counts", dist.Poisson(jnp.exp(mean + scale * z)), obs=counts)


@pytest.mark.thorough
def test_a_mean_of_effects_that_bend_is_no_cause_of_their_sizes(monkeypatch):
    """Effects of small counts are skewed, and move with their mean.

    With any latents as causes the mean was one, and the bound .1 nats lower.
    """
    monkeypatch.setattr(gaussian_search, "fit_conditional", lambda *_: None)
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
    )}  # fmt: skip
    trace = handlers.trace(seeded(guide, random.key(0), params)).get_trace(jnp.zeros(8))
    fn = trace["z"]["fn"]
    scale = np.log(trace["scale"]["value"])
    coordinates = np.concatenate([[scale], fn.unconstrained])
    size = np.exp(guide.start.sizes.log_sizes(coordinates))[1:]
    np.testing.assert_allclose(trace["z"]["value"], fn.unconstrained * size, rtol=1e-4)


# A prior precision that is not diagonal, that of a walk, and the unequal ones of data.
LEVELS = 5
WALK = np.diff(np.eye(LEVELS), axis=0)
WALK = WALK.T @ WALK + 0.1 * np.eye(LEVELS)
DATA = np.diag([0.3, 3.0, 1.0, 0.1, 2.0])
CENTER = 0.4


def walk(points, share=1.0):
    """The logarithm of a scale, and five levels whose prior it is the scale of, in one share."""
    log_scale, levels = points[:, 0], points[:, 1:]
    weights = np.exp(-2 * share * (log_scale - CENTER))
    prior = np.sum(levels * (levels @ WALK), axis=1)
    squares = weights * prior + np.sum(levels * (levels @ DATA), axis=1)
    energies = 0.5 * squares + share * LEVELS * log_scale + 0.5 * log_scale**2
    slope = share * (LEVELS - weights * prior) + log_scale
    pull = weights[:, None] * (levels @ WALK) + levels @ DATA
    return energies, np.concatenate([slope[:, None], pull], axis=1)


def walk_gaussian(spread):
    precision = np.zeros((LEVELS + 1, LEVELS + 1))
    precision[0, 0], precision[1:, 1:] = spread**-2, WALK + DATA
    return Affine(np.eye(LEVELS + 1)[0] * CENTER, np.linalg.cholesky(np.linalg.inv(precision)))


def known(is_scale):
    flags = np.zeros((3, LEVELS + 1), bool)
    flags[1, 0] = is_scale
    return Latents(np.zeros(LEVELS + 1), np.zeros((0, LEVELS + 1)), *flags, (1, LEVELS))


def test_a_basis_makes_prior_and_data_diagonal():
    """At draws of the scale the prior's precision varies by 40 %, here, about that at its mean."""
    rng = np.random.default_rng(0)
    basis = fit_basis(walk, walk_gaussian(0.2), known(True), rng)
    np.testing.assert_allclose(abs(np.linalg.det(basis)), 1.0)
    assert np.array_equal(basis[0], np.eye(LEVELS + 1)[0])
    for matrix in (WALK, DATA):
        turned = basis[1:, 1:].T @ matrix @ basis[1:, 1:]
        rest = turned - np.diag(np.diag(turned))
        assert np.max(np.abs(rest)) < 0.05 * np.max(turned)


@pytest.mark.parametrize(("is_scale", "share"), [(False, 1.0), (True, 0.0)])
def test_without_a_scale_there_is_no_basis(is_scale, share):
    rng = np.random.default_rng(0)
    assert fit_basis(partial(walk, share=share), walk_gaussian(0.3), known(is_scale), rng) is None


def test_a_scale_may_be_an_element_of_a_vector():
    """A model's scales as one latent: the first has no effect here, the second is the walk's."""

    def with_another(points):
        energies, gradients = walk(points[:, 1:])
        return energies + 0.5 * points[:, 0] ** 2, np.hstack([points[:, :1], gradients])

    one = walk_gaussian(0.2)
    factor = np.eye(LEVELS + 2)
    factor[1:, 1:] = one.factor
    gaussian = Affine(np.append(0.0, one.mean), factor)
    flags = np.zeros((3, LEVELS + 2), bool)
    flags[1, :2] = True
    latents = Latents(np.zeros(LEVELS + 2), np.zeros((0, LEVELS + 2)), *flags, (2, LEVELS))
    basis = fit_basis(with_another, gaussian, latents, np.random.default_rng(0))
    assert np.array_equal(basis[:2], np.eye(LEVELS + 2)[:2])
    turned = basis[2:, 2:].T @ WALK @ basis[2:, 2:]
    assert np.max(np.abs(turned - np.diag(np.diag(turned)))) < 0.05 * np.max(turned)
