"""The modes that quasi-Newton paths have found, and the Gaussians of those that lie apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.candidates import Candidate
from numpyro_kscore._starts.host_density import CountedDensity
from numpyro_kscore._starts.pathfinder import PathEnd
from numpyro_kscore._transports.affine import Affine, with_moments
from numpyro_kscore._transports.centering import is_same

# Modes nearer than this, squared and in standard deviations, are one; a mode with less than this
# fraction of the probability is left out.
SAME_MODE, LEAST_MASS = 1.0, 0.02
# Modes further apart than this in the same units hardly overlap, if their Gaussians fit this well.
SEPARATE, MOST_MISFIT = 16.0, 0.5
# Largest squared slope at a mode, in nats per standard deviation of the best Gaussian.
LEAST_SLOPE = 0.01


class StartModes(NamedTuple):
    """The distinct modes whose probability counts.

    Attributes:
        points: where they are, (k, d).
        weights: fractions of probability, (k,).
        parts: a Gaussian for each if they hardly overlap; otherwise empty.
        spanned: the one Gaussian for all of them.
    """

    points: np.ndarray
    weights: np.ndarray
    parts: tuple[Affine, ...]
    spanned: Affine


def find_modes(
    model: CountedDensity,
    ends: Sequence[PathEnd],
    best: Candidate,
    noise: np.ndarray,
    refine_mode: Callable[[Candidate], Candidate],
) -> StartModes:
    """Distinct modes with their weights, and the Gaussian with the moments of all of them.

    Args:
        model: the density.
        ends: where the paths ended.
        best: the best Gaussian, whose coordinates count.
        noise: standard normal draws, (n, d), for weights and fits.
        refine_mode: moves the Gaussian of a mode that lies apart toward the model there.
    """
    same_form = [end for end in ends if is_same(end.best.centering, best.centering)]
    ranked = sorted(same_form, key=lambda end: -end.best.bound.value)
    arrived = [end for end in ranked if _is_mode(end, best)]
    # StartModes that hardly overlap each have a Gaussian of their own, and others one for all.
    found = _distinct(arrived, SEPARATE)
    is_separate = len(found) > 1
    if not is_separate:
        found = _distinct(arrived, SAME_MODE)
    if len(found) < 2:
        points = np.array([end.last.point for end in found]).reshape(-1, len(best.gaussian.mean))
        return StartModes(points, np.ones(len(found)), (), best.gaussian)
    if is_separate:
        found = [end._replace(best=refine_mode(end.best)) for end in found]
    fits = [_fit_of(model, end.best, noise) for end in found]
    is_separate = is_separate and all(fit.misfit < MOST_MISFIT for fit in fits)
    masses = np.array([fit.log_mass for fit in fits])
    weights = np.exp(masses - masses.max())
    kept = weights >= LEAST_MASS * weights.sum()
    found = [end for end, keep in zip(found, kept, strict=True) if keep]
    weights = weights[kept] / weights[kept].sum()
    points = np.stack([end.last.point for end in found])
    if len(found) == 1:
        return StartModes(points, weights, (), best.gaussian)
    parts = tuple(end.best.gaussian for end in found)
    return StartModes(points, weights, parts if is_separate else (), with_moments(parts, weights))


def _distinct(ranked: Sequence[PathEnd], distance: float) -> list[PathEnd]:
    found: list[PathEnd] = []
    for end in ranked:
        if all(_are_apart(end, other, distance) for other in found):
            found.append(end)
    return found


class _Fit(NamedTuple):
    """How well a Gaussian fits the model near it.

    Attributes:
        log_mass: log probability of the model near it, by importance sampling; not normalized.
        misfit: by Stein's identity, how far the model's width in some direction is from the
            Gaussian's: 0 if it is Gaussian, 1 if it is flat there, as along a ring of modes.
    """

    log_mass: float
    misfit: float


def _fit_of(model: CountedDensity, candidate: Candidate, noise: np.ndarray) -> _Fit:
    gaussian = candidate.gaussian
    energies, gradients = model.in_form(candidate.centering)(gaussian.push(noise))
    residual = noise.T @ (noise - gradients @ gaussian.factor) / len(noise)
    is_finite = np.all(np.isfinite(residual))
    misfit = float(np.linalg.norm(residual + residual.T, 2) / 2) if is_finite else np.inf
    ratios = gaussian.log_det + 0.5 * np.sum(noise**2, axis=1) - energies
    ratios = np.where(np.isfinite(ratios), ratios, -np.inf)
    # Truncated where a single draw would dominate (Ionides 2008).
    mean = np.logaddexp.reduce(ratios) - np.log(len(ratios))
    capped = np.minimum(ratios, mean + 0.5 * np.log(len(ratios)))
    return _Fit(float(np.logaddexp.reduce(capped)), misfit)


def _is_mode(end: PathEnd, best: Candidate) -> bool:
    """Whether a path ended at a mode: a slow path may stop where its own metric sees no slope."""
    slope = end.last.gradient @ best.gaussian.factor
    return end.has_arrived and float(slope @ slope) < LEAST_SLOPE


def _are_apart(one: PathEnd, other: PathEnd, distance: float) -> bool:
    """Whether two modes are this far apart, squared, in the units of both Gaussians."""
    factors = one.best.gaussian.factor, other.best.gaussian.factor
    return is_far(one.last.point - other.last.point, factors, distance)


def is_far(move: np.ndarray, factors: Iterable[np.ndarray], distance: float) -> bool:
    """Whether a move (d,) is longer than a squared distance in the units of all factors (d, d)."""
    return all(float(np.sum(np.linalg.solve(f, move) ** 2)) > distance for f in factors)


def distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """The Gaussians that hardly overlap with any that is better, the best one first."""
    out: list[Candidate] = []
    for one in sorted(found, key=lambda one: -one.bound.value):
        pairs = ((one.gaussian, other.gaussian) for other in out)
        if all(is_far(a.mean - b.mean, (a.factor, b.factor), SEPARATE) for a, b in pairs):
            out.append(one)
    return out
