"""The search for a start where data are tall: on some rows, then with few passes over all.

The posterior of a part of the rows, scaled to all, has about the right shape in about the right
coordinates, and its mean in the wrong place, by several standard deviations. A few steps of batch
and match with the density of all rows put both right; where a posterior is Gaussian one step does.
"""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.batch_match import Evaluate, Gaussian, elbo, match_scores
from numpyro_kscore._starts.candidates import CountedModel, Density, Latents, antithetic, factor
from numpyro_kscore._starts.couplings import coupled
from numpyro_kscore._starts.gaussian_start import GaussianStart, find_gaussian
from numpyro_kscore._starts.quasi_newton import quasi_newton_paths
from numpyro_kscore._starts.refinement import FEWEST_PAIRS, SUITED_DRAWS_EACH, in_suited_form

__all__ = ["MOST_BLOCKS", "MOST_ROWS", "find_tall"]

# Rows that the search looks at; fewer where each has latents of its own, which are integrated out.
MOST_ROWS, MOST_BLOCKS = 8192, 2048
# Most passes of a quasi-Newton path that takes the covariance of some rows for a metric.
PATH_LENGTH = 40
# Steps of batch and match in a round, most rounds, and draws for a bound after each.
MATCH_STEPS, MOST_ROUNDS, BOUND_DRAWS = 3, 8, 32
# A round leaves a hundredth of the nats that it brought.
MUCH = 10.0


def find_tall(
    some: Density,
    every: Density,
    share: float,
    latents: Latents,
    rng: np.random.Generator,
    with_couplings: bool,
) -> GaussianStart:
    """A Gaussian near the posterior of all rows, see :func:`find_gaussian`.

    Args:
        some: the density of some rows.
        every: that of all rows.
        share: how large a part of all rows some are.
        latents: what is known of the latents.
        rng: for draws.
        with_couplings: whether sizes of latents may vary with others in its coordinates.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: a search on some rows, and gradients of all rows in the order of 20 for each dimension; a
    search on all rows where some have several modes, whose weights they do not know.
    """
    rest = latents, rng, with_couplings
    found = find_gaussian(some, *rest)
    spent = int(np.ceil(share * found.num_gradients))
    if len(found.weights) > 1:
        found = find_gaussian(every, *rest)
        return found._replace(num_gradients=spent + found.num_gradients)
    model = CountedModel(every)
    evaluate = model.in_form(found.centering)
    if found.couplings is not None:
        evaluate = coupled(evaluate, found.couplings)
    noise = antithetic(rng, BOUND_DRAWS, len(latents.first))
    best = _moved(evaluate, [found.gaussian, _at_mode(evaluate, found.gaussian)], rng, noise)
    if not np.isfinite(best[0]):
        raise FloatingPointError("expected a finite bound with all rows; got none")
    centering, couplings = found.centering, found.couplings
    if np.any(latents.is_hierarchical):
        # Coordinates know where data place a latent, and some rows place it elsewhere.
        dim = len(latents.first)
        draws = best[1].push(antithetic(rng.spawn(1)[0], SUITED_DRAWS_EACH * dim, dim))
        if couplings is not None:
            draws = couplings.latents(draws)
        given = draws, centering, latents.is_hierarchical
        suiting = in_suited_form(CountedModel(some), *given)
        if suiting is not None:
            other = _moved(model.in_form(suiting[1]), [suiting[0]], rng, noise)
            if other[0] > best[0]:
                best, centering, couplings = other, suiting[1], None
    bound, gaussian = best
    return found._replace(
        gaussian=gaussian,
        centering=centering,
        couplings=couplings,
        elbo=bound,
        num_gradients=spent + model.count,
        modes=gaussian.mean[None],
    )


def _at_mode(evaluate: Evaluate, gaussian: Gaussian) -> Gaussian:
    """The Gaussian at the end of a quasi-Newton path from one that is near."""

    def inside(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        energies, gradients = evaluate(gaussian.push(points))
        return energies, gradients @ gaussian.factor

    path = quasi_newton_paths(inside, np.zeros((1, len(gaussian.mean))), PATH_LENGTH)[0]
    if not path.iterates:
        return gaussian
    last = path.iterates[-1]
    return Gaussian(
        gaussian.mean + gaussian.factor @ last.point,
        gaussian.factor @ factor(last.inverse_hessian),
    )


def _moved(
    evaluate: Evaluate, starts: list[Gaussian], rng: np.random.Generator, noise: np.ndarray
) -> tuple[float, Gaussian]:
    """The best of Gaussians after rounds of batch and match, while they bring much; its bound."""
    dim = noise.shape[1]
    num_draws = 2 * max(FEWEST_PAIRS, dim)
    weights = (num_draws * dim / np.arange(1, MATCH_STEPS + 1)).tolist()

    def judged(candidate: Gaussian) -> tuple[float, Gaussian]:
        bound = elbo(candidate, noise, evaluate(candidate.push(noise))[0])
        return bound.value, candidate

    best = max(map(judged, starts), key=lambda one: one[0])
    for _ in range(MOST_ROUNDS):
        before = best
        after = match_scores(evaluate, before[1], rng, weights, num_draws)[-1]
        best = max(before, judged(after), key=lambda one: one[0])
        if not best[0] > before[0] + MUCH:
            break
    return best
