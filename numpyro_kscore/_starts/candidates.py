"""Candidates for a start: Gaussians with their evidence lower bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Bound, elbo
from numpyro_kscore._starts.search import Search
from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.centering import Centering
from numpyro_kscore._transports.sizes import Sizes
from numpyro_kscore._transports.transport import Evaluate

# Bounds that differ by less than this, in nats, are equal: then coordinates are non-centered, where
# small scales have the tail of their prior.
EQUAL_BOUNDS = 0.25


class Candidate(NamedTuple):
    """A Gaussian and its evidence lower bound.

    Attributes:
        bound: the bound, with its error.
        gaussian: the Gaussian.
        centering: the form of its coordinates, arrays (d,).
        sizes: how the sizes of latents vary; None if they do not.
    """

    bound: Bound
    gaussian: Affine
    centering: Centering
    sizes: Sizes | None = None


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
