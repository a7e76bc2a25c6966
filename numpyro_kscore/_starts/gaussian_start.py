"""The Gaussian that a fit starts from, and the coordinates it is one in.

The mode and the curvature there are no summary of many posteriors: densities of hierarchical models
are unbounded, and curvature says nothing of tails. So the evidence lower bound decides: of all
Gaussians along several quasi-Newton paths the one with the highest bound is taken (Zhang et al.
2022, *Pathfinder*), and moved on by batch and match, which looks at whole distributions. It is kept
only where the bound rises. Where priors depend on other latents, this happens in centered and in
non-centered coordinates, and then in partially centered ones that suit what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Bound, Gaussian, elbo, match_scores
from numpyro_kscore._starts.density import AtPoints
from numpyro_kscore._starts.quasi_newton import Iterate, quasi_newton_paths

__all__ = ["GaussianStart", "find_gaussian"]

Density = Callable[[np.ndarray, np.ndarray, np.ndarray], AtPoints]

# Gradients of the model for the paths, and for batch and match; with the bounds they make 3000.
PATH_GRADIENTS, MATCH_GRADIENTS = 1000, 1000
NUM_PATHS = 4
# Paths from more draws of the prior follow where the first ones, bounds included, took fewer.
FEW_GRADIENTS = 1000
# Draws for a bound along a path, where bounds differ by many nats, and in the end.
PATH_DRAWS, LAST_DRAWS = 8, 64
# Iterates looked at in each round of the search for the best one of a path.
LOOKS, ROUNDS = 6, 3
# Radius of random starts in unconstrained coordinates, as NumPyro's, and the scale of its guides.
RADIUS, COLD_SCALE = 2.0, 0.1
# Modes nearer than this, squared and in standard deviations, are one; a mode with less than this
# fraction of the probability is left out.
SAME_MODE, LEAST_MASS = 1.0, 0.02
# Modes further apart than this in the same units hardly overlap, if their Gaussians fit this well.
SEPARATE, MOST_MISFIT = 16.0, 0.5
# Largest squared slope at a mode, in nats per standard deviation of the best Gaussian.
LEAST_SLOPE = 0.01


class GaussianStart(NamedTuple):
    """A Gaussian near the posterior, and how it was found.

    Attributes:
        gaussian: mean and factor in flat coordinates.
        centering: degrees of centering of these coordinates, (d,); 1 is the unconstrained value.
        elbo: its evidence lower bound, in nats.
        num_gradients: how many gradients of the model it took.
        modes: the distinct modes whose probability counts, (k, d), in the same coordinates.
        weights: fractions of probability by their Gaussian approximations, (k,).
        parts: the Gaussians at the modes, with these weights, if they hardly overlap; otherwise
            empty.
    """

    gaussian: Gaussian
    centering: np.ndarray
    elbo: float
    num_gradients: int
    modes: np.ndarray
    weights: np.ndarray
    parts: tuple[Gaussian, ...] = ()


class _Judged(NamedTuple):
    bound: Bound
    gaussian: Gaussian
    centering: np.ndarray


class _Model:
    """The density at points, with a count of its gradients."""

    def __init__(self, density: Density) -> None:
        self._density, self.count = density, 0

    def at(self, points: np.ndarray, centering: np.ndarray, other: np.ndarray) -> AtPoints:
        self.count += len(points)
        return self._density(points, centering, other)

    def in_form(
        self, centering: np.ndarray
    ) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Energies and gradients as functions of the points alone."""

        def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found = self.at(points, centering, centering)
            return found.energies, found.gradients

        return evaluate

    def judge(self, gaussian: Gaussian, centering: np.ndarray, noise: np.ndarray) -> _Judged:
        energies = self.in_form(centering)(gaussian.push(noise))[0]
        return _Judged(elbo(gaussian, noise, energies), gaussian, centering)


class _PathEnd(NamedTuple):
    best: _Judged
    last: Iterate
    has_arrived: bool


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_gaussian(
    density: Density,
    first: np.ndarray,
    from_prior: np.ndarray,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
) -> GaussianStart:
    """A Gaussian near the posterior, in coordinates that suit it.

    Args:
        density: the model, see :func:`~numpyro_kscore._starts.density.batched_density`.
        first: unconstrained values at which the density is finite, (d,); the first path starts
            there.
        from_prior: unconstrained values drawn from the prior, (m, d), from which other paths start;
            none where it cannot be drawn from.
        is_hierarchical: which coordinates have a degree of centering, (d,).
        rng: for draws.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: about 3000 gradients of the model, and O(d³) for each of up to 60 steps.
    """
    model = _Model(density)
    dim = len(first)
    forms = [np.ones(dim)]
    if np.any(is_hierarchical):
        forms.append(np.where(is_hierarchical, 0.0, 1.0))
    noise = _antithetic(rng, LAST_DRAWS, dim)
    cold = model.judge(Gaussian(first, COLD_SCALE * np.eye(dim)), forms[0], noise)
    # Draws of the prior find modes far from the origin; points near it suit vague priors.
    far = max(1, NUM_PATHS // (2 * len(forms)))
    given = [np.stack([first, *from_prior[k * far : (k + 1) * far]]) for k in range(len(forms))]
    ends = [
        _paths(model, points, form, NUM_PATHS // len(forms), rng)
        for points, form in zip(given, forms, strict=True)
    ]
    rest = from_prior[len(forms) * far :]
    if len(rest) and model.count < FEW_GRADIENTS and any(ends):
        # Where paths are short there is time to look for more modes.
        best = max((end.best for form in ends for end in form), key=_surely)
        for form, ended in zip(forms, ends, strict=True):
            if np.array_equal(form, best.centering):
                ended += _paths(model, rest, form, len(rest), rng)
    found = [max((end.best for end in form), key=_surely) for form in ends if form]
    if not found:
        raise FloatingPointError("expected a finite density at one of the starts; got none")
    # One more for partially centered coordinates.
    share = len(found) + (len(forms) > 1)
    found = [_matched(model, judged, rng, noise, share) for judged in found]
    if len(forms) > 1:
        moved = _recentered(model, found[-1], is_hierarchical, rng, noise)
        found.append(_matched(model, moved, rng, noise, share))
    best = max([*found, cold], key=_surely)
    found_modes = _find_modes(model, [end for form in ends for end in form], best, noise)
    return GaussianStart(
        found_modes.spanned,
        best.centering,
        best.bound.value,
        model.count,
        found_modes.points,
        found_modes.weights,
        found_modes.parts,
    )


def _surely(judged: _Judged) -> float:
    return judged.bound.surely


def _paths(
    model: _Model, given: np.ndarray, form: np.ndarray, count: int, rng: np.random.Generator
) -> list[_PathEnd]:
    """Quasi-Newton paths in one form of coordinates, each with its best Gaussian.

    They start at given unconstrained values, and at random points near the origin.
    """
    dim = given.shape[1]
    starts = rng.uniform(-RADIUS, RADIUS, (count, dim))
    moved = model.at(given, np.ones(dim), form).moved
    moved = moved[np.all(np.isfinite(moved), axis=1)]
    starts[: len(moved)] = moved
    budget = PATH_GRADIENTS // NUM_PATHS
    paths = quasi_newton_paths(model.in_form(form), starts, budget)
    noise = _antithetic(rng, PATH_DRAWS, dim)
    return [
        _PathEnd(
            _best_of_path(model, path.iterates, form, noise), path.iterates[-1], path.has_arrived
        )
        for path in paths
        if path.iterates
    ]


def _best_of_path(
    model: _Model, iterates: Sequence[Iterate], form: np.ndarray, noise: np.ndarray
) -> _Judged:
    """The Gaussian of highest bound along a path: a search on a grid that becomes finer."""
    judged: dict[int, _Judged] = {}
    low, high = 0, len(iterates) - 1
    for _ in range(ROUNDS):
        for index in np.unique(np.linspace(low, high, LOOKS).round().astype(int)).tolist():
            if index not in judged:
                judged[index] = model.judge(_local(iterates[index]), form, noise)
        seen = sorted(judged)
        place = seen.index(max(judged, key=lambda index: judged[index].bound.surely))
        low, high = seen[max(place - 1, 0)], seen[min(place + 1, len(seen) - 1)]
    return max(judged.values(), key=_surely)


def _local(iterate: Iterate) -> Gaussian:
    """The Gaussian that an iterate stands for: a Newton step further, with its inverse Hessian."""
    inverse = iterate.inverse_hessian
    return Gaussian(iterate.point - inverse @ iterate.gradient, _factor(inverse))


def _factor(covariance: np.ndarray) -> np.ndarray:
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        # Rounding: its diagonal is positive all the same.
        return np.diag(np.sqrt(np.maximum(np.diag(covariance), np.finfo(float).tiny)))


def _matched(
    model: _Model, start: _Judged, rng: np.random.Generator, noise: np.ndarray, share: int
) -> _Judged:
    """The best Gaussian of batch and match, the start included; takes a share of the gradients."""
    dim = len(start.gaussian.mean)
    num_draws = min(2 * max(16, dim), MATCH_GRADIENTS // 10)
    num_steps = min(60, MATCH_GRADIENTS // num_draws) // share
    evaluate = model.in_form(start.centering)
    steps = match_scores(evaluate, start.gaussian, rng, num_steps, num_draws)
    spaced = steps[-1 :: -max(1, num_steps // (6 // share))]
    return max([start, *(model.judge(g, start.centering, noise) for g in spaced)], key=_surely)


def _recentered(
    model: _Model,
    apart: _Judged,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    noise: np.ndarray,
) -> _Judged:
    """A Gaussian in non-centered coordinates as one in partially centered ones that suit it.

    For a Gaussian prior and likelihood the best degree of centering is one minus the ratio of the
    variances of posterior and prior in non-centered coordinates.
    """
    dim = len(is_hierarchical)
    variance = np.sum(apart.gaussian.factor**2, axis=1)
    centering = np.where(is_hierarchical, np.clip(1 - variance, 0.0, 1.0), 1.0)
    draws = apart.gaussian.push(_antithetic(rng, min(max(128, 3 * dim), 512), dim))
    moved = model.at(draws, apart.centering, centering).moved
    moved = moved[np.all(np.isfinite(moved), axis=1)]
    if len(moved) < len(draws) // 2:
        return apart
    covariance = np.cov(moved.T).reshape(dim, dim)
    kept = len(moved) / (len(moved) + dim)
    covariance = kept * covariance + (1 - kept) * np.diag(np.diag(covariance))
    gaussian = Gaussian(moved.mean(0), _factor(covariance))
    return model.judge(gaussian, centering, noise)


class _Modes(NamedTuple):
    points: np.ndarray
    weights: np.ndarray
    parts: tuple[Gaussian, ...]
    spanned: Gaussian


def _find_modes(
    model: _Model, ends: Sequence[_PathEnd], best: _Judged, noise: np.ndarray
) -> _Modes:
    """Distinct modes with their weights, and the Gaussian with the moments of all of them."""
    same_form = [end for end in ends if np.array_equal(end.best.centering, best.centering)]
    ranked = sorted(same_form, key=lambda end: -end.best.bound.value)
    arrived = [end for end in ranked if _is_mode(end, best)]
    # Modes that hardly overlap each have a Gaussian of their own, and others one for all.
    found = _distinct(arrived, SEPARATE)
    is_separate = len(found) > 1
    if not is_separate:
        found = _distinct(arrived, SAME_MODE)
    if len(found) < 2:
        points = np.array([end.last.point for end in found]).reshape(-1, len(best.centering))
        return _Modes(points, np.ones(len(found)), (), best.gaussian)
    fits = [_fit_of(model, end.best, noise) for end in found]
    is_separate = is_separate and all(fit.misfit < MOST_MISFIT for fit in fits)
    masses = np.array([fit.log_mass for fit in fits])
    weights = np.exp(masses - masses.max())
    kept = weights >= LEAST_MASS * weights.sum()
    found = [end for end, keep in zip(found, kept, strict=True) if keep]
    weights = weights[kept] / weights[kept].sum()
    points = np.stack([end.last.point for end in found])
    if len(found) == 1:
        return _Modes(points, weights, (), best.gaussian)
    parts = tuple(end.best.gaussian for end in found)
    return _Modes(points, weights, parts if is_separate else (), _spanning(parts, weights))


def _distinct(ranked: Sequence[_PathEnd], distance: float) -> list[_PathEnd]:
    found: list[_PathEnd] = []
    for end in ranked:
        if all(_are_apart(end, other, distance) for other in found):
            found.append(end)
    return found


class _Fit(NamedTuple):
    """How well a Gaussian is that of the model near it.

    Attributes:
        log_mass: log probability of the model near it, by importance sampling; not normalized.
        misfit: by Stein's identity, how far the model's width in some direction is from the
            Gaussian's: 0 if it is Gaussian, 1 if it is flat there, as along a ring of modes.
    """

    log_mass: float
    misfit: float


def _fit_of(model: _Model, judged: _Judged, noise: np.ndarray) -> _Fit:
    gaussian = judged.gaussian
    energies, gradients = model.in_form(judged.centering)(gaussian.push(noise))
    residual = noise.T @ (noise - gradients @ gaussian.factor) / len(noise)
    is_finite = np.all(np.isfinite(residual))
    misfit = float(np.linalg.norm(residual + residual.T, 2) / 2) if is_finite else np.inf
    log_volume = np.sum(np.log(np.diag(gaussian.factor)))
    ratios = log_volume + 0.5 * np.sum(noise**2, axis=1) - energies
    ratios = np.where(np.isfinite(ratios), ratios, -np.inf)
    # Truncated where a single draw would dominate (Ionides 2008).
    mean = np.logaddexp.reduce(ratios) - np.log(len(ratios))
    capped = np.minimum(ratios, mean + 0.5 * np.log(len(ratios)))
    return _Fit(float(np.logaddexp.reduce(capped)), misfit)


def _spanning(parts: Sequence[Gaussian], weights: np.ndarray) -> Gaussian:
    """The Gaussian with the moments of a mixture."""
    means = np.stack([part.mean for part in parts])
    mean = weights @ means
    covariance = sum(
        w * (part.factor @ part.factor.T + np.outer(part.mean - mean, part.mean - mean))
        for w, part in zip(weights, parts, strict=True)
    )
    return Gaussian(mean, _factor(np.asarray(covariance)))


def _is_mode(end: _PathEnd, best: _Judged) -> bool:
    """Whether a path ended at a mode: a slow path may stop where its own metric sees no slope."""
    slope = end.last.gradient @ best.gaussian.factor
    return end.has_arrived and float(slope @ slope) < LEAST_SLOPE


def _are_apart(one: _PathEnd, other: _PathEnd, distance: float) -> bool:
    """Whether two modes are this far apart, squared, in the units of both Gaussians."""
    move = one.last.point - other.last.point
    widths = one.best.gaussian.factor, other.best.gaussian.factor
    return all(float(np.sum(np.linalg.solve(w, move) ** 2)) > distance for w in widths)


def _antithetic(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    half = rng.standard_normal((count // 2, dim))
    return np.concatenate([half, -half])
