"""Gaussians moved to the posterior of all data by scores of all data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from numpyro_kscore._starts.batch_match import Bound, Evaluate, Gaussian, elbo, match_scores
from numpyro_kscore._starts.candidates import CountedModel, Judged, antithetic
from numpyro_kscore._starts.refinement import FEWEST_PAIRS, fitted, in_suited_form
from numpyro_kscore._tracing.coupling import Centering

__all__ = ["match_all", "match_in_other_form", "noise_for_bounds", "telling_draws"]

# Steps of batch and match in a round, most rounds, and draws for a bound after each.
MATCH_STEPS, MOST_ROUNDS, BOUND_DRAWS = 3, 8, 32
# A round leaves a hundredth of the nats that it brought.
MUCH = 10.0
# Draws for each dimension that tell which coordinates suit a Gaussian; gradients of all data cost
# much more than draws.
DRAWS_EACH = 64


def noise_for_bounds(rng: np.random.Generator, dim: int) -> np.ndarray:
    """Antithetic noise, (m, d), for bounds by all data."""
    return antithetic(rng, BOUND_DRAWS, dim)


def telling_draws(gaussian: Gaussian, rng: np.random.Generator) -> np.ndarray:
    """Draws of a Gaussian that tell which coordinates suit it, (m, d)."""
    dim = len(gaussian.mean)
    return gaussian.push(antithetic(rng.spawn(1)[0], DRAWS_EACH * dim, dim))


def match_all(
    evaluate: Evaluate, starts: list[Gaussian], rng: np.random.Generator, noise: np.ndarray
) -> tuple[Bound, Gaussian]:
    """The best of Gaussians after rounds of batch and match, while they bring much; its bound.

    Args:
        evaluate: energies and gradients of all data at points (m, d).
        starts: the first Gaussians.
        rng: for draws.
        noise: for bounds, (m, d), antithetic.

    Cost: at most 8 rounds, each of 6 gradients for each dimension and a bound.
    """
    dim = noise.shape[1]
    num_draws = 2 * max(FEWEST_PAIRS, dim)
    weights = (num_draws * dim / np.arange(1, MATCH_STEPS + 1)).tolist()

    def judged(candidate: Gaussian) -> tuple[Bound, Gaussian]:
        return elbo(candidate, noise, evaluate(candidate.push(noise))[0]), candidate

    def value(pair: tuple[Bound, Gaussian]) -> float:
        return pair[0].value

    best = max(map(judged, starts), key=value)
    for _ in range(MOST_ROUNDS):
        before = best
        after = match_scores(evaluate, before[1], rng, weights, num_draws)[-1]
        best = max(before, judged(after), key=value)
        if not value(best) > value(before) + MUCH:
            break
    return best


def match_in_other_form(
    in_form: Callable[[Centering], Evaluate],
    some: CountedModel,
    draws: np.ndarray,
    centering: Centering,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    noise: np.ndarray,
) -> Judged | None:
    """The Gaussian of draws, moved in coordinates that suit them; None if none do.

    Coordinates know where data place a latent, and some of the data place it elsewhere.

    Args:
        in_form: energies and gradients of all data, by coordinates.
        some: a density with the same priors.
        draws: see :func:`telling_draws`, (m, d).
        centering: of their coordinates.
        is_hierarchical: see :class:`Latents`, (d,).
        rng: for draws.
        noise: for bounds, (m, d), antithetic.
    """
    suiting: tuple[Gaussian, Centering] | None = (fitted(draws), centering)
    if np.any(is_hierarchical):
        suiting = in_suited_form(some, draws, centering, is_hierarchical)
    if suiting is None:
        return None
    gaussian, centering = suiting
    return Judged(*match_all(in_form(centering), [gaussian], rng, noise), centering)
