"""Functions of standard normal numbers that latents are by their prior, from draws of it."""

from __future__ import annotations

import numpy as np

from numpyro_kscore._transports.stretch import KNOTS, Marginals, stretched, unchanged

# Standard deviations at which quantiles are taken, and those that tell a width.
PLACES, INNER = 0.2 * np.arange(-17, 18), [12, 22]
# Distance of a quantile from that of a normal distribution, in widths, that counts, and where; of
# 16384 draws the outermost one there has an error of a fifth of it.
SKEWED, SEEN = 0.2, np.abs(PLACES) <= 2.6
# Beyond this width a prior is meant to say nothing, and its quantiles are rounding errors.
WIDEST = 20.0
# Errors of quantiles besides those of draws, second differences of slopes that cost as much as one
# error, and least slopes, in widths.
ERROR, ROUGH, LEAST_SLOPE = 0.01, 0.1, 0.02


def fit_marginals(draws: np.ndarray, columns: np.ndarray, dim: int) -> Marginals | None:
    """The functions for some of d latents, by draws (n, c) of them; None if all are normal.

    ``columns`` are the places of the c latents.
    """
    found = unchanged(dim)
    for draw, column in zip(draws.T, columns, strict=True):
        one = _function(draw)
        if one is not None:
            found.shift[column], found.slopes[column] = one
    return found if np.any(found.vary) else None


def _function(draws: np.ndarray) -> tuple[float, np.ndarray] | None:
    """The image of 0 and the slopes for one latent; None if it is normal, or not known.

    Quantiles are linear in both; they count by their errors, and slopes are smooth.
    """
    from scipy.special import ndtr

    if not np.all(np.isfinite(draws)):
        return None
    below = ndtr(PLACES)
    quantiles = np.quantile(draws, below)
    low, high = quantiles[INNER]
    width = (high - low) / 2
    if not np.all(np.diff(quantiles) > 0) or not width < WIDEST:
        return None
    shape = (quantiles - np.median(draws)) / width
    if np.max(np.abs(shape - PLACES)[SEEN]) < SKEWED:
        return None
    density = np.exp(-0.5 * PLACES**2) / np.sqrt(2 * np.pi) / np.gradient(shape, PLACES)
    errors = np.hypot(np.sqrt(below * (1 - below) / len(draws)) / density, ERROR)
    count = len(KNOTS) + 1
    columns = np.column_stack([np.ones_like(PLACES), stretched(PLACES[:, None], np.eye(count))])
    rough = np.diff(np.eye(count + 1)[1:], 2, axis=0) / ROUGH
    left = np.concatenate([columns / errors[:, None], rough])
    right = np.concatenate([shape / errors, np.zeros(len(rough))])
    shift, *slopes = np.linalg.lstsq(left, right, rcond=None)[0]
    slopes = width * np.maximum(slopes, LEAST_SLOPE)
    return float(np.median(draws) + width * shift), slopes
