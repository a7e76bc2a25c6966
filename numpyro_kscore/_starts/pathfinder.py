"""Gaussians along quasi-Newton paths from several starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.bfgs import Iterate, quasi_newton_paths
from numpyro_kscore._starts.candidates import Candidate, highest, in_form, lower_bound
from numpyro_kscore._starts.newton import newton
from numpyro_kscore._starts.noise import balanced
from numpyro_kscore._starts.search import QUANTILES, RADIUS, Search
from numpyro_kscore._transports.affine import Affine, antithetic, factor
from numpyro_kscore._transports.centering import Centering, is_same, of_degrees

# Gradients of the model for the paths.
PATH_GRADIENTS = 1000
NUM_PATHS = 4
# Paths from more draws of the prior follow where the first ones, bounds included, took fewer.
FEW_GRADIENTS = 1000
# Most draws of the prior that paths start from.
PRIOR_STARTS = 8
# Draws for a bound along a path, where bounds differ by many nats.
PATH_DRAWS = 8
# Iterates looked at in each round of the search for the best one of a path.
LOOKS, ROUNDS = 6, 3
# Scale of NumPyro's guides at their start.
COLD_SCALE = 0.1


class PathEnd(NamedTuple):
    """The outcome of a quasi-Newton path.

    Attributes:
        best: the Gaussian of highest bound along it.
        last: its last iterate.
        has_arrived: whether it converged there.
    """

    best: Candidate
    last: Iterate
    has_arrived: bool


def all_paths(search: Search, forms: Sequence[Centering]) -> list[list[PathEnd]]:
    """The paths in every form of coordinates.

    Draws of the prior find modes far from the origin; points near it suit vague priors, and the
    origin itself those of effects in raw units.
    """
    first, from_prior = search.latents.first, search.latents.from_prior
    prior_widths = search.latents.prior_widths

    def widths_in(form: Centering, count: int) -> np.ndarray:
        return np.tile(np.where(form.degrees == 1, prior_widths, 1.0), (count, 1))

    far = max(1, NUM_PATHS // (2 * len(forms)))
    ends = []
    for k, form in enumerate(forms):
        drawn = from_prior[k * far : (k + 1) * far]
        widths = np.concatenate([np.ones((1, len(first))), widths_in(form, len(drawn))])
        points = np.concatenate([first[None], drawn])
        ends.append(_paths(search, points, widths, form, NUM_PATHS // len(forms), k == 0))
    rest = from_prior[len(forms) * far : PRIOR_STARTS]
    if len(rest) and search.model.count < FEW_GRADIENTS and any(ends):
        # Where paths are short there is time to look for more modes.
        best = highest([end.best for form in ends for end in form])
        for form, ended in zip(forms, ends, strict=True):
            if is_same(form, best.centering):
                ended += _paths(search, rest, widths_in(form, len(rest)), form, len(rest))
    return ends


def more_paths(search: Search, form: Centering, round_number: int) -> list[PathEnd]:
    """Paths from further draws of the prior, and from random points."""
    start = PRIOR_STARTS + round_number * NUM_PATHS
    drawn = search.latents.from_prior[start : start + NUM_PATHS]
    widths = np.where(form.degrees == 1, search.latents.prior_widths, 1.0)
    return _paths(search, drawn, np.tile(widths, (len(drawn), 1)), form, 2 * NUM_PATHS)


def given_scales(search: Search, form: Centering) -> list[Candidate]:
    """The best Gaussian at given values of the scales, in a list; none where there are no scales.

    Where a scale multiplies latents, the density has its highest peak where the scale is zero and
    they are all equal, with next to no probability. All paths end there, and most begin to before
    they have seen a curvature.
    """
    latents, model = search.latents, search.model
    first, is_scale = latents.first, latents.is_scale
    if not np.any(is_scale) or np.all(is_scale):
        return []
    starts = np.tile(first, (len(QUANTILES), 1))
    if len(latents.from_prior):
        of_scales = latents.from_prior[:, is_scale]
        starts[:, is_scale] = np.quantile(of_scales, QUANTILES, axis=0)
    else:
        starts = starts[:1]
    evaluate = model.in_form(form)
    starts = model.at(starts, of_degrees(np.ones_like(first)), form).moved
    has_width = ~is_scale & (form.degrees == 1)
    widths = np.where(has_width, latents.prior_widths, 1.0)
    few = search._replace(noise=balanced(antithetic(search.rng, PATH_DRAWS, len(first))))
    found = []
    for start in starts:
        end = newton(evaluate, start, ~is_scale, widths)
        if end is not None:
            covariance = end.inverse_hessian + COLD_SCALE**2 * np.diag(is_scale)
            mode = Affine(end.point, factor(covariance))
            found.append(in_form(few, mode, form))
    return sorted(found, key=lower_bound)[-1:]


def _paths(
    search: Search,
    given: np.ndarray,
    widths: np.ndarray,
    form: Centering,
    count: int,
    from_origin: bool = False,
) -> list[PathEnd]:
    """Quasi-Newton paths in one form of coordinates, each with its best Gaussian.

    They start at given unconstrained values (m, d), with given widths, and at random points near
    the origin; one more may start at the origin itself.
    """
    dim = given.shape[1]
    starts = search.rng.uniform(-RADIUS, RADIUS, (count, dim))
    moved = search.model.at(given, of_degrees(np.ones(dim)), form).moved
    kept = np.all(np.isfinite(moved), axis=1)
    starts[: kept.sum()] = moved[kept]
    # In raw units a path that takes all coordinates for alike moves scales to where it is instead
    # of means to where the data are, and ends in another valley.
    metrics = np.ones_like(starts)
    metrics[: kept.sum()] = widths[kept]
    if from_origin:
        # In raw units effects are tiny. Where their priors are wide, predictions overflow, or are
        # flat, at all draws and wherever random points are.
        starts = np.concatenate([starts, np.zeros((1, dim))])
        metrics = np.concatenate([metrics, np.ones((1, dim))])
    budget = PATH_GRADIENTS // NUM_PATHS
    paths = quasi_newton_paths(search.model.in_form(form), starts, budget, metrics)
    few = search._replace(noise=balanced(antithetic(search.rng, PATH_DRAWS, dim)))
    return [
        PathEnd(_best_of_path(few, path.iterates, form), path.iterates[-1], path.has_arrived)
        for path in paths
        if path.iterates
    ]


def _best_of_path(search: Search, iterates: Sequence[Iterate], form: Centering) -> Candidate:
    """The Gaussian of highest bound along a path: a search on a grid that becomes finer."""
    found: dict[int, Candidate] = {}
    low, high = 0, len(iterates) - 1
    for _ in range(ROUNDS):
        for index in np.unique(np.linspace(low, high, LOOKS).round().astype(int)).tolist():
            if index not in found:
                found[index] = in_form(search, _local(iterates[index]), form)
        seen = sorted(found)
        place = seen.index(max(found, key=lambda index: found[index].bound.lower))
        low, high = seen[max(place - 1, 0)], seen[min(place + 1, len(seen) - 1)]
    return highest(list(found.values()))


def _local(iterate: Iterate) -> Affine:
    """The Gaussian that an iterate stands for: a Newton step further, with its inverse Hessian."""
    inverse = iterate.inverse_hessian
    return Affine(iterate.point - inverse @ iterate.gradient, factor(inverse))
