"""Priors of functions that can only be drawn: sampled anew at every step, or learned."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.stats import multivariate_normal
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_kscore import ScoreEstimator
from numpyro_kscore.functions import learn_prior, measure, sampled_prior
from numpyro_kscore.regularizers import NuMethod
from support.compiling import quick_jit
from support.linear_functions import JITTER, NOISE, X, Y, features


def sample_function(key, points):
    return features(points) @ random.normal(key, (4,))


# --------------------------------------------------------------------------------- sampled priors


@pytest.mark.slow
def test_score_of_a_sampled_prior_is_near_the_exact_one():
    """Draws from a Gaussian process, used as any draws; the gradient of a whole model is known."""
    points = X[:5]
    covariance = np.asarray(features(points) @ features(points).T, float) + JITTER**2 * np.eye(5)
    test = np.random.default_rng(0).multivariate_normal(np.zeros(5), covariance, 200)
    exact = -np.linalg.solve(covariance, test.T).T
    estimator = ScoreEstimator(regularizer=NuMethod(5))

    def some_model():
        at = measure(points)
        p = sampled_prior(sample_function, at.points, 400, jitter=JITTER, estimator=estimator)
        f = numpyro.sample("f", p)
        numpyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=Y[:5])

    seeded = handlers.seed(some_model, random.key(1))
    gradient = quick_jit(jax.vmap(jax.grad(lambda f: log_density(seeded, (), {}, {"f": f})[0])))
    found = np.asarray(gradient(test.astype(np.float32)))
    found = found - (np.asarray(Y[:5]) - test) / NOISE**2
    # The inverse covariance of n draws in d dimensions is off by about (d + 1)/n = .015.
    assert np.sum((found - exact) ** 2) < 3 * 0.015 * np.sum(exact**2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_draws": 1}, "num_draws: expected an integer of at least 2; got 1"),
        ({"jitter": 0.0}, "jitter: expected a positive finite number; got 0.0"),
        ({"sampler": lambda key, x: x}, r"sampler: expected values of shape \(6,\).*got \(6, 1\)"),
    ],
)
def test_sampled_prior_errors(arguments, message):
    given = {"sampler": sample_function, "points": X, "jitter": 0.1} | arguments
    with pytest.raises(ValueError, match=message), handlers.seed(rng_seed=0):
        sampled_prior(**given)


# --------------------------------------------------------------------------------- learned priors

EVEN = np.linspace(-0.8, 0.8, 5)[:, None]
STEP_JITTER = 0.2


def one_step(key, points):
    """One jump anywhere between -1 and 1, standard normal levels."""
    place_key, level_key = random.split(key)
    place = random.uniform(place_key, minval=-1.0, maxval=1.0)
    return jnp.where(points[:, 0] < place, *random.normal(level_key, (2,)))


def covariances_of_one_step():
    """Covariances of the values given the gap that the jump is in, and the gaps' probabilities."""
    left = np.arange(5) < np.arange(6)[:, None]
    same = (left[:, :, None] == left[:, None]).astype(float)
    gaps = np.diff(np.concatenate([[-1.0], EVEN[:, 0], [1.0]])) / 2
    return same + STEP_JITTER**2 * np.eye(5), gaps


def log_density_of_one_step(f):
    covariances, gaps = covariances_of_one_step()
    each = jax.vmap(lambda c: multivariate_normal.logpdf(f, jnp.zeros(5), c))(covariances)
    return jax.nn.logsumexp(each + jnp.log(gaps))


@pytest.mark.thorough
def test_learned_prior_of_steps():
    """Far better than the Gaussian of the same covariance, which has no jumps."""
    small = {"hidden_dims": (32, 32), "num_steps": 600, "batch_size": 128}
    learn = partial(learn_prior, sampler=one_step, points=EVEN, jitter=STEP_JITTER, **small)
    prior = quick_jit(learn)(random.key(0))
    draws = quick_jit(lambda prior: prior.sample(random.key(1), (2, 500)))(prior)
    assert draws.shape == (2, 500, 5)
    with jax.enable_x64(True):
        wide = jax.eval_shape(learn, random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(wide.layers)} == {jnp.dtype("float64")}
    test = draws.reshape(-1, 5)

    # The exact covariance, by the formula and in the prior.
    covariances, gaps = covariances_of_one_step()
    covariance = np.tensordot(gaps, covariances, 1)
    # Six Monte-Carlo errors of a variance; every single value is Gaussian.
    most = 6 * (2 / 1000) ** 0.5 * covariance.diagonal().max()
    np.testing.assert_allclose(np.cov(test.T), covariance, atol=most)
    np.testing.assert_allclose(prior.variance, np.diag(covariance), atol=most / 10**0.5)

    exact = quick_jit(jax.vmap(jax.grad(log_density_of_one_step)))(test)

    # Passed as an argument: a prior is a pytree.
    @quick_jit
    def together(prior, f):
        return prior.log_prob(f), jax.vmap(jax.grad(prior.log_prob))(f.reshape(-1, 5))

    densities, scores = together(prior, draws)
    assert densities.shape == (2, 500)
    np.testing.assert_allclose(densities[1, 2], prior.log_prob(draws[1, 2]), rtol=1e-5)
    # Rounding of 6e-8, a few times over, times the condition of the covariance, 23.
    gaussian = -(test - prior.mean) @ np.linalg.inv(prior.root @ prior.root)
    np.testing.assert_allclose(prior.inverse_root @ prior.root, np.eye(5), atol=1e-5)
    off = float(jnp.sum((gaussian - exact) ** 2) / jnp.sum(exact**2))
    learned = float(jnp.sum((scores - exact) ** 2) / jnp.sum(exact**2))
    assert learned < 0.2 * off

    # The held-out loss is the exact score's loss plus the error, both in units of 1/σ². The mean of
    # 4000 × 5 squares has a standard error of 1 %; the tolerance is four of them.
    least = 1 - STEP_JITTER**2 * float(jnp.mean(exact**2))
    error = STEP_JITTER**2 * float(jnp.mean(exact**2))
    assert abs(prior.info.gaussian - (least + error * off)) < 0.04
    assert abs(prior.info.held_out - (least + error * learned)) < 0.04
    assert prior.info.losses.shape == (600,)
    prior.info.raise_if_failed()
    with pytest.raises(FloatingPointError, match="learn_prior: expected finite losses"):
        prior.info._replace(held_out=jnp.nan).raise_if_failed()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"jitter": 0.0}, ValueError, "jitter: expected a positive finite number; got 0.0"),
        ({"points": 1.0}, ValueError, r"points: expected shape \(m, ...\).*got \(\)"),
        ({"hidden_dims": ()}, TypeError, r"hidden_dims: expected a tuple.*got \(\)"),
        ({"num_steps": 0}, ValueError, "num_steps: expected an integer of at least 1; got 0"),
        ({"batch_size": 2.0}, TypeError, "batch_size: expected an integer; got 2.0"),
        (
            {"sampler": lambda key, x: x},
            ValueError,
            r"sampler: expected values of shape \(6,\).*got \(6, 1\)",
        ),
    ],
)
def test_learned_prior_errors(arguments, error, message):
    given = {"key": random.key(0), "sampler": sample_function, "points": X, "jitter": 0.1}
    with pytest.raises(error, match=message):
        learn_prior(**given | arguments)
