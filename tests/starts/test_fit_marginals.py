"""Functions of normal numbers from draws, against quantiles in closed form."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import SVI
from numpyro.optim import Adam
from scipy import stats

from numpyro_kscore import AutoImplicit, ImplicitELBO
from numpyro_kscore._starts.fit_marginals import fit_marginals
from numpyro_kscore._starts.prior_draws import MANY_DRAWS, draw_prior
from support.autoguides import first_state

PLACES = np.linspace(-3.5, 3.5, 29)


def test_they_are_the_quantiles_of_the_prior():
    """A function from draws is near the true one, out to 3.5 standard deviations.

    The outermost quantile has 22 draws beyond it, and so an error of 1/√22 = .21 of the length over
    which the density falls by a factor e, here 1. There are four such errors in .85. At 2 standard
    deviations there are 370 draws, which makes .05.
    """
    rng = np.random.default_rng(0)
    draws = np.log(np.abs(rng.standard_normal((MANY_DRAWS, 1))))
    found = fit_marginals(draws, np.array([1]), 3)
    points = np.zeros((len(PLACES), 3))
    points[:, 1] = PLACES
    images = found.push(points)
    expected = np.log(stats.halfnorm.isf(stats.norm.sf(PLACES)))
    assert np.all(np.abs(images[:, 1] - expected) < 0.85)
    inside = np.abs(PLACES) <= 2
    assert np.all(np.abs(images[inside, 1] - expected[inside]) < 0.2)
    np.testing.assert_array_equal(images[:, [0, 2]], 0)


@pytest.mark.parametrize(
    "draws",
    [
        np.random.default_rng(0).standard_normal((MANY_DRAWS, 1)),  # normal already
        np.zeros((MANY_DRAWS, 1)),  # a sampler that says nothing
        np.full((MANY_DRAWS, 1), -np.inf),  # rounded to zero
        100 * np.random.default_rng(0).standard_cauchy((MANY_DRAWS, 1)),  # meant to say nothing
    ],
)
def test_other_latents_stay_as_they_are(draws):
    assert fit_marginals(draws, np.array([0]), 1) is None


def groups(y=None):
    """The scale of effects, of which three rows of much noise tell next to nothing."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", 3):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(scale * effect, 30.0), obs=y)


def test_where_data_say_little_a_guide_starts_with_the_tails_of_the_prior():
    guide = AutoImplicit(groups, hidden_dims=(4,))
    svi = SVI(groups, guide, Adam(1e-2), ImplicitELBO())
    params = svi.get_params(first_state(svi, jnp.array([0.1, -0.3, 0.2])))
    draws = guide.sample_posterior(random.key(0), params, sample_shape=(4000,))["scale"]
    found, prior = np.log(draws), np.log(stats.halfnorm.rvs(size=100_000, random_state=0))
    # The kurtosis of the log of a half normal is 7; so a log sd has an error of √(1.5/4000) = .02.
    assert abs(np.log(np.std(found) / np.std(prior))) < 0.08
    low, expected = (np.quantile(a, 0.01) for a in (found, prior))
    # The density at the 1 % quantile is .01 for each unit: an error of √(.01/4000)/.01 = .16.
    assert abs(low - expected) < 0.5


def test_many_draws_are_those_of_the_same_latents():
    latents = {"scale": jnp.zeros(()), "effect": jnp.zeros(3)}
    drawn = draw_prior(groups, (np.zeros(3),), {}, latents, ("scale",))
    assert drawn.many.shape == (MANY_DRAWS, 1)
    np.testing.assert_array_equal(drawn.columns, [0])
    # Each log sd has an error below .02 and .16.
    assert abs(np.std(drawn.many[:, 0]) / 1.11 - 1) < 0.08
    assert np.std(drawn.few[:, 0]) == pytest.approx(1.11, rel=0.65)
