"""The gradient of Laplace's evidence in the scales, by third derivatives along the Gaussian."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.laplace import Given, Others, halves, some
from numpyro_kscore._starts.noise import balanced
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.transport import Evaluate

# Draws that are enough for third derivatives of leaves of so few latents.
FEW, SMALL_LEAF = 8, 4
# Half the span of differences of gradients.
APART = 1e-5
# Part of a standard deviation over which third derivatives are differences; the error of a slope of
# the evidence, in nats, beyond which they are taken along all axes, and how many of these at once.
SMALL, ROUGH, AXES_AT_ONCE = 0.1, 10.0, 32
# How far halves of the draws may be apart, in units of that error, without and with a correction.
# Corrected halves err in opposite directions: their mean errs by a fifth of what is between them.
HALVES_APART, CORRECTED_APART = 2.0, 6.0


class Bends(NamedTuple):
    """How the mean gradient over the Gaussian differs from the one in its middle, at one value.

    What draws err by there is about what they err by nearby, since the noise is the same.

    Attributes:
        exact: along all axes, (d,).
        by_draws: by two halves of the noise, (2, d).
    """

    exact: np.ndarray
    by_draws: np.ndarray


def evidence_slopes(
    others: Others, at: np.ndarray, given: Given, known: Bends | None = None
) -> tuple[np.ndarray, Bends | None]:
    """The gradient of Laplace's evidence in all latents, (d,); that of the others is near zero.

    ``at`` has the scales, and ``given`` is the mode there. The evidence is minus the energy and
    half the logarithm of the determinant of its Hessian, both at a mode that moves with the scales.
    The sum of third derivatives along the Gaussian gives the derivative of the latter: by draws of
    it, or along all of its axes where these do not agree. What axes told at one value of the scales
    corrects the draws at others; it is given back with the gradient.

    Cost: a gradient for each draw of the noise, some if latents are small leaves alone, and two
    more; two for each latent where axes are needed.
    """

    def with_scales(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return others.held(points, True)

    center = at[None].copy()
    center[:, others.indices] = given.mean
    gradient = with_scales(center)[1][0]

    def bend_by(moves: np.ndarray) -> np.ndarray:
        points = np.tile(center, (len(moves), 1))
        points[:, others.indices] += SMALL * moves
        return (with_scales(points)[1].mean(axis=0) - gradient) / SMALL**2

    bends, known = _bends(others, given.triangle, bend_by, known)
    moves = np.zeros_like(bends)
    inside = given.triangle.transposed(bends[others.indices])
    moves[others.indices] = given.triangle.times(inside)
    return slopes_along(with_scales, center[0], moves[None])[0] - bends - gradient, known


def _bends(
    others: Others,
    triangle: Arrow,
    bend_by: Callable[[np.ndarray], np.ndarray],
    known: Bends | None,
) -> tuple[np.ndarray, Bends | None]:
    """The mean bend of the gradient along the Gaussian, (d,), and what draws err by if axes told.

    ``bend_by`` takes moves of the others (n, r) to the mean bend along them.
    """
    # Squares of the noise have a mean of 1, so that few draws tell what depends on one latent each.
    if not len(others.structure.core) and others.structure.leaves.shape[1] <= SMALL_LEAF:
        return bend_by(triangle.times(some(others, FEW))), known
    parts = (balanced(half) for half in halves(others.noise))
    by_draws = np.stack([bend_by(triangle.times(part)) for part in parts])
    nearly = by_draws if known is None else by_draws + (known.exact - known.by_draws)
    apart = np.delete(nearly[0] - nearly[1], others.indices)
    most = HALVES_APART if known is None else CORRECTED_APART
    if np.max(np.abs(apart), initial=0.0) < most * ROUGH:
        return nearly.mean(axis=0), known
    size = len(others.indices)
    exact = np.zeros_like(nearly[0])
    for first in range(0, size, AXES_AT_ONCE):
        axes = triangle.columns(first, min(AXES_AT_ONCE, size - first))
        exact += len(axes) * bend_by(np.concatenate([axes, -axes]))
    return exact, Bends(exact, by_draws)


def slopes_along(evaluate: Evaluate, at: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """How the gradient changes along vectors (m, d) of any latents at a point (d,), (m, d).

    Products of Hessians hold the scales, so that differences of gradients take their place.
    """
    longest = np.maximum(np.max(np.abs(vectors), axis=1, keepdims=True), np.finfo(float).tiny)
    steps = vectors * (APART / longest)
    ahead, behind = (evaluate(points)[1] for points in (at + steps, at - steps))
    return (ahead - behind) * (longest / (2 * APART))
