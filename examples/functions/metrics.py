"""Quality of predictions that are given as random functions and a noise level."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.special import logsumexp

from examples.functions.data import Split
from examples.functions.fit import Fitted

# Factor on test inputs that moves them out of the distribution.
FAR = 3.0
LEVELS = np.linspace(0.05, 0.95, 19)

COLUMNS = ("rmse", "log_likelihood", "crps", "calibration_error", "entropy_rise", "seconds")


def log_likelihood(draws: Array, noise: dist.Distribution, y: Array) -> Array:
    """Log density of targets (m,) under the mixture over functions (S, m)."""
    return logsumexp(noise.log_prob(y - draws), axis=0) - jnp.log(len(draws))


def crps(draws: Array, noise: dist.Distribution, y: Array) -> float:
    """Mean continuous ranked probability score of targets (m,): E|f - y| - E|f - f'|/2."""
    samples = np.sort(draws + noise.sample(random.key(2), draws.shape), axis=0)
    count = len(samples)
    # Sorted, the sum over pairs of |f_i - f_j| is one of f_i times its rank.
    ranks = (2 * np.arange(count) - count + 1)[:, None]
    between = 2 * np.sum(ranks * samples, axis=0) / (count * (count - 1))
    return float(np.mean(np.mean(np.abs(samples - y), axis=0) - between / 2))


def calibration_error(draws: Array, noise: dist.Distribution, y: Array) -> float:
    """Mean distance between the fraction of targets below a predicted quantile and its level."""
    ranks = np.asarray(jnp.mean(noise.cdf(y - draws), axis=0))
    return float(np.mean([abs(np.mean(ranks <= level) - level) for level in LEVELS]))


def entropy(draws: Array, noise: dist.Distribution) -> float:
    """Mean entropy, in nats, of Gaussians with the predictions' variances.

    Noise counts with its scale squared, because the variance of Student noise may be infinite.
    """
    variance = jnp.var(draws, axis=0) + noise.scale**2
    return float(jnp.mean(0.5 * jnp.log(2 * jnp.pi * jnp.e * variance)))


def measure_fit(fitted: Fitted, data: Split) -> dict[str, Any]:
    """The columns of the table; error and likelihood in the units of the target."""
    draws = jnp.asarray(fitted.draw(jnp.asarray(data.x_test)), jnp.float32)
    y = jnp.asarray(data.y_test)
    far = jnp.asarray(fitted.draw(jnp.asarray(FAR * data.x_test)), jnp.float32)
    error = jnp.sqrt(jnp.mean((jnp.mean(draws, axis=0) - y) ** 2))
    likelihood = jnp.mean(log_likelihood(draws, fitted.noise, y)) - np.log(data.unit)
    found = (
        float(error) * data.unit,
        float(likelihood),
        crps(draws, fitted.noise, y) * data.unit,
        calibration_error(draws, fitted.noise, y),
        entropy(far, fitted.noise) - entropy(draws, fitted.noise),
        fitted.seconds,
    )
    return dict(zip(COLUMNS, found, strict=True))
