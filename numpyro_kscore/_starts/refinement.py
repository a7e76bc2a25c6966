"""Gaussians moved on toward the posterior, in coordinates that suit it.

Rounds of batch and match alternate with a choice of the degrees of centering, as long as the
evidence lower bound rises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numpyro_kscore._starts.batch_match import Evaluate, Gaussian, match_scores
from numpyro_kscore._starts.candidates import (
    CountedModel,
    Judged,
    antithetic,
    factor,
    of_degrees,
    surely,
)
from numpyro_kscore._starts.recentering import suited
from numpyro_kscore._tracing.coupling import Centering

__all__ = [
    "FEWEST_PAIRS",
    "LEAST_GAIN",
    "fitted",
    "in_suited_form",
    "is_apart",
    "match_mode",
    "match_near",
    "preferred",
    "refine",
]

# Steps of batch and match in a round, and most rounds; gains in nats for which another one follows,
# and of a Gaussian that has far to go. Draws of a step are twice the dimension, or these pairs.
MATCH_STEPS, MOST_ROUNDS = 20, 25
LEAST_GAIN, FAR = 0.1, 1.0
FEWEST_PAIRS = 16
# Weight of the first step near the best Gaussian.
NEAR_WEIGHT = 10.0
# Draws that tell which coordinates suit a Gaussian.
RECENTERING_DRAWS = 256
# Steps that refine each of several separate modes.
MODE_STEPS = 10
# Bounds that differ by less than this, in nats, are equal: then coordinates are non-centered, where
# small scales have the tail of their prior.
EQUAL_BOUNDS = 0.25


def refine(
    model: CountedModel,
    found: Sequence[Judged],
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    noise: np.ndarray,
) -> list[Judged]:
    """The best Gaussians of batch and match, from the best one in each form of coordinates.

    Rounds of steps follow while the bound rises by more than it matters. In hierarchical models
    each goes on both in the coordinates so far and in those that suit what was found.

    Returns:
        The best Gaussian; after it the best one in non-centered coordinates, where that is another.
    """
    # In the order of a dict, which is the same in every process: draws follow from it.
    by_form: dict[bytes, list[Judged]] = {}
    for judged in found:
        by_form.setdefault(np.stack(judged.centering).tobytes(), []).append(judged)
    firsts = [max(same, key=surely) for same in by_form.values()]
    matches = [_matched(model, first, rng, noise) for first in firsts]
    best = preferred(matches)
    is_far = surely(best) - max(map(surely, firsts)) > FAR
    best = _climbed(model, best, is_hierarchical, rng, noise, is_far)
    apart = [match for match in matches if is_apart(match)]
    if not apart or is_apart(best):
        return [best]
    # Rounds in coordinates that suit a Gaussian too narrow in a scale keep it so.
    fixed = np.zeros_like(is_hierarchical)
    return [best, _climbed(model, max(apart, key=surely), fixed, rng, noise, is_far=False)]


def _climbed(
    model: CountedModel,
    best: Judged,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    noise: np.ndarray,
    is_far: bool,
) -> Judged:
    """A Gaussian after as many rounds as pay, in other coordinates too where those may change."""
    done = None if is_far else 0
    for _ in range(MOST_ROUNDS):
        starts = [best]
        if np.any(is_hierarchical):
            starts.append(_recentered(model, best, is_hierarchical, rng, noise))
        tried = [_matched(model, start, rng, noise, done) for start in starts]
        before, best = best, preferred([best, *tried])
        gain = surely(best) - surely(before)
        if done is not None:
            if gain < LEAST_GAIN:
                break
            done += MATCH_STEPS
        elif gain < FAR:
            done = 0
    return best


def preferred(found: Sequence[Judged], within: float = EQUAL_BOUNDS) -> Judged:
    """The Gaussian of highest bound, or one in non-centered coordinates that is as good.

    Args:
        found: Gaussians, in any coordinates.
        within: bounds that differ by less, in nats, are equal.
    """
    best = max(found, key=surely)
    equal = [
        judged for judged in found if surely(judged) > surely(best) - within and is_apart(judged)
    ]
    return max(equal, key=surely) if equal else best


def is_apart(judged: Judged) -> bool:
    """Whether coordinates are non-centered: with a degree of 0, and no partial one."""
    degrees = judged.centering.degrees
    return bool(np.all(np.isin(degrees, (0, 1))) and np.any(degrees == 0))


def _matched(
    model: CountedModel,
    start: Judged,
    rng: np.random.Generator,
    noise: np.ndarray,
    done: int | None = None,
    num_steps: int = MATCH_STEPS,
) -> Judged:
    """The best Gaussian of some steps of batch and match, the start included.

    While it is far off, the steps have the published weights, draws times dimensions over steps.
    Those forget all earlier draws at every step, and stop at the noise of one batch. Near the
    best Gaussian weights go on falling with the number of steps ``done`` there.
    """
    evaluate = model.in_form(start.centering)
    steps = _steps(evaluate, start.gaussian, rng, done, num_steps)
    spaced = steps[-1 :: -max(1, num_steps // 3)][:3]
    return max([start, *(model.judge(g, start.centering, noise) for g in spaced)], key=surely)


def match_near(
    evaluate: Evaluate, start: Gaussian, rng: np.random.Generator, count: int
) -> Gaussian:
    """A Gaussian near the best one after one more round of batch and match, the first being 0."""
    return _steps(evaluate, start, rng, count * MATCH_STEPS, MATCH_STEPS)[-1]


def _steps(
    evaluate: Evaluate,
    start: Gaussian,
    rng: np.random.Generator,
    done: int | None,
    num_steps: int,
) -> list[Gaussian]:
    dim = len(start.mean)
    num_draws = 2 * max(FEWEST_PAIRS, dim)
    k = np.arange(1, num_steps + 1)
    weights = num_draws * dim / k if done is None else NEAR_WEIGHT / np.sqrt(done + k)
    return match_scores(evaluate, start, rng, weights.tolist(), num_draws)


def match_mode(
    model: CountedModel, start: Judged, rng: np.random.Generator, noise: np.ndarray
) -> Judged:
    """The Gaussian of one of several separate modes, after some steps of batch and match."""
    return _matched(model, start, rng, noise, num_steps=MODE_STEPS)


def _recentered(
    model: CountedModel,
    known: Judged,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    noise: np.ndarray,
) -> Judged:
    """A Gaussian as one in partially centered coordinates that suit it."""
    draws = known.gaussian.push(antithetic(rng, RECENTERING_DRAWS, len(is_hierarchical)))
    found = in_suited_form(model, draws, known.centering, is_hierarchical)
    return known if found is None else model.judge(*found, noise)


def in_suited_form(
    model: CountedModel, draws: np.ndarray, centering: Centering, is_hierarchical: np.ndarray
) -> tuple[Gaussian, Centering] | None:
    """The Gaussian of draws in partially centered coordinates that suit them.

    Of the model only priors count. None if few draws are finite in those coordinates.
    """
    apart = of_degrees(np.where(is_hierarchical, 0.0, 1.0))
    found = model.at(draws, centering, apart)
    suiting = suited(found.moved, found.values, found.locs, found.log_scales, is_hierarchical)
    if suiting is None:
        return None
    moved = _finite(model.at(draws, centering, suiting).moved)
    return None if len(moved) < len(draws) // 2 else (fitted(moved), suiting)


def fitted(draws: np.ndarray) -> Gaussian:
    """The Gaussian with the moments of draws (m, d), correlations shrunk."""
    count, dim = draws.shape
    covariance = np.cov(draws.T).reshape(dim, dim)
    kept = count / (count + dim)
    covariance = kept * covariance + (1 - kept) * np.diag(np.diag(covariance))
    return Gaussian(draws.mean(0), factor(covariance))


def _finite(rows: np.ndarray) -> np.ndarray:
    return rows[np.all(np.isfinite(rows), axis=1)]
