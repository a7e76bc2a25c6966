"""Increasing functions of numbers, each by its slopes on intervals.

They turn a standard normal number into one of any shape with one mode: tails of scales may be
exponential on one side and normal on the other. The slopes go over into each other smoothly, so
that a density has a score everywhere.

The logarithm of a scale whose prior is half normal is such a function of a normal number. Where
data say little of the scale its posterior has the same tails, which Gaussians and trained networks
leave thin; where they say much, a smooth function changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree

# Slopes change at these standard deviations, over this width.
KNOTS = tuple(range(-4, 5))
WIDTH = 0.3
# Points between which functions are inverted by lines first, and steps of Newton's method then.
GRID, STEPS = np.linspace(2 * KNOTS[0], 2 * KNOTS[-1], 401), 4


def stretched(points: Any, slopes: Any) -> Any:
    """Images of points (..., k) by functions with slopes (k, 10); that of 0 is 0."""
    xp = namespace(points, slopes)
    # Made anew: JAX 0.10 to 0.12 keep an array of NumPy in the precision of the first program.
    knots = np.array(KNOTS, float)
    # The integral of a logistic function.
    rises = WIDTH * (
        xp.logaddexp(0.0, (points[..., None] - knots) / WIDTH) - np.logaddexp(0.0, -knots / WIDTH)
    )
    return slopes[..., 0] * points + xp.sum(rises * _steps(slopes), axis=-1)


def slopes_at(points: Any, slopes: Any) -> tuple[Any, Any]:
    """The slopes at points (..., k), and the derivatives of their logarithms."""
    xp = namespace(points, slopes)
    knots = np.array(KNOTS, float)
    gates = 0.5 * (1 + xp.tanh((points[..., None] - knots) / (2 * WIDTH)))
    steps = _steps(slopes)
    found = slopes[..., 0] + xp.sum(gates * steps, axis=-1)
    changes = xp.sum(gates * (1 - gates) * steps, axis=-1) / WIDTH
    return found, changes / found


def unstretched(count: int) -> np.ndarray:
    """The slopes of functions that change nothing."""
    return np.ones((count, len(KNOTS) + 1))


@pytree
class Marginals:
    """An increasing function for each of d coordinates.

    Attributes:
        shift: images of 0, (d,).
        slopes: see :func:`~numpyro_kscore._transports.stretch.stretched`, (d, 10).
    """

    shift: Any
    slopes: Any

    def push(self, x: Any) -> Any:
        return self.shift + stretched(x, self.slopes)

    def log_volume(self, x: Any) -> Any:
        xp = namespace(x)
        return xp.sum(xp.log(slopes_at(x, self.slopes)[0]), axis=-1)

    def pull(self, x: Any, gradients: Any) -> Any:
        found, bends = slopes_at(x, self.slopes)
        return gradients * found - bends

    def push_score(self, x: Any, score: Any) -> Any:
        found, bends = slopes_at(x, self.slopes)
        return (score - bends) / found

    def steepness(self, x: Any) -> Any:
        """Slopes of the functions at points (..., d)."""
        return slopes_at(x, self.slopes)[0]

    @property
    def vary(self) -> Any:
        """Which latents are not their coordinates, (d,)."""
        return namespace(self.slopes).any(self.slopes != 1, axis=1)

    def invert(self, u: np.ndarray) -> np.ndarray:
        """Coordinates (n, d) with the images ``u``, on the host."""
        x = np.asarray(u, float) - self.shift
        for k in np.flatnonzero(self.vary):
            x[:, k] = _inverse(x[:, k], self.slopes[k])
        return x


def _inverse(values: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Points (n,) whose images by one function are these."""
    images = stretched(GRID[:, None], slopes[None])[:, 0]
    points = np.interp(values, images, GRID)
    # Beyond the grid a function is a line.
    points += np.minimum(values - images[0], 0) / slopes[0]
    points += np.maximum(values - images[-1], 0) / slopes[-1]
    for _ in range(STEPS):
        found, _ = slopes_at(points[:, None], slopes[None])
        points -= (stretched(points[:, None], slopes[None])[:, 0] - values) / found[:, 0]
    return points


def unchanged(dim: int) -> Marginals:
    """Functions that change nothing."""
    return Marginals(np.zeros(dim), unstretched(dim))


def _steps(slopes: Any) -> Any:
    return slopes[..., 1:] - slopes[..., :-1]
