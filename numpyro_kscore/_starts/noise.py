"""Standard normal noise whose squares are those of the distribution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The points are wider than normal quantiles by so much per squared deviation, to see tails better.
WIDER = 0.03


def balanced(noise: np.ndarray) -> np.ndarray:
    """Noise (n, r) with a mean square of 1 in each coordinate.

    By it a skewed density would move the mean, and of many Gaussians the one that is as wide as the
    noise is narrow would have the highest bound.
    """
    return noise / np.sqrt(np.mean(noise**2, axis=0))


class Spread(NamedTuple):
    """Points that are spread over the standard normal distribution in every coordinate.

    Attributes:
        points: the same numbers in each coordinate, in an order of its own, (n, r).
        weights: with which they stand for the distribution, (n, r).
    """

    points: np.ndarray
    weights: np.ndarray


def spread_out(rng: np.random.Generator, count: int, size: int) -> Spread:
    """So many points, in r coordinates."""
    # JAX itself needs SciPy.
    from scipy.special import ndtri

    quantiles = ndtri((np.arange(count) + 0.5) / count)
    places = quantiles * (1 + WIDER * quantiles**2)
    # The squares of all others together matter most.
    places /= np.sqrt(np.mean(places**2))
    weights = np.exp(-0.5 * places**2) * np.gradient(places)
    order = rng.permuted(np.tile(np.arange(count), (size, 1)), axis=1).T
    return Spread(places[order], (weights / weights.sum())[order])
