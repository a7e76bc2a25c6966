"""The Gaussian that a fit starts from, and the coordinates it is one in.

The mode and the curvature there are no summary of many posteriors: densities of hierarchical models
are unbounded, and curvature says nothing of tails. So the evidence lower bound decides: of all
Gaussians along several quasi-Newton paths the one with the highest bound is taken (Zhang et al.
2022, *Pathfinder*), and moved on by batch and match, which looks at whole distributions. It is kept
only where the bound rises. Where priors depend on other latents, this happens in centered and in
non-centered coordinates, and then in partially centered ones that suit what was found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Gaussian
from numpyro_kscore._starts.candidates import (
    CountedModel,
    Density,
    Judged,
    Latents,
    antithetic,
    of_degrees,
    surely,
)
from numpyro_kscore._starts.conditional import Conditional
from numpyro_kscore._starts.couple import couple
from numpyro_kscore._starts.couplings import Couplings
from numpyro_kscore._starts.fading import Fading, fade
from numpyro_kscore._starts.given_drivers import given_drivers
from numpyro_kscore._starts.modes import find_modes
from numpyro_kscore._starts.nearby import Nearby, draw_nearby
from numpyro_kscore._starts.paths import COLD_SCALE, all_paths, given_scales
from numpyro_kscore._starts.refinement import match_mode, preferred, refine
from numpyro_kscore._tracing.coupling import Centering

__all__ = ["GaussianStart", "find_gaussian"]

# Draws for a bound in the end.
LAST_DRAWS = 64
# Bounds that are equal in the last choice, in nats. So many draws hardly see a tail of small
# scales, where parents of effects have the right size in non-centered coordinates alone.
EQUAL_IN_THE_END = 0.5


class GaussianStart(NamedTuple):
    """A Gaussian near the posterior, and how it was found.

    Attributes:
        gaussian: mean and factor in flat coordinates.
        centering: of these coordinates, arrays (d,); a degree of 1 is the unconstrained value.
        elbo: its evidence lower bound, in nats.
        num_gradients: how many gradients of the model it took.
        modes: the distinct modes whose probability counts, (k, d), in the same coordinates.
        weights: fractions of probability by their Gaussian approximations, (k,).
        parts: the Gaussians at the modes, with these weights, if they hardly overlap; otherwise
            empty.
        couplings: how the sizes of latents vary with others in the coordinates of the Gaussian;
            None if they do not.
        warp: another Gaussian, which changes with scales: the Gaussian above is then one of its
            noise, and ``modes`` alone are in the coordinates. None if there is none.
        nearby: draws of it, if it is close to the model.
    """

    gaussian: Gaussian
    centering: Centering
    elbo: float
    num_gradients: int
    modes: np.ndarray
    weights: np.ndarray
    parts: tuple[Gaussian, ...] = ()
    couplings: Couplings | None = None
    warp: Fading | Conditional | None = None
    nearby: Nearby | None = None


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_gaussian(
    density: Density,
    latents: Latents,
    rng: np.random.Generator,
    with_couplings: bool = True,
) -> GaussianStart:
    """A Gaussian near the posterior, in coordinates that suit it.

    Args:
        density: the model, see :func:`~numpyro_kscore._starts.density.batched_density`.
        latents: where paths start, and which of the latents are special.
        rng: for draws.
        with_couplings: whether sizes of latents may vary with others in its coordinates.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: 3000 to 15000 gradients of the model in up to ten dimensions, 30000 to 200000 in a hundred
    (docs/start); O(d³) for each step of batch and match.
    """
    model = CountedModel(density)
    dim = len(latents.first)
    forms = [of_degrees(np.ones(dim))]
    if np.any(latents.is_hierarchical):
        forms.append(of_degrees(np.where(latents.is_hierarchical, 0.0, 1.0)))
    noise = antithetic(rng, LAST_DRAWS, dim)
    cold = model.judge(Gaussian(latents.first, COLD_SCALE * np.eye(dim)), forms[0], noise)
    ends = all_paths(model, latents, forms, rng)
    found = [max((end.best for end in form), key=surely) for form in ends if form]
    if not found:
        raise FloatingPointError("expected a finite density at one of the starts; got none")
    # With draws of its own: those that follow are the same where nothing comes of it.
    apart = rng.spawn(1)[0]
    given = [one for form in forms for one in given_scales(model, latents, form, apart)]
    finalists = refine(model, [*found, cold, *given], latents.is_hierarchical, rng, noise)

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
    chosen = _in_other_forms(model, latents, finalists, rng, apart.spawn(1)[0], noise)
    finalist = finalists[chosen.number]
    if finalist is not plain:
        start = start_from(finalist)
    # Modes may be unknown: then there are no weights.
    if len(start.weights) <= 1:
        start = _in_form(start, chosen, chosen.judged is finalist)
        of_start = start.gaussian, start.couplings, start.warp
        evaluate = model.in_form(start.centering)
        start = start._replace(nearby=draw_nearby(evaluate, *of_start, apart.spawn(1)[0]))
    return start._replace(num_gradients=model.count)


def _in_form(start: GaussianStart, chosen: _Found, is_plain: bool) -> GaussianStart:
    """The start in the form that was chosen."""
    if is_plain:
        return start
    return start._replace(
        gaussian=chosen.judged.gaussian,
        elbo=chosen.judged.bound.value,
        couplings=chosen.couplings,
        warp=chosen.warp,
    )


class _Found(NamedTuple):
    """A Gaussian in coordinates with couplings, one that changes with scales, or a plain one.

    Attributes:
        number: of the finalist that it comes from.
        judged: the Gaussian.
        couplings: of its coordinates.
        warp: what its draws are pushed through.
    """

    number: int
    judged: Judged
    couplings: Couplings | None = None
    warp: Fading | Conditional | None = None


def _in_other_forms(
    model: CountedModel,
    latents: Latents,
    finalists: list[Judged],
    rng: np.random.Generator,
    apart: np.random.Generator,
    noise: np.ndarray,
) -> _Found:
    """The best of some Gaussians, with couplings, changing with scales, or plain."""
    found = []
    for number, finalist in enumerate(finalists):
        evaluate = model.in_form(finalist.centering)
        judged, couplings = couple(evaluate, latents, finalist, rng, noise)
        found.append(_Found(number, judged, couplings))
        if couplings is not None:
            found.append(_Found(number, finalist))
    for one in list(found):
        faded = fade(model, one.judged, one.couplings, latents.is_hierarchical, apart, noise)
        if faded is not None:
            found.append(_Found(one.number, *faded))
    for number, finalist in enumerate(finalists):
        given = given_drivers(model, latents, finalist, apart, noise)
        if given is not None:
            found.append(_Found(number, given[0], None, given[1]))
    best = preferred([one.judged for one in found], EQUAL_IN_THE_END)
    return next(one for one in found if one.judged is best)
