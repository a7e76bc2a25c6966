"""Candidates for a start: Gaussians with their evidence lower bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Bound, Gaussian, elbo
from numpyro_kscore._starts.quasi_newton import Iterate
from numpyro_kscore._tracing.coupling import Centering

__all__ = [
    "AtPoints",
    "CountedModel",
    "Density",
    "Judged",
    "Latents",
    "PathEnd",
    "antithetic",
    "factor",
    "is_same",
    "of_degrees",
    "surely",
    "widths_of",
]

# Fewest draws that tell widths.
FEWEST_DRAWS = 16


class Latents(NamedTuple):
    """What is known of a model's latents before a search, in unconstrained coordinates.

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


class AtPoints(NamedTuple):
    """A model at points (m, d).

    Attributes:
        energies: minus log densities, (m,).
        gradients: of the energy, (m, d).
        moved: the points in the other coordinates, (m, d).
        values: unconstrained values there, (m, d).
        locs: locations of their priors, (m, d); 0 for those that are not hierarchical.
        log_scales: logarithms of the scales of their priors, likewise.
    """

    energies: np.ndarray
    gradients: np.ndarray
    moved: np.ndarray
    values: np.ndarray
    locs: np.ndarray
    log_scales: np.ndarray


Density = Callable[[np.ndarray, Centering, Centering], AtPoints]


def of_degrees(degrees: np.ndarray) -> Centering:
    """Centering of degrees 0 and 1, (d,), for which no scale and no location count."""
    return Centering(degrees, np.zeros_like(degrees), np.zeros_like(degrees))


def is_same(one: Centering, other: Centering) -> bool:
    """Whether two kinds of coordinates are one."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class Judged(NamedTuple):
    """A Gaussian and its evidence lower bound.

    Attributes:
        bound: the bound, with its error.
        gaussian: the Gaussian.
        centering: of its coordinates, arrays (d,).
    """

    bound: Bound
    gaussian: Gaussian
    centering: Centering


class CountedModel:
    """The density at points, with a count of its gradients."""

    def __init__(self, density: Density) -> None:
        self._density, self.count = density, 0

    def at(self, points: np.ndarray, centering: Centering, other: Centering) -> AtPoints:
        """The density at points (n, d) in one form of coordinates, and the points in another."""
        self.count += len(points)
        return self._density(points, centering, other)

    def in_form(
        self, centering: Centering
    ) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Energies and gradients as functions of the points alone."""

        def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            found = self.at(points, centering, centering)
            return found.energies, found.gradients

        return evaluate

    def judge(self, gaussian: Gaussian, centering: Centering, noise: np.ndarray) -> Judged:
        """A Gaussian and its bound, at draws that noise (n, d) is pushed to."""
        energies = self.in_form(centering)(gaussian.push(noise))[0]
        return Judged(elbo(gaussian, noise, energies), gaussian, centering)


class PathEnd(NamedTuple):
    """What a quasi-Newton path found.

    Attributes:
        best: the Gaussian of highest bound along it.
        last: its last iterate.
        has_arrived: whether it converged there.
    """

    best: Judged
    last: Iterate
    has_arrived: bool


def factor(covariance: np.ndarray) -> np.ndarray:
    """Lower Cholesky factor of a covariance (d, d)."""
    try:
        return np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        # Rounding: its diagonal is positive all the same.
        return np.diag(np.sqrt(np.maximum(np.diag(covariance), np.finfo(float).tiny)))


def antithetic(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Standard normal noise (count, dim) in pairs of opposite sign: means have no error."""
    half = rng.standard_normal((count // 2, dim))
    return np.concatenate([half, -half])


def surely(judged: Judged) -> float:
    """The bound of a Gaussian less two errors, for comparisons."""
    return judged.bound.surely


def widths_of(draws: np.ndarray, dim: int) -> np.ndarray:
    """Standard deviations of draws (m, d), by quantiles; 1 where they say nothing."""
    if len(draws) < FEWEST_DRAWS:
        return np.ones(dim)
    low, high = np.quantile(draws, [0.16, 0.84], axis=0)
    found = 0.5 * (high - low)
    return np.where(np.isfinite(found) & (found > 0), found, 1.0)
