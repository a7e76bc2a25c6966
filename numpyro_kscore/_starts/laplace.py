"""Laplace's approximation of the latents of a model, its scales held, and the evidence by it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.noise import Spread, balanced, spread_out
from numpyro_kscore._starts.sparsity import (
    Blocks,
    Held,
    Products,
    Structure,
    blocks_at,
    find_structure,
    misses,
    whole_structure,
)
from numpyro_kscore._transports.affine import antithetic
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.transport import Evaluate
from numpyro_kscore._util.linalg import inverse_of_lower

# Draws over which the Gaussian of the others is fitted, and points that show what it depends on.
NUM_DRAWS, NUM_POINTS = 64, 2
# Steps by the curvature at another mode, of which each has to reach a part of the decrement before,
# and by the one here.
CHORDS, FALL, MOST_STEPS = 12, 0.5, 30
# A mode is found when a step would lower the energy by less than this, in nats.
ARRIVED = 1e-2
# Nats over which the curvature stays the same.
NEAR = 0.3
# Decrease of the energy, as a part of what its slope promises, and most halvings of a step: first,
# and where curvatures say next to nothing, as of probabilities that are all but certain.
DECREASE, HALVINGS, MOST_HALVINGS = 1e-4, 8, 24
# The least curvature that a step goes by, in units of the diagonal.
FLAT = 1e-3
# The part of its square that a slope keeps after a step by a curvature that stays the same.
SAME = 1e-8


class Others(NamedTuple):
    """A model as a function of some of its latents, the others of the scales.

    Attributes:
        evaluate: energies and gradients of all d latents.
        held: the same at points that share their scales.
        products: of their Hessians, the scales held.
        structure: that of the Hessian of the others.
        indices: which of the latents they are, (r,).
        seen: the points at which the structure was found, (n, d).
        noise: standard normal noise (n, r), its second half minus the first, with a mean square
            of 1.
        spread: points that are spread over the standard normal distribution.
    """

    evaluate: Evaluate
    held: Held
    products: Products
    structure: Structure
    indices: np.ndarray
    seen: np.ndarray
    noise: np.ndarray
    spread: Spread

    def checked(self, points: np.ndarray) -> Others:
        """The same, with the structure of the Hessian at further points (n, d) too.

        Numbers may be nearly zero elsewhere, such as those between distant times of a series. Where
        it was dense already the new one has all of them: another place would need more.

        Cost: some products at each point.
        """
        far = [p for p in points if misses(self.structure, self.products, p, self.indices)]
        if not far:
            return self
        if self.structure.is_dense:
            return self._replace(structure=whole_structure(len(self.indices)))
        seen = np.concatenate([far, self.seen])
        structure = find_structure(self.products, seen, self.indices)
        return self._replace(structure=structure, seen=seen)


def make_others(
    evaluate: Evaluate,
    products: Products,
    points: np.ndarray,
    indices: np.ndarray,
    rng: np.random.Generator,
    held: Held | None = None,
) -> Others:
    """A model as a function of its others (r,), whose Hessians are seen at points (n, d)."""
    held = held or (lambda points, with_scales: evaluate(points))
    structure = find_structure(products, points, indices)
    noise = balanced(antithetic(rng, NUM_DRAWS, len(indices)))
    spread = spread_out(rng, NUM_DRAWS, len(indices))
    return Others(evaluate, held, products, structure, indices, points, noise, spread)


class Given(NamedTuple):
    """The others at one value of the scales.

    Attributes:
        mean: where the Gaussian has its mean, (r,).
        triangle: the factor of its covariance.
        evidence: that of the scales, in nats.
        variance: that of the log weights; 0 by Laplace's approximation alone.
        shapes: those of the coordinates, see :class:`~numpyro_kscore._transports.skewed.Skewed`,
            (5, r); None if all are normal.
        scores: the mean gradient of the log density over the best density, (d,). In the scales it
            is that of the bound, which the best density hardly changes. None by a mode alone.
        noise_of_scores: half the difference between two halves of the draws, (d,).
    """

    mean: np.ndarray
    triangle: Arrow
    evidence: float
    variance: float = 0.0
    shapes: np.ndarray | None = None
    scores: np.ndarray | None = None
    noise_of_scores: np.ndarray | None = None


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
    return inverse_of_lower(factors).swapaxes(-1, -2)[..., ::-1, ::-1]


def triangle_at(others: Others, points: np.ndarray) -> Arrow | None:
    """The factor of the inverse mean Hessian at points (n, d), made positive definite if it is not.

    None is returned where numbers are not finite.
    """
    blocks = blocks_at(others.structure, others.products, points, others.indices)
    if not all(np.all(np.isfinite(block)) for block in blocks):
        return None
    places = others.structure.places
    found = triangle_of(blocks, places)
    return triangle_of(_made_positive(blocks), places) if found is None else found


def _made_positive(blocks: Blocks) -> Blocks:
    """The matrix with leaves, and a core given these, whose curvatures are absolute values.

    Where products of latents are saddles, steps by it still go down, and as far as curvatures say
    (Dauphin et al. 2014).
    """
    leaves = _absolute(blocks.leaves)
    count, size, width = blocks.borders.shape
    inner = blocks.borders.reshape(count * size, width)
    moved = np.linalg.solve(leaves, blocks.borders).reshape(count * size, width)
    taken = inner.T @ moved
    return blocks._replace(leaves=leaves, core=_absolute(blocks.core - taken) + taken)


def _absolute(matrices: np.ndarray) -> np.ndarray:
    """Symmetric matrices (..., n, n) with absolute eigenvalues, in units of their diagonals."""
    if not matrices.size:
        return matrices
    sizes = np.abs(np.diagonal(matrices, axis1=-2, axis2=-1))
    units = np.sqrt(np.maximum(sizes, 1e-12 * max(float(np.max(sizes)), 1e-300)))
    units = units[..., None] * units[..., None, :]
    values, axes = np.linalg.eigh(matrices / units)
    values = np.maximum(np.abs(values), FLAT)
    return units * ((axes * values[..., None, :]) @ axes.swapaxes(-1, -2))


def mode_at(
    others: Others, at: np.ndarray, known: Arrow | None = None, is_exact: bool = True
) -> Given | None:
    """The mode of the others from a point (d,), where scales are held; None if it is not found.

    ``known`` is the factor at a mode nearby. Unless it is to be exact, the curvature may be that at
    a point near the mode, which tells less of the evidence.

    Cost: some gradients, and one to three Hessians.
    """
    (energy,), (gradient,) = others.held(at[None], False)
    if not (np.isfinite(energy) and np.all(np.isfinite(gradient))):
        return None
    place = _Place(at, float(energy), gradient)
    bound = np.inf
    for triangle in [] if known is None else [known] * CHORDS:
        decrement = _decrement(others, place, triangle)
        lower = None if decrement > bound else _lower(others, place, triangle)
        if lower is None:
            break
        place, bound = lower, FALL * decrement
    last = triangle_at(others, place.at[None])
    for _ in range(MOST_STEPS):
        lower = None if last is None else _lower(others, place, last)
        if last is None or lower is None:
            break
        before = _decrement(others, place, last)
        place = lower
        # A step by the Hessian of a quadratic ends at its mode.
        if _decrement(others, place, last) < SAME * before:
            break
        if is_exact or before > NEAR:
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


def _decrement(others: Others, place: _Place, triangle: Arrow) -> float:
    """Twice what a Newton step promises, in nats."""
    slopes = triangle.transposed(place.gradient[others.indices])
    return float(slopes @ slopes)


def _lower(others: Others, place: _Place, triangle: Arrow) -> _Place | None:
    """The first of halved steps that lowers the energy enough; None if none does, or at a mode."""
    slopes = triangle.transposed(place.gradient[others.indices])
    if slopes @ slopes < ARRIVED:
        return None
    direction = np.zeros_like(place.at)
    direction[others.indices] = -triangle.times(slopes)
    halvings = np.arange(1, HALVINGS), np.arange(HALVINGS, MOST_HALVINGS)
    for parts in (np.ones(1), *(0.5**count for count in halvings)):
        trials = place.at + parts[:, None] * direction
        energies, gradients = others.held(trials, False)
        is_lower = np.isfinite(energies) & np.all(np.isfinite(gradients), axis=1)
        is_lower &= energies <= place.energy - DECREASE * parts * (slopes @ slopes)
        if np.any(is_lower):
            first = int(np.argmax(is_lower))
            return _Place(trials[first], float(energies[first]), gradients[first])
    return None


def halves(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, ...) that belong to two halves of the noise, each with the negatives of its own."""
    quarters = np.split(rows, 4)
    return np.concatenate(quarters[0::2]), np.concatenate(quarters[1::2])


def some(others: Others, count: int) -> np.ndarray:
    """A part of the noise, (count, r)."""
    return balanced(np.concatenate([half[: count // 2] for half in np.split(others.noise, 2)]))


def pushed_at(
    others: Others, at: np.ndarray, mean: np.ndarray, triangle: Arrow, noise: np.ndarray
) -> np.ndarray:
    """Points (n, d) with the scales of one, and others of a Gaussian."""
    points = np.tile(at, (len(noise), 1))
    points[:, others.indices] = mean + triangle.times(noise)
    return points
