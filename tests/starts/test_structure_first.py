"""Starts of models with dozens of latents, whose structure is looked at before all else."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from jax.scipy.special import digamma, polygamma
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, ImplicitELBO, fit
from numpyro_kscore._starts import structure_search

GROUPS, ROWS = 28, 4
GROUP = np.repeat(np.arange(GROUPS), ROWS)


def groups(y):
    mean = numpyro.sample("mean", dist.Normal(0, 3))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    numpyro.sample("y", dist.Normal(effect[GROUP], 1), obs=y)


def folded(y):
    """The same with a sign that data do not tell."""
    mean = numpyro.sample("mean", dist.Normal(0, 3))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", GROUPS):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    numpyro.sample("y", dist.Normal(jnp.abs(effect[GROUP]), 1), obs=y)


def data(spread, mean=1.0):
    rng = np.random.default_rng(5)
    return jnp.asarray(mean + spread * rng.normal(size=GROUPS)[GROUP] + rng.normal(size=len(GROUP)))


def moments(y):
    """Means and standard deviations of the mean and of the log scale, on a grid."""
    means, logs = np.linspace(-3.0, 4.0, 401), np.linspace(-7.0, 3.0, 401)
    sums = np.asarray(y).reshape(GROUPS, ROWS).mean(axis=1)
    m, log = np.meshgrid(means, logs, indexing="ij")
    variance = np.exp(2 * log) + 1 / ROWS
    square = ((sums[:, None, None] - m) ** 2).sum(axis=0)
    density = -0.5 * (GROUPS * np.log(variance) + square / variance + (m / 3) ** 2)
    density += log - 0.5 * np.exp(2 * log)
    weights = np.exp(density - density.max())
    weights /= weights.sum()
    found = []
    for values in (m, log):
        center = np.sum(weights * values)
        found.append((center, np.sqrt(np.sum(weights * (values - center) ** 2))))
    return found


def fitted(model, y):
    guide = AutoImplicit(model)
    svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())
    return guide, fit(svi, random.key(0), y, progress_bar=False, max_steps=320)


@pytest.mark.thorough
@pytest.mark.parametrize(("spread", "is_centered"), [(0.05, False), (4.0, True)])
def test_scales_are_right_in_coordinates_that_suit_them(spread, is_centered):
    y = data(spread)
    guide, result = fitted(groups, y)
    assert result.info.steps == 0
    start = guide.start
    assert start.is_by_structure
    degrees = np.asarray(start.centering.degrees)[2:]
    assert np.all(degrees == 1) if is_centered else np.all(degrees < 0.5)
    draws = guide.sample_posterior(random.key(1), result.params, y, sample_shape=(10_000,))
    for values, (mean, sd) in zip((draws["mean"], np.log(draws["scale"])), moments(y), strict=True):
        # 10 000 draws have errors of .01 sd, and of .7 % where tails are Gaussian; that of a log
        # scale is exponential.
        assert abs(values.mean() - mean) < 0.05 * sd
        assert abs(values.std() / sd - 1) < 0.05


def rates(y):
    """Positive numbers alone, of which none is held."""
    rates = numpyro.sample("rates", dist.Gamma(2.0, 1.0).expand([4]).to_event(1))
    numpyro.sample("y", dist.Poisson(rates).to_event(1), obs=y)


def start_of(model, y):
    guide = AutoImplicit(model)
    guide.set_up(random.key(0), y)
    return guide.start


def test_models_of_scales_alone_have_a_structure():
    # The posterior is Gamma(2 + y, 2), whose logarithm has these moments.
    y = jnp.array([0.0, 1.0, 4.0, 9.0])
    start = start_of(rates, y)
    draws = start.exact_draws
    assert draws.is_final
    pushed = start.marginals.push(draws.samples)
    mean, sd = digamma(2 + y) - np.log(2), np.sqrt(polygamma(1, 2 + y))
    # 4096 draws have errors of .016 sd, and of .011 in its logarithm.
    np.testing.assert_allclose((pushed.mean(0) - mean) / sd, 0, atol=0.07)
    np.testing.assert_allclose(pushed.std(0) / sd, 1, atol=0.05)


@pytest.mark.thorough
def test_a_structure_that_takes_too_long_is_left(monkeypatch):
    monkeypatch.setattr(structure_search, "MOST_GRADIENTS", 1_000)
    assert not start_of(groups, data(0.05)).is_by_structure


@pytest.mark.thorough
def test_two_modes_are_not_taken_for_one():
    assert not start_of(folded, data(0.3)).is_by_structure


def test_priors_of_small_scales_leave_draws_without_weights():
    # Effects lie within e⁻⁶ of their mean in a tail that draws of the scale reach.
    gaps = start_of(groups, data(0.05)).exact_draws.gaps
    assert len(gaps) == 4096
    # In their own coordinates the lowest of these are thousands of nats below the middle.
    assert np.median(gaps) - gaps.min() < 10
    assert np.all(np.isfinite(gaps))
