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

from numpyro_kscore._starts.batch_match import Gaussian, elbo, match_scores
from numpyro_kscore._starts.density import AtPoints
from numpyro_kscore._starts.quasi_newton import Iterate, Path, quasi_newton_paths

__all__ = ["GaussianStart", "find_gaussian"]

Density = Callable[[np.ndarray, np.ndarray, np.ndarray], AtPoints]

# Gradients of the model for the paths, and for batch and match; with the bounds they make 3000.
PATH_GRADIENTS, MATCH_GRADIENTS = 1000, 1000
NUM_PATHS = 4
# Draws for a bound along a path, where bounds differ by many nats, and in the end.
PATH_DRAWS, LAST_DRAWS = 8, 64
# Iterates looked at in each round of the search for the best one of a path.
LOOKS, ROUNDS = 6, 3
# Rounds in which degrees of centering are chosen.
CENTERING_ROUNDS = 2
# Radius of random starts in unconstrained coordinates, as NumPyro's, and the scale of its guides.
RADIUS, COLD_SCALE = 2.0, 0.1
# Modes nearer than this, squared and in standard deviations, are one; a mode with less than this
# fraction of the probability is left out.
SAME_MODE, LEAST_MASS = 1.0, 0.02
QUARTILE = 0.6745  # of the standard normal distribution


class GaussianStart(NamedTuple):
    """A Gaussian near the posterior, and how it was found.

    Attributes:
        gaussian: mean and factor in flat coordinates.
        centering: degrees of centering of these coordinates, (d,); 1 is the unconstrained value.
        elbo: its evidence lower bound, in nats.
        num_gradients: how many gradients of the model it took.
        modes: the distinct modes whose probability counts, (k, d), in the same coordinates.
        weights: fractions of probability by their Gaussian approximations, (k,).
    """

    gaussian: Gaussian
    centering: np.ndarray
    elbo: float
    num_gradients: int
    modes: np.ndarray
    weights: np.ndarray


class _Judged(NamedTuple):
    elbo: float
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
        return _Judged(elbo(gaussian, energies), gaussian, centering)


class _PathEnd(NamedTuple):
    best: _Judged
    last: Iterate
    has_arrived: bool


def find_gaussian(
    density: Density, first: np.ndarray, is_hierarchical: np.ndarray, rng: np.random.Generator
) -> GaussianStart:
    """A Gaussian near the posterior, in coordinates that suit it.

    Args:
        density: the model, see :func:`~numpyro_kscore._starts.density.batched_density`.
        first: unconstrained values at which the density is finite, (d,); the first path starts
            there.
        is_hierarchical: which coordinates have a degree of centering, (d,).
        rng: for draws.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: about 3000 gradients of the model, and O(d³) for each of up to 60 steps.
    """
    model = _Model(density)
    dim = len(first)
    centered = np.ones(dim)
    forms = [centered]
    if np.any(is_hierarchical):
        forms.append(np.where(is_hierarchical, 0.0, 1.0))
    last_noise = _antithetic(rng, LAST_DRAWS, dim)
    cold = model.judge(Gaussian(first, COLD_SCALE * np.eye(dim)), centered, last_noise)
    ends = [_paths(model, first, form, NUM_PATHS // len(forms), rng) for form in forms]
    best = max((end.best for form in ends for end in form), key=_bound, default=None)
    if best is None:
        raise FloatingPointError("expected a finite density at one of the starts; got none")
    best = _refined(model, best, is_hierarchical, rng, last_noise)
    if cold.elbo > best.elbo:
        best = cold
    modes, weights, spanned = _span_modes([end for form in ends for end in form], best)
    return GaussianStart(spanned, best.centering, best.elbo, model.count, modes, weights)


def _bound(judged: _Judged) -> float:
    return judged.elbo


def _paths(
    model: _Model, first: np.ndarray, form: np.ndarray, count: int, rng: np.random.Generator
) -> list[_PathEnd]:
    """Quasi-Newton paths in one form of coordinates, each with its best Gaussian."""
    dim = len(first)
    starts = rng.uniform(-RADIUS, RADIUS, (count, dim))
    moved = model.at(first[None], np.ones(dim), form).moved[0]
    if np.all(np.isfinite(moved)):
        starts[0] = moved
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
        place = seen.index(max(judged, key=lambda index: judged[index].elbo))
        low, high = seen[max(place - 1, 0)], seen[min(place + 1, len(seen) - 1)]
    return max(judged.values(), key=_bound)


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


def _refined(
    model: _Model,
    best: _Judged,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    noise: np.ndarray,
) -> _Judged:
    """The best of what batch and match finds, in coordinates that are chosen as it goes."""
    dim = len(is_hierarchical)
    rounds = CENTERING_ROUNDS if np.any(is_hierarchical) else 0
    num_draws = min(2 * max(16, dim), MATCH_GRADIENTS // 10)
    num_steps = min(60, MATCH_GRADIENTS // num_draws) // (rounds + 1)
    for k in range(rounds + 1):
        evaluate = model.in_form(best.centering)
        steps = match_scores(evaluate, best.gaussian, rng, num_steps, num_draws)
        spaced = steps[-1 :: -max(1, num_steps // (2 if rounds else 5))]
        found = [model.judge(g, best.centering, noise) for g in [best.gaussian, *spaced]]
        best = max(found, key=_bound)
        if k < rounds:
            other = _recentered(model, best, is_hierarchical, rng)
            judged = model.judge(other.gaussian, other.centering, noise)
            # What was moved is a moment match of few draws: batch and match has yet to see it.
            best = judged if judged.elbo > best.elbo - 0.1 * dim else best
    return best


def _recentered(
    model: _Model, best: _Judged, is_hierarchical: np.ndarray, rng: np.random.Generator
) -> _Judged:
    """The Gaussian's draws in partially centered coordinates that suit them, as a Gaussian again.

    For a Gaussian prior and likelihood the best degree of centering is one minus the ratio of the
    variances of posterior and prior in non-centered coordinates.
    """
    dim = len(is_hierarchical)
    draws = best.gaussian.push(_antithetic(rng, min(max(128, 3 * dim), 512), dim))
    apart = np.where(is_hierarchical, 0.0, 1.0)
    moved = model.at(draws, best.centering, apart).moved
    moved = moved[np.all(np.isfinite(moved), axis=1)]
    if len(moved) < len(draws) // 2:
        return best
    low, high = np.quantile(moved, [0.25, 0.75], axis=0)
    ratio = ((high - low) / (2 * QUARTILE)) ** 2
    centering = np.where(is_hierarchical, np.clip(1 - ratio, 0.0, 1.0), 1.0)
    moved = model.at(draws, best.centering, centering).moved
    moved = moved[np.all(np.isfinite(moved), axis=1)]
    covariance = np.cov(moved.T).reshape(dim, dim)
    kept = len(moved) / (len(moved) + dim)
    covariance = kept * covariance + (1 - kept) * np.diag(np.diag(covariance))
    return _Judged(best.elbo, Gaussian(moved.mean(0), _factor(covariance)), centering)


def _span_modes(
    ends: Sequence[_PathEnd], best: _Judged
) -> tuple[np.ndarray, np.ndarray, Gaussian]:
    """Distinct modes with their weights, and the Gaussian with the moments of all of them."""
    found: list[_PathEnd] = []
    same_form = [end for end in ends if np.array_equal(end.best.centering, best.centering)]
    for end in sorted(same_form, key=lambda end: -end.best.elbo):
        if end.has_arrived and all(_are_apart(end, other) for other in found):
            found.append(end)
    if not found:
        return np.zeros((0, len(best.centering))), np.zeros(0), best.gaussian
    bounds = np.array([end.best.elbo for end in found])
    weights = np.exp(bounds - bounds.max())
    weights = weights / weights.sum()
    kept = weights >= LEAST_MASS
    modes = np.stack([end.last.point for end in found])[kept]
    weights = weights[kept] / weights[kept].sum()
    if len(weights) == 1:
        return modes, weights, best.gaussian
    parts = [end.best.gaussian for end, keep in zip(found, kept, strict=True) if keep]
    means = np.stack([part.mean for part in parts])
    mean = weights @ means
    covariance = sum(
        w * (part.factor @ part.factor.T + np.outer(part.mean - mean, part.mean - mean))
        for w, part in zip(weights, parts, strict=True)
    )
    return modes, weights, Gaussian(mean, _factor(np.asarray(covariance)))


def _are_apart(one: _PathEnd, other: _PathEnd) -> bool:
    move = one.last.point - other.last.point
    width = other.best.gaussian.factor
    return float(np.sum(np.linalg.solve(width, move) ** 2)) > SAME_MODE


def _antithetic(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    half = rng.standard_normal((count // 2, dim))
    return np.concatenate([half, -half])
