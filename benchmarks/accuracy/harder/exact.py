"""Exact draws of linear regressions with unknown noise, whatever the prior of the noise."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random

__all__ = ["linear_regression"]

_GRID = 20_001
_HALF_WIDTH = 3.0  # of the grid, in logarithms of the noise around its estimate


def linear_regression(
    x: Array, y: Array, prior_sd: np.ndarray | None, noise: dist.Distribution
) -> Callable[[Array, int], Array]:
    """A sampler of weights and the logarithm of the noise's scale.

    Given the noise, the weights are independent Gaussians along the singular vectors of the
    predictors. The noise has a density in one dimension, which is inverted on a grid.

    Args:
        x: predictors, (n, k).
        y: response, (n,).
        prior_sd: standard deviations of the weights' Gaussian prior with mean 0, (k,); None for
            the flat prior.
        noise: prior of the noise's standard deviation.

    Returns:
        ``(key, num_draws) -> (num_draws, k + 1)``, weights first.
    """
    # In float64 with the rounded data of the model, since predictors in raw units are collinear.
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    units = 1 / x.std(0).clip(1e-3) if prior_sd is None else prior_sd
    left, lengths, right = np.linalg.svd(x * units, full_matrices=False)
    prior = 0.0 if prior_sd is None else 1.0  # precision in these coordinates
    projected = lengths * (left.T @ y)
    residual = y - left @ (left.T @ y)
    log_estimate = 0.5 * np.log(residual @ residual / len(y))
    grid = log_estimate + np.linspace(-_HALF_WIDTH, _HALF_WIDTH, _GRID)
    variance = np.exp(2 * grid)[:, None]
    precision = lengths**2 / variance + prior
    fitted = (projected / variance) ** 2 / precision
    log_prior = np.asarray(noise.log_prob(jnp.exp(jnp.asarray(grid))), np.float64) + grid
    log_density = (
        log_prior - len(y) * grid - 0.5 * np.log(precision).sum(1)
        - 0.5 * ((y @ y) / variance[:, 0] - fitted.sum(1))
    )  # fmt: skip
    density = np.exp(log_density - log_density.max())
    cumulative = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])

    def exact(key: Array, num_draws: int) -> Array:
        level_key, noise_key = random.split(key)
        levels = np.asarray(random.uniform(level_key, (num_draws,)), np.float64)
        log_scale = np.interp(levels, cumulative / cumulative[-1], grid)
        variance = np.exp(2 * log_scale)[:, None]
        precision = lengths**2 / variance + prior
        z = np.asarray(random.normal(noise_key, (num_draws, x.shape[1])), np.float64)
        along = projected / variance / precision + z / np.sqrt(precision)
        weights = along @ right * units
        return jnp.asarray(np.column_stack([weights, log_scale]), jnp.float32)

    return exact
