"""A Gaussian that changes with the scales of a model, from modes at some of their values.

Latents between two bounds, such as correlations, count as scales too. Rounds of batch and match
follow what ``scale_rounds`` finds, and the bound decides whether this is kept.
"""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.candidates import (
    EQUAL_BOUNDS,
    Candidate,
    bounded,
    highest,
    lower_bound,
)
from numpyro_kscore._starts.climb import climb_near
from numpyro_kscore._starts.interpolation import Found, Scales
from numpyro_kscore._starts.laplace import NUM_POINTS, make_others
from numpyro_kscore._starts.scale_rounds import MOST_SCALES, find_scales
from numpyro_kscore._starts.search import Search
from numpyro_kscore._starts.start import draws_at
from numpyro_kscore._transports.affine import Affine, factor, standard
from numpyro_kscore._transports.stretch import unstretched
from numpyro_kscore._transports.transport import Chain, Evaluate, pulled_back

# Most rounds of batch and match.
MATCHES = 6
# Most that may be left to the model, in nats, or for each latent; less where there are more scales
# than two, between whose values polynomials are wild.
MOST_LEFT, LEFT_BY_TWO, LEFT_BY_MORE = 0.35, 0.02, 0.0125


def fit_conditional(search: Search, known: Candidate) -> Candidate:
    """A Gaussian that changes with the model's scales, if it is close to the model.

    The known one is returned if its bound is no lower, and where much is left: steps take longer to
    mend polynomials of scales than to find all from a plain start.

    Cost: for k scales and r others some gradients and up to r products of Hessians at each of
    2 k² + 4 k + 1 nodes, in two or three rounds; rounds of batch and match as long as they pay;
    O(k² r³) if the others all depend on each other.
    """
    scales, dim = search.latents.scales, len(search.latents.first)
    if not (search.model.has_products and 0 < len(scales) <= MOST_SCALES and len(scales) < dim):
        return known
    evaluate = search.model.in_form(known.centering)
    found = _find(search, known, scales)
    if found is None:
        return known
    given = found.conditional
    inside, start = pulled_back(evaluate, given), standard(dim)
    first = highest([known, bounded(inside, start, search.noise, known.centering)])
    best = climb_near(inside, start, first, search, MATCHES, patience=1)
    if lower_bound(best) < lower_bound(first) + EQUAL_BOUNDS:
        # Matching narrows tails, which the bound hardly sees.
        best = first
    most = dim * (LEFT_BY_TWO if len(scales) <= 2 else LEFT_BY_MORE)
    if best is known or not _is_close(inside, best, search.noise, max(MOST_LEFT, most)):
        return known
    return best._replace(conditional=given)


def _is_close(inside: Evaluate, best: Candidate, noise: np.ndarray, most: float) -> bool:
    """Whether few nats are left to the model by the spread of the gaps between log densities."""
    gaps = draws_at(inside, Chain((best.gaussian,)), noise).gaps
    return 0.5 * float(np.var(gaps)) < most


def _find(search: Search, known: Candidate, scales: np.ndarray) -> Found | None:
    """A Gaussian that changes with scales; None where their distribution is not found."""
    gaussian, dim = known.gaussian, len(search.latents.first)
    rest = np.setdiff1d(np.arange(dim), scales)
    covariance = gaussian.factor @ gaussian.factor.T
    widths = np.sqrt(np.diag(covariance))
    # What the prior decides comes before what the data decide: given the former, the mean of the
    # latter is nearly linear, and factors are smooth.
    rest = rest[np.argsort(-(widths / search.latents.prior_widths)[rest], kind="stable")]
    inside, across = (covariance[np.ix_(scales, columns)] for columns in (scales, rest))
    of_scales = Affine(gaussian.mean[scales], factor(inside))
    moves = np.linalg.solve(of_scales.factor, across)
    marginals = search.latents.marginals
    is_shaped = None if marginals is None else np.asarray(marginals.vary)[scales]
    given = of_scales, unstretched(len(scales)), gaussian.mean[rest], moves
    now = Scales(*given, is_shaped=is_shaped)
    model = search.model
    others = make_others(
        model.in_form(known.centering),
        model.products_in(known.centering),
        gaussian.push(search.noise[:NUM_POINTS]),
        rest,
        search.rng,
    )
    return find_scales(others, now, scales, is_small=True, is_dense=True)
