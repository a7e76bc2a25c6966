"""Posteriors with several modes: symmetric ones that labels explain, and unequal ones."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from benchmarks.accuracy.posterior import Posterior
from benchmarks.accuracy.targets import Draws, Target

__all__ = ["symmetric_mixture", "unequal_modes"]


def _without_labels(draws: Draws) -> Array:
    """Components in the order of their means: two means, two log scales, log odds, (n, 5)."""
    order = jnp.argsort(draws["means"], axis=-1)
    means, scales, weights = (
        jnp.take_along_axis(draws[name], order, axis=-1) for name in ("means", "scales", "weights")
    )
    log_odds = jnp.log(weights[:, :1]) - jnp.log(weights[:, 1:])
    return jnp.concatenate([means, jnp.log(scales), log_odds], axis=1)


def symmetric_mixture() -> Posterior:
    """Two Gaussian components of 250 numbers whose labels may be exchanged: d = 5."""
    rng = np.random.default_rng(401)
    values = np.concatenate([rng.normal(-2, 1, 150), rng.normal(2, 0.7, 100)])

    def model(values: Array) -> None:
        weights = numpyro.sample("weights", dist.Dirichlet(np.ones(2)))
        means = numpyro.sample("means", dist.Normal(0, 5).expand([2]).to_event(1))
        scales = numpyro.sample("scales", dist.HalfNormal(2).expand([2]).to_event(1))
        components = dist.Normal(means, scales)
        mixture = dist.MixtureSameFamily(dist.Categorical(weights), components)
        numpyro.sample("values", mixture, obs=values)

    # A guide on one of the two modes has the whole answer, and so has a chain of NUTS.
    target = Target("symmetric_mixture", model, (jnp.asarray(np.round(values, 2), jnp.float32),))
    return Posterior(target, _without_labels, float64=True)


def unequal_modes() -> Posterior:
    """Three quarters and one quarter of two Gaussians six deviations apart: d = 6."""
    rng = np.random.default_rng(402)
    factors = np.stack([np.eye(6), np.tril(0.3 * rng.normal(size=(6, 6)), -1) + 0.7 * np.eye(6)])
    means = np.zeros((2, 6))
    means[1, :2] = [4.5, 4.0]
    components = dist.MultivariateNormal(
        jnp.asarray(means, jnp.float32), scale_tril=jnp.asarray(factors, jnp.float32)
    )
    weights = dist.Categorical(jnp.array([0.75, 0.25]))
    distribution = dist.MixtureSameFamily(weights, components)

    def model() -> None:
        numpyro.sample("x", distribution)

    return Posterior(
        Target("unequal_modes", model, exact=lambda key, n: distribution.sample(key, (n,)))
    )
