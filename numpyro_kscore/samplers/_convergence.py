"""Have many short chains settled? Nested R-hat, errors and trends of their moments.

Chains come in superchains that start at the same point and go on independently. What the means of
superchains differ by, more than chains within one do, is what is left of the start and of the Monte
Carlo error: nested R-hat (Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman 2024,
*Nested R-hat: assessing the convergence of Markov chain Monte Carlo when running many short
chains*). What all chains have in common, such as a way they still have to go, it cannot see; the
change from the earlier to the later half of the draws does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Moments", "Scale", "nested_rhat", "scale_of", "summarize"]

# Standardized coordinates are cut off here, which gives averages of heavy tails a finite error.
FARTHEST = 10.0
TINY = 1e-30


class Scale(NamedTuple):
    """Medians and half the ranges of 68 %, (d,) each."""

    center: np.ndarray
    width: np.ndarray

    def standardize(self, x: np.ndarray) -> np.ndarray:
        """Standardized values, cut off at 10."""
        return np.clip((x - self.center) / self.width, -FARTHEST, FARTHEST)


class Moments(NamedTuple):
    """Moments of coordinates by chains, and whether they have settled.

    Attributes:
        mean: (d,).
        sd: standard deviations, (d,).
        rhat: nested R-hat of the value or of its squared deviation, whichever is larger, (d,).
        mean_error: Monte Carlo error of the mean, in standard deviations, (d,).
        sd_error: the same of the standard deviation, relative to it, (d,).
        trend: change of the mean or the mean square from the earlier to the later half of the
            draws, in standard errors, whichever is larger, (d,).
        influence: largest relative change of the standard deviation without one superchain, of
            draws that are not cut off, (d,).
    """

    mean: np.ndarray
    sd: np.ndarray
    rhat: np.ndarray
    mean_error: np.ndarray
    sd_error: np.ndarray
    trend: np.ndarray
    influence: np.ndarray


def scale_of(draws: np.ndarray) -> Scale:
    """Location and width of draws (n, d), by quantiles; width 1 where they do not vary."""
    low, center, high = np.quantile(draws, [0.16, 0.5, 0.84], axis=0)
    width = 0.5 * (high - low)
    return Scale(center, np.where(width > 0, width, 1.0))


def nested_rhat(values: np.ndarray) -> np.ndarray:
    """Nested R-hat of values (superchains, chains of each, draws, ...), with the last axes' shape.

    Needs at least two superchains, and two chains or two draws of each.
    """
    between, within = _variances(values)
    return np.sqrt(1 + between / np.maximum(within, TINY))


def _variances(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variance of the means of superchains, and that within one."""
    _, chains, draws = values.shape[:3]
    of_chains = values.mean(2)
    between = of_chains.mean(1).var(0, ddof=1)
    within = np.zeros_like(between)
    if chains > 1:
        within = within + of_chains.var(1, ddof=1).mean(0)
    if draws > 1:
        within = within + values.var(2, ddof=1).mean((0, 1))
    return between, within


def summarize(draws: np.ndarray, num_superchains: int) -> Moments:
    """Moments of draws (chains, draws, d); consecutive chains belong to a superchain."""
    chains, count, dim = draws.shape
    scale = scale_of(draws.reshape(-1, dim))
    u = scale.standardize(draws).reshape(num_superchains, -1, count, dim)
    mean = u.mean((0, 1, 2))
    square = (u - mean) ** 2
    variance = np.maximum(square.mean((0, 1, 2)), TINY)
    sd = np.sqrt(variance)
    return Moments(
        scale.center + scale.width * mean,
        scale.width * sd,
        np.maximum(nested_rhat(u), nested_rhat(square)),
        _error(u.mean((1, 2))) / sd,
        _error(square.mean((1, 2))) / (2 * variance),
        np.maximum(_trend(u), _trend(square)),
        _influence((draws.reshape(u.shape) - scale.center) / scale.width),
    )


def _influence(values: np.ndarray) -> np.ndarray:
    """Largest relative change of standard deviations without one of the superchains, (d,)."""
    mean, square = values.mean((1, 2)), (values**2).mean((1, 2))
    rest = len(values) - 1
    means, squares = (mean.sum(0) - mean) / rest, (square.sum(0) - square) / rest
    without = np.maximum(squares - means**2, TINY)
    variance = np.maximum(square.mean(0) - mean.mean(0) ** 2, TINY)
    return np.abs(np.sqrt(without / variance) - 1).max(0)


def _error(values: np.ndarray) -> np.ndarray:
    """Standard errors of means over superchains."""
    return values.std(0, ddof=1) / len(values) ** 0.5


def _trend(values: np.ndarray) -> np.ndarray:
    """Change from the earlier to the later half of the draws, in standard errors."""
    half = values.shape[2] // 2
    earlier, later = values[:, :, :half], values[:, :, -half:]
    change = later.mean((1, 2)) - earlier.mean((1, 2))
    return np.abs(change.mean(0)) / np.maximum(_error(change), TINY)
