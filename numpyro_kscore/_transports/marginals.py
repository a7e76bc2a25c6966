"""Coordinates that are standard normal where a latent has a known distribution, one by one.

The logarithm of a scale whose prior is half normal has an exponential tail on one side and ends as
that of a square on the other. Where data say little of the scale its posterior has these tails too,
which Gaussians and trained networks leave thin. As the function of a standard normal number that
the prior is, it has them for nothing; and where data say much, a smooth function changes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._transports.stretch import KNOTS, slopes_at, stretched, unstretched
from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree

# Points between which functions are inverted by lines first, and steps of Newton's method then.
GRID, STEPS = np.linspace(2 * KNOTS[0], 2 * KNOTS[-1], 401), 4


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

    @property
    def vary(self) -> Any:
        """Which latents are not their coordinates, (d,)."""
        return namespace(self.slopes).any(self.slopes != 1, axis=1)

    def invert(self, u: np.ndarray) -> np.ndarray:
        """Coordinates (n, d) with the images ``u``, on the host."""
        u, x = np.asarray(u, float), np.empty(np.shape(u))
        for k, (shift, slopes) in enumerate(zip(self.shift, self.slopes, strict=True)):
            x[:, k] = _inverse(u[:, k] - shift, slopes)
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
