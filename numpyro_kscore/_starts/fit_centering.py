"""The partially centered coordinates that suit draws near a posterior."""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.search import Search
from numpyro_kscore._transports.affine import Affine, antithetic, fitted
from numpyro_kscore._transports.centering import Centering, of_degrees

# Draws that tell which coordinates suit a Gaussian.
RECENTERING_DRAWS = 256
# Degrees of centering below this are 0.
LEAST_DEGREE = 0.05
# Quantiles of the scale of a prior between which draws are used.
CENTRAL = (0.1, 0.9)


def fit_centering(
    moved: np.ndarray,
    values: np.ndarray,
    locs: np.ndarray,
    log_scales: np.ndarray,
    is_hierarchical: np.ndarray,
) -> Centering | None:
    """Degrees of centering, with scales and locations; None if too few draws are finite.

    If prior and likelihood are normal, a non-centered latent is normal given its prior: the best
    degree is one minus its variance there, and its mean is that degree times where the data alone
    place it, in units of the prior. Both are those of a linear regression on the location and the
    logarithm of the scale of the prior, at draws where this is not far from its median: a variance
    that includes what they move is too large where data say much.
    """
    standard = (values - locs) * np.exp(-log_scales)
    finite = np.all(np.isfinite(moved) & np.isfinite(standard), axis=1)
    if np.sum(finite) < len(finite) // 2:
        return None
    degrees = np.ones(len(is_hierarchical))
    typical, of_data = np.zeros_like(degrees), np.zeros_like(degrees)
    for i in np.flatnonzero(is_hierarchical):
        columns = (moved, standard, locs, log_scales)
        v, z, loc, log_scale = (column[finite, i] for column in columns)
        low, median, high = np.quantile(log_scale, [CENTRAL[0], 0.5, CENTRAL[1]])
        near = (low <= log_scale) & (log_scale <= high)
        center = np.median(loc)
        features = np.stack([np.ones(len(v)), log_scale - median, loc - center], axis=1)[near]
        both = np.stack([v, z], axis=1)[near]
        coefficients = np.linalg.lstsq(features, both, rcond=None)[0]
        residual = both[:, 0] - features @ coefficients[:, 0]
        degree = 1 - np.sum(residual**2) / max(1, len(residual) - features.shape[1])
        degrees[i] = np.clip(degree, 0.0, 1.0) if degree >= LEAST_DEGREE else 0.0
        if 0 < degrees[i] < 1:
            typical[i] = median
            of_data[i] = center + np.exp(median) * coefficients[0, 1] / degrees[i]
    return Centering(degrees, typical, of_data)


def recentered(
    search: Search, gaussian: Affine, centering: Centering, num_draws: int = RECENTERING_DRAWS
) -> tuple[Affine, Centering] | None:
    """The Gaussian of the draws of another one in partially centered coordinates that suit them.

    Of the model only priors count. None if few draws are finite in those coordinates.
    """
    draws = gaussian.push(antithetic(search.rng, num_draws, len(gaussian.mean)))
    is_hierarchical = search.latents.is_hierarchical
    noncentered = of_degrees(np.where(is_hierarchical, 0.0, 1.0))
    found = search.model.at(draws, centering, noncentered)
    best = fit_centering(found.moved, found.values, found.locs, found.log_scales, is_hierarchical)
    if best is None:
        return None
    moved = search.model.at(draws, centering, best).moved
    moved = moved[np.all(np.isfinite(moved), axis=1)]
    return None if len(moved) < len(draws) // 2 else (fitted(moved), best)
