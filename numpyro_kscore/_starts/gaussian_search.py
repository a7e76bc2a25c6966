"""The Gaussian that a fit starts from, and the coordinates it is one in.

The mode and the curvature there are no summary of many posteriors: densities of hierarchical models
are unbounded, and curvature says nothing of tails. So the evidence lower bound decides: of all
Gaussians along several quasi-Newton paths the one with the highest bound is taken (Zhang et al.
2022, *Pathfinder*), and moved on by batch and match, which looks at whole distributions. It is kept
only where the bound rises. Where priors depend on other latents, this happens in centered and in
non-centered coordinates, and then in partially centered ones that suit what was found.
"""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.candidates import Candidate, highest, in_form, preferred
from numpyro_kscore._starts.climb import climb_in_forms, match_mode
from numpyro_kscore._starts.fit_sizes import fit_sizes
from numpyro_kscore._starts.modes import find_modes, may_be_more
from numpyro_kscore._starts.noise import balanced
from numpyro_kscore._starts.pathfinder import (
    COLD_SCALE,
    all_paths,
    given_scales,
    more_paths,
)
from numpyro_kscore._starts.search import CountedDensity, Density, Latents, Search
from numpyro_kscore._starts.start import GaussianStart, draw_exactly
from numpyro_kscore._transports.affine import Affine, antithetic
from numpyro_kscore._transports.centering import of_degrees
from numpyro_kscore._transports.transport import Chain, pulled_back

# Draws for a bound in the end.
LAST_DRAWS = 64
# Rounds of more paths where there may be more modes, while fewer gradients were taken.
MORE_ROUNDS, MOST_FOR_MODES = 6, 8000
# Bounds that are equal in the last choice, in nats. So many draws hardly see a tail of small
# scales, where parents of effects have the right size in non-centered coordinates alone.
EQUAL_IN_THE_END = 0.5


@np.errstate(all="ignore")  # numbers that overflow are told by their not being finite
def find_gaussian(
    density: Density,
    latents: Latents,
    rng: np.random.Generator,
    with_forms: bool = True,
) -> GaussianStart:
    """A Gaussian near the posterior, in coordinates that suit it.

    With forms, sizes of latents may vary with others.

    Raises:
        FloatingPointError: if the density is finite at no start.

    Cost: 3000 to 15000 gradients of the model in up to ten dimensions, 30000 to 200000 in a hundred
    (docs/start); O(d³) for each step of batch and match.
    """
    model, dim = CountedDensity(density), len(latents.first)
    latents = latents.with_spread(rng)
    search = Search(model, latents, rng, balanced(antithetic(rng, LAST_DRAWS, dim)))
    forms = [of_degrees(np.ones(dim))]
    if np.any(latents.is_hierarchical):
        forms.append(of_degrees(np.where(latents.is_hierarchical, 0.0, 1.0)))
    cold = in_form(search, Affine(latents.first, COLD_SCALE * np.eye(dim)), forms[0])
    paths = all_paths(search, forms)
    for count in range(MORE_ROUNDS):
        for form, ends in zip(forms, paths, strict=True):
            if model.count < MOST_FOR_MODES and may_be_more(ends):
                ends += more_paths(search, form, count)
    found = [highest([end.best for end in ends]) for ends in paths if ends]
    if not found:
        raise FloatingPointError("expected a finite density at one of the starts; got none")
    own = search.with_own_draws()
    given = [one for form in forms for one in given_scales(own, form)]
    finalists = climb_in_forms(search, [*found, cold, *given])

    def start_from(best: Candidate) -> GaussianStart:
        return find_modes(search, [end for ends in paths for end in ends], best, match_mode)

    plain = preferred(finalists)
    start = start_from(plain)
    # Several modes are apart in the coordinates that they were found in.
    if not with_forms or len(start.weights) > 1:
        return start
    chosen, finalist = _with_sizes(search, finalists)
    if finalist is not plain:
        start = start_from(finalist)
    # Modes may be unknown: then there are no weights.
    if len(start.weights) <= 1:
        if chosen is not finalist:
            start = start._replace(
                transports=Chain((chosen.gaussian,)),
                elbo=chosen.bound.value,
                sizes=chosen.sizes,
            )
        evaluate = model.in_form(start.centering)
        if start.sizes is not None:
            evaluate = pulled_back(evaluate, start.sizes)
        draws = draw_exactly(evaluate, start.transports, own.with_own_draws().rng)
        start = start._replace(exact_draws=draws)
    return start._replace(num_gradients=model.count)


def _with_sizes(search: Search, finalists: list[Candidate]) -> tuple[Candidate, Candidate]:
    """The best Gaussian with sizes that vary, or plain; and the finalist that it is from."""
    found = []
    for one in finalists:
        found.append((fit_sizes(search.model.in_form(one.centering), search, one), one))
        found.append((one, one))
    best = preferred([candidate for candidate, _ in found], EQUAL_IN_THE_END)
    return next(pair for pair in found if pair[0] is best)
