"""Gaussians moved to the posterior of all data by scores of all data."""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.batch_match import Bound, Evaluate, Gaussian, elbo, match_scores
from numpyro_kscore._starts.candidates import antithetic
from numpyro_kscore._starts.refinement import FEWEST_PAIRS

__all__ = ["MOST_ROUNDS", "match_all", "match_round", "noise_for_bounds", "telling_draws"]

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


def match_round(evaluate: Evaluate, start: Gaussian, rng: np.random.Generator) -> Gaussian:
    """A Gaussian after a few steps of batch and match with the published weights."""
    dim = len(start.mean)
    num_draws = 2 * max(FEWEST_PAIRS, dim)
    weights = (num_draws * dim / np.arange(1, MATCH_STEPS + 1)).tolist()
    return match_scores(evaluate, start, rng, weights, num_draws)[-1]


def match_all(
    evaluate: Evaluate, start: Gaussian, rng: np.random.Generator, noise: np.ndarray
) -> tuple[Bound, Gaussian]:
    """The best Gaussian of rounds of batch and match, while they bring much; its bound.

    Args:
        evaluate: energies and gradients of all data at points (m, d).
        start: the first Gaussian.
        rng: for draws.
        noise: for bounds, (m, d), antithetic.

    Cost: at most 8 rounds, each of 6 gradients for each dimension and a bound.
    """

    def judged(candidate: Gaussian) -> tuple[Bound, Gaussian]:
        return elbo(candidate, noise, evaluate(candidate.push(noise))[0]), candidate

    def value(pair: tuple[Bound, Gaussian]) -> float:
        return pair[0].value

    best = judged(start)
    for _ in range(MOST_ROUNDS):
        before = best
        best = max(before, judged(match_round(evaluate, before[1], rng)), key=value)
        if not value(best) > value(before) + MUCH:
            break
    return best
