"""The best density of the latents of a model, the scales held, and the evidence of these by it.

The mode and the Hessian there are off where latents are skewed, each by little, but the evidence of
the scales by the sum of all. So the Hessian is averaged over the Gaussian, and the mean moves to
where the gradient vanishes on average, which makes it the best Gaussian (Opper and Archambeau
2009). Where that leaves out much, every coordinate of it gets a shape of its own (``fit_shapes``).
What is left of the evidence is half the variance of the log weights, their second cumulant. All
values of the scales share their noise, which differences between them hardly see.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.fit_shapes import reshaped, unshaped
from numpyro_kscore._starts.laplace import Given, Others, halves, pushed_at, some, triangle_at
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.skewed import pushed, slopes_of

# A mean is found when a step would lower the energy by less than this, in nats, for each latent.
SETTLED = 1e-5
# Draws over which gradients and a Hessian are averaged, and most steps of a mean.
MEAN_DRAWS, AVERAGED, MEAN_STEPS = 32, 16, 4
# Nats left out by a Gaussian, of all coordinates together, that shapes are for; steps to shapes,
# the first time and from those at another value of the scales.
SKEWED, FIRST_STEPS, STEPS = 0.02, 5, 2
# The largest variance of log weights, for each latent, that is taken for a part of the evidence:
# further cumulants are as large, and the bound is below the evidence at any rate.
MOST_LEFT = 0.1


class Shared(NamedTuple):
    """The averaging and the shapes that one value of the scales lends to others.

    Attributes:
        averaging: what follows the factor at a mode if the Hessian is averaged; None if it is not.
        shapes: of coordinates; None if they stay normal.
    """

    averaging: Arrow | None
    shapes: np.ndarray | None


class _Seen(NamedTuple):
    """Bounds of the evidence by each draw, (n,), and their gradients in the draws, (n, r).

    With them come the mean score of all latents, (d,), and half the difference of two halves of it.
    """

    weights: np.ndarray
    slopes: np.ndarray
    scores: np.ndarray
    noise_of_scores: np.ndarray

    @property
    def bound(self) -> float:
        return float(self.weights.mean())

    @property
    def variance(self) -> float:
        """The variance of log weights from their gradients at noise and then its negative.

        For the best density the weights have hardly a part of first or second degree in the noise.
        The squared gradient of a Hermite polynomial has its degree times the mean of its square, so
        that odd parts of degree 3 and even ones of degree 4 take a third and a quarter. A mean over
        n draws and r latents has far less noise than one of the weights themselves.
        """
        ahead, behind = np.split(self.slopes, 2)
        of_odd, of_even = 0.5 * (ahead + behind), 0.5 * (ahead - behind)
        odd, even = (float(np.mean(np.sum(part**2, axis=1))) for part in (of_odd, of_even))
        return odd / 3 + even / 4

    def exceeds(self, other: _Seen) -> bool:
        """Whether its bound is higher, and less is left."""
        return self.bound > other.bound and self.variance < other.variance


def best_given(
    others: Others, at: np.ndarray, mode: Given, shared: Shared | None
) -> tuple[Given, Shared] | None:
    """The best density of the others near their mode, and the evidence of scales by it.

    ``at`` has the scales, (d,). What is shared hardly depends on these, and is found if it is not
    known. None is returned where numbers are not finite.

    Cost: n gradients for the evidence and for each step of shapes, up to five, and up to four times
    ``MEAN_DRAWS``; a Hessian at ``AVERAGED`` draws if the averaging is not known.
    """
    averaging = _averaging(others, at, mode) if shared is None else shared.averaging
    triangle = mode.triangle if averaging is None else mode.triangle.followed_by(averaging)
    found = _centered(others, at, mode.mean, triangle)
    seen = None if found is None else _seen(others, at, found)
    if found is None or seen is None:
        return None
    has_shapes = seen.variance > 2 * SKEWED if shared is None else shared.shapes is not None
    if has_shapes:
        known = None if shared is None else shared.shapes
        shaped = _shaped(others, at, found, known)
        # A bound by few draws may miss a fold or a second mode, which the variance sees.
        if shaped is not None and shaped[1].exceeds(seen):
            found, seen = shaped
    evidence = seen.bound + 0.5 * min(seen.variance, MOST_LEFT * len(mode.mean))
    shapes = found.shapes if shared is None else shared.shapes
    found = found._replace(
        evidence=evidence,
        variance=seen.variance,
        scores=seen.scores,
        noise_of_scores=seen.noise_of_scores,
    )
    return found, Shared(averaging, shapes)


def _averaging(others: Others, at: np.ndarray, mode: Given) -> Arrow | None:
    """The triangle that follows the factor at a mode to average the Hessian; None if none pays."""
    points = pushed_at(others, at, mode.mean, mode.triangle, some(others, AVERAGED))
    averaged = triangle_at(others, points) or mode.triangle
    bounds = []
    for triangle in (mode.triangle, averaged):
        found = _centered(others, at, mode.mean, triangle)
        seen = None if found is None else _seen(others, at, found)
        bounds.append(-np.inf if seen is None else seen.bound)
    return mode.triangle.divided(averaged) if bounds[1] > bounds[0] else None


def _centered(others: Others, at: np.ndarray, mean: np.ndarray, triangle: Arrow) -> Given | None:
    """The Gaussian at whose mean the gradient vanishes on average; None if it is not finite."""
    noise = some(others, MEAN_DRAWS)
    lowest, best = np.inf, None
    for _ in range(MEAN_STEPS):
        energies, gradients = others.held(pushed_at(others, at, mean, triangle, noise), False)
        energy = float(energies.mean())
        slopes = triangle.transposed(gradients[:, others.indices].mean(axis=0))
        if not (energy < lowest and np.all(np.isfinite(slopes))):
            break
        lowest, best = energy, mean
        mean = mean - triangle.times(slopes)
        if float(slopes @ slopes) < SETTLED * len(slopes):
            break
    return None if best is None else Given(best, triangle, 0.0)


def _shaped(
    others: Others, at: np.ndarray, given: Given, known: np.ndarray | None
) -> tuple[Given, _Seen] | None:
    """The same with shapes, and its weights; None where numbers are not finite.

    Steps go on from those that are known.
    """
    shapes = unshaped(len(given.mean)) if known is None else known
    for _ in range(FIRST_STEPS if known is None else STEPS):
        inner = pushed(others.spread.points, shapes)
        points = pushed_at(others, at, given.mean, given.triangle, inner)
        _, gradients = others.held(points, False)
        scores = -given.triangle.transposed(gradients[:, others.indices])
        if not np.all(np.isfinite(scores)):
            return None
        shapes = reshaped(shapes, others.spread, scores)
    given = given._replace(shapes=shapes)
    seen = _seen(others, at, given)
    return None if seen is None else (given, seen)


def _seen(others: Others, at: np.ndarray, given: Given) -> _Seen | None:
    """Weights of a density at its draws; None where numbers are not finite."""
    noise, volume = others.noise, float(np.sum(np.log(given.triangle.diagonal)))
    inner, slopes, bends = noise, 1.0, np.zeros(())
    if given.shapes is not None:
        inner = pushed(noise, given.shapes)
        slopes, bends = slopes_of(noise, given.shapes)
        volume = volume + np.sum(np.log(slopes), axis=1)
    points = pushed_at(others, at, given.mean, given.triangle, inner)
    energies, gradients = others.held(points, True)
    constant = 0.5 * noise.shape[1] * np.log(2 * np.pi)
    weights = -energies + 0.5 * np.sum(noise**2, axis=1) + volume + constant
    moved = noise - slopes * given.triangle.transposed(gradients[:, others.indices]) + bends
    finite = np.all(np.isfinite(weights)) and np.all(np.isfinite(moved))
    one, other = (-half.mean(axis=0) for half in halves(gradients))
    return _Seen(weights, moved, 0.5 * (one + other), 0.5 * (one - other)) if finite else None
