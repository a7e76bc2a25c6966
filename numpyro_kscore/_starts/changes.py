"""How sizes of latents change with the coordinates of others, as far as it is known.

In partially centered coordinates it follows from how the scales of priors depend on latents, and
in those with couplings from the rates that were found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.candidates import CountedModel, Judged, antithetic
from numpyro_kscore._starts.couplings import Couplings
from numpyro_kscore._starts.refinement import is_apart

__all__ = ["Changes", "of_couplings", "of_priors"]

# Draws that tell scales of priors, for each latent they may depend on and at least.
DRAWS_EACH, FEWEST_DRAWS = 4, 256
# Most of the variance of a logarithm of a scale that may be left, and the least effect of a latent
# on it that counts, in its standard deviations.
MOST_REST, LEAST_EFFECT = 0.05, 0.05
# Standard deviation of a logarithm of a scale below which it does not change.
LEAST_CHANGE = 0.01


class Changes(NamedTuple):
    """How sizes change with coordinates.

    Attributes:
        rates: of the logarithms of scales of priors, (d, d).
        offsets: these at the mean, relative to typical scales, (d,).
        degrees: of centering, (d,).
        in_units: whether a latent is in units of the scale, (d,).
    """

    rates: np.ndarray
    offsets: np.ndarray
    degrees: np.ndarray
    in_units: np.ndarray


def of_priors(
    model: CountedModel,
    known: Judged,
    couplings: Couplings | None,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
) -> Changes:
    """The changes of latents in partially centered coordinates, by a linear regression."""
    gaussian, centering = known.gaussian, known.centering
    dim = len(gaussian.mean)
    changes = Changes(
        np.zeros((dim, dim)), np.zeros(dim), centering.degrees.copy(), np.zeros(dim, bool)
    )
    # In non-centered coordinates degrees are no shares of the data.
    may_change = is_hierarchical & (centering.degrees < 1) & (not is_apart(known))
    may_drive = ~may_change
    if couplings is not None:
        may_drive &= ~np.any(couplings.rates != 0, axis=1)
    may_change, may_drive = np.flatnonzero(may_change), np.flatnonzero(may_drive)
    if not len(may_change) or not len(may_drive):
        return changes
    count = max(FEWEST_DRAWS, 2 * (DRAWS_EACH * len(may_drive) // 2))
    draws = gaussian.push(antithetic(rng, count, dim))
    latents = draws if couplings is None else couplings.latents(draws)
    log_scales = model.at(latents, centering, centering).log_scales
    finite = np.all(np.isfinite(log_scales), axis=1)
    if np.sum(finite) < count // 2:
        return changes
    relative = (draws - gaussian.mean)[finite][:, may_drive]
    spread = relative.std(0)
    features = np.concatenate([np.ones((len(relative), 1)), relative / spread], axis=1)
    targets = log_scales[finite][:, may_change]
    coefficients = np.linalg.lstsq(features, targets, rcond=None)[0]
    varies = np.var(targets, axis=0)
    is_linear = np.var(targets - features @ coefficients, axis=0) < MOST_REST * varies
    is_linear &= varies > LEAST_CHANGE**2
    effects = np.where(is_linear, coefficients[1:], 0.0)
    effects[np.abs(effects) < LEAST_EFFECT * np.sqrt(varies)] = 0.0
    changes.rates[np.ix_(may_change, may_drive)] = (effects / spread[:, None]).T
    # Where the data say nothing no scale is typical.
    changes.offsets[may_change] = np.where(
        centering.degrees[may_change] > 0, coefficients[0] - centering.log_scales[may_change], 0.0
    )
    return changes


def of_couplings(couplings: Couplings, mean: np.ndarray, known: Changes) -> Changes:
    """The changes where sizes of non-centered latents fall as scales grow, and the known ones.

    A latent in units of its prior's scale has a size that falls with it at the rate c: its value is
    a centered one, whose size is that times the scale. Other sizes are in units of their own.
    """
    falls = np.any(couplings.rates > 0, axis=1)
    rates = couplings.rates / couplings.shares[:, None]
    is_driver = np.any(rates[falls] != 0, axis=0)
    offsets = rates @ (mean - couplings.center)
    rates = np.where(falls[:, None], rates, known.rates)
    # What others change with has no size of its own.
    rates[is_driver] = 0.0
    return Changes(
        rates=rates,
        offsets=np.where(falls, offsets, known.offsets),
        degrees=np.where(falls, couplings.shares, known.degrees),
        in_units=falls,
    )
