"""Gaussians whose mean and covariance change with some of their latents, the drivers.

Given its scales, many a model is close to Gaussian in all else: time series, smooth curves, fields
(Rue, Martino and Chopin 2009). But every value of the scales has another Gaussian. Where effects
are written as standardized ones times a scale no prior says how it changes, and where there are
several scales no basis makes all of these Gaussians independent. So modes and Cholesky factors are
taken at some values of the drivers (see ``given_drivers``) and interpolated. The logarithm of the
volume is then known everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_kscore._starts.batch_match import Gaussian

__all__ = ["REACH", "Conditional", "exponents", "features", "skewed"]

# Powers of a driver, and most of two together, that entries of the Gaussian are polynomials of, for
# one, two or more drivers.
ALONE, TOGETHER = {1: 6, 2: 6, 3: 5}, {1: 0, 2: 6, 3: 3}
# Beyond so many standard deviations the Gaussian changes no more: there polynomials are wild.
REACH = 3.0


class Conditional(NamedTuple):
    """A Gaussian whose mean and covariance change with k of its latents, the drivers.

    Given the drivers at points ``u`` of theirs, the r others are ``mean + factor (m(u) + T(u) v)``
    at points ``v``, with a vector m(u) and a lower triangle T(u). Every entry of m and T, and the
    logarithms of the diagonal of T, are linear in p :func:`features` of u.

    Attributes:
        order: places of the latents in the order of the other attributes, drivers first, (d,).
        drivers: the Gaussian of the drivers, before their skewness.
        skews: how far the drivers are stretched to the left: ``(1 - exp(-a u)) / a`` takes the
            place of u, (k,).
        others: that of the others where the drivers have their mean.
        means: coefficients of m, (p, r).
        logs: coefficients of the logarithms of the diagonal of T, (p, r).
        rests: coefficients of the rest of T, (p, r, r).
    """

    order: np.ndarray
    drivers: Gaussian
    skews: np.ndarray
    others: Gaussian
    means: np.ndarray
    logs: np.ndarray
    rests: np.ndarray

    @property
    def place(self) -> np.ndarray:
        """Where every latent is in the order, (d,)."""
        return np.argsort(self.order)

    def push(self, points: np.ndarray) -> np.ndarray:
        """Coordinates (m, d) at standard normal points (m, d)."""
        of_drivers, points = self._split(points)
        values, _ = features(of_drivers)
        inner = values @ self.means + np.exp(values @ self.logs) * points
        for value, rest in zip(values.T, self.rests, strict=True):
            inner += value[:, None] * (points @ rest.T)
        found = [self.drivers.push(skewed(of_drivers, self.skews)), self.others.push(inner)]
        return np.concatenate(found, axis=1)[:, self.place]

    def log_volumes(self, points: np.ndarray) -> np.ndarray:
        """Logarithms of the determinants of the derivative of :meth:`push`, (m,)."""
        of_drivers, _ = self._split(points)
        values, _ = features(of_drivers)
        fixed = self.drivers.log_volume + self.others.log_volume
        return fixed + (values @ self.logs).sum(1) - of_drivers @ self.skews

    def pull(self, points: np.ndarray, gradients: np.ndarray) -> np.ndarray:
        """Gradients (m, d) of an energy by the coordinates as those by the points, less volume."""
        of_drivers, points = self._split(points)
        by_drivers, inner = self._split(gradients[:, self.order])
        values, slopes = features(of_drivers)
        inner = inner @ self.others.factor
        scaled = inner * np.exp(values @ self.logs)
        by_values = inner @ self.means.T + (scaled * points - 1) @ self.logs.T
        by_points = scaled
        for number, rest in enumerate(self.rests):
            back = inner @ rest
            by_points = by_points + values[:, number, None] * back
            by_values[:, number] += np.sum(back * points, axis=1)
        by_drivers = by_drivers @ self.drivers.factor * np.exp(-self.skews * of_drivers)
        by_drivers += self.skews + np.einsum("mp,mpk->mk", by_values, slopes)
        return np.concatenate([by_drivers, by_points], axis=1)

    def _split(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        count = len(self.drivers.mean)
        return points[:, :count], points[:, count:]


def skewed(points: np.ndarray, skews: np.ndarray) -> np.ndarray:
    """Points (m, k) stretched to the left, for positive skews (k,): Tukey's g."""
    return -np.expm1(-skews * points) / skews


def features(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Powers of drivers, which end beyond a few standard deviations.

    Args:
        points: of the drivers, (m, k).

    Returns:
        The features, 0 where all drivers are, (m, p), and their derivatives, (m, p, k).
    """
    t = np.tanh(points / REACH)
    slopes, t = 1 - t**2, REACH * t
    powers = exponents(points.shape[1])
    each = t[:, None] ** powers
    derivatives = powers * t[:, None] ** np.maximum(powers - 1, 0) * slopes[:, None]
    others = [np.prod(np.delete(each, j, axis=2), axis=2) for j in range(points.shape[1])]
    return np.prod(each, axis=2), derivatives * np.stack(others, axis=2)


def exponents(count: int) -> np.ndarray:
    """Of some drivers, in all powers of one or two of them, (p, count)."""
    alone, together = (degrees[min(count, 3)] for degrees in (ALONE, TOGETHER))
    found = [
        [i if k == a else j if k == b else 0 for k in range(count)]
        for a in range(count)
        for b in range(a, count)
        for i in range(1, (alone if a == b else together - 1) + 1)
        for j in ((0,) if a == b else range(1, together + 1 - i))
    ]
    return np.array(found)
