"""Gaussians whose mean and covariance change with some of their latents, the scales.

Given its scales, many a model is close to Gaussian in all else: time series, smooth curves, fields
(Rue, Martino and Chopin 2009). But every value of the scales has another Gaussian. Where effects
are written as standardized ones times a scale no prior says how it changes, and where there are
several scales no basis makes all of these Gaussians independent. So modes and Cholesky factors are
taken at some values of the scales (see ``_starts.scale_rounds``) and interpolated. The logarithm
of the volume is then known everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from numpyro_kscore._transports.affine import Affine
from numpyro_kscore._transports.arrow import Arrow
from numpyro_kscore._transports.features import features, through_features
from numpyro_kscore._transports.stretch import slopes_at, stretched
from numpyro_kscore._util.linalg import invert_lower
from numpyro_kscore._util.namespace import namespace
from numpyro_kscore._util.pytree import pytree, static


@pytree
class StretchedGaussian:
    """A Gaussian, each of whose k numbers has a shape of its own.

    Number i is ``mean_i + F_ii s_i(x_i) + sum_(j<i) F_ij x_j`` at standard normal points x: it
    moves with others as normal numbers. A scale that goes to zero, many standard deviations out,
    takes others only as far as data do that say nothing of it any more.

    Attributes:
        gaussian: mean (k,) and lower triangle F (k, k).
        slopes: those of the functions s_i, (k, 10).
    """

    gaussian: Affine
    slopes: Any

    def push(self, x: Any) -> Any:
        return self.gaussian.push(x) + self._own * (stretched(x, self.slopes) - x)

    def log_volume(self, x: Any) -> Any:
        xp = namespace(x)
        stretches = xp.sum(xp.log(slopes_at(x, self.slopes)[0]), axis=-1)
        return self.gaussian.log_volume(x) + stretches

    def pull(self, x: Any, gradients: Any) -> Any:
        found, bends = slopes_at(x, self.slopes)
        return self.gaussian.pull(x, gradients) + gradients * self._own * (found - 1) - bends

    def push_score(self, x: Any, score: Any) -> Any:
        xp = namespace(x, score)
        rest = score - slopes_at(x, self.slopes)[1]
        if xp is np:
            transposed = np.swapaxes(self.derivative(x), -1, -2)
            return np.linalg.solve(transposed, rest[..., None])[..., 0]
        return rest @ invert_lower(self.derivative(x))

    def derivative(self, x: Any) -> Any:
        """The derivative at points (..., k), lower triangles (..., k, k), a row for each image."""
        xp = namespace(x)
        changes = self._own * (slopes_at(x, self.slopes)[0] - 1)
        return self.gaussian.factor + changes[..., None] * xp.eye(x.shape[-1], dtype=x.dtype)

    @property
    def _own(self) -> Any:
        return namespace(self.gaussian.factor).diagonal(self.gaussian.factor)


@pytree
class Conditional:
    """A Gaussian whose mean and covariance change with k of its latents, the scales.

    Given the scales at points ``u`` of theirs, the r others are ``mean + base (m(u) + T(u) v)`` at
    points ``v``, with a vector m(u) and a triangle T(u). Every entry of m and of the logarithms of
    the diagonal of T is linear in p :func:`~numpyro_kscore._transports.features.features` of u, and
    the rest of T in q sums of these.

    Attributes:
        scales: the distribution of the scales.
        mean: of the others where the scales have their mean, (r,).
        base: the factor of their covariance there.
        means: coefficients of m, (p, r).
        logs: coefficients of the logarithms of the diagonal of T, (p, r).
        sums: coefficients of the sums of features, (p, q).
        rests: coefficients of the rest of T, q triangles with zeros on their diagonals.
        order: places of the latents in the order of the other attributes, scales first, d numbers.
    """

    scales: StretchedGaussian
    mean: Any
    base: Arrow
    means: Any
    logs: Any
    sums: Any
    rests: Arrow
    order: tuple[int, ...] = static()

    def push(self, x: Any) -> Any:
        xp = namespace(x)
        u, v = self._split(x)
        values = features(u)
        inner = values @ self.means + xp.exp(values @ self.logs) * v
        inner = sum((weight * rest.times(v) for weight, rest in self._rests(values)), inner)
        found = [self.scales.push(u), self.mean + self.base.times(inner)]
        return xp.concatenate(found, axis=-1)[..., np.argsort(self.order)]

    def log_volume(self, x: Any) -> Any:
        xp = namespace(x)
        u, _ = self._split(x)
        values = features(u)
        fixed = xp.sum(xp.log(self.base.diagonal))
        return fixed + (values @ self.logs).sum(-1) + self.scales.log_volume(u)

    def pull(self, x: Any, gradients: Any) -> Any:
        xp = namespace(x)
        u, v = self._split(x)
        of_scales, of_others = self._split(gradients[..., np.array(self.order)])
        inner = self.base.transposed(of_others)
        by_scales = self.scales.pull(u, of_scales)
        values = features(u)
        by_points = inner * xp.exp(values @ self.logs)
        by_points = sum((w * rest.transposed(inner) for w, rest in self._rests(values)), by_points)
        moved = by_scales + self._through_scales(u, v, inner)
        return xp.concatenate([moved, by_points], axis=-1)

    def push_score(self, x: Any, score: Any) -> Any:
        xp = namespace(x, score)
        u, v = self._split(x)
        of_scales, of_others = self._split(score)
        values = features(u)
        triangle = self.rests.combined(values @ self.sums)
        triangle = triangle.with_diagonal(xp.exp(values @ self.logs))
        # The derivative is a block triangle: what others move with the scales is subtracted when
        # their own scores are known.
        inner = triangle.solve_transposed(of_others)
        rest = of_scales + self._through_scales(u, v, -inner)
        found = [self.scales.push_score(u, rest), self.base.solve_transposed(inner)]
        return xp.concatenate(found, axis=-1)[..., np.argsort(self.order)]

    def _through_scales(self, u: Any, v: Any, inner: Any) -> Any:
        """The gradient in u of an energy of the others, and of minus their log volume, (..., k).

        ``inner`` is the gradient of the energy in ``m(u) + T(u) v``, (..., r).
        """
        xp = namespace(u)
        values = features(u)
        scaled = inner * xp.exp(values @ self.logs)
        by_values = inner @ self.means.T + (scaled * v - 1) @ self.logs.T
        for k in range(self.sums.shape[1]):
            by_sum = xp.sum(inner * self.rests[k].times(v), axis=-1)
            by_values = by_values + by_sum[..., None] * self.sums[:, k]
        return through_features(u, by_values)

    def _rests(self, values: Any) -> Iterator[tuple[Any, Arrow]]:
        """Every triangle of the rest with its weights (..., 1) at values of the features."""
        weights = values @ self.sums
        return ((weights[..., k, None], self.rests[k]) for k in range(weights.shape[-1]))

    def _split(self, points: Any) -> tuple[Any, Any]:
        count = self.scales.slopes.shape[0]
        return points[..., :count], points[..., count:]
