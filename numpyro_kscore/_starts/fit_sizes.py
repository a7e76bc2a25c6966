"""Sizes of latents that vary with other latents, found from the model's scores.

Let the size of θ_i fall at ``rate_ij`` with θ_j, as in ``_transports.sizes``. In coordinates v
without that, the score of θ_j at given v is ``s_j - Σ_i rate_ij (θ_i s_i + 1)`` to first order,
with the scores s of θ. If the posterior of v is a Gaussian,
that is linear in v. So the rates are the coefficients of a linear regression of the model's scores
on ``θ_i s_i + 1`` and θ at draws of a Gaussian nearby. The bound decides whether they are kept.
"""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.candidates import Candidate, lower_bound
from numpyro_kscore._starts.climb import LEAST_GAIN, climb_near
from numpyro_kscore._starts.search import Search
from numpyro_kscore._transports.affine import antithetic, fitted
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.transport import Evaluate, pulled_back

# Draws for the regression, for each dimension and at least; most dimensions it is done in.
DRAWS_PER_DIM, FEWEST_DRAWS, MOST_DIMS = 8, 256, 256
# Rates count beyond four standard errors and where a standard deviation of the other latent changes
# the size by five percent; another latent counts if the squares of its effects add up to this.
LEAST_RATIO, LEAST_EFFECT, LEAST_STRENGTH = 4.0, 0.05, 0.05
# Largest change of a logarithm of size by a standard deviation of the other latent.
MOST_EFFECT = 2.0
# Least part of a draw's residual that its own influence leaves.
LEAST_REST = 0.05
# Rounds of batch and match in the new coordinates.
ROUNDS = 2


def fit_sizes(evaluate: Evaluate, search: Search, known: Candidate) -> Candidate:
    """A Gaussian whose sizes vary; the known one if its bound is no higher.

    Cost: 256 gradients of the model, or 8 for each dimension, and where sizes vary two rounds of
    batch and match, or four; O(d³).
    """
    gaussian, dim = known.gaussian, len(known.gaussian.mean)
    is_scale = search.latents.is_scale
    if not 2 <= dim <= MOST_DIMS:
        return known
    draws = gaussian.push(antithetic(search.rng, max(FEWEST_DRAWS, DRAWS_PER_DIM * dim), dim))
    energies, gradients = evaluate(draws)
    finite = np.isfinite(energies) & np.all(np.isfinite(gradients), axis=1)
    draws, scores = draws[finite], -gradients[finite]
    if len(draws) < 3 * dim + 1:
        return known
    # Sizes are powers of scales, and not of the numbers that these are functions of.
    causes = search.latents.marginals
    values, mean = draws, gaussian.mean
    if causes is not None:
        values, scores, mean = (
            causes.push(draws),
            causes.push_score(draws, scores),
            causes.push(mean),
        )
    # Positive numbers may be scales. A mean of effects that bend seems to change their sizes, and
    # what others' sizes vary with has no size that varies itself, as a mean has: so anything else
    # counts only where the bound says so.
    tried = [is_scale]
    if np.any(rates_by_regression(values, scores, ~is_scale)):
        tried.append(np.ones(dim, bool))
    searches = search, search.with_own_draws()
    best = known
    for may_drive, own in zip(tried, searches, strict=False):
        rates = rates_by_regression(values, scores, may_drive)
        if not np.any(rates):
            continue
        varying = Sizes(rates, mean, causes)
        start = fitted(draws * np.exp(-varying.log_sizes(draws)))
        inside = pulled_back(evaluate, varying)
        found = climb_near(inside, start, known, own, ROUNDS, ROUNDS)
        if lower_bound(found) > lower_bound(best) + LEAST_GAIN:
            best = found._replace(sizes=varying)
    return best


def rates_by_regression(draws: np.ndarray, scores: np.ndarray, may_drive: np.ndarray) -> np.ndarray:
    """Rates that stand out from their errors, (d, d).

    Draws far out have large residuals, so errors are those that allow for residuals of any size
    (HC3: MacKinnon and White 1985). Errors that take all residuals for equal find effects that are
    none, and one false effect can keep a fit out of the tail of a scale
    (benchmarks/results/2026-11-27-sizes-that-vary.md).
    """
    count, dim = draws.shape
    spread = draws.std(0)
    products = draws * scores + 1
    scale = products.std(0) + np.finfo(float).tiny
    features = np.concatenate(
        [np.ones((count, 1)), (draws - draws.mean(0)) / spread, products / scale], axis=1
    )
    gram = features.T @ features
    ridge = 1e-10 * np.trace(gram) / len(gram)
    inverse = np.linalg.inv(gram + ridge * np.eye(len(gram)))
    # Row k of the influences is what draw k adds to the coefficients, for a residual of one.
    influences = features @ inverse
    leverages = np.sum(influences * features, axis=1)
    coefficients = influences.T @ scores
    residuals = scores - features @ coefficients
    rates, errors = np.zeros((dim, dim)), np.zeros((dim, dim))
    for j in range(dim):
        # The size of a latent does not vary with itself: leave its own product out.
        own = dim + 1 + j
        pivot, cross = inverse[own, own], inverse[dim + 1 :, own]
        dropped, change = coefficients[own, j] / pivot, influences[:, own]
        rates[:, j] = coefficients[dim + 1 :, j] - cross * dropped
        rest = 1 - leverages + change**2 / pivot
        alone = (residuals[:, j] + dropped * change) / np.maximum(rest, LEAST_REST)
        moved = influences[:, dim + 1 :] - np.outer(change, cross / pivot)
        errors[:, j] = np.sqrt(np.square(alone) @ np.square(moved))
    clear = np.abs(rates) > LEAST_RATIO * errors
    rates = rates / scale[:, None]
    effects = rates * spread
    clear &= np.abs(effects) > LEAST_EFFECT
    np.fill_diagonal(clear, False)
    clear &= may_drive
    strength = np.sum(np.where(clear, effects, 0.0) ** 2, axis=0)
    out = np.zeros((dim, dim))
    is_driven = np.zeros(dim, bool)
    for j in np.argsort(-strength):
        # A latent whose own size varies is no measure of the size of others.
        if strength[j] < LEAST_STRENGTH or is_driven[j]:
            continue
        limit = MOST_EFFECT / spread[j]
        out[:, j] = np.where(clear[:, j], np.clip(rates[:, j], -limit, limit), 0.0)
        out[j] = 0.0
        is_driven |= clear[:, j]
    out[np.any(out != 0, axis=0)] = 0.0
    return out
