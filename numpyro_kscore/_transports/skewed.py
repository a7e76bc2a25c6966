"""Coordinates with shapes of their own, which change with some others, the scales.

Given its scales, a latent that few data tell of is skewed: a group without a single event is normal
on one side and ends on the other. Each coordinate is a smooth increasing function of a standard
normal number, by its slopes in four zones. Of the eight densities in
``benchmarks/results/2026-11-29-many-latents.md`` it leaves out .00002 nats at most, where the best
Gaussians leave out .0004 to .03.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_kscore._transports.features import features, through_features
from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree, static

# Slopes go over into the next ones at these standard deviations, over about this width.
KNOTS, WIDTH = np.array([-2.0, 0.0, 2.0]), 1.0
# Numbers of a shape: a shift, and the logarithms of the slopes.
NUM_SHAPES = len(KNOTS) + 2


@pytree
class Skewed:
    """A shape for each of r coordinates, which changes with k others, the scales.

    Shapes are linear in q sums of :func:`~numpyro_kscore._transports.features.features` of the
    scales. The scales themselves stay as they are.

    Attributes:
        base: shapes where scales are 0: shifts, then logarithms of slopes, (5, r).
        sums: coefficients of the sums of features, (p, q).
        changes: of shapes with each of the sums, (q, 5, r).
        count: k, the number of scales, which come first.
    """

    base: Any
    sums: Any
    changes: Any
    count: int = static()

    def push(self, x: Any) -> Any:
        u, v = self._split(x)
        return namespace(x).concatenate([u, pushed(v, self._shapes(u))], axis=-1)

    def log_volume(self, x: Any) -> Any:
        u, v = self._split(x)
        slopes, _ = slopes_of(v, self._shapes(u))
        return namespace(x).log(slopes).sum(-1)

    def pull(self, x: Any, gradients: Any) -> Any:
        u, v = self._split(x)
        of_scales, of_others = self._split(gradients)
        shapes = self._shapes(u)
        slopes, bends = slopes_of(v, shapes)
        moved = of_scales + self._through(u, v, shapes, slopes, of_others)
        return namespace(x).concatenate([moved, of_others * slopes - bends], axis=-1)

    def push_score(self, x: Any, score: Any) -> Any:
        u, v = self._split(x)
        of_scales, of_others = self._split(score)
        shapes = self._shapes(u)
        slopes, bends = slopes_of(v, shapes)
        moved = (of_others - bends) / slopes
        # The points of a coordinate that is held move against its shape.
        rest = of_scales + self._through(u, v, shapes, slopes, -moved)
        return namespace(x, score).concatenate([rest, moved], axis=-1)

    def _through(self, u: Any, v: Any, shapes: Any, slopes: Any, of_others: Any) -> Any:
        """The gradient in the scales of an energy, and of minus the log volume, (..., k).

        ``of_others`` is the gradient of the energy in the others, (..., r).
        """
        xp = namespace(v)
        rises, gates, _ = zones(v)
        sizes = xp.exp(shapes[..., 1:, :])
        of_slopes = sizes * (rises * of_others[..., None, :] - gates / slopes[..., None, :])
        of_shapes = xp.concatenate([of_others[..., None, :], of_slopes], axis=-2)
        by_sums = xp.einsum("...sr,qsr->...q", of_shapes, self.changes)
        return through_features(u, by_sums @ self.sums.T)

    def _shapes(self, u: Any) -> Any:
        """Shapes (..., 5, r)."""
        xp = namespace(u, self.base)
        return self.base + xp.tensordot(features(u) @ self.sums, self.changes, axes=1)

    def _split(self, points: Any) -> tuple[Any, Any]:
        return points[..., : self.count], points[..., self.count :]


def pushed(points: Any, shapes: Any) -> Any:
    """Images of points (..., r) by functions with shapes (..., 5, r)."""
    rises, _, _ = zones(points)
    return shapes[..., 0, :] + (namespace(points).exp(shapes[..., 1:, :]) * rises).sum(-2)


def slopes_of(points: Any, shapes: Any) -> tuple[Any, Any]:
    """Slopes at points (..., r), and the derivatives of their logarithms."""
    _, gates, changes = zones(points)
    sizes = namespace(points).exp(shapes[..., 1:, :])
    slopes = (sizes * gates).sum(-2)
    return slopes, (sizes * changes).sum(-2) / slopes


def zones(points: Any) -> tuple[Any, Any, Any]:
    """The rises, slopes and changes of four zones at points (..., r), each (..., 4, r).

    Slopes are positive and add up to one, rises are their integrals from zero.
    """
    xp = namespace(points)
    places = (points[..., None, :] - KNOTS[:, None]) / WIDTH
    # Integrals of logistic functions.
    above = WIDTH * (xp.logaddexp(0.0, places) - np.logaddexp(0.0, -KNOTS[:, None] / WIDTH))
    gates = 0.5 * (1 + xp.tanh(0.5 * places))
    changes = gates * (1 - gates) / WIDTH
    one = xp.ones_like(points[..., None, :])
    return tuple(
        xp.concatenate([whole, part], axis=-2) - xp.concatenate([part, 0 * one], axis=-2)
        for whole, part in ((points[..., None, :], above), (one, gates), (0 * one, changes))
    )
