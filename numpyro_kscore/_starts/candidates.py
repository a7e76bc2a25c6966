"""Candidates for a start: Gaussians with their evidence lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Bound, elbo
from numpyro_kscore._starts.host_density import CountedDensity
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.conditional import Conditional
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.transport import Evaluate

# Fewest draws that tell widths.
FEWEST_DRAWS = 16
# Bounds that differ by less than this, in nats, are equal: then coordinates are non-centered, where
# small scales have the tail of their prior.
EQUAL_BOUNDS = 0.25


class Latents(NamedTuple):
    """A model's latents before a search, in unconstrained coordinates.

    Attributes:
        first: values at which the density is finite, (d,); the first path starts there.
        from_prior: draws of the prior, (m, d), from which other paths start; none where it cannot
            be drawn from.
        is_hierarchical: which coordinates have a degree of centering, (d,).
        is_scale: which may be scales of others: those of positive numbers, (d,).
        is_between: which others have values between two bounds, such as correlations, (d,).
        sizes: numbers of coordinates of the latents, in their order.
    """

    first: np.ndarray
    from_prior: np.ndarray
    is_hierarchical: np.ndarray
    is_scale: np.ndarray
    is_between: np.ndarray
    sizes: tuple[int, ...]


class Search(NamedTuple):
    """What all parts of a search use.

    Attributes:
        model: the density, in any form of coordinates.
        latents: what is known of the latents before it.
        rng: makes all draws but those of the noise.
        noise: standard normal noise for bounds, its second half minus the first, (m, d).
    """

    model: CountedDensity
    latents: Latents
    rng: np.random.Generator
    noise: np.ndarray

    def with_own_draws(self) -> Search:
        """The same with other draws: those that follow do not depend on how many it makes."""
        return self._replace(rng=self.rng.spawn(1)[0])


class Candidate(NamedTuple):
    """A Gaussian and its evidence lower bound.

    Attributes:
        bound: the bound, with its error.
        gaussian: the Gaussian.
        centering: the form of its coordinates, arrays (d,).
        sizes: how the sizes of latents vary; None if they do not.
        conditional: the map to these coordinates from those of the Gaussian; None if these are one.
    """

    bound: Bound
    gaussian: Affine
    centering: Centering
    sizes: Sizes | None = None
    conditional: Conditional | None = None


def bounded(
    evaluate: Evaluate, gaussian: Affine, noise: np.ndarray, centering: Centering
) -> Candidate:
    """A Gaussian with its bound."""
    energies = evaluate(gaussian.push(noise))[0]
    return Candidate(elbo(gaussian, noise, energies), gaussian, centering)


def in_form(search: Search, gaussian: Affine, centering: Centering) -> Candidate:
    """A Gaussian in some form of coordinates with its bound."""
    return bounded(search.model.in_form(centering), gaussian, search.noise, centering)


def lower_bound(candidate: Candidate) -> float:
    """The bound of a Gaussian less two errors, for comparisons."""
    return candidate.bound.lower


def highest(found: Sequence[Candidate]) -> Candidate:
    """The candidate of highest lower bound."""
    return max(found, key=lower_bound)


def preferred(found: Sequence[Candidate], within: float = EQUAL_BOUNDS) -> Candidate:
    """The Gaussian of highest bound, or a non-centered one within so many nats of it."""
    best = highest(found)
    least = lower_bound(best) - within
    equal = [one for one in found if lower_bound(one) > least and is_noncentered(one)]
    return highest(equal) if equal else best


def is_noncentered(candidate: Candidate) -> bool:
    """Whether coordinates are non-centered: with a degree of 0, and no partial one."""
    degrees = candidate.centering.degrees
    return bool(np.all(np.isin(degrees, (0, 1))) and np.any(degrees == 0))


def widths_of(draws: np.ndarray, dim: int) -> np.ndarray:
    """Standard deviations of draws (m, d), by quantiles; 1 where they say nothing."""
    if len(draws) < FEWEST_DRAWS:
        return np.ones(dim)
    low, high = np.quantile(draws, [0.16, 0.84], axis=0)
    found = 0.5 * (high - low)
    return np.where(np.isfinite(found) & (found > 0), found, 1.0)
