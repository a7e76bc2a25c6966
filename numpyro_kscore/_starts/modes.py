"""The modes that quasi-Newton paths have found, and the Gaussians of those that lie apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from numpyro_kscore._starts.candidates import Candidate
from numpyro_kscore._starts.noise import balanced
from numpyro_kscore._starts.pathfinder import PathEnd
from numpyro_kscore._starts.search import Search
from numpyro_kscore._starts.start import GaussianStart
from numpyro_kscore._transports.affine import antithetic, with_moments
from numpyro_kscore._transports.centering import is_same
from numpyro_kscore._transports.transport import Chain

# Modes nearer than this, squared and in standard deviations, are one; a mode with less than this
# fraction of the probability is left out.
SAME_MODE, LEAST_MASS = 1.0, 0.02
# Modes further apart than this in the same units hardly overlap, if their Gaussians fit this well.
SEPARATE, MOST_MISFIT = 16.0, 0.5
# Draws for the probability of each of several modes: their shares are what a fit hardly changes.
MASS_DRAWS = 1024
# Nats below the highest bound, from which on a mode hardly counts.
FARTHEST = 5.0
# Largest squared slope at a mode, in nats per standard deviation of the best Gaussian.
LEAST_SLOPE = 0.01


def find_modes(
    search: Search,
    ends: Sequence[PathEnd],
    best: Candidate,
    refine_mode: Callable[[Search, Candidate], Candidate],
) -> GaussianStart:
    """The start at the distinct modes whose probability counts: a Gaussian with their moments.

    Modes that hardly overlap each have a Gaussian of their own, which ``refine_mode`` moves toward
    the model, and others one for all.
    """
    same_form = [end for end in ends if is_same(end.best.centering, best.centering)]
    ranked = sorted(same_form, key=lambda end: -end.best.bound.value)
    arrived = [end for end in ranked if _is_mode(end, best)]
    found = _distinct(arrived, SEPARATE)
    is_separate = len(found) > 1
    if not is_separate:
        found = _distinct(arrived, SAME_MODE)
    weights = np.ones(len(found))
    if is_separate:
        found = [end._replace(best=refine_mode(search, end.best)) for end in found]
    if len(found) > 1:
        dim = len(best.gaussian.mean)
        many = search._replace(noise=balanced(antithetic(search.rng, MASS_DRAWS, dim)))
        masses, misfits = zip(*(_fit_of(many, end.best) for end in found), strict=True)
        # A mode that does not count has no say in how well the others are fitted.
        kept, weights = counting(list(zip(found, misfits, strict=True)), np.array(masses))
        found = [end for end, _ in kept]
        is_separate = is_separate and max(misfit for _, misfit in kept) < MOST_MISFIT
    parts = tuple(end.best.gaussian for end in found)
    return GaussianStart(
        Chain((with_moments(parts, weights) if len(parts) > 1 else best.gaussian,)),
        best.centering,
        best.bound.value,
        search.model.count,
        np.array([end.last.point for end in found]).reshape(-1, len(best.gaussian.mean)),
        weights,
        parts if is_separate and len(parts) > 1 else (),
    )


def may_be_more(ends: Sequence[PathEnd]) -> bool:
    """Whether paths have found several modes that count, and one of them too seldom.

    The probability that the next path ends at a new mode is about the fraction of paths whose mode
    was found once (Good 1953). Components with exchangeable labels have k! modes: where there are
    more than two, every one is to be found three times.
    """
    arrived = [end for end in ends if end.has_arrived]
    if not arrived:
        return False
    first = max(arrived, key=lambda end: end.best.bound.value)
    least = first.best.bound.value - FARTHEST
    likely = [end for end in arrived if end.best.bound.value > least]
    likely = [end for end in likely if is_same(end.best.centering, first.best.centering)]
    found = _distinct(likely, SEPARATE)
    times = [sum(len(_distinct([mode, end], SEPARATE)) == 1 for end in likely) for mode in found]
    return len(found) > 1 and min(times) < min(len(found), 3)


def counting(found: Sequence[Any], log_masses: np.ndarray) -> tuple[list[Any], np.ndarray]:
    """Those that have probability enough to count, and their fractions of it."""
    weights = np.exp(log_masses - np.max(log_masses))
    counts = weights >= LEAST_MASS * np.sum(weights)
    kept = [one for one, count in zip(found, counts, strict=True) if count]
    return kept, weights[counts] / np.sum(weights[counts])


def _fit_of(search: Search, candidate: Candidate) -> tuple[float, float]:
    """How well a Gaussian fits the model near it: log probability there, and misfit.

    The former is by importance sampling, and not normalized. The misfit is, by Stein's identity,
    how much wider the model is than the Gaussian in some direction: 0 if it is Gaussian, 1 if it is
    flat there, as along a ring of modes.
    """
    gaussian, noise = candidate.gaussian, search.noise
    energies, gradients = search.model.in_form(candidate.centering)(gaussian.push(noise))
    residual = noise.T @ (noise - gradients @ gaussian.factor) / len(noise)
    is_finite = np.all(np.isfinite(residual))
    misfit = float(np.linalg.eigvalsh(residual + residual.T)[-1] / 2) if is_finite else np.inf
    ratios = gaussian.log_det + 0.5 * np.sum(noise**2, axis=1) - energies
    ratios = np.where(np.isfinite(ratios), ratios, -np.inf)
    # Truncated where a single draw would dominate (Ionides 2008).
    mean = np.logaddexp.reduce(ratios) - np.log(len(ratios))
    capped = np.minimum(ratios, mean + 0.5 * np.log(len(ratios)))
    return float(np.logaddexp.reduce(capped)), misfit


def _is_mode(end: PathEnd, best: Candidate) -> bool:
    """Whether a path ended at a mode: a slow path may stop where its own metric sees no slope."""
    slope = end.last.gradient @ best.gaussian.factor
    return end.has_arrived and float(slope @ slope) < LEAST_SLOPE


def _distinct(ranked: Sequence[PathEnd], distance: float) -> list[PathEnd]:
    places = [(end.last.point, end.best.gaussian.factor) for end in ranked]
    return [ranked[k] for k in _apart(places, distance)]


def distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """The Gaussians that hardly overlap with any that is better, the best one first."""
    ranked = sorted(found, key=lambda one: -one.bound.value)
    places = [(one.gaussian.mean, one.gaussian.factor) for one in ranked]
    return [ranked[k] for k in _apart(places, SEPARATE)]


def _apart(places: Sequence[tuple[np.ndarray, np.ndarray]], distance: float) -> list[int]:
    """Which points (d,) are this far, squared, from those before, in the units of both factors."""
    kept: list[int] = []
    for k, (point, factor) in enumerate(places):
        others = ((point - places[j][0], (factor, places[j][1])) for j in kept)
        if all(is_far(move, factors, distance) for move, factors in others):
            kept.append(k)
    return kept


def is_far(move: np.ndarray, factors: Iterable[np.ndarray], distance: float) -> bool:
    """Whether a move (d,) is longer than a squared distance in the units of all factors (d, d)."""
    return all(float(np.sum(np.linalg.solve(f, move) ** 2)) > distance for f in factors)
