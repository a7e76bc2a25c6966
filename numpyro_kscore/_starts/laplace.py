"""The latents of a model near their mode, the scales held: a Gaussian, and the evidence left to it.

Laplace's approximation is the mode and the Hessian there. Both are off where latents are skewed,
each by little, but the evidence of the scales by the sum of all. So the mean moves to where the
gradient vanishes on average over the Gaussian, the Hessian is averaged likewise, which makes it the
best Gaussian (Opper and Archambeau 2009), and what is left of the evidence is half the variance of
its log weights, the second cumulant. All values of the scales share their noise, which differences
between them hardly see.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.sparsity import (
    Blocks,
    Products,
    Structure,
    blocks_at,
    find_structure,
)
from numpyro_kscore._transports.affine import antithetic
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.transport import Evaluate

# Draws over which the Gaussian of the others is fitted, and points that show what it depends on.
NUM_DRAWS, NUM_POINTS = 64, 2
# Steps by the curvature at another mode, and by the one here.
CHORDS, MOST_STEPS = 4, 30
# A mode is found when a step would lower the energy by less than this, in nats, or a mean, for
# each latent.
ARRIVED, SETTLED = 1e-2, 1e-5
# Decrease of the energy, as a part of what its slope promises, and most halvings of a step.
DECREASE, HALVINGS = 1e-4, 8
# Parts of the diagonal that are added to a Hessian until it is positive definite.
RIDGES = (0.0, 1e-6, 1e-3, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0, 100.0, 1e3)
# Draws over which gradients and a Hessian are averaged, and most steps of a mean.
MEAN_DRAWS, AVERAGED, MEAN_STEPS = 32, 16, 4


class Others(NamedTuple):
    """A model as a function of some of its latents, the others of the scales.

    Attributes:
        evaluate: energies and gradients of all d latents.
        products: of their Hessians.
        structure: that of the Hessian of the others.
        indices: which of the latents they are, (r,).
        noise: standard normal noise (n, r), its second half minus the first, with a mean square
            of 1.
    """

    evaluate: Evaluate
    products: Products
    structure: Structure
    indices: np.ndarray
    noise: np.ndarray


def make_others(
    evaluate: Evaluate,
    products: Products,
    points: np.ndarray,
    indices: np.ndarray,
    rng: np.random.Generator,
) -> Others:
    """A model as a function of its others (r,), whose Hessians are seen at points (n, d)."""
    structure = find_structure(products, points, indices)
    noise = balanced(antithetic(rng, NUM_DRAWS, len(indices)))
    return Others(evaluate, products, structure, indices, noise)


class Given(NamedTuple):
    """The others at one value of the scales.

    Attributes:
        mean: where the Gaussian has its mean, (r,).
        triangle: the factor of its covariance.
        evidence: that of the scales, in nats.
        variance: that of the log weights; 0 by Laplace's approximation alone.
    """

    mean: np.ndarray
    triangle: Arrow
    evidence: float
    variance: float = 0.0


def triangle_of(blocks: Blocks, places: tuple[int, ...]) -> Arrow | None:
    """A triangle T with T Tᵀ the inverse of a matrix; None if that is not positive definite."""
    count, size, width = blocks.borders.shape
    try:
        if not count:
            return Arrow(blocks.leaves, blocks.borders, _root(blocks.core), places)
        leaves = _root(blocks.leaves)
        across = leaves @ (leaves.swapaxes(1, 2) @ blocks.borders)
        # Matrices make it one product: NumPy would take one for each leaf.
        inner, moved = (a.reshape(count * size, width) for a in (blocks.borders, across))
        core = _root(blocks.core - inner.T @ moved) if width else blocks.core
    except np.linalg.LinAlgError:
        return None
    borders = -(moved @ core).reshape(count, size, width)
    found = Arrow(leaves, borders, core, places)
    return found if all(np.all(np.isfinite(a)) for a in (leaves, core)) else None


def _root(matrices: np.ndarray) -> np.ndarray:
    """Lower factors of the inverses of positive definite matrices (..., n, n)."""
    # The inverse of a lower factor with both orders reversed is a lower factor of the inverse.
    factors = np.linalg.cholesky(matrices[..., ::-1, ::-1])
    return np.linalg.inv(factors).swapaxes(-1, -2)[..., ::-1, ::-1]


def triangle_at(others: Others, points: np.ndarray) -> Arrow | None:
    """The factor of the inverse mean Hessian at points (n, d), with a ridge where that is needed.

    None is returned where numbers are not finite.
    """
    blocks = blocks_at(others.structure, others.products, points, others.indices)
    if not all(np.all(np.isfinite(block)) for block in blocks):
        return None
    places = others.structure.places
    diagonal = [np.abs(np.einsum("...ii->...i", a)) for a in (blocks.leaves, blocks.core)]
    largest = max(float(np.max(a, initial=0.0)) for a in diagonal)
    if not largest > 0:
        return None
    for ridge in RIDGES:
        more = [
            ridge * np.maximum(a, 1e-12 * largest)[..., None] * np.eye(a.shape[-1])
            for a in diagonal
        ]
        widened = blocks._replace(leaves=blocks.leaves + more[0], core=blocks.core + more[1])
        found = triangle_of(widened, places)
        if found is not None:
            return found
    return None


def mode_at(others: Others, at: np.ndarray, known: Arrow | None = None) -> Given | None:
    """The mode of the others from a point (d,), where scales are held; None if it is not found.

    ``known`` is the factor at a mode nearby.

    Cost: some gradients, and one to three Hessians.
    """
    (energy,), (gradient,) = others.evaluate(at[None])
    if not (np.isfinite(energy) and np.all(np.isfinite(gradient))):
        return None
    place = _Place(at, float(energy), gradient)
    for triangle in [] if known is None else [known] * CHORDS:
        lower = _lower(others, place, triangle)
        if lower is None:
            break
        place = lower
    last = triangle_at(others, place.at[None])
    for _ in range(MOST_STEPS):
        lower = None if last is None else _lower(others, place, last)
        if lower is None:
            break
        place = lower
        last = triangle_at(others, place.at[None])
    if last is None:
        return None
    slopes = last.transposed(place.gradient[others.indices])
    decrement = min(float(slopes @ slopes), 2 * len(slopes))
    volume = float(np.sum(np.log(last.diagonal)))
    constant = 0.5 * len(slopes) * np.log(2 * np.pi)
    evidence = 0.5 * decrement + volume - place.energy + constant
    mean = place.at[others.indices]
    if decrement < ARRIVED:
        mean = mean - last.times(slopes)
    return Given(mean, last, evidence) if np.isfinite(evidence) else None


class _Place(NamedTuple):
    """A point (d,), with the energy and its gradient (d,) there."""

    at: np.ndarray
    energy: float
    gradient: np.ndarray


def _lower(others: Others, place: _Place, triangle: Arrow) -> _Place | None:
    """The first of halved steps that lowers the energy enough; None if none does, or at a mode."""
    slopes = triangle.transposed(place.gradient[others.indices])
    if slopes @ slopes < ARRIVED:
        return None
    direction = np.zeros_like(place.at)
    direction[others.indices] = -triangle.times(slopes)
    for parts in (np.ones(1), 0.5 ** np.arange(1, HALVINGS)):
        trials = place.at + parts[:, None] * direction
        energies, gradients = others.evaluate(trials)
        is_lower = np.isfinite(energies) & np.all(np.isfinite(gradients), axis=1)
        is_lower &= energies <= place.energy - DECREASE * parts * (slopes @ slopes)
        if np.any(is_lower):
            first = int(np.argmax(is_lower))
            return _Place(trials[first], float(energies[first]), gradients[first])
    return None


def balanced(noise: np.ndarray) -> np.ndarray:
    """Noise (n, r) with a mean square of 1: by it a skewed density would move the mean."""
    return noise / np.sqrt(np.mean(noise**2, axis=0))


def best_gaussian(
    others: Others, at: np.ndarray, mode: Given, averaging: Arrow | None
) -> tuple[Given, Arrow] | None:
    """The best Gaussian of the others near their mode, and the evidence of scales by it.

    ``at`` has the scales, (d,). ``averaging`` is what follows the factor at a mode if the Hessian
    is averaged; it hardly depends on the scales, and is found if it is not known. None is returned
    where numbers are not finite.

    Cost: n gradients and up to four times ``MEAN_DRAWS``; a Hessian at ``AVERAGED`` draws if the
    averaging is not known.
    """
    mean, triangle = mode.mean, mode.triangle
    if averaging is not None:
        triangle = triangle.followed_by(averaging)
    half = len(others.noise) // 2
    parts = others.noise[: MEAN_DRAWS // 2], others.noise[half:][: MEAN_DRAWS // 2]
    some = balanced(np.concatenate(parts))
    for _ in range(MEAN_STEPS):
        points = _pushed(others, at, mean, triangle, some)
        _, gradients = others.evaluate(points)
        slopes = triangle.transposed(gradients[:, others.indices].mean(axis=0))
        if not np.all(np.isfinite(slopes)):
            return None
        if averaging is not None and float(slopes @ slopes) < SETTLED * len(slopes):
            break
        mean = mean - triangle.times(slopes)
        if averaging is None:
            points[:, others.indices] -= triangle.times(slopes)
            averaged = triangle_at(others, points[:: len(some) // AVERAGED]) or triangle
            averaging, triangle = mode.triangle.divided(averaged), averaged
    energies, gradients = others.evaluate(_pushed(others, at, mean, triangle, others.noise))
    if averaging is None or not (np.all(np.isfinite(energies)) and np.all(np.isfinite(gradients))):
        return None
    volume = float(np.sum(np.log(triangle.diagonal)))
    constant = 0.5 * len(mean) * np.log(2 * np.pi)
    weights = -energies + 0.5 * np.sum(others.noise**2, axis=1) + volume + constant
    slopes = others.noise - triangle.transposed(gradients[:, others.indices])
    variance = _variance(slopes)
    return Given(mean, triangle, float(weights.mean()) + 0.5 * variance, variance), averaging


def _variance(slopes: np.ndarray) -> float:
    """The variance of log weights from their gradients (n, r) at noise and then its negative.

    For the best Gaussian the weights have no part of first or second degree in the noise. The
    squared gradient of a Hermite polynomial has its degree times the mean of its square, so that
    odd parts of degree 3 and even ones of degree 4 take a third and a quarter. A mean over n draws
    and r latents has far less noise than one of the weights themselves.
    """
    ahead, behind = np.split(slopes, 2)
    of_odd, of_even = 0.5 * (ahead + behind), 0.5 * (ahead - behind)
    odd, even = (float(np.mean(np.sum(part**2, axis=1))) for part in (of_odd, of_even))
    return odd / 3 + even / 4


def bound_at(others: Others, at: np.ndarray, mode: Given) -> tuple[float, np.ndarray]:
    """The evidence lower bound of given scales, and its gradient in all latents, (d,).

    The Gaussian is that of the mode, with a better mean. At the best one the bound does not change
    with it, so that its gradient in the scales is the mean of the model's.
    """
    noise, mean = others.noise[::2], mode.mean
    for _ in range(2):
        points = _pushed(others, at, mean, mode.triangle, noise)
        energies, gradients = others.evaluate(points)
        gradient = gradients.mean(axis=0)
        mean = mean - mode.triangle.times(mode.triangle.transposed(gradient[others.indices]))
    volume = float(np.sum(np.log(mode.triangle.diagonal)))
    return volume - float(energies.mean()), -gradient


def _pushed(
    others: Others, at: np.ndarray, mean: np.ndarray, triangle: Arrow, noise: np.ndarray
) -> np.ndarray:
    """Points (n, d) with the scales of one, and others of a Gaussian."""
    points = np.tile(at, (len(noise), 1))
    points[:, others.indices] = mean + triangle.times(noise)
    return points
