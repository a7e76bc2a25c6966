"""Correlations that fade with the scales of priors.

A Gaussian has the same correlations everywhere. Those of effects in a group, such as intercept and
slope, do not: they come from the data, and where a slope's scale is small its prior decides alone.
Let effects have normal priors of scales τ and a normal likelihood with precision J, and their
coordinates the sizes D(τ) that take τ out, see ``_tracing.centering``. Given those before it, the
mean of effect i then moves with value j by ``-J_ij`` times its variance, in proportion to D_i²: in
coordinates by D_i D_j times what it is at the typical scales, where D is one. That is taken for
effects in ascending order of their degrees of centering. What the prior decides comes first: what
remains of the others, given those, is of the data, at any scale.

The bound decides whether this is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Gaussian, elbo
from numpyro_kscore._starts.candidates import CountedModel, Judged, factor
from numpyro_kscore._starts.changes import Changes, of_couplings, of_priors
from numpyro_kscore._starts.couplings import Couplings, coupled
from numpyro_kscore._starts.recentering import LEAST_DEGREE
from numpyro_kscore._starts.refinement import fitted, match_near
from numpyro_kscore._starts.warp import warped
from numpyro_kscore._starts.whole import telling_draws

__all__ = ["Fading", "fade"]

# Largest degree of centering, for a finite logarithm of what is left.
MOST_DEGREE = 1 - 1e-6
# Step of central differences of means, in standard deviations.
STEP = 1e-4
# Rounds of batch and match in the new coordinates.
ROUNDS = 2


class Fading(NamedTuple):
    """A Gaussian whose correlations change with some of the latents, the drivers.

    Attributes:
        order: places of the latents in the order of the other attributes, drivers first, (d,).
        gaussian: mean, less what shifts make of it, and factor, where all sizes D are one.
        rates: how the logarithms of scales of priors change with the k drivers, (d, k); 0 for
            latents whose size does not change, drivers among them.
        offsets: these logarithms at the mean, relative to typical scales, (d,).
        degrees: degrees of centering, (d,).
        shifts: what is added to the points in proportion to D, (d,); 0 for latents whose size does
            not change.
    """

    order: np.ndarray
    gaussian: Gaussian
    rates: np.ndarray
    offsets: np.ndarray
    degrees: np.ndarray
    shifts: np.ndarray

    @property
    def place(self) -> np.ndarray:
        """Where every latent is in the order, (d,)."""
        return np.argsort(self.order)

    def push(self, points: np.ndarray) -> np.ndarray:
        """Coordinates (m, d) at standard normal points (m, d)."""
        own, rest = self._parts()
        sizes, _ = self._sizes(points)
        moved = points + sizes * self.shifts
        found = self.gaussian.mean + own * moved + sizes * ((sizes * moved) @ rest.T)
        return found[:, self.place]

    def log_volumes(self, points: np.ndarray) -> np.ndarray:
        """Those of the triangle's diagonal, whatever the sizes, (m,)."""
        return np.full(len(points), self.gaussian.log_volume)

    def pull(self, points: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients by the coordinates, (m, d), as those by the points, (m, d)."""
        own, rest = self._parts()
        sizes, slopes = self._sizes(points)
        gradients = gradients[:, self.order]
        shifts = sizes * self.shifts
        scaled = sizes * (points + shifts)
        back = (sizes * gradients) @ rest
        of_points = own * gradients + sizes * back
        of_sizes = slopes * (
            sizes * gradients * (scaled @ rest.T) + scaled * back + shifts * of_points
        )
        # Drivers have no size that changes, and depend on drivers alone.
        count = self.rates.shape[1]
        of_points[:, :count] += of_sizes @ self.rates @ self.gaussian.factor[:count, :count]
        return of_points

    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        own = np.diag(self.gaussian.factor)
        return own, self.gaussian.factor - np.diag(own)

    def _sizes(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """D at points (m, d), and the derivatives of their logarithms by those of scales."""
        count = self.rates.shape[1]
        drivers = points[:, :count] @ self.gaussian.factor[:count, :count].T
        log_sizes, slopes = _log_sizes(self.offsets + drivers @ self.rates.T, self.degrees)
        return np.exp(log_sizes - _log_sizes(self.offsets, self.degrees)[0]), slopes


def _log_sizes(moves: np.ndarray, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logarithm of r / √(1 - c + c r²) at log r, and its derivative."""
    of_data, of_prior = np.log(degrees) + 2 * moves, np.log1p(-degrees)
    total = np.logaddexp(of_data, of_prior)
    return moves - 0.5 * total, np.exp(of_prior - total)


def fade(
    model: CountedModel,
    known: Judged,
    couplings: Couplings | None,
    is_hierarchical: np.ndarray,
    rng: np.random.Generator,
    noise: np.ndarray,
) -> tuple[Judged, Couplings | None, Fading] | None:
    """A Gaussian with correlations that fade, and its couplings; None if its bound is no higher.

    Args:
        model: the model.
        known: the best Gaussian without.
        couplings: how sizes vary with others in its coordinates.
        is_hierarchical: which latents have a prior that is set by others, (d,).
        rng: for draws.
        noise: for bounds, (m, d), antithetic.

    Cost: 256 gradients of the model or more, and two rounds of batch and match; O(d³).
    """
    evaluate, start = model.in_form(known.centering), known
    if couplings is not None:
        if couplings.basis is not None:
            return None
        couplings, gaussian = _of_one_sign(couplings, known.gaussian, rng)
        evaluate, start = coupled(evaluate, couplings), known._replace(gaussian=gaussian)
    changes = of_priors(model, start, couplings, is_hierarchical, rng)
    if couplings is not None:
        changes = of_couplings(couplings, start.gaussian.mean, changes)
    if not np.any(changes.rates):
        return None
    fading = _faded(start.gaussian, changes)
    inside = warped(evaluate, fading)
    dim = len(known.gaussian.mean)
    found, best = Gaussian(np.zeros(dim), np.eye(dim)), known
    for count in range(ROUNDS + 1):
        if count:
            found = match_near(inside, found, rng, count - 1)
        bound = elbo(found, noise, inside(found.push(noise))[0])
        if bound.surely > best.bound.surely:
            best = Judged(bound, found, known.centering)
    return None if best is known else (best, couplings, fading)


def _of_one_sign(
    couplings: Couplings, gaussian: Gaussian, rng: np.random.Generator
) -> tuple[Couplings, Gaussian]:
    """Couplings without negative rates of latents that have positive ones too.

    Those stand for correlations that fade: what depends on a latent that narrows narrows itself.
    """
    falls = np.any(couplings.rates > 0, axis=1)
    rates = np.where(falls[:, None], np.maximum(couplings.rates, 0.0), couplings.rates)
    if np.array_equal(rates, couplings.rates):
        return couplings, gaussian
    draws = telling_draws(gaussian, rng)
    latents, fewer = couplings.latents(draws), couplings._replace(rates=rates)
    # Latents with rates do not change the sizes of others.
    return fewer, fitted(latents * np.exp(-fewer.log_sizes(latents)))


def _faded(gaussian: Gaussian, changes: Changes) -> Fading:
    """The Gaussian with the correlations that it has at its mean."""
    dim = len(gaussian.mean)
    drivers, driven = (np.flatnonzero(np.any(changes.rates != 0, axis=axis)) for axis in (0, 1))
    others = np.setdiff1d(np.arange(dim), np.concatenate([drivers, driven]))
    by_degree = driven[np.argsort(changes.degrees[driven], kind="stable")]
    order = np.concatenate([drivers, by_degree, others])
    covariance = (gaussian.factor @ gaussian.factor.T)[np.ix_(order, order)]
    fading = Fading(
        order,
        Gaussian(gaussian.mean[order], factor(covariance)),
        changes.rates[np.ix_(order, drivers)],
        np.where(np.isin(order, driven), changes.offsets[order], 0.0),
        np.clip(changes.degrees[order], LEAST_DEGREE, MOST_DEGREE),
        np.zeros(dim),
    )
    return _shifted(fading, np.isin(order, driven) & changes.in_units[order])


def _shifted(fading: Fading, in_units: np.ndarray) -> Fading:
    """The same where means change too, of latents that are in units of their prior's scale.

    Their values have a mean in proportion to D², and their coordinates one in proportion to D. The
    factor has the part of this that is linear in the drivers, which it then must not have twice.
    """
    if not np.any(in_units):
        return fading
    mean, triangle = fading.gaussian
    count = fading.rates.shape[1]
    shifts = np.zeros_like(mean)
    shifts[in_units] = np.linalg.solve(triangle[np.ix_(in_units, in_units)], mean[in_units])
    moved = fading._replace(gaussian=Gaussian(mean - triangle @ shifts, triangle), shifts=shifts)
    ends = STEP * np.eye(len(mean))[:count]
    own = triangle[:, :count].T
    slopes = (moved.push(ends) - moved.push(-ends))[:, fading.order] / (2 * STEP) - own
    return moved._replace(
        gaussian=Gaussian(
            moved.gaussian.mean, triangle - np.pad(slopes.T, ((0, 0), (0, len(mean) - count)))
        )
    )
