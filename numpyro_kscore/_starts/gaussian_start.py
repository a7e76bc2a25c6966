"""The Gaussian that a fit starts from, and the coordinates it is one in.

The mode and the curvature there are no summary of many posteriors: densities of hierarchical models
are unbounded, and curvature says nothing of tails. So the evidence lower bound decides: of all
Gaussians along several quasi-Newton paths the one with the highest bound is taken (Zhang et al.
2022, *Pathfinder*), and moved on by batch and match, which looks at whole distributions. It is kept
only where the bound rises. Where priors depend on other latents, this happens in centered and in
non-centered coordinates, and then in partially centered ones that suit what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Gaussian
from numpyro_kscore._starts.candidates import (
    CountedModel,
    Density,
    Judged,
    PathEnd,
    antithetic,
    factor,
    surely,
    widths_of,
)
from numpyro_kscore._starts.couplings import Couplings, couple
from numpyro_kscore._starts.modes import find_modes
from numpyro_kscore._starts.quasi_newton import Iterate, quasi_newton_paths
from numpyro_kscore._starts.refinement import match_mode, preferred, refine

__all__ = ["GaussianStart", "find_gaussian"]

# Gradients of the model for the paths.
PATH_GRADIENTS = 1000
NUM_PATHS = 4
# Paths from more draws of the prior follow where the first ones, bounds included, took fewer.
FEW_GRADIENTS = 1000
# Most draws of the prior that paths start from.
PRIOR_STARTS = 8
# Draws for a bound along a path, where bounds differ by many nats, and in the end.
PATH_DRAWS, LAST_DRAWS = 8, 64
# Iterates looked at in each round of the search for the best one of a path.
LOOKS, ROUNDS = 6, 3
# Radius of random starts in unconstrained coordinates, as NumPyro's, and the scale of its guides.
RADIUS, COLD_SCALE = 2.0, 0.1


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
        couplings: how the sizes of latents vary with others in the coordinates of the Gaussian;
            None if they do not.
    """

    gaussian: Gaussian
    centering: np.ndarray
    elbo: float
    num_gradients: int
    modes: np.ndarray
    weights: np.ndarray
    parts: tuple[Gaussian, ...] = ()
    couplings: Couplings | None = None


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_gaussian(
    density: Density,
    first: np.ndarray,
    from_prior: np.ndarray,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    with_couplings: bool = True,
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
        with_couplings: whether sizes of latents may vary with others in its coordinates.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: 2000 to 5000 gradients of the model in up to ten dimensions, and up to 60000 in a hundred
    (docs/start); O(d³) for each step of batch and match.
    """
    model = CountedModel(density)
    dim = len(first)
    forms = [np.ones(dim)]
    if np.any(is_hierarchical):
        forms.append(np.where(is_hierarchical, 0.0, 1.0))
    noise = antithetic(rng, LAST_DRAWS, dim)
    cold = model.judge(Gaussian(first, COLD_SCALE * np.eye(dim)), forms[0], noise)
    ends = _all_paths(model, first, from_prior, forms, rng)
    found = [max((end.best for end in form), key=surely) for form in ends if form]
    if not found:
        raise FloatingPointError("expected a finite density at one of the starts; got none")
    finalists = refine(model, [*found, cold], is_hierarchical, rng, noise)

    def start_from(best: Judged) -> GaussianStart:
        modes = find_modes(
            model,
            [end for form in ends for end in form],
            best,
            noise,
            lambda judged: match_mode(model, judged, rng, noise),
        )
        return GaussianStart(
            modes.spanned,
            best.centering,
            best.bound.value,
            model.count,
            modes.points,
            modes.weights,
            modes.parts,
        )

    plain = preferred(finalists)
    start = start_from(plain)
    # Several modes are apart in the coordinates that they were found in.
    if not with_couplings or len(start.weights) > 1:
        return start
    pairs = [couple(model, finalist, rng, noise) for finalist in finalists]
    best = preferred([judged for judged, _ in pairs])
    chosen = next(k for k, (judged, _) in enumerate(pairs) if judged is best)
    if finalists[chosen] is not plain:
        start = start_from(finalists[chosen])
    couplings = pairs[chosen][1]
    start = start._replace(num_gradients=model.count)
    if couplings is None or len(start.weights) > 1:
        return start
    return start._replace(gaussian=best.gaussian, elbo=best.bound.value, couplings=couplings)


def _all_paths(
    model: CountedModel,
    first: np.ndarray,
    from_prior: np.ndarray,
    forms: Sequence[np.ndarray],
    rng: np.random.Generator,
) -> list[list[PathEnd]]:
    """The paths in every form of coordinates.

    Draws of the prior find modes far from the origin; points near it suit vague priors, and the
    origin itself those of effects in raw units.
    """
    prior_widths = widths_of(from_prior, len(first))

    def widths_in(form: np.ndarray, count: int) -> np.ndarray:
        return np.tile(np.where(form == 1, prior_widths, 1.0), (count, 1))

    far = max(1, NUM_PATHS // (2 * len(forms)))
    ends = []
    for k, form in enumerate(forms):
        drawn = from_prior[k * far : (k + 1) * far]
        widths = np.concatenate([np.ones((1, len(first))), widths_in(form, len(drawn))])
        points = np.concatenate([first[None], drawn])
        ends.append(_paths(model, points, widths, form, NUM_PATHS // len(forms), rng, k == 0))
    rest = from_prior[len(forms) * far : PRIOR_STARTS]
    if len(rest) and model.count < FEW_GRADIENTS and any(ends):
        # Where paths are short there is time to look for more modes.
        best = max((end.best for form in ends for end in form), key=surely)
        for form, ended in zip(forms, ends, strict=True):
            if np.array_equal(form, best.centering):
                ended += _paths(model, rest, widths_in(form, len(rest)), form, len(rest), rng)
    return ends


def _paths(
    model: CountedModel,
    given: np.ndarray,
    widths: np.ndarray,
    form: np.ndarray,
    count: int,
    rng: np.random.Generator,
    from_origin: bool = False,
) -> list[PathEnd]:
    """Quasi-Newton paths in one form of coordinates, each with its best Gaussian.

    They start at given unconstrained values (m, d), with given widths, and at random points near
    the origin; one more may start at the origin itself.
    """
    dim = given.shape[1]
    starts = rng.uniform(-RADIUS, RADIUS, (count, dim))
    moved = model.at(given, np.ones(dim), form).moved
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
    paths = quasi_newton_paths(model.in_form(form), starts, budget, metrics)
    noise = antithetic(rng, PATH_DRAWS, dim)
    return [
        PathEnd(
            _best_of_path(model, path.iterates, form, noise), path.iterates[-1], path.has_arrived
        )
        for path in paths
        if path.iterates
    ]


def _best_of_path(
    model: CountedModel, iterates: Sequence[Iterate], form: np.ndarray, noise: np.ndarray
) -> Judged:
    """The Gaussian of highest bound along a path: a search on a grid that becomes finer."""
    judged: dict[int, Judged] = {}
    low, high = 0, len(iterates) - 1
    for _ in range(ROUNDS):
        for index in np.unique(np.linspace(low, high, LOOKS).round().astype(int)).tolist():
            if index not in judged:
                judged[index] = model.judge(_local(iterates[index]), form, noise)
        seen = sorted(judged)
        place = seen.index(max(judged, key=lambda index: judged[index].bound.surely))
        low, high = seen[max(place - 1, 0)], seen[min(place + 1, len(seen) - 1)]
    return max(judged.values(), key=surely)


def _local(iterate: Iterate) -> Gaussian:
    """The Gaussian that an iterate stands for: a Newton step further, with its inverse Hessian."""
    inverse = iterate.inverse_hessian
    return Gaussian(iterate.point - inverse @ iterate.gradient, factor(inverse))
