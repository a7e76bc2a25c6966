"""The distribution of a model's scales, from their evidence at some values.

They are expected to be standard normal in coordinates of their own: normal ones, each of them
stretched. Their evidence tells how far these coordinates have to change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from numpyro_kscore._transports.affine import Affine, factor
from numpyro_kscore._transports.features import MANY
from numpyro_kscore._transports.stretch import stretched, unstretched

# The distribution widens, narrows or, in standard deviations, moves so much at once; largest
# correlation in a step; most that a slope may differ from the mean one, and grow at once.
MOST_CHANGE, MOST_CORRELATION, MOST_STRETCH, MOST_GROWTH = 3.0, 0.9, 20.0, 2.0
# Places between which slopes are taken, the outer ones where tails are known; the grid on which
# quantiles are found; the least slope of a log density in its tails.
ENDS, FAR_ENDS = np.arange(-3.0, 4.0), np.arange(-5.0, 6.0)
GRID = np.linspace(-40.0, 40.0, 8001)
LEAST_FALL = 0.25
# Least effective part of weighted points by which a distribution moves in the end.
LEAST_EFFECTIVE = 0.5
# Places at which a distribution is compared with the one before, and some of them.
INSIDE = np.abs(ENDS) <= 2
SIDES = (-2.0, 0.0, 2.0)
# Places from which on a tail is known at few points, between which its logarithm is a line.
FAR = 3.5


class Change(NamedTuple):
    """A change of the distribution of the scales, relative to its previous value.

    Attributes:
        mean: where its median moves, (k,).
        factor: lower triangle that follows the one so far, (k, k).
        slopes: the new ones of :func:`~numpyro_kscore._transports.stretch.stretched`, (k, 10).
        size: how far all of it is from no change.
    """

    mean: np.ndarray
    factor: np.ndarray
    slopes: np.ndarray
    size: float


class Tails(NamedTuple):
    """The evidence at points on the axes of scales, farther out than what is interpolated.

    Attributes:
        points: (m, k).
        evidences: the highest ones of all values of the other scales, (m,).
    """

    points: np.ndarray
    evidences: np.ndarray


def change_at_first(
    points: np.ndarray,
    evidences: np.ndarray,
    gradients: np.ndarray | None = None,
    most: float = MOST_CHANGE,
) -> Change:
    """The change by the evidence at a few points of scales that are taken for standard normal.

    Gradients (n, k) of the evidence tell correlations, which points on axes do not. The
    distribution moves by ``most`` standard deviations at once.
    """
    slopes, curvature = _quadratic(points, evidences, gradients)
    curvatures, axes = np.linalg.eigh(curvature)
    curvatures = np.clip(curvatures, MOST_CHANGE**-2, MOST_CHANGE**2)
    covariance = (axes / curvatures) @ axes.T
    move = limited(covariance @ slopes, most)
    size = max(float(np.linalg.norm(move)), float(np.max(np.abs(np.log(curvatures)))) / 2)
    return Change(move, factor(covariance), unstretched(len(move)), size)


def change_nearby(
    points: np.ndarray,
    evidences: np.ndarray,
    slopes: np.ndarray,
    gradients: np.ndarray | None = None,
    most: np.ndarray | float = MOST_STRETCH,
) -> Change:
    """The change by the evidence on axes of scales taken for standard normal.

    Medians, widths and shapes come from quantiles on every axis, where the other scales have their
    median; correlations, with what these add to widths and moves, from a regression. That needs
    points in pairs, or the gradients (n, k). Slopes in the tails are at ``most`` so large, (k,).
    """
    count = points.shape[1]
    middle, widths, found = along_axes(points, evidences, slopes, most)
    correlated = np.outer(widths, widths) * _quadratic(points, evidences, gradients)[1]
    correlated = np.clip(correlated, -MOST_CORRELATION, MOST_CORRELATION)
    np.fill_diagonal(correlated, 1.0)
    values, axes = np.linalg.eigh(correlated)
    covariance = (axes / np.maximum(values, MOST_CHANGE**-2)) @ axes.T
    move = limited(widths * (covariance @ (middle / widths)))
    triangle = factor(covariance * np.outer(widths, widths))
    inside = np.repeat(ENDS[INSIDE, None], count, axis=1)
    changes = (
        np.linalg.norm(move),
        np.max(np.abs(np.log(np.diag(triangle)))),
        np.max(np.abs(stretched(inside, found) - stretched(inside, slopes))),
    )
    return Change(move, triangle, found, float(max(changes)))


def along_axes(
    points: np.ndarray,
    evidences: np.ndarray,
    slopes: np.ndarray,
    most: np.ndarray | float = MOST_STRETCH,
    tails: Tails | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Medians, widths (k,) and slopes (k, 10) of scales by the evidence on the axis of each.

    Slopes in tails are by quantiles if these are known. Otherwise they continue the others.
    """
    count = points.shape[1]
    far = Tails(np.empty((0, count)), np.empty(0)) if tails is None else tails
    points = np.concatenate([points, far.points])
    evidences = np.concatenate([evidences, far.evidences])
    places = np.empty((len(FAR_ENDS), count))
    for k in range(count):
        is_on = np.all(np.delete(points, k, axis=1) == 0, axis=1)
        places[:, k] = _quantiles(points[is_on, k], evidences[is_on])
    places = stretched(places, slopes)
    low, middle, high = places[np.searchsorted(FAR_ENDS, SIDES)]
    widths = np.clip((high - low) / 4, 1 / MOST_CHANGE, MOST_CHANGE)
    by_quantiles = np.diff((places - middle) / widths, axis=0).T / np.diff(FAR_ENDS)
    by_quantiles = np.clip(by_quantiles, 1 / MOST_STRETCH, MOST_STRETCH)
    found = _continued(by_quantiles[:, 2:-2], most / widths)
    for side, is_known in (
        (slice(2), np.any(far.points < 0, axis=0)),
        (slice(-2, None), np.any(far.points > 0, axis=0)),
    ):
        found[is_known, side] = by_quantiles[is_known, side]
    return middle, widths, found


def moments_by(values: np.ndarray, points: np.ndarray) -> Affine | None:
    """Mean and covariance at standard normal points (m, k) whose log weights are given, (m,).

    They see what axes do not, such as a scale that is skewed the more the larger another one is.
    None is returned where few points have the weight.
    """
    weights = np.exp(values - np.max(values))
    weights /= weights.sum()
    if not 1 / np.sum(weights**2) > LEAST_EFFECTIVE * len(points):
        return None
    mean = weights @ points
    rest = points - mean
    return Affine(mean, factor((rest * weights[:, None]).T @ rest))


def _continued(slopes: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Slopes (k, 10) from those between quantiles (k, 6): they grow on as they do there, to most.

    A density beyond the last evidence known is a line, and slopes by its quantiles would grow with
    every round.
    """
    sides = [slopes[:, ::-1], slopes]
    for number, side in enumerate(sides):
        growth = np.clip(side[:, -1] / side[:, -2], 1 / MOST_GROWTH, MOST_GROWTH)
        further = side[:, -1:] * growth[:, None] ** np.arange(1, 3)
        sides[number] = np.minimum(further, np.minimum(most, MOST_STRETCH)[:, None])
    return np.concatenate([sides[0][:, ::-1], slopes, sides[1]], axis=1)


def _quadratic(
    points: np.ndarray, evidences: np.ndarray, gradients: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Slope (k,) and negative curvature (k, k) of the evidence; what is far counts less."""
    count = points.shape[1]
    if gradients is not None and count > MANY:
        return _quadratic_by_differences(points, gradients)
    one, other = np.triu_indices(count)
    squares = points[:, one] * points[:, other]
    columns = np.concatenate([np.ones((len(points), 1)), points, squares], axis=1)
    weights = np.exp(-0.125 * np.sum(points**2, axis=1))
    if gradients is not None:
        unit = np.eye(count)
        moved = unit[:, one] * points[:, None, other] + unit[:, other] * points[:, None, one]
        linear = np.broadcast_to(unit, (len(points), count, count))
        of_slopes = np.concatenate([np.zeros((len(points), count, 1)), linear, moved], axis=2)
        columns = np.concatenate([columns, of_slopes.reshape(-1, columns.shape[1])])
        evidences = np.concatenate([evidences, gradients.ravel()])
        weights = np.concatenate([weights, np.repeat(weights, count)])
    found = np.linalg.lstsq(columns * weights[:, None], evidences * weights, rcond=None)[0]
    _, first, second = np.split(found, np.cumsum([1, count]))
    half = np.zeros((count, count))
    half[one, other] = -second
    return first, half + half.T


def _quadratic_by_differences(
    points: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean slope and negative curvature over a standard normal distribution of many scales.

    Gradients are those at the center and both ends of all axes, the upper ones first. Their second
    differences add up to half the Laplacian of the slope.
    """
    step = points[1, 0]
    ahead, behind = np.split(gradients[1:], 2)
    half = (behind - ahead) / (2 * step)
    bends = (ahead + behind - 2 * gradients[0]) / step**2
    return gradients[0] + 0.5 * bends.sum(axis=0), 0.5 * (half + half.T)


def _quantiles(places: np.ndarray, evidences: np.ndarray) -> np.ndarray:
    """Quantiles of a density on a line, where a normal distribution has them at the far ends.

    Its logarithm is a spline through what is known near the middle. Farther out it is a line from
    place to place, and falls on beyond the last, by no less than between the last two: the slope
    of a spline at its end may be anything.
    """
    # JAX itself needs SciPy.
    from scipy.interpolate import CubicSpline

    order = np.argsort(places)
    places, evidences = places[order], evidences[order]
    is_near = np.abs(places) < FAR
    near = places[is_near]
    curve = CubicSpline(near, evidences[is_near])
    secants = np.diff(evidences) / np.diff(places)
    # Where nothing is known farther out.
    rise = max(float(curve(near[0], 1)) if is_near[0] else 0.0, secants[0], LEAST_FALL)
    fall = max(-float(curve(near[-1], 1)) if is_near[-1] else 0.0, -secants[-1], LEAST_FALL)
    inside = (near[0] <= GRID) & (near[-1] >= GRID)
    density = np.where(inside, curve(GRID), np.interp(GRID, places, evidences))
    density += rise * np.minimum(GRID - places[0], 0) - fall * np.maximum(GRID - places[-1], 0)
    density = np.exp(density - density.max())
    # Sums from both sides: upper tails are differences of what is nearly 1.
    below, above = (np.cumsum(a) - 0.5 * a for a in (density, density[::-1]))
    total = density.sum()
    shares = np.array([0.5 * math.erfc(-end / math.sqrt(2)) for end in FAR_ENDS])
    left = np.interp(shares, below / total, GRID)
    right = np.interp(shares[::-1], above / total, GRID[::-1])
    return np.where(FAR_ENDS < 0, left, right)


def limited(move: np.ndarray, most: float = MOST_CHANGE) -> np.ndarray:
    """A move that is not too long at once."""
    length = max(float(np.linalg.norm(move)), np.finfo(float).tiny)
    return move * min(1.0, most / length)
