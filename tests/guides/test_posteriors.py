"""Posteriors in closed form, found by hand-written guides and by ``AutoImplicit``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import SVI

from numpyro_kscore import AutoImplicit, Implicit, ImplicitELBO
from support.compiling import quick_jit

KEY = random.key(0)

REGRESSORS = np.array([[1.0, 0.2], [1.0, 0.9], [1.0, 1.4], [1.0, 2.5]])
RESPONSES = np.array([0.3, 1.4, 1.1, 2.6])
PRECISION = REGRESSORS.T @ REGRESSORS / 0.25 + np.eye(2) / 4.0
COVARIANCE = np.linalg.inv(PRECISION)
MEAN = COVARIANCE @ REGRESSORS.T @ RESPONSES / 0.25


def draw_noise(dim, name="noise"):
    return numpyro.sample(
        name, dist.Normal(jnp.zeros(dim), 1.0).to_event(1), infer={"is_auxiliary": True}
    )


def regression(name):
    """Intercept and slope, strongly correlated since the regressors are not centered."""
    weights = numpyro.sample(name, dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    mean = REGRESSORS @ weights
    numpyro.sample(f"{name} data", dist.Normal(mean, 0.5).to_event(1), obs=RESPONSES)


def fit(model, guide, elbo, steps=1000):
    """Parameters after a run with decaying steps, so that the last ones hardly move."""
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-2, steps))
    svi = SVI(model, guide, optimizer, elbo)
    return svi.run(KEY, steps, progress_bar=False).params


def regressions():
    for name in ("implicit", "explicit"):
        regression(name)


def implicit_guide():
    """A network of the user's own."""
    first = numpyro.param("first", lambda key: 0.5 * random.normal(key, (3, 20)))
    second = numpyro.param("second", lambda key: 0.1 * random.normal(key, (20, 2)))
    mixing = numpyro.param("mixing", lambda key: 0.3 * random.normal(key, (3, 2)))
    noise = draw_noise(3)
    output = jnp.tanh(noise @ first) @ second
    numpyro.sample(
        "implicit", Implicit(numpyro.param("a", jnp.zeros(2)) + noise @ mixing + output, 1)
    )


def semi_implicit_guide():
    """A Normal given noise, whose marginal has no density in closed form."""
    mixing = numpyro.param("more mixing", lambda key: 0.3 * random.normal(key, (2, 2)))
    loc = numpyro.param("b", jnp.zeros(2)) + draw_noise(2, "more noise") @ mixing
    sd = numpyro.param("sd", jnp.full(2, 0.3), constraint=constraints.positive)
    numpyro.sample("semi-implicit", dist.Normal(loc, sd).to_event(1))


def hand_written_guide():
    """One kind of hand-written guide for each copy of the regression."""
    implicit_guide()
    # Independent Normals.
    loc = numpyro.param("loc", jnp.zeros(2))
    scale = numpyro.param("scale", jnp.full(2, 0.3), constraint=constraints.positive)
    numpyro.sample("explicit", dist.Normal(loc, scale).to_event(1))


# Tolerance of a fit's mean and sd, in posterior standard deviations. 4000 draws scatter a mean by
# .016 and an sd by .011; the last steps add noise, and with 64 particles the sd is 2-4 % too small.
# Over three seeds the means of all sites were within .065 and the sds within .06.
MEAN_TOLERANCE, SD_TOLERANCE = 0.12, 0.10


def check_regression(draws):
    sd = np.sqrt(np.diag(COVARIANCE))
    assert np.all(np.abs(draws.mean(0) - MEAN) / sd < MEAN_TOLERANCE)
    assert np.all(np.abs(draws.std(0) / sd - 1) < SD_TOLERANCE)
    correlation = np.corrcoef(draws.T)[0, 1]
    # 4000 draws scatter a correlation of -.82 by .005; over five keys and three fits it was within
    # .016.
    assert abs(correlation - COVARIANCE[0, 1] / np.prod(sd)) < 0.04


def draws_of(guide, params, site):
    def one(key):
        seeded = handlers.seed(handlers.substitute(guide, data=params), key)
        return handlers.trace(seeded).get_trace()[site]["value"]

    return np.asarray(quick_jit(jax.vmap(one))(random.split(random.key(2), 4000)))


@pytest.fixture(scope="session")
def hand_written_fit():
    params = fit(regressions, hand_written_guide, ImplicitELBO(64))
    return params, draws_of(hand_written_guide, params, "implicit")


def test_a_hand_written_guide_finds_a_gaussian_posterior(hand_written_fit):
    check_regression(hand_written_fit[1])


@pytest.mark.slow
def test_a_semi_implicit_guide_finds_a_gaussian_posterior():
    model = functools.partial(regression, "semi-implicit")
    params = fit(model, semi_implicit_guide, ImplicitELBO(64))
    check_regression(draws_of(semi_implicit_guide, params, "semi-implicit"))


def test_explicit_guide_finds_the_mean_field_optimum(hand_written_fit):
    params, _ = hand_written_fit
    # The best independent Gaussian: the posterior's mean, and its conditional deviations.
    conditional_sd = 1 / np.sqrt(np.diag(PRECISION))
    assert np.all(np.abs(params["loc"] - MEAN) / conditional_sd < MEAN_TOLERANCE)
    assert np.all(np.abs(params["scale"] / conditional_sd - 1) < SD_TOLERANCE)


VOTES = jnp.array([5.0, 3.0, 9.0])


def conjugate_model():
    """Independent blocks with closed-form posteriors, one kind of support each."""
    # Likelihoods by their sufficient statistics: 14 of 20, a total of 11 in 3 days, 17 votes.
    chance = numpyro.sample("chance", dist.Beta(2.0, 3.0))
    numpyro.factor("successes", 14.0 * jnp.log(chance) + 6.0 * jnp.log1p(-chance))
    rate = numpyro.sample("rate", dist.Gamma(3.0, 1.0))
    numpyro.factor("counts", 11.0 * jnp.log(rate) - 3.0 * rate)
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))
    numpyro.factor("votes", jnp.sum(VOTES * jnp.log(shares)))
    # The support of one site is the value of another.
    width = numpyro.sample("width", dist.Gamma(4.0, 1.0))
    numpyro.sample("place", dist.Uniform(0.0, width))
    level = numpyro.sample("level", dist.Uniform(-1.0, 3.0))
    numpyro.sample("reading", dist.Normal(level, 0.7), obs=1.5)
    regression("weights")


def conjugate_moments():
    """Mean and sd of every coordinate under the exact posterior."""
    alpha = np.array([6.0, 5.0, 12.0])
    share = alpha / alpha.sum()
    level = dist.TruncatedNormal(1.5, 0.7, low=-1.0, high=3.0)
    moments = {
        "chance": (16 / 25, np.sqrt(16 * 9 / (25**2 * 26))),
        "rate": (14 / 4, np.sqrt(14) / 4),
        "shares": (share, np.sqrt(share * (1 - share) / (alpha.sum() + 1))),
        "width": (4.0, 2.0),
        # E[place | width] = width / 2 and E[place² | width] = width² / 3, with E width² = 20.
        "place": (2.0, np.sqrt(20 / 3 - 4)),
        "level": (float(level.mean), float(np.sqrt(level.variance))),
    }
    return {name: (np.asarray(mean), np.asarray(sd)) for name, (mean, sd) in moments.items()}


@pytest.fixture(scope="session")
def conjugate_draws():
    guide = AutoImplicit(conjugate_model, hidden_dims=(32, 32))
    params = fit(conjugate_model, guide, ImplicitELBO(64))
    return guide.sample_posterior(random.key(2), params, sample_shape=(4000,))


@pytest.mark.slow
@pytest.mark.parametrize("site", ["chance", "rate", "shares", "width", "place", "level"])
def test_conjugate_posteriors(conjugate_draws, site):
    mean, sd = conjugate_moments()[site]
    draws = np.asarray(conjugate_draws[site])
    assert np.all(np.abs(draws.mean(0) - mean) / sd < MEAN_TOLERANCE)
    assert np.all(np.abs(draws.std(0) / sd - 1) < SD_TOLERANCE)


@pytest.mark.slow
def test_correlated_posterior(conjugate_draws):
    check_regression(np.asarray(conjugate_draws["weights"]))


@pytest.mark.slow
def test_draws_lie_in_the_support(conjugate_draws):
    draws = {name: np.asarray(value) for name, value in conjugate_draws.items()}
    assert np.all((draws["chance"] > 0) & (draws["chance"] < 1))
    assert np.all(draws["rate"] > 0)
    np.testing.assert_allclose(draws["shares"].sum(-1), 1.0, rtol=1e-5)
    assert np.all((draws["place"] > 0) & (draws["place"] < draws["width"]))
    assert np.all((draws["level"] > -1) & (draws["level"] < 3))


@pytest.mark.slow
def test_independent_blocks_come_out_uncorrelated(conjugate_draws):
    names = ["chance", "rate", "level", "width"]
    correlation = np.corrcoef([np.asarray(conjugate_draws[name]) for name in names])
    # 4000 draws scatter a correlation by .016; over five keys the largest of six was .02 to .04.
    assert np.all(np.abs(correlation - np.eye(4)) < 0.1)
