"""The others at given scales against quadrature, and the start of large models against exact ones.

Counts of many groups with log rates that have a common scale: given that, groups are independent,
and each takes an integral in one variable.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore._starts import evidence_slopes as slopes_of_evidence
from numpyro_kscore._starts.best_given import best_given
from numpyro_kscore._starts.evidence_slopes import evidence_slopes
from numpyro_kscore._starts.laplace import Others, mode_at
from numpyro_kscore._starts.noise import balanced, spread_out
from numpyro_kscore._starts.sparsity import find_structure
from numpyro_kscore._transports.affine import antithetic
from numpyro_kscore._transports.skewed import pushed
from support.dense_others import dense_others

GROUPS = 240
COUNTS = np.random.default_rng(0).poisson(
    np.exp(0.8 * np.random.default_rng(1).normal(size=GROUPS))
)
# Errors that are left: of the evidence, in nats, by a second cumulant; of means, in sd, and sds, by
# shapes of four slopes that are fitted to 64 points. The modes are off by .03, .14 and .26 sd. An
# sd that is off by 7 %, of two groups with 13 counts, leaves out .005 nats, which looks like noise.
LEFT_OUT = {-1.0: (0.01, 0.01, 0.01), -0.2: (0.02, 0.02, 0.02), 0.3: (0.1, 0.03, 0.07)}
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)


def log_integrals(log_scale):
    """Log integrals of every group, and means and deviations of its standardized log rate."""
    rates = np.exp(log_scale) * NODES
    terms = COUNTS[:, None] * rates - np.exp(rates) - np.array([_log_factorial(COUNTS)]).T
    weights = np.exp(terms) * WEIGHTS / np.sqrt(2 * np.pi)
    totals = weights.sum(axis=1)
    means = weights @ NODES / totals
    return np.log(totals), means, np.sqrt(weights @ NODES**2 / totals - means**2)


def _log_factorial(counts):
    return np.array([np.sum(np.log(np.arange(1, k + 1))) for k in counts])


@pytest.fixture(scope="module")
def others():
    def evaluate(points):
        scale, z = np.exp(points[:, :1]), points[:, 1:]
        rates = scale * z
        energies = np.exp(rates) - COUNTS * rates + 0.5 * z**2 + 0.5 * np.log(2 * np.pi)
        energies = energies.sum(axis=1) + _log_factorial(COUNTS).sum()
        moved = np.exp(rates) - COUNTS
        gradients = np.concatenate([(moved * rates).sum(1, keepdims=True), scale * moved + z], 1)
        return energies, gradients

    def products(points, vectors):
        scale, z = np.exp(points[:, :1]), points[:, 1:]
        rates = scale * z
        curvatures = np.mean(scale**2 * np.exp(rates) + 1, axis=0)
        across = np.mean(scale * (np.exp(rates) * (1 + rates) - COUNTS), axis=0)
        assert not vectors[:, 0].any()
        return np.concatenate([vectors[:, 1:] @ across[:, None], vectors[:, 1:] * curvatures], 1)

    indices = np.arange(1, GROUPS + 1)
    points = np.zeros((2, GROUPS + 1))
    structure = find_structure(products, points, indices)
    noise = balanced(antithetic(np.random.default_rng(2), 64, GROUPS))
    spread = spread_out(np.random.default_rng(3), 64, GROUPS)

    def held(points, with_scales):
        return evaluate(points)

    return Others(evaluate, held, products, structure, indices, points, noise, spread)


def moments(given):
    """Means and standard deviations of the groups, by the shapes of their coordinates."""
    places = np.tile(NODES[:, None], GROUPS)
    images = places if given.shapes is None else pushed(places, given.shapes)
    weights = WEIGHTS / WEIGHTS.sum()
    mean = weights @ images
    width = given.triangle.diagonal
    return given.mean + width * mean, width * np.sqrt(weights @ images**2 - mean**2)


@pytest.mark.parametrize("log_scale", [-1.0, -0.2, 0.3])
def test_the_evidence_of_a_scale_is_that_of_quadrature(others, log_scale):
    at = np.zeros(GROUPS + 1)
    at[0] = log_scale
    best, _ = best_given(others, at, mode_at(others, at), None)
    totals, means, widths = log_integrals(log_scale)
    evidence, (left_out, of_mean, of_width) = totals.sum(), LEFT_OUT[log_scale]
    # The bound is a mean over 64 draws.
    error = 3 * (best.variance / 64) ** 0.5 + left_out
    assert abs(best.evidence - evidence) < error
    found_means, found_widths = moments(best)
    assert np.max(np.abs(found_means - means) / widths) < of_mean
    np.testing.assert_allclose(found_widths, widths, rtol=of_width)


def test_shapes_leave_out_less_than_gaussians(others):
    at = np.zeros(GROUPS + 1)
    at[0] = 0.3
    mode = mode_at(others, at)
    best, shared = best_given(others, at, mode, None)
    plain, _ = best_given(others, at, mode, shared._replace(shapes=None))
    assert plain.shapes is None
    assert best.variance < 0.02 * plain.variance


def test_the_slope_of_the_evidence_is_a_difference(others):
    def mode(log_scale):
        at = np.zeros(GROUPS + 1)
        at[0] = log_scale
        return at, mode_at(others, at)

    slope = evidence_slopes(others, *mode(-0.2))[0][0]
    ahead, behind = (mode(-0.2 + step)[1].evidence for step in (1e-3, -1e-3))
    # Groups do not depend on each other, and noise has squares of 1: nothing is random here but the
    # square of a tenth of a standard deviation. A slope of .3 moves the log scale by .02 sd.
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-3, atol=0.3)


def field(size=60):
    """A Gaussian process seen with noise, and its evidence given size and length."""
    rng = np.random.default_rng(4)
    x, y = np.linspace(0, 6, size), rng.normal(size=size)
    noise = 0.1

    def covariance(scales):
        apart = jnp.abs(x[:, None] - x)
        return jnp.exp(2 * scales[0] - apart * jnp.exp(-scales[1]))

    def energy(point):
        factor = jnp.linalg.cholesky(covariance(point[:2]))
        left = (y - factor @ point[2:]) / noise
        return 0.5 * jnp.sum(left**2) + 0.5 * jnp.sum(point[2:] ** 2)

    def evidence(scales):
        whole = covariance(scales) + noise**2 * jnp.eye(size)
        return -0.5 * jnp.linalg.slogdet(whole)[1] - 0.5 * y @ jnp.linalg.solve(whole, y)

    return energy, evidence, size


@pytest.mark.thorough
def test_slopes_of_the_evidence_where_all_depends_on_all(monkeypatch):
    energy, evidence, size = field()
    with jax.enable_x64(True):
        others, at, mode = dense_others(energy, [0.2, 0.5], size)
        by_draws = evidence_slopes(others, at, mode)[0][:2]
        monkeypatch.setattr(slopes_of_evidence, "ROUGH", 0.0)
        along_axes, bends = evidence_slopes(others, at, mode)
        by_axes = along_axes[:2]
        known = np.asarray(jax.grad(evidence)(jnp.array(at[:2])))
        # Axes at one value correct the draws at others.
        monkeypatch.setattr(slopes_of_evidence, "ROUGH", np.inf)
        at[:2] += [0.1, -0.1]
        nearby = mode_at(others, at)
        corrected = evidence_slopes(others, at, nearby, bends)[0][:2]
        uncorrected = evidence_slopes(others, at, nearby)[0][:2]
        known_nearby = np.asarray(jax.grad(evidence)(jnp.array(at[:2])))
    # Errors by draws are within the limit; along axes, those of differences are left.
    assert 0.1 < np.max(np.abs(by_draws - known)) < 1
    np.testing.assert_allclose(by_axes, known, atol=0.01)
    # The noise is the same at both values, so that a correction leaves a part of the error.
    left = np.max(np.abs(corrected - known_nearby))
    assert left < np.max(np.abs(uncorrected - known_nearby)) / 3


def test_what_is_shared_at_one_scale_serves_others(others):
    at = np.zeros(GROUPS + 1)
    at[0] = -0.2
    mode = mode_at(others, at)
    _, shared = best_given(others, at, mode, None)
    at[0] = 0.0
    mode = mode_at(others, at, mode.triangle)
    borrowed, _ = best_given(others, at, mode, shared)
    own, _ = best_given(others, at, mode, None)
    assert abs(borrowed.evidence - own.evidence) < 0.1
    for one, other in zip(moments(borrowed), moments(own), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.03, atol=0.03)


def groups(counts):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(scale * z)), obs=counts)


@pytest.mark.thorough
def test_a_large_model_is_fitted_without_a_step():
    guide = AutoImplicit(groups)
    svi = SVI(groups, guide, optax.adam(1e-2), ImplicitELBO())
    counts = jnp.asarray(COUNTS)
    result = fit(svi, random.key(0), counts, progress_bar=False)
    assert result.info.converged
    assert result.info.steps == 0
    assert guide.start.is_by_structure
    assert guide.start.num_gradients < 10_000
    # Steps go on from it all the same.
    state, loss = svi.update(result.state, counts)
    assert abs(loss - result.losses[0]) < 5
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(4000,))
    line = np.linspace(-2.0, 1.0, 601)
    every = [log_integrals(s) for s in line]
    masses = np.array([totals.sum() for totals, _, _ in every]) - 0.5 * line**2
    masses = np.exp(masses - masses.max())
    masses /= masses.sum()
    mean = masses @ line
    width = np.sqrt(masses @ (line - mean) ** 2)
    found = np.log(np.asarray(draws["scale"]))
    # Three errors of 4000 draws, and the .05 sd that the search may leave.
    assert abs(found.mean() - mean) < (3 / 4000**0.5 + 0.05) * width
    assert found.std() == pytest.approx(width, rel=3 / 8000**0.5 + 0.05)
    of_groups = masses @ np.stack([means for _, means, _ in every])
    spread = masses @ np.stack([w**2 + m**2 for _, m, w in every]) - of_groups**2
    errors = np.abs(np.asarray(draws["z"]).mean(axis=0) - of_groups) / np.sqrt(spread)
    assert np.median(errors) < 0.03
    assert np.max(errors) < 4.5 / 4000**0.5 + 0.05
    ratios = np.asarray(draws["z"]).std(axis=0) / np.sqrt(spread)
    assert np.all(np.abs(ratios - 1) < 0.1)


@pytest.mark.thorough
def test_a_regression_with_many_latents_needs_no_scale():
    """Without any scale the start is one Gaussian, here exactly the posterior."""
    rng = np.random.default_rng(3)
    design = rng.normal(size=(400, 200)) / 10
    data = jnp.asarray(design @ rng.normal(size=200) + rng.normal(size=400))

    def model(design):
        weights = numpyro.sample("weights", dist.Normal(0, 1).expand([200]).to_event(1))
        numpyro.sample("y", dist.Normal(design @ weights, 1.0), obs=data)

    guide = AutoImplicit(model)
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    result = fit(svi, random.key(0), jnp.asarray(design), progress_bar=False)
    assert result.info.cause == "tol"
    assert result.info.steps == 0
    covariance = np.linalg.inv(design.T @ design + np.eye(200))
    mean = covariance @ design.T @ np.asarray(data)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(4000,))["weights"]
    errors = (np.asarray(draws).mean(axis=0) - mean) / np.sqrt(np.diag(covariance))
    assert np.max(np.abs(errors)) < 4.5 / 4000**0.5
    ratios = np.cov(np.asarray(draws).T) / covariance
    np.testing.assert_allclose(np.diag(ratios), 1, atol=4.5 * (2 / 4000) ** 0.5)
