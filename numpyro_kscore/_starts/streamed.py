"""The search for a start where data come in batches: on some of them, then with few passes.

Let f be the mean energy of some batches and F that of all. Near a point a the surrogate ::

    f(x) + (F - f)(a) + (F - f)'(a) (x - a) + (x - a)ᵀ (F - f)''(a) (x - a) / 2

differs from F by third order in x - a, with a factor that is small where the batches are alike. A
Gaussian is matched to it without looking at the data again, and its mean is the next a. The rounds
converge as Newton's method does, and keep what is not Gaussian in the posterior (the surrogate
likelihood of Jordan, Lee and Yang 2019, here to second order).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Evaluate, Gaussian, elbo, match_scores
from numpyro_kscore._starts.candidates import CountedModel, Density, Latents, antithetic, factor
from numpyro_kscore._starts.couplings import coupled
from numpyro_kscore._starts.gaussian_start import GaussianStart, find_gaussian
from numpyro_kscore._starts.refinement import FEWEST_PAIRS, SUITED_DRAWS_EACH, in_suited_form
from numpyro_kscore._tracing.coupling import Centering

__all__ = ["Quadratic", "find_streamed"]

# Steps of batch and match in a round, most rounds, and draws for a bound in the end.
MATCH_STEPS, MOST_ROUNDS, BOUND_DRAWS = 3, 8, 32
# Rounds end when the mean moves by less than this, in root mean square standard deviations.
NEAR = 0.1


class Quadratic(NamedTuple):
    """An energy near a point.

    Attributes:
        value: at the point.
        slope: (d,).
        bend: the Hessian, (d, d); None beyond the dimensions in which it is computed.
    """

    value: np.ndarray
    slope: np.ndarray
    bend: np.ndarray | None


class _Moved(NamedTuple):
    """A Gaussian, its bound, its coordinates, and the passes over all batches that it took."""

    bound: float
    gaussian: Gaussian
    centering: Centering
    passes: int


# From a point (d,) and its centering.
Expand = Callable[[np.ndarray, Centering], Quadratic]


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_streamed(
    some: Density,
    share: float,
    expansions: tuple[Expand, Expand],
    latents: Latents,
    rng: np.random.Generator,
    with_couplings: bool,
) -> GaussianStart:
    """A Gaussian near the posterior of all batches, see :func:`find_gaussian`.

    Args:
        some: the mean density of some batches.
        share: how large a part of all batches some are.
        expansions: of that density, and of the mean density of all batches.
        latents: what is known of the latents.
        rng: for draws.
        with_couplings: whether sizes of latents may vary with others in its coordinates.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: a search on some batches, and two to eight passes over all, each with two gradients for
    each dimension up to 128, for every mode.
    """
    dim = len(latents.first)
    found = find_gaussian(some, latents, rng, with_couplings)
    model = CountedModel(some)

    def difference(point: np.ndarray, centering: Centering) -> Quadratic:
        few, every = (expand(point, centering) for expand in expansions)
        bend = None if every.bend is None or few.bend is None else every.bend - few.bend
        return Quadratic(every.value - few.value, every.slope - few.slope, bend)

    def in_other_form(
        gaussian: Gaussian, centering: Centering
    ) -> tuple[Gaussian, Centering] | None:
        # Coordinates know where data place a latent, and some batches place it elsewhere.
        draws = gaussian.push(antithetic(rng.spawn(1)[0], SUITED_DRAWS_EACH * dim, dim))
        return in_suited_form(model, draws, centering, latents.is_hierarchical)

    is_alone = not found.parts and found.couplings is None
    other = in_other_form if is_alone and np.any(latents.is_hierarchical) else None
    starts = [found._replace(gaussian=part) for part in found.parts or (found.gaussian,)]
    moved = [_moved(model, difference, start, other, rng) for start in starts]
    bounds = np.array([one.bound for one in moved])
    passes = sum(one.passes for one in moved)
    if not np.any(np.isfinite(bounds)):
        raise FloatingPointError("expected a finite bound with all batches; got none")
    weights = np.exp(bounds - np.max(bounds))
    weights = weights / np.sum(weights)
    gaussians = tuple(one.gaussian for one in moved)
    return found._replace(
        gaussian=_spanned(gaussians, weights),
        centering=moved[0].centering,
        elbo=float(np.max(bounds) - np.log(np.max(weights))),
        num_gradients=int(np.ceil(share * found.num_gradients)) + passes * (1 + 2 * dim),
        modes=np.stack([gaussian.mean for gaussian in gaussians]),
        weights=weights,
        parts=gaussians if found.parts else (),
    )


def _moved(
    model: CountedModel,
    difference: Callable[[np.ndarray, Centering], Quadratic],
    start: GaussianStart,
    in_other_form: Callable[[Gaussian, Centering], tuple[Gaussian, Centering] | None] | None,
    rng: np.random.Generator,
) -> _Moved:
    """A Gaussian moved to the posterior of all batches, in coordinates that follow."""
    gaussian, centering, couplings = start.gaussian, start.centering, start.couplings
    dim = len(gaussian.mean)
    num_draws = 2 * max(FEWEST_PAIRS, dim)
    weights = (num_draws * dim / np.arange(1, MATCH_STEPS + 1)).tolist()
    noise = antithetic(rng, BOUND_DRAWS, dim)
    best = _Moved(-np.inf, gaussian, centering, 0)
    for count in range(1, MOST_ROUNDS + 1):
        point = gaussian.mean
        if couplings is not None:
            point = couplings.latents(point[None])[0]
        at_point = difference(point, centering)
        best = best._replace(passes=count)
        if not all(np.all(np.isfinite(a)) for a in at_point if a is not None):
            break
        inside = _corrected(model.in_form(centering), point, at_point)
        if couplings is not None:
            inside = coupled(inside, couplings)
        after = match_scores(inside, gaussian, rng, weights, num_draws)[-1]
        value = elbo(after, noise, inside(after.push(noise))[0]).value
        if not np.isfinite(value):
            break
        move = np.linalg.solve(after.factor, after.mean - gaussian.mean)
        gaussian = after
        best = _Moved(value, gaussian, centering, count)
        if np.mean(move**2) < NEAR**2:
            break
        suiting = None if in_other_form is None else in_other_form(gaussian, centering)
        if suiting is not None:
            gaussian, centering = suiting
    return best


def _corrected(evaluate: Evaluate, point: np.ndarray, difference: Quadratic) -> Evaluate:
    """Energies and gradients with a quadratic function added."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(points)
        moves = points - point
        bends = np.zeros_like(moves) if difference.bend is None else moves @ difference.bend
        changes = difference.value + np.sum(moves * (difference.slope + 0.5 * bends), axis=1)
        return energies + changes, gradients + difference.slope + bends

    return inside


def _spanned(parts: tuple[Gaussian, ...], weights: np.ndarray) -> Gaussian:
    """The Gaussian with the moments of a mixture."""
    if len(parts) == 1:
        return parts[0]
    means = np.stack([part.mean for part in parts])
    mean = weights @ means
    covariances = np.stack([part.factor @ part.factor.T for part in parts])
    apart = (means - mean).T @ (weights[:, None] * (means - mean))
    return Gaussian(mean, factor(np.einsum("k,kij->ij", weights, covariances) + apart))
