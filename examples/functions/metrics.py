"""Quality of predictions that are given as random functions and a noise level."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm

from examples.functions.data import Split
from examples.functions.fit import Fitted

# Factor on test inputs that moves them out of the distribution.
FAR = 3.0
LEVELS = np.linspace(0.05, 0.95, 19)

COLUMNS = ("rmse", "log_likelihood", "calibration_error", "entropy_rise", "seconds")


def log_likelihood(draws: Array, noise: float, y: Array) -> Array:
    """Log density of targets (m,) under the mixture over functions (S, m)."""
    each = norm.logpdf(y, draws, noise)
    return logsumexp(each, axis=0) - jnp.log(len(draws))


def calibration_error(draws: Array, noise: float, y: Array) -> float:
    """Mean distance between the fraction of targets below a predicted quantile and its level."""
    ranks = np.asarray(jnp.mean(norm.cdf(y, draws, noise), axis=0))
    return float(np.mean([abs(np.mean(ranks <= level) - level) for level in LEVELS]))


def entropy(draws: Array, noise: float) -> float:
    """Mean entropy, in nats, of Gaussians with the variances of the predictions."""
    variance = jnp.var(draws, axis=0) + noise**2
    return float(jnp.mean(0.5 * jnp.log(2 * jnp.pi * jnp.e * variance)))


def measure_fit(fitted: Fitted, data: Split) -> dict[str, Any]:
    """The columns of the table; error and likelihood in the units of the target."""
    draws = fitted.draw(jnp.asarray(data.x_test))
    y = jnp.asarray(data.y_test)
    far = fitted.draw(jnp.asarray(FAR * data.x_test))
    error = jnp.sqrt(jnp.mean((jnp.mean(draws, axis=0) - y) ** 2))
    likelihood = jnp.mean(log_likelihood(draws, fitted.noise, y)) - np.log(data.unit)
    found = (
        float(error) * data.unit,
        float(likelihood),
        calibration_error(draws, fitted.noise, y),
        entropy(far, fitted.noise) - entropy(draws, fitted.noise),
        fitted.seconds,
    )
    return dict(zip(COLUMNS, found, strict=True))
