"""Shapes of many coordinates at once, from scores at points that are drawn for all of them.

The best product of densities of single coordinates has, for each, the mean of the model's score
over all others. So one evaluation at a point moves all coordinates together, and each takes what
others add for noise. A shape goes by steps of the natural gradient: in coordinates where it is
standard normal so far, the score differs from a standard normal one by little, and only that
difference is averaged.
"""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.noise import Spread
from numpyro_kscore._transports.skewed import NUM_SHAPES, zones

# Standard deviations at which the metric is integrated, and their weights.
PLACES = np.linspace(-4.0, 4.0, 33)
WEIGHTS = np.exp(-0.5 * PLACES**2) / np.sum(np.exp(-0.5 * PLACES**2))
# The factor by which a slope changes in a step at most.
MOST_FACTOR = 3.0


def reshaped(shapes: np.ndarray, spread: Spread, scores: np.ndarray) -> np.ndarray:
    """Shapes (5, r) after a step, by scores at the images of points that are spread, (n, r).

    The step of a coordinate is the shorter the more of it could be noise (James and Stein), but for
    its shift: of that there is little, since all points have the same squares.
    """
    slopes = np.exp(shapes[1:])
    rises, gates, changes = zones(spread.points)
    own = (slopes * gates).sum(axis=1)
    moves = np.concatenate([np.ones_like(own)[:, None], rises], axis=1) / own[:, None]
    # The model's score where the shape so far is standard normal, less a standard normal one.
    beyond = own * scores + (slopes * changes).sum(axis=1) / own + spread.points
    gradient = np.einsum("nr,nkr->rk", spread.weights * beyond, moves)
    metric = _metric(slopes)
    shift = np.zeros_like(gradient)
    shift[:, 0] = gradient[:, 0] / metric[:, 0, 0]
    step = np.linalg.solve(metric, gradient[..., None])[..., 0] - shift
    gained = np.maximum(np.sum(step * gradient, axis=1), 1e-300)
    noise = 0.5 * (NUM_SHAPES - 1) * _noise(spread, beyond)
    step = shift + step * np.maximum(0.0, 1 - noise / gained)[:, None]
    ahead = np.clip(slopes + step[:, 1:].T, slopes / MOST_FACTOR, slopes * MOST_FACTOR)
    return np.concatenate([shapes[:1] + step[:, 0], np.log(ahead)])


def _metric(slopes: np.ndarray) -> np.ndarray:
    """The second derivative of the divergence from a standard normal density, (r, 5, 5)."""
    rises, gates, changes = (a[..., 0].T for a in zones(PLACES[:, None]))
    of_all, bends = slopes.T @ gates, slopes.T @ changes
    zero, one = np.zeros((1, len(PLACES))), np.ones((1, len(PLACES)))
    by_shapes, by_slopes = np.concatenate([one, rises]), np.concatenate([zero, gates])
    moves = by_shapes / of_all[:, None]
    turns = by_slopes / of_all[:, None] - by_shapes * (bends / of_all**2)[:, None]
    return sum(np.einsum("m,rim,rjm->rij", WEIGHTS, a, a) for a in (moves, turns))


def _noise(spread: Spread, values: np.ndarray) -> np.ndarray:
    """The variance of a weighted mean of values (n, r), by second differences of neighbors."""
    order = np.argsort(spread.points, axis=0)
    values, weights = (np.take_along_axis(a, order, axis=0) for a in (values, spread.weights))
    rests = values[1:-1] - 0.5 * (values[2:] + values[:-2])
    weights_inside = weights[1:-1] / weights[1:-1].sum(axis=0)
    variances = np.sum(weights_inside * rests**2, axis=0) / 1.5
    return variances * np.sum(weights**2, axis=0)


def unshaped(size: int) -> np.ndarray:
    """Shapes of r standard normal coordinates, (5, r)."""
    return np.zeros((NUM_SHAPES, size))
