"""Functions of standard normal numbers that latents are by their prior, from draws of it."""

from __future__ import annotations

import numpy as np

from numpyro_kscore._starts.scale_distribution import BELOW, ENDS, SIDES, continued
from numpyro_kscore._transports.marginals import Marginals, unchanged
from numpyro_kscore._transports.stretch import stretched

# Distance of a quantile from that of a normal distribution, in standard deviations, that counts.
# Of 16384 draws the outermost quantiles have errors of a third of it.
SKEWED = 0.3
# Beyond this spread a prior is meant to say nothing, and its quantiles are rounding errors.
WIDEST = 20.0


def fit_marginals(draws: np.ndarray, columns: np.ndarray, dim: int) -> Marginals | None:
    """The functions for some of d latents, by draws (n, c) of them; None if all are normal.

    ``columns`` are the places of the c latents.
    """
    found = unchanged(dim)
    for draw, column in zip(draws.T, columns, strict=True):
        one = _function(draw)
        if one is not None:
            found.shift[column], found.slopes[column] = one
    return found if np.any(found.vary) else None


def _function(draws: np.ndarray) -> tuple[float, np.ndarray] | None:
    """The image of 0 and the slopes for one latent; None if it is normal, or not known."""
    if not np.all(np.isfinite(draws)):
        return None
    places = np.quantile(draws, BELOW)
    low, middle, high = places[SIDES]
    width = (high - low) / 4
    if not np.all(np.diff(places) > 0) or not width < WIDEST:
        return None
    shape = (places - middle) / width
    if np.max(np.abs(shape - ENDS)) < SKEWED:
        return None
    slopes = continued((np.diff(shape) / np.diff(ENDS))[None])
    # Steps of slopes are smooth, so that the median moves a little.
    moved = np.median(draws) - width * stretched(np.zeros(1), slopes)[0]
    return float(moved), width * slopes[0]
