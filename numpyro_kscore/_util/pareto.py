"""Importance weights: Pareto smoothing, effective number of draws, resampling.

The weights of a guide q against a posterior p are ``w = p/q``. The shape k of the generalized
Pareto distribution of the largest of them says whether q can stand for p (Vehtari, Simpson, Gelman,
Yao and Gabry 2024; Yao, Vehtari, Simpson and Gelman 2018): below 0.7 averages under q can be
corrected by the weights, above they cannot. It does not depend on the normalizing constants of p
and q. The smoothing itself is ArviZ's.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_kscore._util.checks import check_count
from numpyro_kscore._util.keys import check_key, host_generator

GOOD_KHAT = 0.7
# Log weights with a smaller range count as equal: there is no tail to fit.
CONSTANT = 1e-2
# Variation below which weights do not matter, whatever their shape. By Cauchy and Schwarz they
# change no average by more than .15 sd: what `diagnose` calls good (a variance changes by .15 √2 of
# itself at most where tails are Gaussian, an sd by 10 %).
SMALLEST_VARIATION = 0.15
# Least logarithm of the edge of a tail, relative to the largest weight.
LOWEST = math.log(np.finfo(float).tiny)
# Fewer numbers have no shape.
LEAST_TAIL = 5
# Constants of the fit: Zhang and Stephens' multiple of the first quartile; the shape that is
# expected, and the number of draws that this counts for.
PRIOR_QUARTILES, PRIOR_SHAPE, PRIOR_COUNT = 3.0, 0.5, 10


def pareto_smooth(log_weights: Any) -> tuple[np.ndarray, float]:
    """Pareto-smoothed log weights, normalized, and k̂.

    The largest ``min(n/5, 3 √n)`` weights are replaced by quantiles of the generalized Pareto
    distribution that is fitted to them, and cut at the largest raw weight.

    Args:
        log_weights: (n,), n at least 25, finite, up to a constant.

    Returns:
        Log weights whose exponentials sum to 1, (n,), and k̂; ``-inf`` for equal weights.

    Raises:
        ValueError: for another shape, or numbers that are not finite.

    Source: Vehtari, Simpson, Gelman, Yao and Gabry 2024.

    Example::

        from numpyro_kscore.diagnostics import pareto_smooth

        log_weights, k = pareto_smooth(0.5 * samples[:, 0])
        log_weights  # (200,)
        k < 0.7  # True
    """
    values = np.asarray(log_weights, np.float64)
    if values.ndim != 1 or values.shape[0] < 25 or not np.all(np.isfinite(values)):
        raise ValueError(
            f"log_weights: expected at least 25 finite numbers of shape (n,); got shape "
            f"{values.shape}, {int(np.sum(~np.isfinite(values)))} of them not finite"
        )
    values = values - np.max(values)
    if np.ptp(values) < CONSTANT:
        return values - np.log(np.sum(np.exp(values))), -np.inf
    n = len(values)
    order = np.argsort(values)
    count = math.ceil(min(0.2 * n, 3 * n**0.5))
    # Exponentials of numbers far below zero are rounded.
    edge = max(values[order[n - count - 1]], LOWEST)
    largest = order[n - count :][values[order[n - count :]] > edge]
    shape, scale = fit_tail(np.exp(values[largest]) - np.exp(edge))
    if np.isfinite(shape):
        levels = (np.arange(len(largest)) + 0.5) / len(largest)
        # Quantiles of a huge shape overflow; they are cut at the largest raw weight in any case.
        with np.errstate(over="ignore"):
            quantiles = np.exp(edge) + scale * np.expm1(-shape * np.log1p(-levels)) / shape
        values[largest] = np.minimum(np.log(quantiles), 0.0)
    return values - np.logaddexp.reduce(values), shape


def fit_tail(excess: np.ndarray) -> tuple[float, float]:
    """Shape and scale of a generalized Pareto distribution, fitted to numbers above zero, (m,).

    The estimate is a mean over a grid, weighted by the profile likelihood (Zhang and Stephens
    2009). The shape is drawn towards 1/2 as if by ten more numbers, which keeps it from varying
    where there are few (Vehtari et al. 2024). It is infinite for fewer than five numbers.
    """
    m = len(excess)
    if m < LEAST_TAIL:
        return np.inf, np.nan
    ordered = np.sort(excess)
    size = 30 + int(m**0.5)
    quartile = ordered[int(m / 4 + 0.5) - 1]
    grid = 1 - (size / (np.arange(size) + 0.5)) ** 0.5
    grid = grid / (PRIOR_QUARTILES * quartile) + 1 / ordered[-1]
    # The likelihood of numbers that differ by rounding alone has no maximum.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        shapes = np.mean(np.log1p(-grid[:, None] * ordered), axis=1)
        profile = m * (np.log(-grid / shapes) - shapes - 1)
        weights = np.exp(profile - np.max(profile))
        rate = np.sum(grid * weights) / np.sum(weights)
        shape = float(np.mean(np.log1p(-rate * ordered)))
        scale = -shape / rate
    if not np.isfinite(scale):
        return np.inf, np.nan
    return (shape * m + PRIOR_SHAPE * PRIOR_COUNT) / (m + PRIOR_COUNT), float(scale)


def weight_ess(log_weights: Any) -> float:
    """Effective number of weighted draws, ``(Σw)²/Σw²`` (Kong 1992).

    Args:
        log_weights: logarithms of weights, (n,), finite or -inf, up to a constant.

    Returns:
        A number from 1 to n; 0 if all are -inf, where no draw has any weight.

    Raises:
        ValueError: for another shape, no weights, NaN or infinity.

    Example::

        from numpyro_kscore.diagnostics import weight_ess

        weight_ess(jnp.zeros(100))  # 100.0: of equal weights
        weight_ess(2.0 * samples[:, 0]) < 100  # True
    """
    values = np.asarray(log_weights, np.float64)
    if values.ndim != 1 or not values.size or np.any(np.isnan(values) | (values == np.inf)):
        raise ValueError(
            f"log_weights: expected numbers or -inf, of shape (n,); got shape {values.shape}, "
            f"{int(np.sum(np.isnan(values) | (values == np.inf)))} of them NaN or infinity. Leave "
            "out the draws that have none"
        )
    largest = np.max(values)
    if largest == -np.inf:
        return 0.0
    weights = np.exp(values - largest)
    return float(np.sum(weights) ** 2 / np.sum(weights**2))


def weight_variation(log_weights: np.ndarray, log_shares: Any = 0.0) -> float:
    """The standard deviation of weights (n,) over their mean.

    Where draws are not all of the guide itself, its own shares in what they are from, of which the
    logarithms are given, are the weights of a guide that is the model. What counts then is how far
    weights are from these.
    """
    n = len(log_weights)
    shares = np.exp(np.broadcast_to(log_shares, n).astype(np.float64))
    weights = np.exp(log_weights - np.max(log_weights))
    difference = weights / np.mean(weights) - shares / np.mean(shares)
    return float(np.mean(difference**2) ** 0.5)


def are_reliable(khat: float, variation: float) -> bool:
    """Whether weights can be averaged: k̂ is below 0.7, or they are nearly equal."""
    return khat < GOOD_KHAT or are_nearly_equal(variation)


def are_nearly_equal(variation: float) -> bool:
    """Whether weights vary too little to matter."""
    return variation < SMALLEST_VARIATION


def importance_resample(
    rng_key: Array, values: Any, log_weights: Any, num_samples: int | None = None
) -> Any:
    """Resample draws of a guide by Pareto-smoothed weights, to make draws of the posterior.

    Meant for k̂ below 0.7. Draws are taken with replacement, by systematic resampling, which adds
    little noise; with effective number m, a draw that is kept occurs about n/m times.

    Args:
        rng_key: random key.
        values: an array or pytree of arrays with leading axis n.
        log_weights: (n,), from :func:`~numpyro_kscore.khat`.
        num_samples: number of draws to return; by default n.

    Returns:
        The same tree, with leading axis ``num_samples``.

    Raises:
        TypeError: for a count that is not an integer, or a key that is none.
        ValueError: for weights of another length, fewer than 25, or not finite.

    Example::

        from numpyro_kscore.diagnostics import importance_resample

        log_weights = 0.5 * samples[:, 0]  # shifts the first mean by 0.5
        moved = importance_resample(random.key(1), samples, log_weights)
        moved  # (200, 2)
        jnp.mean(moved[:, 0] - samples[:, 0]) > 0.3  # True
    """
    check_key("rng_key", rng_key, "the values")
    weights = np.exp(pareto_smooth(log_weights)[0])
    n = weights.shape[0]
    for leaf in jax.tree.leaves(values):
        if jnp.shape(leaf)[:1] != (n,):
            raise ValueError(
                f"values: expected {n} draws along the first axis, one for each weight; got shape "
                f"{jnp.shape(leaf)}"
            )
    count = n if num_samples is None else num_samples
    check_count("num_samples", count)
    generator = host_generator(rng_key)
    levels = (np.arange(count) + generator.uniform()) / count
    rows = np.minimum(np.searchsorted(np.cumsum(weights) / np.sum(weights), levels), n - 1)
    # Shuffled: neighbors would be copies of each other.
    rows = generator.permutation(rows)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], values)
