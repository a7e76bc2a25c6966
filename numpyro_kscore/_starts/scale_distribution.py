"""The distribution of a model's scales, from their evidence at some values.

They are expected to be standard normal in coordinates of their own: normal ones, stretched to the
left or to the right. Their evidence tells how far these coordinates have to change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.polynomial import Polynomial

from numpyro_kscore._transports.affine import factor
from numpyro_kscore._transports.conditional import skewed

# How much the distribution may widen, narrow or, in standard deviations, move at once; and largest
# correlation in a step.
MOST_CHANGE, MOST_CORRELATION = 3.0, 0.9
# Largest skewness, and one of zero, without its division by zero. Quantiles that it comes from, in
# standard deviations of a normal distribution, what is beyond each, and the grid they are found on.
MOST_SKEW, NO_SKEW, QUANTILE = 0.5, 1e-3, 2.0
OUTSIDE = 0.5 * math.erfc(QUANTILE / math.sqrt(2))
GRID = np.linspace(-8.0, 8.0, 1601)
# Smallest distance of quantiles: a step of the grid.
SMALLEST = 0.01


class Change(NamedTuple):
    """A change of the distribution of the scales, relative to its previous value.

    Attributes:
        mean: where its median moves, before the skewness, (k,).
        factor: lower triangle that follows the one so far, (k, k).
        skews: the new ones, (k,).
        size: how far all of it is from no change.
    """

    mean: np.ndarray
    factor: np.ndarray
    skews: np.ndarray
    size: float


def change_at_first(points: np.ndarray, evidences: np.ndarray) -> Change:
    """The change by the evidence at a few points of scales that are taken for standard normal."""
    slopes, curvature = _quadratic(points, evidences)
    curvatures, axes = np.linalg.eigh(curvature)
    curvatures = np.clip(curvatures, MOST_CHANGE**-2, MOST_CHANGE**2)
    covariance = (axes / curvatures) @ axes.T
    move = _limited(covariance @ slopes)
    size = max(float(np.linalg.norm(move)), float(np.max(np.abs(np.log(curvatures)))) / 2)
    return Change(move, factor(covariance), np.full(len(move), NO_SKEW), size)


def change_nearby(points: np.ndarray, evidences: np.ndarray, skews: np.ndarray) -> Change:
    """The change by the evidence on axes and in pairs of scales taken for standard normal.

    Skewness and widths come from quantiles on every axis, where the other scales have their
    median; how far to move and correlations, with what these add to widths, from a regression.
    """
    count = points.shape[1]
    slopes, curvature = _quadratic(points, evidences, with_cubes=True)
    own = np.maximum(np.diag(curvature), MOST_CHANGE**-2)
    units = np.sqrt(np.outer(own, own))
    correlated = np.clip(curvature / units, -MOST_CORRELATION, MOST_CORRELATION)
    np.fill_diagonal(correlated, 1.0)
    values, axes = np.linalg.eigh(correlated)
    covariance = (axes / np.maximum(values, MOST_CHANGE**-2)) @ axes.T
    quantiles = np.empty((3, count))
    for k in range(count):
        is_on = np.all(np.delete(points, k, axis=1) == 0, axis=1)
        quantiles[:, k] = _quantiles(points[is_on, k], evidences[is_on])
    low, middle, high = skewed(quantiles, skews)
    below, above = (np.maximum(side, SMALLEST) for side in (middle - low, high - middle))
    found = np.clip(-0.5 * np.log(above / below) * 2 / QUANTILE, -MOST_SKEW, MOST_SKEW)
    found = np.where(np.abs(found) < NO_SKEW, NO_SKEW, found)
    spread = skewed(np.array([[QUANTILE], [-QUANTILE]]), found)
    sizes = (high - low) / (spread[0] - spread[1])
    sizes = np.clip(sizes, 1 / MOST_CHANGE, MOST_CHANGE)
    move = _limited(covariance / units @ slopes)
    triangle = factor(covariance * np.outer(sizes, sizes))
    changes = (
        np.linalg.norm(move),
        np.max(np.abs(np.log(np.diag(triangle)))),
        np.max(np.abs(found - skews)),
    )
    return Change(move, triangle, found, float(max(changes)))


def _quadratic(
    points: np.ndarray, evidences: np.ndarray, with_cubes: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Slope (k,) and negative curvature (k, k) of the evidence; what is far counts less.

    With cubes the slope is its mean under a standard normal, where it changes along an axis.
    """
    count = points.shape[1]
    one, other = np.triu_indices(count)
    squares, cubes = points[:, one] * points[:, other], points**3 if with_cubes else points[:, :0]
    columns = np.concatenate([np.ones((len(points), 1)), points, squares, cubes], axis=1)
    weights = np.exp(-0.125 * np.sum(points**2, axis=1))
    found = np.linalg.lstsq(columns * weights[:, None], evidences * weights, rcond=None)[0]
    _, first, second, third = np.split(found, np.cumsum([1, count, len(one)]))
    half = np.zeros((count, count))
    half[one, other] = -second
    return first + 3 * third if with_cubes else first, half + half.T


def _quantiles(places: np.ndarray, evidences: np.ndarray) -> np.ndarray:
    """The lower one, the median and the upper one of a density on a line, (3,).

    Its logarithm is a polynomial through what is known, and a line beyond.
    """
    curve = Polynomial.fit(places, evidences, len(places) - 1)
    inside = np.clip(GRID, places.min(), places.max())
    density = curve(inside) + (GRID - inside) * curve.deriv()(inside)
    sums = np.cumsum(np.exp(density - density.max()))
    return np.interp([OUTSIDE, 0.5, 1 - OUTSIDE], sums / sums[-1], GRID)


def _limited(move: np.ndarray) -> np.ndarray:
    """A move that is not too long at once."""
    length = max(float(np.linalg.norm(move)), np.finfo(float).tiny)
    return move * min(1.0, MOST_CHANGE / length)
